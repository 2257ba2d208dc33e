"""Compute capabilities as people write them: 8.9, 89, sm_89, SM89."""

from __future__ import annotations

import re
from collections.abc import Sequence

from trtfuse.errors import InputError

WORDS = {"all": "portable", "portable": "portable", "current": "current", "native": "current"}


def read(wanted: Sequence[str], offered: Sequence[str]) -> tuple[str, ...]:
    """The capabilities named, as "8.9", each once and in order; "portable" and "current" stay words.

    wanted: one in each or several separated by commas. offered: those the target knows.
    Raises InputError naming the valid ones.
    """
    found: dict[str, None] = {}
    for text in (part.strip() for item in wanted for part in item.split(",")):
        if not text:
            continue
        word = WORDS.get(text.lower())
        match = re.fullmatch(r"(?:sm|compute)?[_ ]?(\d{1,2})\.?(\d)", text.lower())
        name = word or (f"{match[1]}.{match[2]}" if match else text)
        if word is None and name not in offered:
            raise InputError(
                f"there is no compute capability {text!r} to build for: use {', '.join(offered)}, or portable"
            )
        found[name] = None
    if "portable" in found and len(found) > 1:
        raise InputError(
            "--compute-capability portable stands alone: leave the others out, or name those only"
        )
    return tuple(found)
