"""Which sites are fused: no overlaps, the larger region first; by policy or by a saved selection."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trtfuse.errors import InputError
from trtfuse.fusion import Site
from trtfuse.fusions import FUSIONS, NAMES
from trtfuse.model import one_line
from trtfuse.view import View

SCHEMA = "trtfuse/select/1"
LOWERINGS = ("plugin", "native", "keep")
# Why a site cannot be a plugin of the target, in words that follow its name; None if it can.
Refusal = Callable[[Site], str | None]


def disjoint(sites: list[Site], view: View, first: Callable[[Site], bool] = lambda _: True) -> list[Site]:
    """The sites without overlaps, named and in the order of the graph.

    Where two overlap, one that is `first` is kept, then the op that stands first in FUSIONS, then the one of
    more nodes.
    """
    rank = {f.op: k for k, f in enumerate(FUSIONS)}
    taken: set[int] = set()
    kept: list[Site] = []
    for site in sorted(
        sites, key=lambda s: (not first(s), rank[s.fusion.op], -len(s.found.nodes), view.order(s.root))
    ):
        nodes = {id(n) for n in site.found.nodes}
        if nodes & taken:
            continue
        taken |= nodes
        kept.append(site)
    kept.sort(key=lambda s: view.order(s.root))
    counts: dict[str, int] = {}
    for site in kept:
        number = counts.get(site.fusion.op, 0)
        counts[site.fusion.op] = number + 1
        site.id = f"{site.fusion.op}_{number}"
    return kept


def no_plugins(_: Site) -> str | None:
    """The refusal of a target that takes no plugins."""
    return "the target takes no plugins"


def choose(sites: list[Site], select: str | Path, refusal: Refusal | None = None) -> list[Site]:
    """Sets `lowering` and `reason` of each site; returns those to be fused.

    select: "all", "none", "auto", or a selection file (JSON: schema "trtfuse/select/1", "ops" and "sites",
    each from a name to plugin, native or keep; sites win over ops). "all" makes every site a plugin that can
    be one. refusal: of the target; None where the fused file itself is the product, in which every fused site
    is alike. Raises InputError for an unusable file, and where it selects a plugin for what cannot be one.
    """
    policy = str(select)
    if policy in ("all", "auto", "none"):
        for site in sites:
            site.lowering = "keep" if policy == "none" else "native"
            site.reason = REASONS[policy]
            if policy == "all" and refusal is not None:
                _force_plugin(site, refusal)
    else:
        _by_file(sites, Path(select), refusal)
    return [s for s in sites if s.lowering != "keep"]


REASONS = {
    "all": "all sites are fused",
    "none": "none is fused, as asked",
    "auto": "native: one operator, or the shortest spelling, is what the target fuses best by itself",
}


def _force_plugin(site: Site, refusal: Refusal) -> None:
    why_not = refusal(site)
    if why_not is None:
        site.lowering = "plugin"
    else:
        site.reason += f"; native, since {why_not}"


def _by_file(sites: list[Site], path: Path, refusal: Refusal | None) -> None:
    chosen = read_selection(path)
    unknown = set(chosen["sites"]) - {s.id for s in sites}
    if unknown:
        raise InputError(
            f"{path} selects sites that the model has not ({', '.join(sorted(unknown)[:3])}): "
            "list the model's sites with `trtfuse explain`"
        )
    for site in sites:
        by_site = chosen["sites"].get(site.id)
        site.lowering = by_site or chosen["ops"].get(site.fusion.op, "native")
        site.reason = (
            f"{path.name} says so" if by_site or site.fusion.op in chosen["ops"] else "not in the file"
        )
        if site.lowering == "plugin" and refusal is None:
            site.lowering = "native"
        elif site.lowering == "plugin" and refusal is not None and (why_not := refusal(site)) is not None:
            raise InputError(
                f"{path} selects a plugin for {site.id}, but {why_not}: write native or keep for it"
            )


def read_selection(path: Path) -> dict[str, dict[str, str]]:
    """The selection file's "ops" and "sites". Raises InputError with the fault in one line."""
    try:
        data: Any = json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise InputError(
            f"cannot read the selection {path}: {e.strerror}; give auto, all, none or a file"
        ) from e
    except (ValueError, RecursionError) as e:
        raise InputError(f"the selection {path} is not JSON: {one_line(e)}") from e
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise InputError(f'the selection {path} is of another kind: its "schema" must be "{SCHEMA}"')
    result: dict[str, dict[str, str]] = {}
    for part in ("ops", "sites"):
        entries = data.get(part, {})
        if not isinstance(entries, dict) or any(v not in LOWERINGS for v in entries.values()):
            raise InputError(f'"{part}" in {path} must map names to one of {", ".join(LOWERINGS)}')
        result[part] = entries
    wrong = set(result["ops"]) - NAMES
    if wrong:
        raise InputError(f"{path} names no fused op of ours: {', '.join(sorted(wrong))}")
    return result
