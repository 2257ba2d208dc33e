"""RMSNorm and its skip form: the spellings that must match and those that must not, by numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from graphs import F16, F32, I64, Graph, assert_same, finish, fused, layer_norm, names, normal, ops, prove

RMS, SKIP = "TrtfuseRmsNorm", "TrtfuseSkipRmsNorm"
ROWS = ("batch", 8, 32)


def gain(g: Graph, shape: tuple[int, ...] = (32,)) -> np.ndarray:
    return (1 + normal(shape, 1, F32, 0.3)).astype(g.dtype)


def rms_norm(
    g: Graph,
    x: str,
    *,
    square: str = "pow",
    inverse: str = "reciprocal",
    eps: float = 1e-6,
    casts: bool = False,
    first: bool = False,
    weight: Any = None,
    axes: tuple[int, ...] = (-1,),
) -> str:
    """x / sqrt(mean(x x) + eps) * weight"""
    inner = F32 if casts else g.dtype
    wide = g.cast(x, F32) if casts else x
    squared = (
        g.Mul(wide, wide)
        if square == "mul"
        else g.Pow(wide, np.asarray(2, I64 if square == "int" else inner))
    )
    shifted = g.Add(g.reduce("ReduceMean", squared, axes), np.asarray(eps, inner))
    root = g.Sqrt(shifted)
    if inverse == "reciprocal":
        y = g.Mul(wide, g.Reciprocal(root))
    elif inverse == "one_over":
        y = g.Mul(wide, g.Div(np.asarray(1, inner), root))
    elif inverse == "power":
        y = g.Mul(wide, g.Pow(shifted, np.asarray(-0.5, inner)))
    else:
        y = g.Div(wide, root)
    if casts:
        y = g.cast(y, g.dtype)
    weight = gain(g) if weight is None else weight
    return str(g.Mul(weight, y) if first else g.Mul(y, weight))


MATCH: dict[str, Callable[[Graph, str], str]] = {
    "dynamo": lambda g, x: rms_norm(g, x, square="mul", first=True),
    "torchscript": lambda g, x: rms_norm(g, x, inverse="one_over"),
    "div": lambda g, x: rms_norm(g, x, inverse="div"),
    "power": lambda g, x: rms_norm(g, x, inverse="power"),
    "int-exponent": lambda g, x: rms_norm(g, x, square="int"),
    "positive-axis": lambda g, x: rms_norm(g, x, axes=(2,)),
    "weight-1-1-h": lambda g, x: rms_norm(g, x, weight=gain(g, (1, 1, 32))),
}


CASES = [
    (spelling, opset)
    for spelling in MATCH
    for opset in (7, 11, 13, 17, 18, 20, 23)
    if spelling != "int-exponent" or opset >= 12  # Pow of mixed types came with opset 12
]


@pytest.mark.parametrize(("spelling", "opset"), CASES)
def test_spellings_that_match(spelling: str, opset: int) -> None:
    g = Graph(opset)
    prove(g, MATCH[spelling](g, g.input("x", ROWS)), [RMS])


@pytest.mark.parametrize("casts", [True, False])
@pytest.mark.parametrize("inverse", ["reciprocal", "div"])
def test_half_precision(casts: bool, inverse: str) -> None:
    g = Graph(18, F16)
    x = g.input("x", ROWS, scale=3)
    prove(g, rms_norm(g, x, casts=casts, inverse=inverse, eps=1e-5, first=True), [RMS])


def test_the_standard_operator() -> None:
    g = Graph(23)
    made, _ = prove(g, g.RMSNormalization(g.input("x", ROWS), gain(g), axis=-1, epsilon=1e-6), [RMS])
    assert ops(made) == [RMS]


def test_a_weight_plus_one_as_gemma_has_it() -> None:
    """The gain is computed from a constant: it is the same in every run."""
    g = Graph(18)
    weight = g.Add(normal((32,), 3, F32, 0.3), 1.0)
    prove(g, rms_norm(g, g.input("x", ROWS), weight=weight), [RMS])


def l1(g: Graph, x: str) -> str:
    return str(g.Mul(g.Div(x, g.Sqrt(g.Add(g.reduce("ReduceMean", g.Abs(x)), 1e-6))), gain(g)))


def of_another(g: Graph, x: str) -> str:
    y = g.Sin(x)
    return str(g.Mul(g.Div(x, g.Sqrt(g.Add(g.reduce("ReduceMean", g.Mul(y, y)), 1e-6))), gain(g)))


def product_of_two(g: Graph, x: str) -> str:
    return str(g.Mul(g.Div(x, g.Sqrt(g.Add(g.reduce("ReduceMean", g.Mul(x, g.Sin(x))), 3.0))), gain(g)))


def sum_of_squares(g: Graph, x: str) -> str:
    return str(g.Mul(g.Div(x, g.Sqrt(g.Add(g.reduce("ReduceSum", g.Mul(x, x)), 1e-6))), gain(g)))


DECOYS: dict[str, Callable[[Graph, str], str]] = {
    "wrong-axis": lambda g, x: rms_norm(g, x, axes=(1,)),
    "l1": l1,
    "of-another": of_another,
    "product-of-two": product_of_two,
    "sum": sum_of_squares,
    "weight-along-another-axis": lambda g, x: rms_norm(g, x, weight=gain(g, (32, 1))),
}


@pytest.mark.parametrize("decoy", DECOYS)
def test_decoys_that_must_not_match(decoy: str) -> None:
    g = Graph(13)
    prove(g, DECOYS[decoy](g, g.input("x", (2, 32, 32))), [])


def test_a_weight_that_enlarges_is_not_taken() -> None:
    g = Graph(14)
    prove(g, rms_norm(g, g.input("x", ("batch", 1)), weight=gain(g, (2,))), [])


def test_a_weight_at_run_time_is_not_taken() -> None:
    g = Graph(14)
    x = g.input("x", ROWS)
    prove(g, rms_norm(g, x, weight=g.input("w", (32,))), [])


@pytest.mark.parametrize("read", [False, True])
def test_a_residual_before_it(read: bool) -> None:
    g = Graph(18)
    total = g.Add(g.input("x", ROWS), g.input("skip", ROWS))
    y = rms_norm(g, total)
    made, _ = prove(g, g.Add(g.Sin(y), total) if read else y, [SKIP])
    assert ops(made) == ["TrtfuseSkipRmsNorm_sum" if read else "TrtfuseSkipRmsNorm"]


def test_a_llama_block_in_half_precision() -> None:
    g = Graph(18, F16)
    total = g.Add(g.input("x", ROWS), g.input("skip", ROWS))
    y = rms_norm(g, total, casts=True, first=True)
    made, _ = prove(g, g.Add(g.Sin(y), total), [SKIP])
    assert ops(made) == ["TrtfuseSkipRmsNorm_sum_fp16"]


@pytest.mark.parametrize("bias", [False, True])
def test_onnx_runtimes_own_operator(bias: bool) -> None:
    g = Graph(17)
    given = [gain(g)] + ([normal((32,), 9)] if bias else [])
    x, skip = g.input("x", ROWS), g.input("skip", ROWS)
    outputs = g.node(
        "SkipSimplifiedLayerNormalization", x, skip, *given, outputs=4, domain="com.microsoft", epsilon=1e-6
    )
    g.nodes[-1].output[1] = g.nodes[-1].output[2] = ""
    model = finish(g, g.Add(outputs[0], outputs[3]))
    made, sites, _ = fused(model)
    assert names(sites) == [SKIP]
    assert_same(model, made, g.feeds)


def test_a_layer_norm_is_no_rms_norm() -> None:
    g = Graph(17)
    prove(g, layer_norm(g, g.input("x", ROWS)), ["TrtfuseLayerNorm"])
