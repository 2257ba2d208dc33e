"""The child process of a build, seen from both sides.

The parent writes the order into a temporary folder and reads events (JSON lines: progress, log, note, done,
error) from a pipe; the engine comes back as a file there. What native code prints goes into a file, whose end
explains a death.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trtfuse import errors
from trtfuse.errors import BuildError, EnvironmentMissing, InputError, TrtfuseError
from trtfuse.targets import BuildOptions, Plan, messages

Send = Callable[..., None]  # send(kind, **what): one event to the parent

# The child finds modules where the parent does; it is no fork (threads of native libraries do not survive it)
# and not multiprocessing's spawn (which would run the caller's script again).
_START = (
    "import pickle, sys\n"
    "with open(sys.argv[1], 'rb') as f: sys.path[:] = pickle.load(f)\n"
    "from trtfuse.targets.child import main\n"
    "main(sys.argv[1], int(sys.argv[2]))\n"
)
_KEPT = 12  # log lines of warnings and errors that are kept to explain a death


def build(target: str, model: Path, options: BuildOptions) -> Plan:
    """Builds in a child process; see `trtfuse.targets.build`."""
    with contextlib.ExitStack() as stack:
        try:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="trtfuse-")))
            _order(folder, target, model, options)
        except OSError as e:
            raise InputError(
                f"cannot write the temporary files of the build: {e.strerror or e}; "
                "set TMPDIR to a folder with room"
            ) from e
        done, log, status = _run(folder, options)
        if done is None:
            raise _death(target, status, log, folder / "output")
        if done["kind"] == "error":
            raise _raised(done)
        return Plan(
            data=(folder / "engine").read_bytes(),
            target=target,
            compute_capabilities=tuple(done["compute_capabilities"]),
            seconds=done["seconds"],
            layers=done["layers"],
            version=done["version"],
            notes=tuple(done["notes"]),
            portable=done["portable"],
            kernels=done["kernels"],
        )


def _order(folder: Path, target: str, model: Path, options: BuildOptions) -> None:
    profile = options.profile
    order = {
        "target": target,
        "model": str(model.resolve()),
        "profile": {n: (profile.min[n], profile.opt[n], profile.max[n]) for n in profile.opt},
        "compute_capability": tuple(options.compute_capability),
        "timing_cache": str(options.timing_cache.resolve()) if options.timing_cache else None,
        "plugins": options.plugins
        and (str(options.plugins.library.resolve()), options.plugins.sites, options.plugins.embedded),
        "tf32": options.tf32,
        "verbose": options.verbose,
    }
    with open(folder / "order", "wb") as f:
        pickle.dump([p or os.getcwd() for p in sys.path], f)
        pickle.dump(order, f)


def _run(folder: Path, options: BuildOptions) -> tuple[dict[str, Any] | None, list[str], int]:
    """Runs the child to its end: its last word if it had one, its warnings and errors, its exit status."""
    reader, writer = os.pipe()
    done, log = None, deque[str](maxlen=_KEPT)
    try:
        with open(folder / "output", "wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-c", _START, str(folder / "order"), str(writer)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(writer,),
            )
    except BaseException:
        os.close(reader)
        raise
    finally:
        os.close(writer)
    try:
        with open(reader, encoding="utf-8") as events:
            for line in events:
                try:
                    event = json.loads(line)
                except ValueError:  # cut off by the child's death
                    continue
                if event["kind"] in ("done", "error"):
                    done = event
                else:
                    _tell(event, options, log)
        status = process.wait()
    finally:  # an interrupt, or an error of the caller's progress: the child must not go on by itself
        if process.poll() is None:
            process.kill()
            process.wait()
    return done, list(log), status


def _tell(event: dict[str, Any], options: BuildOptions, log: deque[str]) -> None:
    if event["kind"] == "progress" and options.progress is not None:
        options.progress(event["phase"], event["step"], event["steps"])
    elif event["kind"] == "log":
        if event["severity"] in ("warning", "error"):
            log.append(event["text"])
        if options.verbose:
            print(f"[{event['severity']}] {event['text']}", file=sys.stderr)


def _raised(event: dict[str, Any]) -> TrtfuseError:
    kind = getattr(errors, event["class"], BuildError)
    error: TrtfuseError = kind(event["text"])
    return error


def _death(target: str, status: int, log: list[str], output: Path) -> TrtfuseError:
    """The error for a child that ended without a word."""
    name = messages.NAMES[target]
    printed = [s for line in output.read_text(errors="replace").splitlines() if (s := line.strip())]
    # The logger's errors say more than what the C++ runtime prints at the end, but may be absent.
    last = [messages.clean(line) for line in (log[-1:] + printed[-1:])]
    words = f"; its last words: {' | '.join(dict.fromkeys(last))}" if last else ""
    if status < 0:
        try:
            how = f"died of {signal.Signals(-status).name}"
        except ValueError:
            how = f"died of signal {-status}"
        if -status == signal.SIGKILL:
            return BuildError(
                f"{name} was killed while building, probably for lack of memory: close other programs, "
                f"use smaller --max-shapes, or build on a larger machine{words}"
            )
    else:
        how = f"ended with {status}"
    return BuildError(
        f"{name} {how} while building{words}; it cannot take this model: keep sites by --select, "
        "simplify the graph, or use --target onnx"
    )


# --- in the child -------------------------------------------------------------------------------------------


def main(order_path: str, pipe: int) -> None:
    """Carries out the order; every way it can end by itself is told through the pipe."""
    _die_with_parent()
    lock = threading.Lock()

    def send(kind: str, **what: Any) -> None:
        data = (json.dumps({"kind": kind, **what}) + "\n").encode()
        with lock:  # TensorRT reports from several threads
            view = memoryview(data)
            while view:
                view = view[os.write(pipe, view) :]

    with open(order_path, "rb") as f:
        pickle.load(f)
        order = pickle.load(f)
    try:
        result = _build(order, Path(order_path).parent, send)
        send("done", **result)
    except TrtfuseError as e:
        send("error", **{"class": type(e).__name__, "text": str(e)})
    except MemoryError:
        text = "the build ran out of memory: use smaller --max-shapes, or build on a larger machine"
        send("error", **{"class": "BuildError", "text": text})
    except OSError as e:
        text = (
            f"cannot write or read a file of the build: {e.strerror or e}; set TMPDIR to a folder with room"
        )
        send("error", **{"class": "InputError", "text": text})
    except Exception as e:
        name = messages.NAMES[order["target"]]
        text = f"{name} failed: {type(e).__name__}: {messages.clean(str(e))}"
        send("error", **{"class": "BuildError", "text": text})
    os._exit(0)  # past the destructors of native libraries, which have nothing left to say


def _build(order: dict[str, Any], folder: Path, send: Send) -> dict[str, Any]:
    from trtfuse.targets import builder, tensorrt, tensorrt_rtx

    target = {"tensorrt": tensorrt, "tensorrt-rtx": tensorrt_rtx}[order["target"]]
    try:
        trt = target.load()
    except (ImportError, OSError) as e:
        name = messages.NAMES[order["target"]]
        raise EnvironmentMissing(
            f"{name} cannot be loaded ({messages.clean(str(e))}): {target.INSTALL}"
        ) from e
    return builder.build(trt, target, order, folder, send)


def _die_with_parent() -> None:
    """Asks the kernel (Linux) to end this process when its parent does."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
