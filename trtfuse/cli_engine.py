"""`trtfuse run` and `trtfuse bench`: engines on this machine's GPU."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trtfuse.errors import GateError, InputError

if TYPE_CHECKING:
    from trtfuse.benchmark import Outcome

EngineArgument = Annotated[
    Path, typer.Argument(metavar="ENGINE", help="A serialized engine.", show_default=False)
]
Inputs = Annotated[
    Path | None,
    typer.Option(
        "--load-inputs",
        metavar="FILE",
        show_default=False,
        help="Inputs: .npz, or Polygraphy's JSON. Default: random ones of the preferred shapes.",
    ),
]
Shapes = Annotated[
    list[str] | None,
    typer.Option("--shapes", metavar="SPEC", show_default=False, help="Shapes of random inputs: x:1x128."),
]
HostCode = Annotated[
    bool,
    typer.Option(
        "--allow-host-code",
        help="Run code that the engine carries, whatever it is: an engine is a program.",
    ),
]
Library = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", show_default=False, help="Plugins of an engine that was built without them inside."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON to stdout, and nothing else.")]


def run(
    engine: EngineArgument,
    load_inputs: Inputs = None,
    shapes: Shapes = None,
    save_outputs: Annotated[
        Path | None,
        typer.Option(metavar="FILE", show_default=False, help="Where the outputs go: .npz."),
    ] = None,
    cuda_graph: Annotated[
        bool, typer.Option("--cuda-graph", help="Record the launches and replay them.")
    ] = False,
    allow_host_code: HostCode = False,
    plugin_library: Library = None,
    json: Json = False,
    verbose: Annotated[int, typer.Option("-v", "--verbose", count=True, help="-vv: tracebacks.")] = 0,
) -> None:
    """Run ENGINE on inputs and show the outputs."""
    from trtfuse import feeds, screen

    with screen.quiet_libraries(verbose):
        from trtfuse.engine import Engine

        with Engine(engine, allow_host_code=allow_host_code, plugin_library=plugin_library) as loaded:
            given = feeds.of(loaded, load_inputs, shapes or [])
            results = [loaded(feed, cuda_graph=cuda_graph) for feed in given]
        if save_outputs is not None:
            feeds.save(save_outputs, results)
    summary = [feeds.summary(outputs) for outputs in results]
    if json:
        import json as encoder

        sys.stdout.write(encoder.dumps({"schema": "trtfuse/run/1", "outputs": summary}, indent=2) + "\n")
        return
    screen.show_outputs(summary)
    if save_outputs is not None:
        screen.line(f"outputs: {save_outputs}")


def bench(
    engine: EngineArgument,
    against: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="PLAN", show_default=False, help="An engine to time beside it; may be repeated."
        ),
    ] = None,
    onnx: Annotated[
        Path | None,
        typer.Option(metavar="MODEL", show_default=False, help="An ONNX model for ONNX Runtime, likewise."),
    ] = None,
    load_inputs: Inputs = None,
    shapes: Shapes = None,
    rounds: Annotated[int, typer.Option(min=6, help="How often the candidates take turns.")] = 20,
    cuda_graph: Annotated[bool, typer.Option(help="Time recorded launches, as servers run them.")] = True,
    tf32: Annotated[bool, typer.Option("--tf32", help="Let ONNX Runtime compute fp32 in TF32.")] = False,
    minimum_speedup: Annotated[
        float | None,
        typer.Option(
            metavar="X", show_default=False, help="Exit with 1 unless X times as fast as each PLAN."
        ),
    ] = None,
    allow_host_code: HostCode = False,
    plugin_library: Library = None,
    json: Json = False,
    verbose: Annotated[int, typer.Option("-v", "--verbose", count=True, help="-vv: tracebacks.")] = 0,
) -> None:
    """Time ENGINE on this GPU, beside others.

    Candidates take turns in one process; times are the GPU's, with inputs and outputs there.
    """
    from trtfuse import account, screen

    engines = {"engine": engine}
    for path in against or []:
        name = path.name if path.name not in engines else str(path)
        engines[name] = path
    with screen.quiet_libraries(verbose):
        from trtfuse import benchmark, feeds
        from trtfuse.engine import Engine

        with Engine(engine, allow_host_code=allow_host_code, plugin_library=plugin_library) as loaded:
            feed = feeds.of(loaded, load_inputs, shapes or [])[0]
        outcome = benchmark.run(
            benchmark.Job(
                engines,
                feed,
                onnx,
                cuda_graph=cuda_graph,
                trusted=allow_host_code,
                rounds=rounds,
                tf32=tf32,
                library=plugin_library,
            )
        )
    latencies = {
        name: account.latency(outcome, name) for name in [*engines, *(["onnxruntime"] if onnx else [])]
    }
    transfers = [t * 1e3 for t in outcome.transfers] if outcome.transfers else None
    notes = [f"on {outcome.gpu}; {outcome.clocks}", *outcome.notes]
    if json:
        _print_json(latencies, transfers, notes)
    else:
        screen.show_latencies(latencies, transfers, notes)
    if minimum_speedup is not None:
        _gate(outcome, minimum_speedup)


def _print_json(latencies: dict[str, Any], transfers: list[float] | None, notes: list[str]) -> None:
    import json as encoder

    data = {
        "schema": "trtfuse/bench/1",
        "latency_ms": {name: one.model_dump() for name, one in latencies.items()},
        "transfers_ms": transfers,
        "notes": notes,
    }
    sys.stdout.write(encoder.dumps(data, indent=2) + "\n")


def _gate(outcome: Outcome, minimum: float) -> None:
    if not outcome.comparisons:
        raise InputError("--minimum-speedup compares with an engine: name one with --against")
    for name, compared in outcome.comparisons.items():
        if compared.low < minimum:
            raise GateError(
                f"the engine is {compared.ratio:.3f} times as fast as {name} (95 %: {compared.low:.3f} to "
                f"{compared.high:.3f}), and {minimum:g} was asked for"
            )
