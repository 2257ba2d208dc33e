"""Time and peak memory of rewriting a model, trtfuse beside other optimizers.

    python scripts/bench_rewrite.py                  1k, 4k and 16k nodes: results/rewrite.json and rewrite.md
    python scripts/bench_rewrite.py --large          a model over 2 GB: results/rewrite-large.json and .md
    python scripts/bench_rewrite.py --tools onnxslim,ort --nodes 1000 --runs 1

Each run is a process of its own; runs of the tools are interleaved, and medians are shown. `rewrite s` is the
work between the loaded and the finished model where a tool lets it be told apart, else loading is in it;
`whole s` is the process from its start to its end; peak is its largest resident set, imports included.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
RESULTS = HERE / "results"
sys.path.insert(0, str(ROOT / "models"))

MIB = 1 << 20
OUTSIDE_REWRITING = {"load", "write", "verify", "build"}  # stages of trtfuse.pipeline's timings
HIDDEN, HEADS = 64, 4


def _peak() -> int:
    """This process's largest resident set so far, in bytes."""
    # not getrusage: its figure begins at what the parent held when it started this process
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _trtfuse(model: Path, output: Path) -> dict[str, float]:
    from trtfuse import pipeline

    started = time.perf_counter()
    result = pipeline.fuse(model, output, select="all")
    whole = time.perf_counter() - started
    stages: dict[str, float] = dict(result.timings)
    inside = sum(seconds for stage, seconds in stages.items() if stage not in OUTSIDE_REWRITING)
    return {"rewrite": inside if stages else whole, **{f"stage {k}": v for k, v in stages.items()}}


def _trtfuse_cli(model: Path, output: Path) -> dict[str, float]:
    command = [str(Path(sys.executable).with_name("trtfuse")), "fuse", str(model), "-o", str(output)]
    started = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise RuntimeError(f"trtfuse fuse exited {done.returncode}: {done.stderr.strip()}")
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    return {"rewrite": time.perf_counter() - started, "peak": peak}


def _ort(model: Path, output: Path) -> dict[str, float]:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.optimized_model_filepath = str(output)
    if model.stat().st_size + _weights(model) > 2 * 1000**3:
        options.add_session_config_entry(
            "session.optimized_model_external_initializers_file_name", f"{output.name}.data"
        )
    started = time.perf_counter()
    ort.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
    return {"rewrite": time.perf_counter() - started}


def _ort_transformers(model: Path, output: Path) -> dict[str, float]:
    import onnx
    from onnxruntime.transformers.optimizer import optimize_by_fusion

    loaded = onnx.load(model)
    started = time.perf_counter()
    optimized = optimize_by_fusion(loaded, model_type="bert", num_heads=HEADS, hidden_size=HIDDEN)
    seconds = time.perf_counter() - started
    optimized.save_model_to_file(str(output), use_external_data_format=_weights(model) > 0)
    return {"rewrite": seconds}


def _onnxslim(model: Path, output: Path) -> dict[str, float]:
    import onnx
    import onnxslim

    loaded = onnx.load(model)
    started = time.perf_counter()
    slimmed = onnxslim.slim(loaded)
    seconds = time.perf_counter() - started
    if slimmed is None:
        raise RuntimeError("onnxslim returned no model")
    onnx.save(slimmed, output, save_as_external_data=_weights(model) > 0, location=f"{output.name}.data")
    return {"rewrite": seconds}


TOOLS: dict[str, tuple[str, Callable[[Path, Path], dict[str, float]]]] = {
    "trtfuse": ("trtfuse, Python", _trtfuse),
    "trtfuse-cli": ("trtfuse fuse (whole command)", _trtfuse_cli),
    "ort": ("ONNX Runtime, ORT_ENABLE_ALL (its loading and writing included)", _ort),
    "ort-transformers": ("onnxruntime.transformers.optimizer", _ort_transformers),
    "onnxslim": ("onnxslim", _onnxslim),
}


def _weights(model: Path) -> int:
    """Bytes of the external file beside a generated model; 0 if it has none."""
    data = model.with_name(model.name + ".data")
    return data.stat().st_size if data.exists() else 0


def child(tool: str, model: Path, output: Path) -> None:
    """One run, in this process: prints its figures as one JSON line on the last line."""
    figures = TOOLS[tool][1](model, output)
    figures.setdefault("peak", _peak())
    print(json.dumps(figures))


def run_once(tool: str, model: Path, limit: float) -> dict[str, Any]:
    """One run in a fresh process: its figures, or the reason why there are none under `error`."""
    with tempfile.TemporaryDirectory(dir=model.parent) as folder:
        output = Path(folder) / "out.onnx"
        command = [sys.executable, __file__, "--child", tool, str(model), str(output)]
        started = time.perf_counter()
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=limit, stdin=subprocess.DEVNULL
            )
        except subprocess.TimeoutExpired:
            return {"error": f"over {limit:.0f} s"}
        whole = time.perf_counter() - started
        if done.returncode:
            lines = (done.stderr or done.stdout).strip().splitlines()
            return {"error": f"exit {done.returncode}: {lines[-1][:200] if lines else 'no message'}"}
        figures: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
        figures["whole"] = whole
        if not output.exists():
            return {"error": "wrote no file"}
        figures["nodes"] = _count_nodes(output)
        figures["bytes"] = sum(path.stat().st_size for path in Path(folder).iterdir())
        return figures


def _count_nodes(path: Path) -> int:
    import onnx

    return len(onnx.load(path, load_external_data=False).graph.node)


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of the runs of one tool on one model; its first error if it has one."""
    for run in runs:
        if "error" in run:
            return {"error": run["error"]}
    return {key: statistics.median(run[key] for run in runs) for key in runs[0]} | {"runs": len(runs)}


def measure(models: dict[str, Path], tools: Sequence[str], runs: int, limit: float) -> list[dict[str, Any]]:
    """A row for each model and tool; a tool that failed or ran out of time is not run again on that model."""
    rows = []
    for label, model in models.items():
        found: dict[str, list[dict[str, Any]]] = {tool: [] for tool in tools}
        for index in range(runs):
            for tool in tools:
                if any("error" in run for run in found[tool]):
                    continue
                found[tool].append(run_once(tool, model, limit))
                print(
                    f"{label} {tool} run {index + 1}: {_brief(found[tool][-1])}", file=sys.stderr, flush=True
                )
        size = model.stat().st_size + _weights(model)
        for tool in tools:
            row = {"model": label, "tool": tool, "nodes_before": _count_nodes(model), "model_bytes": size}
            rows.append(row | summary(found[tool]))
    return rows


def _brief(run: dict[str, Any]) -> str:
    return run["error"] if "error" in run else f"{run['rewrite']:.2f} s, {run['peak'] / MIB:.0f} MiB"


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    lines = [
        "| model | tool | nodes | rewrite s | whole s | peak MiB | peak / model |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        name = TOOLS[row["tool"]][0]
        if "error" in row:
            lines.append(f"| {row['model']} | {name} | {row['nodes_before']} | {row['error']} | | | |")
            continue
        share = f"{row['peak'] / row['model_bytes']:.2f}" if row["model_bytes"] > 100 * MIB else ""
        lines.append(
            f"| {row['model']} | {name} | {row['nodes_before']} → {row['nodes']:.0f} | {row['rewrite']:.2f} "
            f"| {row['whole']:.2f} | {row['peak'] / MIB:.0f} | {share} |"
        )
    return "\n".join(lines) + "\n"


def environment() -> dict[str, Any]:
    """What the figures depend on."""
    import platform
    from importlib.metadata import version

    packages = ("onnx", "onnxruntime-gpu", "onnxslim", "onnx-graphsurgeon", "numpy")
    return {
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "packages": {name: version(name) for name in packages},
    }


def save(rows: list[dict[str, Any]], stem: str) -> str:
    """Writes `stem`.json and `stem`.md and returns the table.

    Rows measured earlier for other tools or models are kept, so that tools can be run one at a time.
    """
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{stem}.json"
    fresh = {(row["model"], row["tool"]) for row in rows}
    earlier = json.loads(path.read_text())["rows"] if path.exists() else []
    merged = rows + [row for row in earlier if (row["model"], row["tool"]) not in fresh]
    order = list(TOOLS)
    merged.sort(key=lambda row: (row["model"].split()[0], row["nodes_before"], order.index(row["tool"])))
    text = table(merged)
    path.write_text(json.dumps({"environment": environment(), "rows": merged}, indent=1) + "\n")
    (RESULTS / f"{stem}.md").write_text(text)
    return text


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--tools", default=",".join(TOOLS), help=f"some of {','.join(TOOLS)}")
    parser.add_argument("--nodes", default="1000,4000,16000")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--limit", type=float, default=300, help="seconds after which a run is given up")
    parser.add_argument("--large", action="store_true", help="only the model over 2 GB, one run each")
    parser.add_argument("--folder", type=Path, help="where the models go (default: a temporary folder)")
    parser.add_argument("--child", nargs=3, metavar=("TOOL", "MODEL", "OUTPUT"), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.child:
        tool, model, output = options.child
        child(tool, Path(model), Path(output))
        return 0
    tools = options.tools.split(",")
    if unknown := set(tools) - set(TOOLS):
        parser.error(f"no tool {', '.join(sorted(unknown))}: choose from {', '.join(TOOLS)}")

    import onnx

    import generate

    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        models: dict[str, Path] = {}
        if options.large:
            models["large"] = folder / "large.onnx"
            if not models["large"].exists():
                generate.write_large(models["large"])
        else:
            for count in map(int, options.nodes.split(",")):
                for kind in ("transformer", "chain"):
                    path = folder / f"{kind}-{count}.onnx"
                    layers = generate.layers_for(count)
                    made = (
                        generate.transformer(layers, HIDDEN, HEADS)
                        if kind == "transformer"
                        else generate.chain(count)
                    )
                    onnx.save(made, path)
                    models[f"{kind} {count}"] = path
        rows = measure(models, tools, 1 if options.large else options.runs, options.limit)
    print(save(rows, "rewrite-large" if options.large else "rewrite"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
