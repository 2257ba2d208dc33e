"""Times of the kernels on this GPU, beside a device copy of the same bytes and torch.compile, in one run.

    python scripts/bench_kernels.py [--out FILE.json] [--quick]

Each is a CUDA graph of launches on rotating tensors (so that large ones do not come from L2), replayed in
turns with the others; medians in microseconds a launch. Needs torch, nvcc and an
NVIDIA GPU.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import math
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from trtfuse.plugin_library import activation_names, build

SIZES = ((1024, 768), (16384, 768), (65536, 1024))
WIDE = ((1024, 3072), (16384, 3072))
SCORES = ((8, 12, 128, 128), (32, 12, 512, 512))
ROTATING_BYTES = 128 * 2**20  # that the tensors of a case exceed: more than L2
MOST_SETS = 64
GOAL = 0.9  # of the copy's bandwidth
WARM_UP = 3
POINTER, LONG = ctypes.c_void_p, ctypes.c_int64

Tensors = list[Any]
Call = Callable[..., Any]


class Bench:
    """Holds torch and the library, and times one case after another. kind: the type's number."""

    def __init__(self, torch: Any, library: Path, rounds: int) -> None:
        self.torch, self.rounds = torch, rounds
        self.kernels = ctypes.CDLL(str(library))
        self.results: list[dict[str, Any]] = []
        self.use("fp16")

    def use(self, word: str) -> None:
        """Tensors of that type from now on."""
        kinds = {"fp32": (0, "float32"), "fp16": (1, "float16"), "bf16": (2, "bfloat16")}
        self.word, (self.kind, name) = word, kinds[word]
        self.dtype = getattr(self.torch, name)

    def randn(self, *shape: int) -> Any:
        return self.torch.randn(shape, device="cuda").to(self.dtype)

    def bytes_of(self, shape: tuple[int, ...]) -> int:
        return math.prod(shape) * int(self.dtype.itemsize)

    def launch(self, name: str, *arguments: Any) -> None:
        """One launcher of the C interface on torch's current stream."""
        stream = POINTER(self.torch.cuda.current_stream().cuda_stream)
        status = getattr(self.kernels, f"trtfuse_test_{name}")(self.kind, *map(native, arguments), stream)
        if status != 0:
            raise RuntimeError(f"{name}: CUDA error {status}")

    def case(
        self, name: str, shape: tuple[int, ...], ours: Call, theirs: Call, inputs: int, outputs: int
    ) -> None:
        """Times `ours(*inputs, *outputs)`, `theirs(*inputs)` compiled, and a copy of as many bytes."""
        moved = self.bytes_of(shape) * (inputs + outputs)
        sets = min(MOST_SETS, ROTATING_BYTES // moved + 2)
        tensors = [[self.randn(*shape) for _ in range(inputs + outputs)] for _ in range(sets)]
        halves = [
            self.torch.empty(moved // 2, dtype=self.torch.uint8, device="cuda") for _ in range(2 * sets)
        ]
        compiled = self.torch.compile(theirs, dynamic=False)
        graphs = {
            "trtfuse": self.graph(lambda i: ours(*tensors[i]), sets),
            "torch.compile": self.graph(lambda i: compiled(*tensors[i][:inputs]), sets),
            "copy": self.graph(lambda i: halves[2 * i].copy_(halves[2 * i + 1]), sets),
        }
        medians = self.replay(graphs, sets)
        share = medians["copy"] / medians["trtfuse"]
        label = f"{name} {'x'.join(map(str, shape))} {self.word}"
        self.results.append({"case": label, "bytes": moved, "us": medians, "of_copy": round(share, 3)})
        figures = "  ".join(f"{k} {v:8.2f}" for k, v in medians.items())
        speed = moved / medians["trtfuse"] / 1e6
        mark = "" if share >= GOAL else " *"
        print(f"{label:42} {figures}  {speed:5.2f} TB/s, {share:4.0%} of copy{mark}", flush=True)

    def graph(self, run: Callable[[int], Any], sets: int) -> Any:
        """A CUDA graph of one launch on each set of tensors."""
        torch = self.torch
        torch.cuda.synchronize()  # the tensors are filled on another stream
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(WARM_UP):
                for i in range(sets):
                    run(i)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for i in range(sets):
                run(i)
        return graph

    def replay(self, graphs: dict[str, Any], sets: int) -> dict[str, float]:
        """Median microseconds a launch, the graphs in turns."""
        event = self.torch.cuda.Event
        times: dict[str, list[float]] = {k: [] for k in graphs}
        for count in range(self.rounds + WARM_UP):
            for key, graph in graphs.items():
                begin, end = event(enable_timing=True), event(enable_timing=True)
                begin.record()
                graph.replay()
                end.record()
                end.synchronize()
                if count >= WARM_UP:
                    times[key].append(begin.elapsed_time(end) * 1e3 / sets)
        return {k: round(statistics.median(v), 3) for k, v in times.items()}


def native(value: Any) -> Any:
    """What ctypes passes: tensors by their address, None as a null pointer, floats as C's float."""
    if value is None:
        return POINTER(0)
    if isinstance(value, float):
        return ctypes.c_float(value)
    return POINTER(value.data_ptr()) if hasattr(value, "data_ptr") else value


def norms(bench: Bench, rows: int, columns: int) -> None:
    """y = norm(x), y = norm(x + skip), and that with the sum as a second output."""
    f, shape = bench.torch.nn.functional, (rows, columns)
    scale, bias = bench.randn(columns), bench.randn(columns)
    size = (LONG(rows), LONG(columns))

    def layer(skip: Any, x: Any, y: Any, total: Any = None) -> None:
        bench.launch("layer_norm", x, skip, None, scale, bias, y, total, *size, 1e-5, 0)

    def rms(skip: Any, x: Any, y: Any, total: Any = None) -> None:
        bench.launch("rms_norm", x, skip, None, scale, y, total, *size, 1e-6, 0)

    def layer_torch(s: Any) -> Any:
        return f.layer_norm(s, (columns,), scale, bias)

    def rms_torch(s: Any) -> Any:
        return f.rms_norm(s, (columns,), scale, 1e-6)

    def with_sum(norm: Call) -> Call:
        return lambda x, skip: (norm(x + skip), x + skip)

    for word, ours, theirs in (("layer", layer, layer_torch), ("rms", rms, rms_torch)):
        run, reference = _skips(ours), theirs
        bench.case(f"{word}_norm", shape, run["plain"], reference, 1, 1)
        bench.case(f"skip_{word}_norm", shape, run["skip"], _of_sum(reference), 2, 1)
        bench.case(f"skip_{word}_norm sum", shape, run["sum"], with_sum(reference), 2, 2)


def _skips(launch: Call) -> dict[str, Call]:
    return {
        "plain": lambda x, y: launch(None, x, y),
        "skip": lambda x, skip, y: launch(skip, x, y),
        "sum": lambda x, skip, y, total: launch(skip, x, y, total),
    }


def _of_sum(norm: Call) -> Call:
    return lambda x, skip: norm(x + skip)


def bias_act(bench: Bench, rows: int, columns: int, name: str, function: Call) -> None:
    number, bias = activation_names().index(name), bench.randn(columns)

    def ours(x: Any, y: Any) -> None:
        bench.launch("bias_act", number, 0.01, x, bias, y, LONG(rows), LONG(columns), 0)

    bench.case(f"bias_act {name}", (rows, columns), ours, lambda x: function(x + bias), 1, 1)


def gated_act(bench: Bench, rows: int, columns: int) -> None:
    number, silu = activation_names().index("silu"), bench.torch.nn.functional.silu

    def ours(gate: Any, up: Any, y: Any) -> None:
        bench.launch("gated_act", number, 0.01, gate, up, y, LONG(rows * columns))

    bench.case("gated_act silu", (rows, columns), ours, lambda gate, up: silu(gate) * up, 2, 1)


def softmax(bench: Bench, shape: tuple[int, ...]) -> None:
    """With a key mask: one value a column, for each of a batch."""
    own = (shape[0], *(1 for _ in shape[1:-1]), shape[-1]) if len(shape) > 2 else shape[-1:]
    mask = bench.randn(*own)
    full_sizes, own_sizes = (LONG * len(shape))(*shape), (LONG * len(own))(*own)

    def ours(x: Any, y: Any) -> None:
        bench.launch(
            "softmax", x, mask, None, 1, y, full_sizes, len(shape), own_sizes, len(own), 0.125, 0.0, 1
        )

    bench.case("softmax mask", shape, ours, lambda x: (x * 0.125 + mask).softmax(-1), 1, 1)


def all_cases(bench: Bench) -> None:
    f = bench.torch.nn.functional
    for rows, columns in SIZES:
        norms(bench, rows, columns)
    for shape in (*SIZES, *SCORES):
        softmax(bench, shape)
    for rows, columns in (*SIZES, *WIDE):
        bias_act(bench, rows, columns, "relu", f.relu)
        bias_act(bench, rows, columns, "gelu", f.gelu)
        bias_act(bench, rows, columns, "gelu_tanh", lambda x: f.gelu(x, approximate="tanh"))
        gated_act(bench, rows, columns)


def main() -> int:
    parser = argparse.ArgumentParser(description="Times the kernels beside a copy and torch.compile.")
    parser.add_argument("--out", type=Path, help="also write the figures as JSON")
    parser.add_argument("--quick", action="store_true", help="fp16 alone, fewer rounds")
    options = parser.parse_args()
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError:
        print("bench_kernels: torch is missing: pip install torch", file=sys.stderr)
        return 4
    if not torch.cuda.is_available():
        print("bench_kernels: no NVIDIA GPU here: run it on a machine that has one", file=sys.stderr)
        return 4
    major, minor = torch.cuda.get_device_capability()
    given = os.environ.get("TRTFUSE_TEST_KERNELS")
    library = Path(given) if given else build(architectures=[f"{major}{minor}"], kernels_only=True)
    bench = Bench(torch, library, 15 if options.quick else 41)
    gpu = torch.cuda.get_device_name()
    print(f"{gpu}, torch {torch.__version__}; median us a launch; * below {GOAL:.0%} of the copy")
    with torch.no_grad():
        for word in ("fp16",) if options.quick else ("fp16", "fp32", "bf16"):
            bench.use(word)
            all_cases(bench)
    if options.out is not None:
        head = {"gpu": gpu, "torch": torch.__version__, "cuda": torch.version.cuda}
        options.out.write_text(json.dumps({**head, "cases": bench.results}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
