"""The sites of a model: found, without overlaps, and chosen."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trtfuse import lower, normalise
from trtfuse.choose import choose, disjoint, no_plugins
from trtfuse.fusion import NearMiss, Site, find
from trtfuse.fusions import FUSIONS
from trtfuse.model import Model
from trtfuse.view import View


@dataclass
class Matched:
    """A normalised model with its sites: all without overlaps, and those chosen to be fused."""

    model: Model
    view: View
    sites: list[Site]
    chosen: list[Site]
    near_misses: list[NearMiss]


def match(model: Model, select: str | Path = "all", target: str = "onnx") -> Matched:
    """Finds and chooses the sites of a model that is loaded and has none of its own functions left."""
    view = normalise.view(model)
    normalise.pass_over(view)
    sites, misses = find(FUSIONS, view)
    refusal = {"tensorrt": lower.plugin_refusal(view), "tensorrt-rtx": no_plugins}.get(target)
    if target == "tensorrt" and str(select) == "all":
        may_be = lower.plugin_refusal(view)
        sites = disjoint(sites, view, lambda s: may_be(s) is None)  # a smaller plugin before no plugin
    else:
        sites = disjoint(sites, view)
    return Matched(model, view, sites, choose(sites, select, refusal), misses)
