"""The kernels' own code on this machine's CPU, block by block, against fp64.

Compiled by g++ with the folder `cpu` in place of CUDA's headers. What only a GPU shows (its rounding of
powers and reciprocals, races, speed) is for the tests beside this one.
"""

from __future__ import annotations

import ctypes
import math
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from .conftest import ACTIVATIONS

HERE = Path(__file__).parent
PLUGINS = HERE.parents[1] / "plugins"
TYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
DTYPES = tuple(TYPES)
# (relative, absolute) of a result's rounding
TOLERANCE = {"float32": (2e-6, 2e-6), "float16": (1.1e-3, 2e-6), "bfloat16": (8.5e-3, 2e-6)}
COLUMNS = (1, 7, 64, 127, 128, 768, 1000, 1024, 3072, 8192, 20000)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    if shutil.which("g++") is None:
        pytest.skip("g++ is missing: it compiles the kernels")
    folder = tmp_path_factory.mktemp("kernels")
    options = ["-std=c++17", "-O2", "-fPIC", "-Wno-unknown-pragmas", f"-I{HERE / 'cpu'}", f"-I{PLUGINS}"]
    known = subprocess.run(
        ["g++", "-x", "c++", "-fsyntax-only", "-"], input="_Float16 x;", text=True, capture_output=True
    )
    if known.returncode != 0:
        pytest.skip("this g++ has no _Float16: version 12 has")

    def compiled(source: Path) -> str:
        made = folder / f"{source.name}.o"
        subprocess.run(["g++", "-x", "c++", *options, "-c", str(source), "-o", str(made)], check=True)
        return str(made)

    sources = [*sorted(PLUGINS.glob("*/*.cu")), PLUGINS / "kernels.cpp", HERE / "cpu" / "shared.cpp"]
    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compiled, sources))
    made = folder / "kernels.so"
    subprocess.run(["g++", "-shared", "-o", str(made), *objects], check=True)
    return ctypes.CDLL(str(made))


def normal(*shape: int, dtype: str = "float32", mean: float = 0.0, std: float = 1.0, seed: int = 0) -> Any:
    """Normal numbers rounded to `dtype`; the same for the same seed."""
    return (np.random.default_rng(seed).standard_normal(shape) * std + mean).astype(TYPES[dtype])


def starting_at(x: Any, offset: int) -> Any:
    """The same tensor, `offset` elements behind a boundary of 16 bytes."""
    room = np.zeros(x.size + offset + 16, x.dtype)
    first = (-room.ctypes.data % 16) // x.itemsize + offset
    room[first : first + x.size] = x.ravel()
    return room[first : first + x.size].reshape(x.shape)


def call(library: ctypes.CDLL, name: str, *arguments: Any) -> None:
    def native(value: Any) -> Any:
        if value is None:
            return ctypes.c_void_p(0)
        if isinstance(value, np.ndarray):
            assert value.flags.c_contiguous
            return ctypes.c_void_p(value.ctypes.data)
        if isinstance(value, float):
            return ctypes.c_float(value)
        if isinstance(value, tuple):
            return (ctypes.c_int64 * max(len(value), 1))(*value)
        return value

    status = getattr(library, f"trtfuse_test_{name}")(*map(native, arguments), ctypes.c_void_p(0))
    assert status == 0


def poisoned(x: Any, offset: int = 0) -> Any:
    """A result that shows every element that no one wrote."""
    return starting_at(np.full(x.shape, np.nan, x.dtype), offset)


def number(x: Any) -> int:
    return [np.dtype(t) for t in TYPES.values()].index(x.dtype)


def sizes(x: Any) -> tuple[ctypes.c_int64, ctypes.c_int64]:
    return ctypes.c_int64(x.size // x.shape[-1]), ctypes.c_int64(x.shape[-1])


def layer_norm(
    library: ctypes.CDLL,
    x: Any,
    scale: Any = None,
    bias: Any = None,
    *,
    skip: Any = None,
    preset: Any = None,
    epsilon: float = 1e-5,
    with_sum: bool = False,
    offset: int = 0,
) -> tuple[Any, Any]:
    y, total = poisoned(x, offset), poisoned(x, offset) if with_sum else None
    scalar = int(preset is not None and preset.size == 1)
    call(library, "layer_norm", number(x), x, skip, preset, scale, bias, y, total, *sizes(x), epsilon, scalar)
    return y, total


def rms_norm(library: ctypes.CDLL, x: Any, scale: Any, skip: Any = None, epsilon: float = 1e-6) -> Any:
    y = poisoned(x)
    call(library, "rms_norm", number(x), x, skip, None, scale, y, None, *sizes(x), epsilon, 0)
    return y


def softmax(
    library: ctypes.CDLL, x: Any, mask: Any = None, condition: Any = None, scale: float = 1.0,
    fill: float = -math.inf, keep: int = 1,
) -> Any:  # fmt: skip
    y = poisoned(x)
    other = mask if mask is not None else condition
    own = () if other is None else other.shape
    each = 1 if condition is None else condition.itemsize
    shapes = (x.shape, x.ndim, own, len(own))
    call(library, "softmax", number(x), x, mask, condition, each, y, *shapes, scale, fill, keep)
    return y


def agree(have: Any, want: Any, scale: float = 1.0) -> None:
    """have within its type's rounding of the fp64 want, and NaN and infinities in the same places."""
    name = next(n for n, t in TYPES.items() if have.dtype == np.dtype(t))
    wide = have.astype(np.float64)
    if name == "float16":
        with np.errstate(over="ignore"):
            want = want.astype(np.float16).astype(np.float64)
    np.testing.assert_array_equal(np.isnan(wide), np.isnan(want))
    np.testing.assert_array_equal(np.isinf(wide), np.isinf(want))
    finite = np.isfinite(want)
    relative, absolute = TOLERANCE[name]
    error = np.abs(wide[finite] - want[finite])
    allowed = relative * np.abs(want[finite]) + absolute * scale
    assert error.size == 0 or (error / allowed).max() <= 1, (error / allowed).max()


def normalised(s: Any, scale: Any = None, bias: Any = None, epsilon: float = 1e-5) -> Any:
    with np.errstate(invalid="ignore"):
        centred = s - s.mean(-1, keepdims=True)
        y = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + epsilon)
    y = y if scale is None else y * scale.astype(np.float64)
    return y if bias is None else y + bias.astype(np.float64)


def soft(x: Any) -> Any:
    with np.errstate(invalid="ignore"):
        e = np.exp(x - x.max(-1, keepdims=True))
        return e / e.sum(-1, keepdims=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_norms(library: ctypes.CDLL, rows: int, columns: int, dtype: str) -> None:
    x, skip = normal(rows, columns, dtype=dtype), normal(rows, columns, dtype=dtype, seed=3)
    scale, bias = normal(columns, dtype=dtype, seed=1), normal(columns, dtype=dtype, seed=2)
    preset = normal(columns, dtype=dtype, seed=4)
    y, _ = layer_norm(library, x, scale, bias)
    agree(y, normalised(x.astype(np.float64), scale, bias), scale=4)
    y, total = layer_norm(library, x, scale, bias, skip=skip, preset=preset, with_sum=True)
    want = (x.astype(np.float32) + preset.astype(np.float32) + skip.astype(np.float32)).astype(np.float64)
    agree(total, want)
    agree(y, normalised(want, scale, bias), scale=4)
    s = (x.astype(np.float32) + skip.astype(np.float32)).astype(np.float64)
    wanted = s / np.sqrt((s * s).mean(-1, keepdims=True) + 1e-6) * scale.astype(np.float64)
    agree(rms_norm(library, x, scale, skip), wanted, scale=4)


@pytest.mark.parametrize("columns", [64, 128, 768, 1000, 4096, 16384, 40000])
def test_a_large_mean_costs_nothing(library: ctypes.CDLL, columns: int) -> None:
    x = normal(3, columns, mean=1000, std=0.1)
    agree(layer_norm(library, x)[0], normalised(x.astype(np.float64)), scale=10)


@pytest.mark.parametrize("columns", [64, 768, 1000])
@pytest.mark.parametrize("at", ["first", "last"])
def test_an_outlier_far_from_the_rest(library: ctypes.CDLL, columns: int, at: str) -> None:
    """The statistics are of deviations from what the first thread has: the worst that can be there."""
    x = normal(3, columns, std=1e-3)
    x[:, 0 if at == "first" else -1] = 1e4
    agree(layer_norm(library, x)[0], normalised(x.astype(np.float64)), scale=math.sqrt(columns))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [64, 127, 768, 3072, 40000])
def test_infinities_and_nan_stay_in_their_rows(library: ctypes.CDLL, columns: int, dtype: str) -> None:
    x = normal(6, columns, dtype=dtype)
    x[1, 5], x[2, 6], x[4, 7] = math.inf, math.nan, -math.inf
    agree(layer_norm(library, x)[0], normalised(x.astype(np.float64)), scale=4)
    x[5] = -math.inf
    agree(softmax(library, x), soft(x.astype(np.float64)))


@pytest.mark.parametrize("value", [0.0, 3.0])
def test_a_row_of_one_value_is_not_a_number_without_an_epsilon(library: ctypes.CDLL, value: float) -> None:
    x = np.full((2, 64), value, np.float32)
    assert np.isnan(layer_norm(library, x, epsilon=0.0)[0]).all()
    assert (layer_norm(library, x, epsilon=1e-5)[0] == 0).all()


@pytest.mark.parametrize("offset", [1, 3, 8])
@pytest.mark.parametrize("columns", [64, 768, 1001, 3072, 40000])
def test_tensors_that_begin_anywhere(library: ctypes.CDLL, columns: int, offset: int) -> None:
    x = starting_at(normal(3, columns, dtype="float16"), offset)
    scale = starting_at(normal(columns, dtype="float16", seed=1), 1)
    want = normalised(x.astype(np.float64), scale)
    agree(layer_norm(library, x, scale, offset=5)[0], want, scale=4)
    agree(softmax(library, x), soft(x.astype(np.float64)))


def test_rows_that_shared_memory_does_not_hold(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    x = normal(2, 40000)
    cached = layer_norm(library, x)[0], softmax(library, x)
    monkeypatch.setenv("TRTFUSE_CPU_SHARED_MEMORY", "49152")
    np.testing.assert_array_equal(layer_norm(library, x)[0], cached[0])
    np.testing.assert_array_equal(softmax(library, x), cached[1])


MASKS = ((2, 3, 5, 0), (2, 1, 1, 0), (1, 3, 5, 0), (2, 1, 5, 0), (0,), (2, 3, 5, 1), (1,))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1, 7, 64, 127, 512, 3072, 20000])
@pytest.mark.parametrize("shape", MASKS)
def test_softmax(library: ctypes.CDLL, shape: tuple[int, ...], columns: int, dtype: str) -> None:
    """Additive and boolean masks of any broadcast. A 0 in the shape stands for the columns."""
    if columns == 20000 and shape != MASKS[0]:
        return
    x = normal(2, 3, 5, columns, dtype=dtype)
    mask = normal(*(d or columns for d in shape), dtype=dtype, seed=1, std=2)
    wide = x.astype(np.float64)
    agree(softmax(library, x, mask, scale=0.125), soft(wide * 0.125 + mask.astype(np.float64)))
    for kind, keep, fill in ((np.bool_, 1, -1e4), (np.int32, 0, -math.inf)):
        condition = (mask.astype(np.float32) > 0).astype(kind)
        kept = condition.astype(bool) if keep else ~condition.astype(bool)
        want = soft(np.where(kept, wide * 0.5, fill))
        agree(softmax(library, x, condition=condition, scale=0.5, fill=fill, keep=keep), want)


def activated(x: Any, activation: str, alpha: float = 0.01) -> Any:
    """act(x) in fp64."""
    with np.errstate(all="ignore"):
        sigmoid = 1 / (1 + np.exp(-x))
        cubed = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
        values = {
            "relu": lambda: np.where(x < 0, 0.0, x),
            "sigmoid": lambda: sigmoid,
            "tanh": lambda: np.tanh(x),
            "gelu": lambda: x * 0.5 * np.vectorize(math.erfc, otypes=[np.float64])(-x / math.sqrt(2)),
            "gelu_tanh": lambda: x / (1 + np.exp(-2 * cubed)),
            "quick_gelu": lambda: x / (1 + np.exp(-1.702 * x)),
            "silu": lambda: x * sigmoid,
            "hardswish": lambda: x * np.clip(x + 3, 0, 6) / 6,
            "mish": lambda: x * np.tanh(np.logaddexp(0, x)),
            "leaky_relu": lambda: np.where(x < 0, alpha * x, x),
        }
        return values[activation]()


def bias_act(library: ctypes.CDLL, x: Any, bias: Any, activation: str) -> Any:
    y, kind = poisoned(x), ACTIVATIONS.index(activation)
    scalar = int(bias is not None and bias.size == 1)
    call(library, "bias_act", number(x), kind, 0.01, x, bias, y, *sizes(x), scalar)
    return y


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(library: ctypes.CDLL, activation: str, dtype: str) -> None:
    x = np.linspace(-12, 12, 16000).reshape(16, 1000).astype(TYPES[dtype])
    bias = normal(1000, dtype=dtype, seed=1)
    agree(bias_act(library, x, None, activation), activated(x.astype(np.float64), activation))
    total = (x.astype(np.float32) + bias.astype(np.float32)).astype(np.float64)
    agree(bias_act(library, x, bias, activation), activated(total, activation), scale=2)
    gate, up, y = normal(3, 77, dtype=dtype, std=3), normal(3, 77, dtype=dtype, seed=2), poisoned(x[:3, :77])
    kind, count = ACTIVATIONS.index(activation), ctypes.c_int64(gate.size)
    call(library, "gated_act", number(gate), kind, 0.01, gate, up, y, count)
    agree(y, activated(gate.astype(np.float64), activation) * up.astype(np.float64), scale=3)


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "quick_gelu", "silu"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_what_is_short_for_16_bits_rounds_as_the_exact_does(
    library: ctypes.CDLL, activation: str, dtype: str
) -> None:
    """Every value of the type: at most one unit in the last place off, and that seldom."""
    x = np.arange(2**16, dtype=np.uint32).astype(np.uint16).view(TYPES[dtype])
    x = x[np.isfinite(x.astype(np.float32))].reshape(1, -1)
    have = bias_act(library, x, None, activation)
    with np.errstate(over="ignore"):
        want = activated(x.astype(np.float64), activation).astype(TYPES[dtype])
    tiny = 2.0**-24 if dtype == "float16" else 1e-7  # bf16: below it the tail may go to 0 sooner
    wide = np.abs(want.astype(np.float64))
    ulp = np.maximum(
        2.0 ** (np.floor(np.log2(np.maximum(wide, 1e-300))) - (10 if dtype == "float16" else 7)), tiny
    )
    off = np.abs(have.astype(np.float64) - want.astype(np.float64)) / ulp
    assert off.max() <= 1.01
    assert (off > 0.5).mean() < (0.02 if dtype == "float16" else 0.005)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_of_infinities_and_nan(library: ctypes.CDLL, activation: str, dtype: str) -> None:
    values = [math.inf, -math.inf, math.nan, 0.0, -0.0, 60.0, -60.0, 3e4, -3e4]
    x = np.array([values], TYPES[dtype])
    agree(bias_act(library, x, None, activation), activated(x.astype(np.float64), activation), scale=10)


@pytest.mark.parametrize("activation", ["gelu", "silu", "sigmoid"])
def test_what_is_not_finite_leaves_its_neighbours_alone(library: ctypes.CDLL, activation: str) -> None:
    for value in (math.inf, -math.inf, math.nan):
        x = normal(1, 64, dtype="float16")
        x[0, 3], x[0, 8] = value, value
        agree(bias_act(library, x, None, activation), activated(x.astype(np.float64), activation))
