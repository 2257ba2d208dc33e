"""What every file that trtfuse makes must equal, and on what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtfuse.errors import GateError

if TYPE_CHECKING:
    import numpy as np

    from trtfuse.result import SiteReport
    from trtfuse.verify import Accuracy, Tolerances


@dataclass(frozen=True)
class Proof:
    """What a file that we made must equal: the reference on these inputs, within the tolerances."""

    reference: Path
    inputs: list[dict[str, np.ndarray[Any, Any]]]
    tolerances: Tolerances
    sites: Sequence[SiteReport]

    def accuracy(self, made: Path) -> Accuracy:
        from trtfuse.verify import compare

        return compare(self.reference, made, self.inputs, self.tolerances)

    def gate(self, made: Path, what: str) -> Accuracy:
        """The comparison. Raises GateError with the site to suspect."""
        from trtfuse.verify import suspect

        accuracy = self.accuracy(made)
        if accuracy.passed:
            return accuracy
        fused = [s for s in self.sites if s.lowering != "keep"]
        guilty = suspect(self.reference, made, self.inputs, fused)
        hint = f"; suspect {guilty}" if guilty else ""
        raise GateError(
            f"the {what} differs from the original: {accuracy.reason}{hint}; "
            "keep that site by --select FILE, or allow more by --atol and --rtol"
        )
