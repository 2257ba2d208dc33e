"""The command line: `trtfuse build`, `fuse`, `explain`, `check`, `run`, `bench`, `plugins`, `doctor`.

Exit codes: 0 done; 1 a gate failed (accuracy, latency); 2 usage, or an input that cannot be used; 3 the
build failed, or trtfuse itself did; 4 this machine lacks something; 130 interrupted. An error is one line on
stderr; `-vv` adds the traceback.

Heavy packages are imported by the commands that need them, so that help and version answer at once.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer

from trtfuse import __version__, cli_engine, cli_plugins, errors_cli
from trtfuse.errors import EnvironmentMissing, GateError, InputError

TOLERANCE = re.compile(r"(.+:)?[0-9.]+([eE][-+]?[0-9]+)?")
STATISTIC = re.compile(r"(.+:)?(max|mean|median|elemwise|quantile)")
SHAPE = re.compile(r".+:(\[[0-9, ]*\]|[0-9]+(x[0-9]+)*)(,.+)?")
CAPABILITY = re.compile(r"(sm_?)?[0-9]+(\.[0-9])?[a-z]?", re.IGNORECASE)
# Options that take several values at once, as in Polygraphy, and what a further value looks like.
SEVERAL = {
    "--atol": TOLERANCE,
    "--rtol": TOLERANCE,
    "--check-error-stat": STATISTIC,
    "--shapes": SHAPE,
    "--min-shapes": SHAPE,
    "--opt-shapes": SHAPE,
    "--max-shapes": SHAPE,
    "--compute-capability": CAPABILITY,
}

app = typer.Typer(
    name="trtfuse",
    add_completion=False,
    rich_markup_mode=None,  # plain help: the same in a pipe, in a log and on a terminal
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    pretty_exceptions_enable=False,
)
app.add_typer(cli_plugins.app, name="plugins")
app.command("run")(cli_engine.run)
app.command("bench")(cli_engine.bench)


class Target(str, Enum):
    """What `trtfuse build` builds for."""

    auto = "auto"
    tensorrt = "tensorrt"
    tensorrt_rtx = "tensorrt-rtx"
    onnx = "onnx"


class Precision(str, Enum):
    """The types the engine computes in."""

    keep = "keep"
    fp16 = "fp16"
    bf16 = "bf16"


class Qdq(str, Enum):
    """What happens to QuantizeLinear and DequantizeLinear."""

    auto = "auto"
    keep = "keep"
    drop = "drop"


ModelArgument = Annotated[Path, typer.Argument(metavar="MODEL", help="An ONNX model.", show_default=False)]
Verbose = Annotated[
    int, typer.Option("-v", "--verbose", count=True, help="What the libraries say; -vv: and tracebacks.")
]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="Print nothing but errors.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON to stdout, and nothing else.")]
Select = Annotated[
    str, typer.Option(metavar="auto|all|none|FILE", help="Which sites are fused; FILE: a saved selection.")
]
Shapes = Annotated[
    list[str] | None,
    typer.Option(
        "--shapes",
        metavar="SPEC",
        show_default=False,
        help="Shapes of dynamic inputs: x:1x128 or x:[1,128], several with spaces, commas or repeated.",
    ),
]
MinShapes = Annotated[
    list[str] | None,
    typer.Option("--min-shapes", metavar="SPEC", show_default=False, help="The smallest shapes to support."),
]
OptShapes = Annotated[
    list[str] | None,
    typer.Option("--opt-shapes", metavar="SPEC", show_default=False, help="The shapes to be fastest at."),
]
MaxShapes = Annotated[
    list[str] | None,
    typer.Option("--max-shapes", metavar="SPEC", show_default=False, help="The largest shapes to support."),
]
Atol = Annotated[
    list[str] | None,
    typer.Option(
        "--atol",
        metavar="[OUTPUT:]NUMBER",
        show_default=False,
        help="Absolute tolerance, as Polygraphy's: 1e-5 out:1e-3. Default: by the output's type.",
    ),
]
Rtol = Annotated[
    list[str] | None,
    typer.Option(
        "--rtol", metavar="[OUTPUT:]NUMBER", show_default=False, help="Relative tolerance, likewise."
    ),
]
ErrorStat = Annotated[
    list[str] | None,
    typer.Option(
        "--check-error-stat",
        metavar="[OUTPUT:]STAT",
        show_default=False,
        help="Which error is held against the tolerance: max, mean, median, elemwise or quantile.",
    ),
]
LoadInputs = Annotated[
    Path | None,
    typer.Option(
        "--load-inputs",
        metavar="FILE",
        show_default=False,
        help="Inputs to compare on: .npz, or Polygraphy's JSON. Default: made from what reads each input.",
    ),
]
Capability = Annotated[
    list[str] | None,
    typer.Option(
        "--compute-capability",
        metavar="CC",
        show_default=False,
        help="GPU architectures of the engine, such as 8.6 or 12.0. Default: all that the target offers.",
    ),
]


def _version(value: bool) -> None:
    if value:
        sys.stdout.write(f"trtfuse {__version__}\n")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _top(
    context: typer.Context,
    _: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Fuses an ONNX model, builds a TensorRT engine from it, and proves the result against ONNX Runtime."""
    if context.invoked_subcommand is None:
        sys.stdout.write(context.get_help() + "\n")


@app.command()
def build(
    model: ModelArgument,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", metavar="FILE", show_default=False, help="Default: MODEL.engine here."
        ),
    ] = None,
    target: Annotated[Target, typer.Option(help="auto: TensorRT on an NVIDIA GPU, else TensorRT-RTX.")] = (
        Target.auto
    ),
    precision: Annotated[Precision, typer.Option(help="keep: the types of the model.")] = Precision.keep,
    shapes: Shapes = None,
    min_shapes: MinShapes = None,
    opt_shapes: OptShapes = None,
    max_shapes: MaxShapes = None,
    select: Select = "auto",
    qdq: Annotated[
        Qdq, typer.Option(help="Take out Q/DQ first: all (drop), or what TensorRT refuses (auto).")
    ] = Qdq.keep,
    tf32: Annotated[
        bool, typer.Option("--tf32", help="Let TensorRT compute fp32 in TF32: faster, 10 bits of mantissa.")
    ] = False,
    compute_capability: Capability = None,
    external_plugins: Annotated[
        bool,
        typer.Option("--external-plugins", help="Leave the plugin library out of the engine; you load it."),
    ] = False,
    atol: Atol = None,
    rtol: Rtol = None,
    check_error_stat: ErrorStat = None,
    load_inputs: LoadInputs = None,
    timing_cache: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            show_default=False,
            help="Kernel times to reuse; kept up to date. Default: one for each user and GPU.",
        ),
    ] = None,
    measure: Annotated[
        bool, typer.Option(help="Time the engine beside plain TensorRT's and ONNX Runtime.")
    ] = True,
    report: Annotated[
        Path | None,
        typer.Option(metavar="DIR", show_default=False, help="Where report.json and report.html go."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Build even if nothing has changed.")] = False,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = 0,
) -> None:
    """Fuse MODEL, build an engine, check it, report."""
    if precision is not Precision.keep:
        wanted = precision.value
        raise InputError(
            f"--precision {wanted} is not offered by this version; use keep, and export the model in {wanted}"
        )
    from trtfuse import screen

    _check_selection(select)
    with screen.progress(not quiet) as progress, screen.quiet_libraries(verbose):
        from trtfuse import pipeline

        result = pipeline.build(
            model,
            output,
            target=target.value,
            precision=precision.value,
            shapes=shapes or [],
            min_shapes=min_shapes or [],
            opt_shapes=opt_shapes or [],
            max_shapes=max_shapes or [],
            select=select,
            qdq=qdq.value,
            tf32=tf32,
            compute_capability=tuple(compute_capability or ()),
            external_plugins=external_plugins,
            atol=atol or [],
            rtol=rtol or [],
            check_error_stat=check_error_stat or [],
            load_inputs=load_inputs,
            timing_cache=timing_cache,
            measure=measure,
            report=report,
            force=force,
            verbose=verbose > 1,
            progress=progress,
        )
        made = result.to_report()
    if json:
        sys.stdout.write(made.to_json())
    elif not quiet:
        if result.up_to_date is not None:
            screen.line(f"up to date: {result.engine_path} (--force builds it again)")
        screen.show_build(made, str(result.report_dir) if result.report_dir is not None else None)


@app.command()
def fuse(
    model: ModelArgument,
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="FILE", show_default=False, help="The fused ONNX file.")
    ],
    select: Select = "all",
    qdq: Annotated[Qdq, typer.Option(help="Take out Q/DQ first: all, or what TensorRT refuses.")] = Qdq.keep,
    verify: Annotated[
        bool, typer.Option("--verify", help="Compare the file with MODEL before writing.")
    ] = False,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = 0,
) -> None:
    """Write MODEL with its sites fused, as ONNX.

    The file runs in any ONNX Runtime, with no trtfuse installed.
    """
    from trtfuse import screen

    _check_selection(select)
    with screen.progress(not quiet) as progress, screen.quiet_libraries(verbose):
        from trtfuse import pipeline

        made = pipeline.fuse(
            model, output, select=select, qdq=qdq.value, verify=verify, progress=progress
        ).to_report()
    if json:
        sys.stdout.write(made.to_json())
    elif not quiet:
        screen.show_fuse(made)


@app.command()
def explain(
    model: ModelArgument,
    shapes: Shapes = None,
    qdq: Annotated[Qdq, typer.Option(help="Take out Q/DQ first: all, or what TensorRT refuses.")] = Qdq.keep,
    json: Json = False,
    verbose: Verbose = 0,
) -> None:
    """Show MODEL's sites, near misses and what is saved.

    Nothing is written.
    """
    from trtfuse import screen

    with screen.progress(True) as progress, screen.quiet_libraries(verbose):
        from trtfuse import pipeline

        made = pipeline.explain(model, shapes=shapes or [], qdq=qdq.value, progress=progress).to_report()
    if json:
        sys.stdout.write(made.to_json())
    else:
        screen.show_explain(made)


@app.command()
def check(
    reference: Annotated[
        Path, typer.Argument(metavar="A", help="The reference, an ONNX model.", show_default=False)
    ],
    candidate: Annotated[
        Path, typer.Argument(metavar="B", help="What is compared with it.", show_default=False)
    ],
    shapes: Shapes = None,
    atol: Atol = None,
    rtol: Rtol = None,
    check_error_stat: ErrorStat = None,
    load_inputs: LoadInputs = None,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = 0,
) -> None:
    """Compare model B with model A in ONNX Runtime.

    Exits with 1 where an output differs by more than the tolerances allow.
    """
    from trtfuse import screen

    with screen.progress(not quiet) as progress, screen.quiet_libraries(verbose):
        from trtfuse import account, pipeline

        compared = pipeline.check(
            reference,
            candidate,
            shapes=shapes or [],
            atol=atol or [],
            rtol=rtol or [],
            check_error_stat=check_error_stat or [],
            load_inputs=load_inputs,
            progress=progress,
        )
        accuracy = account.accuracy(compared.to_dict(), compared.inputs)
    if json:
        sys.stdout.write(accuracy.model_dump_json(indent=2) + "\n")
    elif not quiet:
        screen.show_accuracy(accuracy)
    if not accuracy.passed:
        failed = [name for name, o in accuracy.outputs.items() if not o.passed]
        why = accuracy.reason or f"{', '.join(failed) or 'an output'} differs by more than allowed"
        advice = "; --atol and --rtol set what is allowed" if failed else ""
        raise GateError(f"{candidate} does not give what {reference} gives: {why}{advice}")


@app.command()
def doctor(json: Json = False, verbose: Verbose = 0) -> None:
    """Show what this machine can build and run.

    Each missing part comes with what brings it. Exits with 4 where no engine can be built.
    """
    from trtfuse import doctor as examiner
    from trtfuse import screen

    with screen.quiet_libraries(verbose):
        checks = examiner.examine()
        builds = examiner.builds_engines(checks)
    if json:
        import json as encoder

        sys.stdout.write(encoder.dumps(examiner.as_dict(checks), indent=2) + "\n")
    else:
        screen.show_doctor(checks, builds)
    if not builds:
        missing = [c for c in checks if not c.ok and (c.needed or c.name == "tensorrt-rtx")]
        remedies = "; ".join(c.remedy for c in missing if c.remedy)
        names = ", ".join(c.name for c in missing) or "an engine builder"
        raise EnvironmentMissing(f"no engine can be built here for want of {names}: {remedies}")


def _check_selection(select: str) -> None:
    if select not in ("auto", "all", "none") and not Path(select).is_file():
        raise InputError(f"--select {select}: no such file; use auto, all, none, or a saved selection's path")


def expand(arguments: Sequence[str]) -> list[str]:
    """`--atol 1e-5 out:1e-3` as `--atol 1e-5 --atol out:1e-3`: several values after one option.

    A further value is taken only while it looks like the option's values, so a model's path may follow.
    """
    words, at = list(arguments), 0
    expanded: list[str] = []
    while at < len(words):
        word = words[at]
        at += 1
        expanded.append(word)
        if word == "--":
            return expanded + words[at:]
        option, equals, _ = word.partition("=")
        if option not in SEVERAL:
            continue
        if not equals and at < len(words):
            expanded.append(words[at])
            at += 1
        while at < len(words) and SEVERAL[option].fullmatch(words[at]):
            expanded += [option, words[at]]
            at += 1
    return expanded


def verbosity(arguments: Sequence[str]) -> int:
    """How many -v there are, known before the arguments are parsed (a bad one may need a traceback too)."""
    return sum(a.count("v") if re.fullmatch(r"-[vq]+", a) else a == "--verbose" for a in arguments)


def run(arguments: Sequence[str]) -> int:
    """Runs the command line `arguments` (without the program's name) and returns the exit code."""
    words = expand(arguments)
    try:
        command = typer.main.get_command(app)
        with command.make_context("trtfuse", words) as context:
            command.invoke(context)
        sys.stdout.flush()
        return 0
    except BaseException as e:
        return errors_cli.say(e, verbosity(arguments))


def _terminated(number: int, frame: FrameType | None) -> NoReturn:
    """Ends by an exception, so that files half written are removed."""
    raise SystemExit(128 + number)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """The entry point of the `trtfuse` command."""
    for name in ("stdout", "stderr"):
        stream: Any = getattr(sys, name)
        if stream is None:  # closed by who started us
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 (until the end)
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # names that the terminal cannot show must not end the run
    for number in (signal.SIGTERM, getattr(signal, "SIGHUP", None)):
        if number is not None and signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _terminated)
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


if __name__ == "__main__":
    main()
