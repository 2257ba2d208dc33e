"""What a run did: sites with their traffic, accuracy, engine, timings."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from trtfuse.fusion import NearMiss, Site
from trtfuse.model import Model, graphs
from trtfuse.traffic import sizes, traffic

if TYPE_CHECKING:
    from trtfuse.benchmark import Outcome
    from trtfuse.report import Accuracy as ReportedAccuracy
    from trtfuse.report import Report
    from trtfuse.shapes import Profile
    from trtfuse.targets import Plan, Plugins
    from trtfuse.verify import Accuracy


@dataclass(frozen=True)
class SiteReport:
    """What became of one site. bytes: through memory at the profile's opt shapes, None where unknown."""

    id: str
    op: str
    variant: str
    nodes: list[str]
    lowering: str
    reason: str
    bytes_before: int | None
    bytes_after: int | None
    launches_before: int
    launches_after: int
    output: str


@dataclass
class Result:
    """What `build`, `fuse` and `explain` did. timings: seconds of each stage.

    accuracy: of the fused file. nodes, nodes_after: of the model and of the fused file. dequantized: whether
    quantization was taken out, so that results compare with the fused file's and not with the model's.
    plugins: those in the engine. engine_accuracy, outcome: of the engine on the GPU. up_to_date: the report
    of the build that left nothing to do.
    """

    model: Path
    target: str
    source: Model
    sites: list[SiteReport]
    near_misses: list[NearMiss]
    timings: dict[str, float] = field(default_factory=dict)
    nodes_after: int | None = None
    fused_path: Path | None = None
    accuracy: Accuracy | ReportedAccuracy | None = None
    engine_path: Path | None = None
    engine: Plan | None = None
    profile: Profile | None = None
    report_dir: Path | None = None
    notes: list[str] = field(default_factory=list)
    tolerances: tuple[str, ...] = ()
    dequantized: bool = False
    plugins: Plugins | None = None
    engine_accuracy: Accuracy | None = None
    outcome: Outcome | None = None
    up_to_date: Report | None = None

    @property
    def nodes(self) -> int:
        return count_nodes(self.source)

    def to_report(self) -> Report:
        """The result as `report.json` holds it."""
        if self.up_to_date is not None:
            return self.up_to_date
        from trtfuse import account
        from trtfuse.verify import Accuracy

        graph = self.source.proto.graph
        weights = {t.name for t in graph.initializer}
        return account.make_report(
            self.model,
            opset=self.source.opset,
            nodes=self.nodes,
            nodes_after=self.nodes_after,
            inputs=[i for i in graph.input if i.name not in weights],
            outputs=graph.output,
            sites=self.sites,
            near_misses=self.near_misses,
            fused_path=self.fused_path,
            fused_accuracy=self.accuracy.to_dict() if isinstance(self.accuracy, Accuracy) else None,
            engine_accuracy=self.engine_accuracy.to_dict() if self.engine_accuracy else None,
            outcome=self.outcome,
            plugins=self.plugins,
            engine_path=self.engine_path,
            engine=self.engine,
            target=self.target,
            profile=self.profile,
            tolerances=self.tolerances,
            timings=self.timings,
            notes=self.notes,
            folder=self.report_dir,
            reference=self.fused_path if self.dequantized else None,
        )


def count_nodes(model: Model) -> int:
    """Nodes in all graphs of a model, Constant nodes apart."""
    return sum(n.op_type != "Constant" for g in graphs(model.proto.graph) for n in g.node)


def site_reports(sites: list[Site], model: Model, profile: Profile | None) -> list[SiteReport]:
    """What to report of the sites; traffic is at the profile's opt shapes."""
    known = sizes(model.proto, dict(profile.opt) if profile else {}) if sites else {}
    return [_site_report(site, known) for site in sites]


def _site_report(site: Site, known: dict[str, int]) -> SiteReport:
    cost = traffic(site, known)
    fused = site.lowering != "keep"
    return SiteReport(
        id=site.id,
        op=site.fusion.op,
        variant=site.variant,
        nodes=[n.name or n.outputs[0].name for n in reversed(site.found.nodes)],
        lowering=site.lowering,
        reason=site.reason,
        bytes_before=cost.bytes_before,
        bytes_after=cost.bytes_after if fused else cost.bytes_before,
        launches_before=cost.launches_before,
        launches_after=cost.launches_after if fused else cost.launches_before,
        output=next(iter(site.results.values())).name,
    )
