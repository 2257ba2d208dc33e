"""Fused sites that trtfuse and ONNX Runtime's two optimizers find in the real models of the catalogue.

    python scripts/count_fusions.py [NAME...] [--tools trtfuse,ort,ort-python] [--models DIR]

Writes results/fusions.json and results/fusions.md. A site is counted where the written file has one node for
it, subgraphs included. The error is the largest difference of any output from the original's (graph
optimizations off) on three sets of inputs, as a share of that output's largest value. A quantized model
answers in steps: where rounding falls the other way, its error is a whole step, whoever rewrote it.
ONNX Runtime's python optimizer is told that each is a BERT: of its model types none finds more in these.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "scripts" / "results"
sys.path.insert(0, str(ROOT / "models"))

from catalogue import CATALOGUE, Model  # noqa: E402
from fetch import CACHE, FetchError, fetch  # noqa: E402

# What a column counts, as op types of ONNX, ONNX Runtime and trtfuse (there the name before `_`).
KINDS: dict[str, tuple[str, ...]] = {
    "norm": (
        "LayerNormalization",
        "SimplifiedLayerNormalization",
        "RMSNormalization",
        "SkipLayerNormalization",
        "SkipSimplifiedLayerNormalization",
        "EmbedLayerNormalization",
        "TrtfuseLayerNorm",
        "TrtfuseRmsNorm",
        "TrtfuseSkipLayerNorm",
        "TrtfuseSkipRmsNorm",
        "TrtfuseEmbedLayerNorm",
        "TrtfuseChannelLayerNorm",
    ),
    "skip_norm": (
        "SkipLayerNormalization",
        "SkipSimplifiedLayerNormalization",
        "TrtfuseSkipLayerNorm",
        "TrtfuseSkipRmsNorm",
    ),
    "attention": ("Attention", "MultiHeadAttention", "QAttention", "GroupQueryAttention", "TrtfuseAttention"),
    "softmax": ("TrtfuseSoftmax",),
    "gelu": ("Gelu", "BiasGelu", "FastGelu"),
    "hardswish": ("HardSwish",),
    "silu": ("Swish", "QuickGelu"),
}
COLUMNS = ("norm", "skip_norm", "sum", "attention", "softmax", "gelu", "hardswish", "silu")
ACTIVATIONS = {"gelu": ("gelu", "gelu_tanh"), "hardswish": ("hardswish",), "silu": ("silu", "quick_gelu")}
WITH_ACTIVATION = ("TrtfuseBiasAct", "TrtfuseLinearAct", "TrtfuseGatedAct")


def nodes_of(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """Every node of a graph and of the graphs inside its nodes."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            for inner in [attribute.g] if attribute.HasField("g") else attribute.graphs:
                yield from nodes_of(inner)


def _activation(node: onnx.NodeProto) -> str:
    for attribute in node.attribute:
        if attribute.name == "activation":
            return bytes(attribute.s).decode()
    return ""


def _has_sum(node: onnx.NodeProto) -> bool:
    # ONNX Runtime's sum is the fourth output, trtfuse's the second; one that nobody reads has no name
    last = 1 if node.domain == "trtfuse" else 3
    return len(node.output) > last and node.output[last] != ""


def sites(before: onnx.ModelProto, after: onnx.ModelProto) -> tuple[dict[str, int], dict[str, int]]:
    """Sites by column of the table, and all op types of `after` that are new or more frequent than before."""
    had = Counter(node.op_type for node in nodes_of(before.graph))
    have: Counter[str] = Counter()
    columns: Counter[str] = Counter()
    for node in nodes_of(after.graph):
        op = node.op_type.split("_")[0] if node.domain == "trtfuse" else node.op_type
        activation = _activation(node)
        have[f"{op}({activation})" if activation else op] += 1
        columns["sum"] += op in KINDS["skip_norm"] and _has_sum(node)
        for column, ops in KINDS.items():
            fused_activation = op in WITH_ACTIVATION and activation in ACTIVATIONS.get(column, ())
            columns[column] += op in ops or fused_activation
    return {column: columns[column] for column in COLUMNS}, {
        op: n for op, n in sorted(have.items()) if n > had[op]
    }


def session(path: Path) -> ort.InferenceSession:
    """A CPU session that runs the file as it is written."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def error(model: Model, original: Path, candidate: Path) -> float:
    """The largest difference of any output, as a share of that output's largest value in the original."""
    reference, other = session(original), session(candidate)
    names = [output.name for output in reference.get_outputs()]
    worst = 0.0
    for seed in range(3):
        feeds = model.feeds(seed)
        for expected, actual in zip(reference.run(names, feeds), other.run(names, feeds), strict=True):
            if expected.shape != actual.shape or not np.array_equal(np.isnan(expected), np.isnan(actual)):
                return float("inf")
            difference = float(np.max(np.abs(expected.astype(np.float64) - actual), initial=0.0))
            worst = max(worst, difference / (float(np.max(np.abs(expected), initial=0.0)) or 1.0))
    return worst


def _trtfuse(model: Model, source: Path, output: Path) -> None:
    from trtfuse import pipeline

    pipeline.fuse(source, output, select="all")


def _trtfuse_drop(model: Model, source: Path, output: Path) -> None:
    from trtfuse import pipeline

    pipeline.fuse(source, output, select="all", qdq="drop")


def _quantized(model: onnx.ModelProto) -> bool:
    return any(node.op_type == "QuantizeLinear" for node in nodes_of(model.graph))


def _ort(model: Model, source: Path, output: Path) -> None:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.optimized_model_filepath = str(output)
    ort.InferenceSession(str(source), options, providers=["CPUExecutionProvider"])


def _ort_python(model: Model, source: Path, output: Path) -> None:
    from onnxruntime.transformers.optimizer import optimize_by_fusion

    encoder = model.encoder
    optimized = optimize_by_fusion(
        onnx.load(source),
        model_type=encoder.model_type if encoder else "bert",
        num_heads=encoder.heads if encoder else 0,
        hidden_size=encoder.hidden if encoder else 0,
    )
    optimized.save_model_to_file(str(output))


TOOLS: dict[str, tuple[str, Callable[[Model, Path, Path], None]]] = {
    "trtfuse": ("trtfuse", _trtfuse),
    "trtfuse-drop": ("trtfuse, --qdq drop", _trtfuse_drop),
    "ort": ("ORT_ENABLE_ALL", _ort),
    "ort-python": ("ORT's python optimizer", _ort_python),
}


def measure(model: Model, source: Path, tool: str, folder: Path) -> dict[str, Any]:
    """A row of the table: what one tool did to one model, or why it could not."""
    output = folder / f"{model.name}.{tool}.onnx"
    row: dict[str, Any] = {"model": model.name, "tool": tool, "nodes_before": model.nodes}
    before = onnx.load(source)
    reference = source
    if tool == "trtfuse-drop":  # the error of fusing, not of taking the quantization out
        from trtfuse import pipeline

        reference = folder / f"{model.name}.dequantized.onnx"
        pipeline.fuse(source, reference, select="none", qdq="drop")
    row["nodes_before"] = sum(1 for _ in nodes_of(before.graph))
    try:
        TOOLS[tool][1](model, source, output)
        after = onnx.load(output)
        row["sites"], row["ops"] = sites(before, after)
        row["nodes"] = sum(1 for _ in nodes_of(after.graph))
    except Exception as failure:  # whatever a tool raises on a model is a result of this table
        return row | {"failed": _first_line(failure)}
    try:
        row["error"] = error(model, reference, output)
    except Exception as failure:
        row["failed"] = f"its file does not run: {_first_line(failure)}"
    return row


def _first_line(failure: Exception) -> str:
    text = f"{type(failure).__name__}: {failure}".strip().splitlines()[0]
    return text if len(text) <= 160 else text[:157] + "..."


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    titles = {"skip_norm": "with residual", "sum": "its sum read again"}
    head = ["model", "tool", "nodes", *(titles.get(c, c) for c in COLUMNS), "relative error"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for name in dict.fromkeys(row["model"] for row in rows):
        known = CATALOGUE[name].sites
        of_model = [row for row in rows if row["model"] == name]
        cells = [str(known.get(column, 0)) for column in COLUMNS]
        lines.append(
            f"| {name} | in the graph | {of_model[0]['nodes_before']} | " + " | ".join(cells) + " | |"
        )
        for row in of_model:
            if "sites" in row:
                cells = [str(row["sites"][column]) for column in COLUMNS]
                last = row.get("failed", "") if "error" not in row else f"{row['error']:.1e}"
            else:
                cells, last = [""] * len(COLUMNS), row["failed"]
            lines.append(
                f"| | {TOOLS[row['tool']][0]} | {row.get('nodes', '')} | "
                + " | ".join(cells)
                + f" | {last} |"
            )
    return "\n".join(lines) + "\n"


def save(rows: list[dict[str, Any]]) -> str:
    """Writes results/fusions.json and .md, keeps earlier rows of others, and returns the table."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / "fusions.json"
    fresh = {(row["model"], row["tool"]) for row in rows}
    earlier = json.loads(path.read_text())["rows"] if path.exists() else []
    merged = rows + [row for row in earlier if (row["model"], row["tool"]) not in fresh]
    models, tools = list(CATALOGUE), list(TOOLS)
    merged.sort(key=lambda row: (models.index(row["model"]), tools.index(row["tool"])))
    text = table(merged)
    versions = {"onnx": onnx.__version__, "onnxruntime": ort.__version__}
    path.write_text(json.dumps({"environment": versions, "rows": merged}, indent=1) + "\n")
    (RESULTS / "fusions.md").write_text(text)
    return text


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; 1 if trtfuse failed on a model or found fewer sites than the catalogue lists."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("names", nargs="*", help="models of the catalogue (default: all)")
    parser.add_argument("--tools", default=",".join(TOOLS), help=f"some of {','.join(TOOLS)}")
    parser.add_argument("--models", type=Path, default=CACHE, help="where the models are or go")
    options = parser.parse_args(argv)
    rows = []
    short = []
    for name in options.names or list(CATALOGUE):
        try:
            source = fetch(name, options.models)
        except FetchError as failure:
            print(f"{name}: left out: {failure}", file=sys.stderr)
            continue
        ours: list[dict[str, Any]] = []
        with tempfile.TemporaryDirectory() as folder:
            for tool in options.tools.split(","):
                if tool == "trtfuse-drop" and not _quantized(onnx.load(source, load_external_data=False)):
                    continue
                row = measure(CATALOGUE[name], source, tool, Path(folder))
                rows.append(row)
                if tool.startswith("trtfuse"):
                    ours.append(row)
        short += [f"{name}: {row['failed']}" for row in ours if "failed" in row]
        for site, count in CATALOGUE[name].sites.items() if ours else ():
            most = max(row.get("sites", {}).get(site, 0) for row in ours)
            if most < count:
                short.append(f"{name}: {most} of {count} {site}")
    print(save(rows))
    for line in short:
        print(f"short of the catalogue: {line}", file=sys.stderr)
    return 1 if short else 0


if __name__ == "__main__":
    sys.exit(main())
