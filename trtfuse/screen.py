"""What the command line shows: tables and progress; and the silence of the libraries below.

Results go to stdout, everything else to stderr. What is piped is never cut to a width, never coloured, and
holds no progress.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trtfuse.report import Accuracy, Latency, NearMiss, OpTotal, Report, Site, number, saved, seconds, size

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from trtfuse.doctor import Check

UNLIMITED = 100_000  # columns: wide enough that nothing is wrapped or cut when nobody's terminal is the limit
Progress = Callable[[str, int, int], None]


def line(text: str = "") -> None:
    """Writes a line to stdout."""
    sys.stdout.write(f"{text}\n")


@contextlib.contextmanager
def quiet_libraries(verbose: int) -> Iterator[None]:
    """Keeps what libraries write (native ones too) from stdout; without -v from stderr as well.

    Works on the file descriptors, since ONNX Runtime, protobuf and TensorRT write past Python's streams.
    """
    with contextlib.ExitStack() as stack:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        null = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
        if verbose:
            logging.basicConfig(level=logging.INFO if verbose == 1 else logging.DEBUG, stream=sys.stderr)
            stack.enter_context(contextlib.redirect_stdout(sys.stderr))
            _move(stack, 1, 2)
        else:
            stack.enter_context(contextlib.redirect_stdout(null))
            stack.enter_context(contextlib.redirect_stderr(null))
            _move(stack, 1, null.fileno())
            _move(stack, 2, null.fileno())
        yield


def _move(stack: contextlib.ExitStack, descriptor: int, to: int) -> None:
    """Lets `descriptor` lead to `to` until the stack unwinds; a closed descriptor stays as it is."""
    try:
        kept = os.dup(descriptor)
    except OSError:
        return
    stack.callback(os.close, kept)
    stack.callback(os.dup2, kept, descriptor)
    os.dup2(to, descriptor)


@contextlib.contextmanager
def progress(shown: bool) -> Iterator[Progress]:
    """Yields the callback of stages and builder phases; it draws on a terminal's stderr, else does nothing.

    callback(stage, 0, 0) begins a stage; callback(phase, step, steps) moves a phase inside it.
    """
    if not shown or not is_terminal(sys.stderr):
        yield lambda phase, step, steps: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    # Its own descriptor: the libraries' silence must not silence it.
    with open(os.dup(2), "w", encoding="utf-8", errors="replace") as terminal:
        columns = (SpinnerColumn(), TextColumn("{task.description:<34}"), BarColumn(), TimeElapsedColumn())
        console = Console(file=terminal, force_terminal=True)
        with Bars(
            *columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False
        ) as bars:
            phases: dict[str, TaskID] = {}

            def advance(phase: str, step: int, steps: int) -> None:
                if steps <= 0:
                    for task in phases.values():
                        bars.remove_task(task)
                    phases.clear()
                    phases[""] = bars.add_task(phase, total=None)
                    return
                if phase not in phases:
                    phases[phase] = bars.add_task(f"  {phase}", total=steps)
                bars.update(phases[phase], completed=step, total=steps)
                if step >= steps:
                    bars.remove_task(phases.pop(phase))

            yield advance


def show_build(report: Report, folder: str | None) -> None:
    """The end of `trtfuse build`: what was fused, how exact it is, how long it took, where everything is."""
    _fused(report)
    line()
    _accuracy("fused file", report.accuracy.fused)
    if report.accuracy.fused.measured:
        _outputs(report.accuracy.fused)
    engine = report.accuracy.engine
    if engine.measured:
        _accuracy("engine", engine)
        _outputs(engine)
    elif report.engine.path is not None:
        line(
            f"engine: accuracy not measured here: {engine.reason}; "
            "measure it with the first two commands below"
        )
    if report.engine.path is not None:
        _latency(report)
    _notes(report)
    line()
    line("stages:  " + ", ".join(f"{stage} {seconds(s)}" for stage, s in report.timings.items()))
    built = report.engine
    if built.path is not None:
        by = f"{built.target} {built.version}" if built.version else f"{built.target}"
        capable = f", for {', '.join(built.compute_capabilities)}" if built.compute_capabilities else ""
        line(f"engine:  {built.path} ({size(built.bytes)}, {by}{capable})")
    else:
        line(f"engine:  none ({built.reason})")
    if report.fused is not None:
        line(f"fused:   {report.fused.path} ({size(report.fused.bytes)})")
    if folder is not None:
        line(f"report:  {os.path.join(folder, 'report.html')}")
    if report.commands:
        line()
        line("Compare with other tools:")
        for command in report.commands:
            line(f"  {command}")
    if report.deploy:
        line()
        line("Load the engine in other tools:")
        for command in report.deploy:
            line(f"  {command}")


def show_fuse(report: Report) -> None:
    """The end of `trtfuse fuse`: one line, and what was not exact if it was compared."""
    counts: dict[str, int] = {}
    for total in report.totals():
        if total.lowering != "keep":
            counts[total.op] = counts.get(total.op, 0) + total.sites
    words = ", ".join(f"{count} {op}" for op, count in counts.items())
    path = report.fused.path if report.fused is not None else "nowhere"
    compared = ""
    if report.accuracy.fused.measured:
        compared = f"; accuracy {'passed' if report.accuracy.fused.passed else 'failed'}"
    fused = _plural(sum(counts.values()), "site")
    line(f"{fused} fused{f' ({words})' if words else ''}: {path}{compared}")


def show_explain(report: Report) -> None:
    """`trtfuse explain`: every site, every near miss with the condition that fails, totals."""
    _fused(report, verb="found")
    _notes(report)
    if report.sites:
        line()
        _sites(report.sites)
    if report.near_misses:
        line()
        line("Near misses:")
        _print(_misses(report.near_misses))


def show_outputs(runs: Sequence[Mapping[str, Mapping[str, Any]]]) -> None:
    """`trtfuse run`: each output of each feed in a line."""
    table = _table("output", "type", ">smallest", ">largest", ">mean", ">not finite")
    for outputs in runs:
        for name, o in outputs.items():
            kind = f"{o['dtype']} {'x'.join(map(str, o['shape']))}".strip()
            numbers = (number(o[key]) for key in ("min", "max", "mean"))
            table.add_row(name, kind, *numbers, str(o["not_finite"]))
    _print(table)


def show_accuracy(accuracy: Accuracy) -> None:
    """`trtfuse check`: the comparison output by output."""
    _outputs(accuracy, indent=0)
    _accuracy("accuracy", accuracy)


def show_doctor(checks: Sequence[Check], builds: bool) -> None:
    """`trtfuse doctor`: each part of the machine, and what mends a missing one."""
    table = _table("", "part", "what is there")
    for check in checks:
        table.add_row("ok" if check.ok else "missing" if check.needed else "-", check.name, check.detail)
        if check.remedy:
            table.add_row("", "", f"-> {check.remedy}")
    _print(table)
    if builds:
        line()
        line("trtfuse build works on this machine.")


def _fused(report: Report, verb: str = "fused") -> None:
    if not report.sites:
        line(f"no sites {verb}: no place in {report.model.path} fits a fused op")
        return
    table = _table("op", "lowering", ">sites", ">launches*", ">bytes before*", ">bytes after", ">saved")
    for total in report.totals():
        table.add_row(*_total_cells(total))
    table.add_section()
    table.add_row(*_total_cells(report.total()))
    _print(table)
    line("* if each operator were a kernel of its own, as in ONNX; the target fuses some of them by itself")


def _total_cells(t: OpTotal) -> list[str]:
    before, after = (size(t.bytes_before), size(t.bytes_after)) if t.sized else ("unknown", "unknown")
    if t.sized and t.sized < t.sites:
        before, after = f"{before} ({t.sized} of {t.sites} sites)", f"{after}"
    launches = f"{t.launches_before} -> {t.launches_after}"
    return [t.op, t.lowering, str(t.sites), launches, before, after, saved(t.bytes_before, t.bytes_after)]


def _sites(sites: Sequence[Site]) -> None:
    """Every site: what it is, what it saves, and the last of its nodes."""
    table = _table("site", "variant", "lowering", ">bytes", ">launches", ">nodes", "the last node")
    for s in sites:
        known = s.bytes_before is not None and s.bytes_after is not None
        traffic = f"{size(s.bytes_before)} -> {size(s.bytes_after)}" if known else "unknown"
        launches = f"{s.launches_before} -> {s.launches_after}"
        cells = (traffic, launches, str(len(s.nodes)), s.nodes[-1] if s.nodes else "")
        table.add_row(s.id, s.variant or "-", s.lowering, *cells)
    _print(table)
    line("(all nodes by name: --json)")


def _misses(misses: Sequence[NearMiss]) -> Table:
    table = _table("op", "node", "why not")
    for miss in misses:
        table.add_row(miss.op, miss.node, miss.reason)
    return table


def _accuracy(name: str, accuracy: Accuracy) -> None:
    if not accuracy.measured:
        line(
            f"{name}: not measured here: {accuracy.reason}{'; measure it with:' if accuracy.command else ''}"
        )
        if accuracy.command:
            line(f"  {accuracy.command}")
        return
    on = f" on {_plural(accuracy.inputs, 'input')}" if accuracy.inputs else ""
    why = f": {accuracy.reason}" if accuracy.reason else ""
    line(f"{name}: {'passed' if accuracy.passed else 'FAILED'}{on}{why}")
    for note in accuracy.notes:
        line(f"  note: {note}")


def _outputs(accuracy: Accuracy, indent: int = 2) -> None:
    if not accuracy.outputs:
        return
    table = _table("output", "type", ">largest error", ">relative", ">allowed", "worst element", "")
    for name, o in accuracy.outputs.items():
        kind = f"{o.dtype or ''} {'x'.join(map(str, o.shape or []))}".strip()
        allowed = f"{number(o.atol)} or {number(o.rtol)} |y|"
        worst = "-"
        if o.worst_expected is not None and o.worst_index is not None:
            worst = f"{o.worst_index}: {number(o.worst_actual)} for {number(o.worst_expected)}"
        state = "passed" if o.passed else "FAILED"
        table.add_row(name, kind, number(o.max_abs), number(o.max_rel), allowed, worst, state)
    _print(table, indent)


def _latency(report: Report) -> None:
    latency = report.latency_ms
    if not latency.engine.measured:
        line(f"engine: latency not measured here: {latency.engine.reason}; measure it with:")
        line(f"  {latency.engine.command}")
        return
    show_latencies(
        {
            "engine": latency.engine,
            "plain TensorRT": latency.plain,
            "ONNX Runtime": latency.onnxruntime,
            **{f"not taken: {name}": one for name, one in latency.candidates.items()},
        },
        latency.transfers,
        latency.notes,
    )


def show_latencies(
    latencies: Mapping[str, Latency], transfers: Sequence[float] | None, notes: Sequence[str]
) -> None:
    """Times by candidate, the first held against the others; why one was not timed."""
    table = _table("latency", ">median ms", ">p95", ">p99", ">inferences/s", ">engine's speedup", "95 %")
    for name, one in latencies.items():
        if not one.measured or one.p50 is None:
            continue
        interval = f"{one.interval[0]:.3f} to {one.interval[1]:.3f}" if one.interval else ""
        speedup = f"{one.speedup:.3f}" if one.speedup else ""
        times = [f"{t:.4f}" for t in (one.p50, one.p95, one.p99) if t is not None]
        table.add_row(name, *times, f"{one.throughput or 0:.1f}", speedup, interval)
    _print(table, 0)
    if transfers is not None:
        line(f"(not in these: inputs to the GPU {transfers[0]:.4f} ms, outputs back {transfers[1]:.4f} ms)")
    for name, one in latencies.items():
        if not one.measured:
            line(f"{name}: not timed: {one.reason}")
    for note in notes:
        line(f"  note: {note}")


def _notes(report: Report) -> None:
    for chosen in report.profile.derived:
        line(f"shapes chosen: {chosen}")
    for note in report.notes:
        line(f"note: {note}")


def _plural(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def _table(*columns: str) -> Table:
    """A plain table; a column whose title begins with > is aligned to the right."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for title in columns:
        table.add_column(
            Text(title.removeprefix(">")),
            justify="right" if title.startswith(">") else "left",
            overflow="fold",
        )
    return table


def _print(table: Table, indent: int = 0) -> None:
    """Prints a table; names are taken as they are (no markup), lines end where their text ends."""
    terminal = is_terminal(sys.stdout)
    buffer = io.StringIO()
    console = _console(buffer, terminal)
    console.print(table)
    for row in buffer.getvalue().splitlines():
        line(" " * indent + row.rstrip())


def _console(file: io.StringIO, terminal: bool) -> Console:
    from rich.console import Console

    options: dict[str, Any] = {"markup": False, "highlight": False, "emoji": False, "file": file}
    if terminal:
        width = _terminal_width()
        return Console(force_terminal=True, width=width, **options)
    return Console(width=UNLIMITED, color_system=None, **options)


def _terminal_width() -> int:
    import shutil

    return max(shutil.get_terminal_size((100, 24)).columns, 40)


def is_terminal(stream: Any) -> bool:
    """Whether `stream` is a terminal that can draw."""
    try:
        return bool(stream.isatty()) and os.environ.get("TERM") != "dumb"
    except (AttributeError, ValueError):
        return False
