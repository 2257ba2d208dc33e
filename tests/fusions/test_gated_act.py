"""Gated activations: SwiGLU and GeGLU, and what is none, by numbers."""

from __future__ import annotations

import pytest
from graphs import F16, F32, Graph, normal, ops, prove
from test_bias_act import MATCH

GATED = "TrtfuseGatedAct"
ROWS = ("batch", 8, 32)


def two(g: Graph, width: int = 64) -> tuple[str, str]:
    """The projections of one input: gate and up."""
    x = g.input("x", ROWS)
    return (
        g.MatMul(x, normal((32, width), 3, g.dtype, 0.2)),
        g.MatMul(x, normal((32, width), 5, g.dtype, 0.2)),
    )


@pytest.mark.parametrize("opset", [9, 13, 20])
@pytest.mark.parametrize(
    "spelling", ["silu", "erf (xa)h", "tanh xxx", "quick gelu", "hardswish by clip", "mish"]
)
@pytest.mark.parametrize("swapped", [False, True])
def test_spellings_that_match(spelling: str, opset: int, swapped: bool) -> None:
    g = Graph(opset)
    gate, up = two(g)
    act = MATCH[spelling][0](g, gate)
    made, _ = prove(g, g.Mul(up, act) if swapped else g.Mul(act, up), [GATED])
    assert ops(made) == [f"{GATED}_{MATCH[spelling][1]}"]


def test_half_precision() -> None:
    g = Graph(13, F16)
    gate, up = two(g)
    prove(g, g.Mul(MATCH["silu"][0](g, gate), up), [GATED])


def test_a_split_of_one_projection() -> None:
    g = Graph(13)
    projected = g.MatMul(g.input("x", ROWS), normal((32, 64), 3, scale=0.2))
    gate, up = g.node("Split", projected, outputs=2, axis=-1)
    prove(g, g.Mul(MATCH["silu"][0](g, gate), up), [GATED])


@pytest.mark.parametrize("slope", [1.0, 1.702])
@pytest.mark.parametrize("swapped", [False, True])
def test_the_gate_may_be_multiplied_first(slope: float, swapped: bool) -> None:
    g = Graph(13)
    gate, up = two(g)
    sigmoid = g.Sigmoid(gate if slope == 1 else g.Mul(gate, slope))
    made, _ = prove(g, g.Mul(gate, g.Mul(up, sigmoid) if swapped else g.Mul(sigmoid, up)), [GATED])
    assert ops(made) == [f"{GATED}_{'silu' if slope == 1 else 'quick_gelu'}"]


def test_half_precision_multiplied_in_fp32() -> None:
    g = Graph(13, F16)
    gate, up = two(g)
    wide = g.cast(gate, F32)
    y = g.cast(g.Mul(g.Mul(wide, g.Sigmoid(wide)), g.cast(up, F32)), F16)
    made, _ = prove(g, y, [GATED])
    assert ops(made) == [f"{GATED}_silu_fp16"]


def test_a_sigmoid_times_another_tensor_is_no_gate_of_silu() -> None:
    """As in GLU and in LSTM cells: nothing is multiplied by its own sigmoid."""
    g = Graph(13)
    gate, up = two(g)
    prove(g, g.Mul(g.Sigmoid(gate), g.Tanh(up)), [])


def test_a_factor_that_callers_may_override_is_a_tensor() -> None:
    g = Graph(13)
    factor = g.weight(normal((2, 8, 32), 3), name="factor")
    g.input("factor", (2, 8, 32))
    del g.feeds[0]["factor"]
    prove(g, g.Mul(MATCH["silu"][0](g, g.input("x", (2, 8, 32))), factor), [GATED])


def test_a_constant_factor_is_no_gate() -> None:
    g = Graph(13)
    prove(g, g.Mul(MATCH["silu"][0](g, g.input("x", ROWS)), normal((32,), 3)), ["TrtfuseBiasAct"])


def test_an_activation_times_its_own_input_is_no_gate() -> None:
    g = Graph(13)
    x = g.input("x", ROWS)
    prove(g, g.Mul(MATCH["silu"][0](g, x), x), ["TrtfuseBiasAct"])


def test_a_broadcast_factor_is_no_gate() -> None:
    g = Graph(13)
    x, factor = g.input("x", ROWS), g.input("factor", ("batch", 1, 32))
    prove(g, g.Mul(MATCH["silu"][0](g, x), factor), ["TrtfuseBiasAct"])


def test_an_activation_that_is_read_elsewhere_is_fused_alone() -> None:
    g = Graph(13)
    gate, up = two(g)
    act = MATCH["silu"][0](g, gate)
    prove(g, g.Add(g.Mul(act, up), g.Sin(act)), ["TrtfuseBiasAct"])
