"""What trtfuse finds in exported models, beside what their architectures hold, and how far answers move.

    python scripts/export_zoo.py FOLDER && python scripts/count_exports.py FOLDER
    python scripts/count_exports.py FOLDER --only llama,t5 --misses

Reads the .onnx files of one or more folders, named model.exporter.opset[.attention][.type].onnx as
export_zoo.py, export_keras.py and export_paddle.py name them. Each is fused, checked, and run against the
original in ONNX Runtime with graph optimizations off; the error is relative to the largest value of the
output. Writes results/exporters.md, unless --only or --misses is given. Exits 1 where a file does not hold.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from zoo import held_by

from trtfuse import files
from trtfuse import model as models
from trtfuse.fusion import NearMiss, Site
from trtfuse.inputs import runnable_inputs
from trtfuse.pipeline import fuse_model
from trtfuse.result import count_nodes

RESULTS = Path(__file__).resolve().parent / "results" / "exporters.md"
LIMITS = {"fp32": 2e-5, "fp16": 1e-2}  # of the largest value
PARTS = ("norms", "skips", "activations", "gates", "attentions")
NORMS = ("TrtfuseLayerNorm", "TrtfuseRmsNorm", "TrtfuseGroupNorm", "TrtfuseChannelLayerNorm")
SKIPS = ("TrtfuseSkipLayerNorm", "TrtfuseSkipRmsNorm")
HEADER = """# What trtfuse finds in what exporters write

Made by `scripts/export_zoo.py`, `export_keras.py` and `export_paddle.py`, then `scripts/count_exports.py`:
small models with random weights, run in ONNX Runtime with graph optimizations off, fused against original.
`error` is the largest difference, relative to the largest value of the output; `nodes`, before and after.
`skips` are the norms that take the sum before them. A cell **found/held** names a part of the architecture
of which some was not found; one number says that all were. Some files no runtime takes: TorchScript gives
some fp16 models weights and activations of different types.

"""


@dataclass
class Row:
    """One file: what is in it, what was found, whether it holds."""

    file: str
    entry: dict[str, str]
    nodes: tuple[int, int] = (0, 0)
    sites: list[Site] = field(default_factory=list)
    misses: list[NearMiss] = field(default_factory=list)
    error: float = float("nan")
    fault: str = ""
    unusable: str = ""  # why the original itself does not run

    @property
    def holds(self) -> dict[str, int]:
        """What the architecture has."""
        return asdict(held_by(self.entry["model"], self.entry["dtype"]))

    @property
    def found(self) -> dict[str, int]:
        """The sites by part of the architecture."""
        ops = Counter(s.fusion.op for s in self.sites)
        silu = sum(s.attributes.get("activation") == "silu" for s in self.sites if s.fusion.op == NORMS[2])
        skips = sum(ops[o] for o in SKIPS)
        return {
            "norms": skips + sum(ops[o] for o in NORMS),
            "skips": skips,
            "activations": ops["TrtfuseBiasAct"] + ops["TrtfuseLinearAct"] + silu,
            "gates": ops["TrtfuseGatedAct"],
            "attentions": ops["TrtfuseAttention"],
        }

    @property
    def missing(self) -> dict[str, int]:
        holds = {} if self.unusable else self.holds
        return {p: holds[p] - n for p, n in self.found.items() if n < holds.get(p, 0)}


def _run(path: Path, inputs: list[dict[str, np.ndarray]]) -> list[list[np.ndarray]]:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(str(path), options, ["CPUExecutionProvider"])
    names = {i.name for i in session.get_inputs()}
    return [session.run(None, {n: v for n, v in feed.items() if n in names}) for feed in inputs]


def _difference(reference: list[np.ndarray], other: list[np.ndarray]) -> float:
    """The largest difference, relative to the largest value; infinite where NaN or infinity differ."""
    worst = 0.0
    for a, b in zip(reference, other, strict=True):
        x, y = a.astype(np.float64), b.astype(np.float64)
        if x.shape != y.shape or (np.isfinite(x) != np.isfinite(y)).any():
            return float("inf")
        finite = np.isfinite(x)
        if finite.any():
            size = np.abs(x[finite]).max() or 1.0
            worst = max(worst, float(np.abs(x[finite] - y[finite]).max() / size))
    return worst


def entry_of(path: Path) -> dict[str, str]:
    """What a file's name says of it: model, exporter, opset, attention and dtype."""
    model, *words = path.name.removesuffix(".onnx").split(".")
    entry = {"model": model, "exporter": "", "opset": "0", "attention": "", "dtype": "fp32"}
    for word in words:
        key = "attention" if word in ("eager", "sdpa") else "dtype" if word in LIMITS else "exporter"
        entry["opset" if word.isdigit() else key] = word
    return entry


def examine(path: Path, folder: Path) -> Row:
    """Fuses one file and compares the answers."""
    row = Row(path.name, entry_of(path))
    fused_path = folder / "fused.onnx"
    try:
        source = models.load(path)
        inputs = runnable_inputs(path, source.proto, count=3)
        reference = _run(path, inputs)
    except Exception as e:  # exporters write files that no runtime takes
        row.unusable = " ".join(str(e).split())[:120]
        return row
    try:
        fused, matched = fuse_model(source)
        row.nodes = (count_nodes(source), count_nodes(fused))
        row.sites, row.misses = matched.chosen, matched.near_misses
        models.save(fused, fused_path)
        onnx.checker.check_model(str(fused_path), full_check=True)
    except Exception as e:  # a fault of any kind is what this script is there to show
        row.fault = f"{type(e).__name__}: {e}".splitlines()[0]
        return row
    try:
        errors = [_difference(a, b) for a, b in zip(reference, _run(fused_path, inputs), strict=True)]
    except Exception as e:
        row.fault = f"{type(e).__name__}: {e}".splitlines()[0]
        return row
    row.error = max(errors)
    limit = LIMITS[row.entry["dtype"]]
    if not row.error <= limit:
        row.fault = f"error {row.error:.1e} above {limit:g}"
    return row


def _table(rows: list[Row]) -> str:
    """A line for all files of one model, exporter and type in which the same was found."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in sorted(rows, key=lambda r: (r.entry["model"], r.entry["exporter"], r.entry["dtype"])):
        key = (*(row.entry[k] for k in ("model", "exporter", "dtype")), str(row.found), row.unusable != "")
        groups.setdefault(key, []).append(row)
    heads = ["model", "exporter", "type", "opsets", "attention", *PARTS, "nodes", "error"]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for group in groups.values():
        first = group[0]
        cells = [first.entry[k] for k in ("model", "exporter", "dtype")]
        cells.append(", ".join(str(o) for o in sorted({int(r.entry["opset"]) for r in group})))
        cells.append(", ".join(sorted({r.entry["attention"] for r in group} - {""})))
        for part, found in first.found.items():
            lacks = found < first.holds[part]
            cells.append(
                "" if first.unusable else f"**{found}/{first.holds[part]}**" if lacks else str(found)
            )
        nodes = dict.fromkeys(f"{a} → {b}" for a, b in (r.nodes for r in group))
        cells.append("" if first.unusable else ", ".join(nodes))
        faults = [r.fault for r in group if r.fault]
        worst = f"{max(r.error for r in group):.1e}"
        cells.append("original does not run" if first.unusable else faults[0] if faults else worst)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _tell(row: Row, misses: bool) -> None:
    found = " ".join(f"{p} {n}" for p, n in row.found.items() if n)
    lacks = " ".join(f"{p} -{n}" for p, n in row.missing.items())
    said = f"does not run: {row.unusable}" if row.unusable else row.fault or f"{row.error:.0e}"
    print(f"{row.file:48} {found}  {said}" + (f"  LACKS {lacks}" if lacks else ""), flush=True)
    if misses:
        for (op, reason), times in Counter((m.op, m.reason) for m in row.misses).items():
            print(f"      {op}: {reason} ({times})")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument(
        "--only", default="", help="files whose name holds this text (or one of several, comma-separated)"
    )
    parser.add_argument("--misses", action="store_true", help="print the near-misses")
    options = parser.parse_args()
    paths = [p for f in options.folders for p in sorted(f.glob("*.onnx"))]
    paths = [p for p in paths if any(o in p.name for o in options.only.split(","))]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for path in paths:
            row = examine(path, Path(folder))
            _tell(row, options.misses)
            rows.append(row)
    if not options.only and not options.misses:
        with files.atomic_write(RESULTS) as out:
            out.write((HEADER + _table(rows)).encode())
    faults = [r for r in rows if r.fault]
    missing = sum(bool(r.missing) for r in rows)
    print(f"{len(rows)} files, {len(faults)} faults, {missing} with something not found")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
