"""Damages a valid model in every way a disk or a download does, and runs trtfuse's commands on the results.

    python scripts/fuzz_files.py [--cases 1000] [--seed 0] [--out results.json] [--keep FOLDER]

Each case flips bits, overwrites, cuts, repeats or zeroes bytes of a small transformer block, and must end
within the time limit with exit code 0 (and a file that the checker takes), 1 (the outputs differ from those
of a model that is not what it was: a gate) or 2 (one line, and no file). Never a traceback, a crash of the
process or a hang. Cases are forked from one process that has everything loaded; POSIX only.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

LIMIT = 10  # seconds a case may take
COMMANDS = (
    ("fuse", "m.onnx", "-o", "out.onnx"),
    ("fuse", "m.onnx", "-o", "out.onnx", "--verify"),
    ("explain", "m.onnx"),
    ("build", "m.onnx", "--target", "onnx", "-o", "out.onnx"),
    ("check", "m.onnx", "good.onnx"),
)
ALLOWED = {0, 1, 2}


def block() -> onnx.ModelProto:
    """A norm, a GELU behind a projection, and a softmax under a mask, with a branch."""
    rng = np.random.default_rng(0)

    def weight(name: str, *shape: int) -> TensorProto:
        return numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32) * 0.2, name)

    def scalar(name: str, value: float) -> TensorProto:
        return numpy_helper.from_array(np.array(value, np.float32), name)

    node = helper.make_node
    weights = [weight("w", 16, 16), weight("b", 16), weight("gamma", 16), weight("beta", 16)]
    weights += [scalar("two", 2.0), scalar("eps", 1e-5), scalar("root", 2**0.5), scalar("one", 1.0)]
    weights += [scalar("half", 0.5), numpy_helper.from_array(np.array(True), "flag"), weight("mask", 16)]
    inner = helper.make_graph(
        [node("Add", ["h", "b"], ["inner"]), node("Relu", ["inner"], ["branch"])],
        "branch",
        [],
        [helper.make_tensor_value_info("branch", TensorProto.FLOAT, ["n", 16])],
    )
    nodes = [
        node("ReduceMean", ["x"], ["mean"], axes=[-1]),
        node("Sub", ["x", "mean"], ["centred"]),
        node("Pow", ["centred", "two"], ["squared"]),
        node("ReduceMean", ["squared"], ["variance"], axes=[-1]),
        node("Add", ["variance", "eps"], ["shifted"]),
        node("Sqrt", ["shifted"], ["std"]),
        node("Div", ["centred", "std"], ["unit"]),
        node("Mul", ["unit", "gamma"], ["scaled"]),
        node("Add", ["scaled", "beta"], ["normal"]),
        node("MatMul", ["normal", "w"], ["p"]),
        node("Add", ["p", "b"], ["biased"]),
        node("Div", ["biased", "root"], ["d"]),
        node("Erf", ["d"], ["e"]),
        node("Add", ["e", "one"], ["f"]),
        node("Mul", ["biased", "f"], ["g"]),
        node("Mul", ["g", "half"], ["h"]),
        node("If", ["flag"], ["i"], then_branch=inner, else_branch=inner),
        node("Add", ["i", "mask"], ["masked"]),
        node("Softmax", ["masked"], ["y"], axis=-1),
    ]
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "block",
        [value("x", TensorProto.FLOAT, ["n", 16])],
        [value("y", TensorProto.FLOAT, ["n", 16])],
        weights,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)


def damaged(data: bytes, rng: random.Random) -> tuple[str, bytes]:
    """What was done, and the bytes."""
    made = bytearray(data)
    way = rng.choice(["flip", "flip", "flips", "byte", "cut", "head", "zero", "repeat", "swap", "insert"])
    at, size = rng.randrange(len(made)), rng.choice([1, 4, 16, 64, 256])
    if way == "flip":
        made[at] ^= 1 << rng.randrange(8)
    elif way == "flips":
        for _ in range(rng.randrange(2, 20)):
            made[rng.randrange(len(made))] ^= 1 << rng.randrange(8)
    elif way == "byte":
        made[at] = rng.choice([0, 0x7F, 0x80, 0xFF, rng.randrange(256)])
    elif way == "cut":
        del made[at:]
    elif way == "head":
        del made[: min(at, size)]
    elif way == "zero":
        made[at : at + size] = bytes(len(made[at : at + size]))
    elif way == "repeat":
        made[at:at] = made[at : at + size]
    elif way == "swap":
        other = rng.randrange(len(made))
        made[at], made[other] = made[other], made[at]
    else:
        made[at:at] = rng.randbytes(size)
    return way, bytes(made)


@dataclass
class Ended:
    """How a case ended. code: the exit code, or minus the signal; None: it hung."""

    code: int | None
    error: str
    seconds: float


def run(words: tuple[str, ...], folder: Path) -> Ended:
    """Runs a command line in a fork of this process."""
    begin = time.monotonic()
    child = os.fork()
    if child == 0:
        try:
            os.chdir(folder)
            os.setpgid(0, 0)
            for name, descriptor in (("stdout", 1), ("stderr", 2)):
                os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
            sys.stdout, sys.stderr = (open(n, "w", closefd=False) for n in (1, 2))  # noqa: SIM115
            from trtfuse import cli

            code = cli.run(words)
            sys.stdout.flush()
            sys.stderr.flush()
        except BaseException as e:
            os.write(2, f"uncaught {type(e).__name__}: {e}\n".encode())
            code = 99
        os._exit(code)
    while time.monotonic() - begin < LIMIT:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            return Ended(code, (folder / "stderr").read_text(errors="replace"), time.monotonic() - begin)
        time.sleep(0.005)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return Ended(None, "", time.monotonic() - begin)


def fault(words: tuple[str, ...], ended: Ended, folder: Path) -> str | None:
    """What is wrong with how a case ended; None if nothing is."""
    made, before = folder / "out.onnx", {"m.onnx", "good.onnx", "stdout", "stderr"}
    if ended.code is None:
        return f"no end within {LIMIT} s"
    if ended.code not in ALLOWED:
        return f"exit code {ended.code}: {ended.error.strip()[-300:]}"
    left = {p.name for p in folder.iterdir()} - before - {"out.onnx", "out.report"}
    if left:
        return f"left {', '.join(sorted(left))}"
    if ended.code == 0:
        if words[0] in ("fuse", "build"):
            try:
                onnx.checker.check_model(str(made), full_check=False)
            except Exception as e:
                return f"wrote what the checker refuses: {str(e)[:200]}"
        return None
    if made.exists():
        return f"exit code {ended.code} and a file"
    lines = ended.error.splitlines()
    if len(lines) != 1 or not lines[0].startswith("error: ") or "internal error" in lines[0]:
        return f"exit code {ended.code} with {len(lines)} lines: {ended.error[-300:]}"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs trtfuse on damaged models.")
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="where the counts go, as JSON")
    parser.add_argument("--keep", type=Path, help="where models go that were handled wrongly")
    options = parser.parse_args()
    counts, faults = fuzz(options.cases, options.seed, options.keep)
    summary = {
        "cases": options.cases,
        "seed": options.seed,
        "exit_codes": dict(sorted(counts.items())),
        "wrong": len(faults),
    }
    print(json.dumps(summary))
    for line in faults:
        print(line)
    if options.out is not None:
        options.out.write_text(json.dumps(summary, indent=1) + "\n")
    return 1 if faults else 0


def fuzz(cases: int, seed: int, keep: Path | None = None) -> tuple[dict[str, int], list[str]]:
    """How often each exit code came, and what went wrong, a line each."""
    import onnxruntime  # noqa: F401  (loaded once, here)

    from trtfuse import cli, pipeline, verify  # noqa: F401

    counts: collections.Counter[str] = collections.Counter()
    faults: list[str] = []
    good = block().SerializeToString()
    for number in range(cases):
        rng = random.Random(f"{seed}/{number}")
        words = COMMANDS[number % len(COMMANDS)]
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            way, data = damaged(good, rng)
            (folder / "m.onnx").write_bytes(data)
            (folder / "good.onnx").write_bytes(good)
            ended = run(words, folder)
            counts[str(ended.code)] += 1
            wrong = fault(words, ended, folder)
            if wrong is not None:
                faults.append(f"case {seed}/{number} ({way}; {' '.join(words)}): {wrong}")
                if keep is not None:
                    keep.mkdir(parents=True, exist_ok=True)
                    shutil.copy(folder / "m.onnx", keep / f"{seed}-{number}.onnx")
    return dict(counts), faults


if __name__ == "__main__":
    sys.exit(main())
