"""A GEMM with its bias, activation and residual: what must match and what must not, by numbers."""

from __future__ import annotations

import pytest
from graphs import F16, Graph, normal, ops, prove
from test_bias_act import MATCH, SINGLE

LINEAR = "TrtfuseLinearAct"
ROWS = ("batch", 8, 32)


def linear(g: Graph, x: str, width: int = 64, swapped: bool = False) -> str:
    y, bias = g.MatMul(x, normal((32, width), 3, g.dtype, 0.2)), normal((width,), 4, g.dtype)
    return str(g.Add(bias, y) if swapped else g.Add(y, bias))


@pytest.mark.parametrize("opset", [9, 13, 20])
@pytest.mark.parametrize(
    "spelling", ["erf (xa)h", "tanh pow", "silu", "hardswish by clip", "mish", "quick gelu"]
)
@pytest.mark.parametrize("swapped", [False, True])
def test_composed_activations(spelling: str, opset: int, swapped: bool) -> None:
    spelled, activation, _ = MATCH.get(spelling) or MATCH["tanh (xa)h"]
    g = Graph(opset)
    made, _ = prove(g, spelled(g, linear(g, g.input("x", ROWS), swapped=swapped)), [LINEAR])
    assert ops(made) == [f"{LINEAR}_{activation}"]


@pytest.mark.parametrize("activation", SINGLE)
def test_single_activations(activation: str) -> None:
    g = Graph(13)
    prove(g, SINGLE[activation](g, linear(g, g.input("x", ROWS))), [LINEAR])


@pytest.mark.parametrize("dtype", [None, F16])
def test_a_residual_after_it(dtype: type | None) -> None:
    g = Graph(13, dtype or Graph().dtype)
    x = g.input("x", ROWS)
    y = MATCH["erf (xa)h"][0](g, linear(g, x, 32))
    made, _ = prove(g, g.Add(y, x), [LINEAR])
    assert "residual" in ops(made)[0]


@pytest.mark.parametrize("transposed", [0, 1])
def test_gemm(transposed: int) -> None:
    g = Graph(13)
    weight = normal((64, 32) if transposed else (32, 64), 3, scale=0.2)
    y = g.Gemm(g.input("x", ("batch", 32)), weight, normal((64,), 4), transB=transposed)
    made, _ = prove(g, MATCH["silu"][0](g, y), [LINEAR])
    assert ("transB" in ops(made)[0]) == bool(transposed)


@pytest.mark.parametrize("attributes", [{"alpha": 0.5}, {"beta": 2.0}, {"transA": 1}])
def test_a_gemm_that_is_more_than_a_linear_layer(attributes: dict[str, float]) -> None:
    g = Graph(13)
    x = g.input("x", (32, 8) if "transA" in attributes else (8, 32))
    y = g.Gemm(x, normal((32, 64), 3, scale=0.2), normal((64,), 4), **attributes)
    prove(g, MATCH["silu"][0](g, y), ["TrtfuseBiasAct"])


def test_a_weight_at_run_time() -> None:
    g = Graph(13)
    y = g.Add(g.MatMul(g.input("x", ROWS), g.input("w", (32, 64))), normal((64,), 4))
    prove(g, MATCH["silu"][0](g, y), ["TrtfuseBiasAct"])


def test_a_weight_for_each_batch() -> None:
    g = Graph(13)
    y = g.Add(g.MatMul(g.input("x", (2, 8, 32)), normal((2, 32, 64), 3, scale=0.2)), normal((64,), 4))
    prove(g, MATCH["silu"][0](g, y), ["TrtfuseBiasAct"])


def test_a_product_that_is_read_elsewhere() -> None:
    g = Graph(13)
    product = g.MatMul(g.input("x", ROWS), normal((32, 64), 3, scale=0.2))
    y = MATCH["silu"][0](g, g.Add(product, normal((64,), 4)))
    prove(g, g.Add(y, g.Sin(product)), ["TrtfuseBiasAct"])


def test_no_activation_is_nothing_to_fuse() -> None:
    g = Graph(13)
    prove(g, linear(g, g.input("x", ROWS)), [])


@pytest.mark.parametrize("batch", [4, "batch"])
def test_a_residual_that_enlarges_stays_outside(batch: int | str) -> None:
    g = Graph(13)
    y = MATCH["silu"][0](g, linear(g, g.input("x", (1, 8, 32))))
    made, misses = prove(g, g.Add(y, g.input("other", (batch, 8, 64))), [LINEAR])
    assert "residual" not in ops(made)[0]
    assert any("are not of one shape" in m.reason for m in misses)


@pytest.mark.parametrize(
    ("shape", "taken"), [((), True), ((1,), True), ((1, 64), True), ((8, 64), False), ((8, 1), False)]
)
@pytest.mark.parametrize("transposed", [0, 1])
def test_biases_of_a_gemm(shape: tuple[int, ...], taken: bool, transposed: int) -> None:
    g = Graph(13)
    weight = normal((64, 32) if transposed else (32, 64), 3, scale=0.2)
    y = g.Gemm(g.input("x", (8, 32)), weight, normal(shape, 4), transB=transposed)
    prove(g, g.Relu(y), [LINEAR] if taken else [])


def test_a_bias_that_enlarges_the_product_stays_outside() -> None:
    g = Graph(13)
    y = g.Add(g.MatMul(g.input("x", ROWS), normal((32, 1), 3)), normal((64,), 4))
    prove(g, MATCH["silu"][0](g, y), ["TrtfuseBiasAct"])


def test_a_product_of_one_row_and_a_bias_of_more_axes() -> None:
    g = Graph(13)
    y = g.Add(g.MatMul(g.input("x", (32,)), normal((32, 64), 3, scale=0.2)), normal((1, 64), 4))
    prove(g, g.Relu(y), [LINEAR])


def test_a_shared_weight_is_stored_once() -> None:
    g = Graph(13)
    weight, bias = g.weight(normal((32, 32), 3, scale=0.2)), g.weight(normal((32,), 4))
    x = g.input("x", ROWS)
    for _ in range(3):
        x = g.Relu(g.Add(g.MatMul(x, weight), bias))
    made, _ = prove(g, x, [LINEAR] * 3)
    assert sorted(t.name for t in made.graph.initializer) == sorted([weight, bias])


def test_a_residual_that_broadcasts_stays_outside() -> None:
    g = Graph(13)
    x, other = g.input("x", ROWS), g.input("other", (1, 8, 64))
    made, _ = prove(g, g.Add(MATCH["silu"][0](g, linear(g, x)), other), [LINEAR])
    assert "residual" not in ops(made)[0]
