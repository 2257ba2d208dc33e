"""Activations with and without a bias: the spellings that must match and those that must not, by numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from graphs import F16, F32, F64, Graph, assert_same, finish, fused, names, normal, ops, prove

ACT, LINEAR = "TrtfuseBiasAct", "TrtfuseLinearAct"
ROWS = ("batch", 8, 32)
Spelling = Callable[[Graph, str], str]


def erf_gelu(
    g: Graph, x: str, order: str = "(xa)h", root: str = "div", two: float = 2**0.5, half: Any = 0.5
) -> str:
    inner = g.Div(x, two) if root == "div" else g.Mul(x, 1 / two)
    a = g.Add(g.Erf(inner), 1.0)
    return ordered(g, x, a, half, order)


def ordered(g: Graph, x: str, a: str, half: Any, order: str) -> str:
    """x * a * half in the orders that exporters use."""
    return str(
        {
            "(xa)h": lambda: g.Mul(g.Mul(x, a), half),
            "(ax)h": lambda: g.Mul(half, g.Mul(a, x)),
            "(xh)a": lambda: g.Mul(g.Mul(x, half), a),
            "x(ah)": lambda: g.Mul(x, g.Mul(a, half)),
            "(xa)/2": lambda: g.Div(g.Mul(x, a), 2.0),
            "x(a/2)": lambda: g.Mul(x, g.Div(a, 2.0)),
        }[order]()
    )


ORDERS = ("(xa)h", "(ax)h", "(xh)a", "x(ah)", "(xa)/2", "x(a/2)")


def tanh_gelu(g: Graph, x: str, cube: str = "pow", order: str = "(xa)h", k: float = 0.044715) -> str:
    c = float(np.sqrt(2 / np.pi))
    if cube == "pow":
        inner = g.Mul(g.Add(x, g.Mul(g.Pow(x, 3.0), k)), c)
    elif cube == "xxx":
        inner = g.Mul(c, g.Add(x, g.Mul(k, g.Mul(g.Mul(x, x), x))))
    elif cube == "chain":
        inner = g.Mul(g.Add(x, g.Mul(g.Mul(g.Mul(k, x), x), x)), c)
    elif cube == "x by square":
        inner = g.Mul(g.Add(x, g.Mul(g.Mul(k, x), g.Mul(x, x))), c)
    elif cube == "factored":
        inner = g.Mul(g.Mul(c, x), g.Add(g.Mul(g.Mul(k, x), x), 1.0))
    else:  # factored with the square first
        inner = g.Mul(g.Mul(x, c), g.Add(1.0, g.Mul(k, g.Mul(x, x))))
    return ordered(g, x, g.Add(g.Tanh(inner), 1.0), 0.5, order)


def softplus_tanh(g: Graph, x: str) -> str:
    return str(g.Mul(x, g.Tanh(g.Log(g.Add(g.Exp(x), 1.0)))))


MATCH: dict[str, tuple[Spelling, str, int]] = {  # spelling, activation, first opset
    **{f"erf {o}": (lambda g, x, o=o: erf_gelu(g, x, o), "gelu", 9) for o in ORDERS},
    "erf times 1/sqrt(2)": (lambda g, x: erf_gelu(g, x, root="mul"), "gelu", 9),
    **{f"tanh {o}": (lambda g, x, o=o: tanh_gelu(g, x, order=o), "gelu_tanh", 7) for o in ORDERS},
    **{
        f"tanh {c}": (lambda g, x, c=c: tanh_gelu(g, x, c), "gelu_tanh", 7)
        for c in ("xxx", "factored", "squared")
    },
    "tanh k x x x": (lambda g, x: tanh_gelu(g, x, "chain"), "gelu_tanh", 7),
    "tanh (k x) x^2": (lambda g, x: tanh_gelu(g, x, "x by square"), "gelu_tanh", 7),
    "half inside": (
        lambda g, x: g.Mul(x, g.Add(g.Mul(g.Erf(g.Mul(x, 0.5**0.5)), 0.5), 0.5)),
        "gelu",
        9,
    ),
    "silu by exp": (lambda g, x: g.Div(x, g.Add(g.Exp(g.Neg(x)), 1.0)), "silu", 7),
    "hardswish by relu and min": (
        lambda g, x: g.Mul(x, g.Div(g.Min(g.Relu(g.Add(x, 3.0)), 6.0), 6.0)),
        "hardswish",
        8,
    ),
    "hardswish by min and relu": (
        lambda g, x: g.Mul(x, g.Mul(g.Relu(g.Min(g.Add(x, 3.0), 6.0)), 1 / 6)),
        "hardswish",
        8,
    ),
    "hardswish by min and max": (
        lambda g, x: g.Mul(g.Mul(x, g.Max(g.Min(g.Add(x, 3.0), 6.0), 0.0)), 1 / 6),
        "hardswish",
        8,
    ),
    "hardswish by relu and clip from above": (
        lambda g, x: g.Div(g.Mul(x, g.Clip(g.Relu(g.Add(x, 3.0)), "", np.asarray(6, g.dtype))), 6.0),
        "hardswish",
        11,
    ),
    "hardswish by a clipped line": (
        lambda g, x: g.Mul(x, g.clip(g.Add(g.Mul(x, 1 / 6), 0.5), 0, 1)),
        "hardswish",
        7,
    ),
    "QuickGelu of 1": (lambda g, x: g.node("QuickGelu", x, domain="com.microsoft", alpha=1.0), "silu", 13),
    "Swish": (lambda g, x: g.Swish(x), "silu", 24),
    "Swish of 1.702": (lambda g, x: g.Swish(x, alpha=1.702), "quick_gelu", 24),
    "silu": (lambda g, x: g.Mul(x, g.Sigmoid(x)), "silu", 7),
    "silu swapped": (lambda g, x: g.Mul(g.Sigmoid(x), x), "silu", 7),
    "swish with beta 1": (lambda g, x: g.Mul(x, g.Sigmoid(g.Mul(x, 1.0))), "silu", 7),
    "quick gelu": (lambda g, x: g.Mul(x, g.Sigmoid(g.Mul(1.702, x))), "quick_gelu", 7),
    "hardswish by clip": (
        lambda g, x: g.Div(g.Mul(x, g.clip(g.Add(x, 3.0), 0, 6)), 6.0),
        "hardswish",
        7,
    ),
    "hardswish, clip divided": (
        lambda g, x: g.Mul(x, g.Div(g.clip(g.Add(3.0, x), 0, 6), 6.0)),
        "hardswish",
        7,
    ),
    "hardswish times a sixth": (
        lambda g, x: g.Mul(g.Mul(x, g.clip(g.Add(x, 3.0), 0, 6)), 1 / 6),
        "hardswish",
        7,
    ),
    "hardswish by hardsigmoid": (
        lambda g, x: g.Mul(x, g.HardSigmoid(x, alpha=1 / 6, beta=0.5)),
        "hardswish",
        7,
    ),
    "mish": (lambda g, x: g.Mul(x, g.Tanh(g.Softplus(x))), "mish", 7),
    "mish by log and exp": (softplus_tanh, "mish", 7),
    "Gelu": (lambda g, x: g.Gelu(x), "gelu", 20),
    "Gelu by tanh": (lambda g, x: g.Gelu(x, approximate="tanh"), "gelu_tanh", 20),
    "HardSwish": (lambda g, x: g.HardSwish(x), "hardswish", 14),
    "Mish": (lambda g, x: g.Mish(x), "mish", 18),
    "Gelu of com.microsoft": (lambda g, x: g.node("Gelu", x, domain="com.microsoft"), "gelu", 13),
    "FastGelu": (lambda g, x: g.node("FastGelu", x, domain="com.microsoft"), "gelu_tanh", 13),
    "QuickGelu": (
        lambda g, x: g.node("QuickGelu", x, domain="com.microsoft", alpha=1.702),
        "quick_gelu",
        13,
    ),
}
OPSETS = (7, 9, 11, 13, 14, 17, 18, 20, 23, 24, 25)
# ONNX Runtime runs Swish at opset 24 and not at 25
CASES = [
    (s, o)
    for s, (_, _, first) in MATCH.items()
    for o in OPSETS
    if o >= first and (o < 25 or "Swish" not in s.split()[0] or s == "HardSwish")
]


@pytest.mark.parametrize(("spelling", "opset"), CASES)
@pytest.mark.parametrize("bias", [False, True])
def test_spellings_that_match(spelling: str, opset: int, bias: bool) -> None:
    spelled, activation, _ = MATCH[spelling]
    g = Graph(opset)
    x = g.input("x", ROWS, scale=2)
    y = spelled(g, g.Add(x, normal((32,), 3))) if bias else spelled(g, x)
    made, _ = prove(g, y, [ACT], tolerance=5e-4 if "Fast" in spelling else 0)
    assert ops(made) == [f"{ACT}_{activation}" + ("_bias" if bias else "")]


@pytest.mark.parametrize("constants", ["node", "identity"])
@pytest.mark.parametrize("spelling", ["erf (xa)h", "tanh (xa)h", "hardswish by clip", "quick gelu"])
def test_constants_however_they_are_held(spelling: str, constants: str) -> None:
    g = Graph(13, constants=constants)
    prove(g, MATCH[spelling][0](g, g.input("x", ROWS)), [ACT])


SINGLE: dict[str, Spelling] = {
    "relu": lambda g, x: g.Relu(x),
    "relu by clip": lambda g, x: g.Clip(x, np.asarray(0, g.dtype)),
    "relu by max": lambda g, x: g.Max(x, 0.0),
    "sigmoid": lambda g, x: g.Sigmoid(x),
    "tanh": lambda g, x: g.Tanh(x),
    "leaky_relu": lambda g, x: g.LeakyRelu(x, alpha=0.2),
}


@pytest.mark.parametrize("activation", SINGLE)
def test_one_operator_is_fused_with_a_bias_only(activation: str) -> None:
    g = Graph(13)
    prove(g, SINGLE[activation](g, g.input("x", ROWS)), [])
    g = Graph(13)
    made, _ = prove(g, SINGLE[activation](g, g.Add(g.input("x", ROWS), normal((32,), 3))), [ACT])
    slope = "_alpha0p2" if activation == "leaky_relu" else ""
    assert ops(made) == [f"{ACT}_{activation.split()[0]}{slope}_bias"]


@pytest.mark.parametrize("shape", [(), (1,), (32,), (1, 32), (1, 1, 32)])
@pytest.mark.parametrize("first", [False, True])
def test_biases_that_are_taken(shape: tuple[int, ...], first: bool) -> None:
    g = Graph(13)
    x, bias = g.input("x", ROWS), normal(shape, 3)
    made, _ = prove(g, erf_gelu(g, g.Add(bias, x) if first else g.Add(x, bias)), [ACT])
    assert ops(made) == [f"{ACT}_gelu_bias"]


@pytest.mark.parametrize("shape", [(8, 1), (1, 8, 32), (2, 1, 1, 32)])
def test_biases_that_are_not_taken_stay_outside(shape: tuple[int, ...]) -> None:
    """Along another axis, of more axes than one, or of higher rank."""
    g = Graph(13)
    made, _ = prove(g, erf_gelu(g, g.Add(g.input("x", ROWS), normal(shape, 3))), [ACT])
    assert ops(made) == [f"{ACT}_gelu"]


def test_a_bias_that_enlarges_stays_outside() -> None:
    g = Graph(13)
    made, _ = prove(g, erf_gelu(g, g.Add(g.input("x", ("batch", 8, 1)), normal((32,), 3))), [ACT])
    assert ops(made) == [f"{ACT}_gelu"]


def test_a_sum_of_two_tensors_is_no_bias() -> None:
    g = Graph(13)
    made, _ = prove(g, erf_gelu(g, g.Add(g.input("x", ROWS), g.input("other", ROWS))), [ACT])
    assert ops(made) == [f"{ACT}_gelu"]


def test_a_biased_tensor_that_is_read_keeps_its_add() -> None:
    g = Graph(13)
    z = g.Add(g.input("x", ROWS), normal((32,), 3))
    made, _ = prove(g, g.Add(erf_gelu(g, z), g.Sin(z)), [ACT])
    assert ops(made) == [f"{ACT}_gelu"]


@pytest.mark.parametrize("between_casts", [False, True])
@pytest.mark.parametrize("spelling", ["erf (xa)h", "tanh xxx", "silu", "hardswish by clip"])
def test_half_precision(spelling: str, between_casts: bool) -> None:
    g = Graph(13, F16)
    x = g.Add(g.input("x", ROWS, scale=2), normal((32,), 3, F16))
    if between_casts:
        x, g.dtype = g.cast(x, F32), F32
    y = MATCH[spelling][0](g, x)
    if between_casts:
        y, g.dtype = g.cast(y, F16), F16
    made, _ = prove(g, y, [ACT])
    assert ops(made)[0].endswith("_fp16")


DECOYS: dict[str, tuple[Spelling, str]] = {
    "root 1.4137": (lambda g, x: erf_gelu(g, x, two=1.4137), "1.4137 is not sqrt(2)"),
    "root 1.415": (lambda g, x: erf_gelu(g, x, two=1.415), "1.415 is not sqrt(2)"),
    "half 0.501": (lambda g, x: erf_gelu(g, x, half=0.501), "0.501 is not 1/2"),
    "cubic 0.0448": (lambda g, x: tanh_gelu(g, x, k=0.0448), "0.0448 is not 0.044715"),
    "cubic 0.0448 in a chain": (
        lambda g, x: tanh_gelu(g, x, "chain", k=0.0448),
        "0.0448 is not 0.044715",
    ),
    "half 0.501 inside": (
        lambda g, x: g.Mul(x, g.Add(g.Mul(g.Erf(g.Mul(x, 0.5**0.5)), 0.501), 0.5)),
        "0.501 is not 1/2",
    ),
    "exp of the positive": (lambda g, x: g.Div(x, g.Add(g.Exp(x), 1.0)), ""),
    "exp plus 1.001": (lambda g, x: g.Div(x, g.Add(g.Exp(g.Neg(x)), 1.001)), "1.001 is not 1"),
    "line of 0.501": (
        lambda g, x: g.Mul(x, g.clip(g.Add(g.Mul(x, 1 / 6), 0.501), 0, 1)),
        "0.501 is not 1/2",
    ),
    "clip from 1": (lambda g, x: g.Div(g.Mul(x, g.clip(g.Add(x, 3.0), 1, 6)), 6.0), ""),
    "clipped line from 1/2": (
        lambda g, x: g.Mul(x, g.clip(g.Add(g.Mul(x, 1 / 6), 0.5), 0.5, 1)),
        "",
    ),
    "clip at run time": (
        lambda g, x: g.Div(
            g.Mul(x, g.Clip(g.Add(x, 3.0), g.reduce("ReduceMean", g.Abs(x), (0, 1, 2), 0), 6.0)), 6.0
        ),
        "",
    ),
    "sixth 0.1668": (
        lambda g, x: g.Mul(g.Mul(x, g.clip(g.Add(x, 3.0), 0, 6)), 0.1668),
        "0.1668 is not 1/6",
    ),
    "hardsigmoid of 0.1668": (
        lambda g, x: g.Mul(x, g.HardSigmoid(x, alpha=0.1668, beta=0.5)),
        "",
    ),
    "mish of 1.001": (
        lambda g, x: g.Mul(x, g.Tanh(g.Log(g.Add(g.Exp(x), 1.001)))),
        "1.001 is not 1",
    ),
    "sum of two gates": (lambda g, x: g.Add(x, g.Sigmoid(x)), ""),
    "runtime slope": (lambda g, x: g.Mul(x, g.Sigmoid(g.Mul(x, g.Cos(x)))), ""),
    "slope 1.7": (lambda g, x: g.Mul(x, g.Sigmoid(g.Mul(x, 1.7))), "1.7 is not 1.702"),
    "gate of another": (lambda g, x: g.Mul(x, g.Sigmoid(g.reduce("ReduceMean", x))), ""),
    "clip to 5": (lambda g, x: g.Div(g.Mul(x, g.clip(g.Add(x, 3.0), 0, 5)), 6.0), ""),
    "shift of 3.001": (
        lambda g, x: g.Div(g.Mul(x, g.clip(g.Add(x, 3.001), 0, 6)), 6.0),
        "3.001 is not 3",
    ),
    "shift of 2": (lambda g, x: g.Div(g.Mul(x, g.clip(g.Add(x, 2.0), 0, 6)), 6.0), ""),
    "hardsigmoid of 0.2": (lambda g, x: g.Mul(x, g.HardSigmoid(x)), ""),
    "softplus without tanh": (lambda g, x: g.Mul(x, g.Softplus(x)), ""),
    "erf of another": (
        lambda g, x: g.Mul(g.Mul(x, g.Add(g.Erf(g.Div(g.Sin(x), 2**0.5)), 1.0)), 0.5),
        "",
    ),
}


@pytest.mark.parametrize("decoy", DECOYS)
def test_decoys_that_must_not_match(decoy: str) -> None:
    spelled, reason = DECOYS[decoy]
    g = Graph(13)
    _, misses = prove(g, spelled(g, g.input("x", ROWS, scale=3)), [])
    assert not reason or any(reason in m.reason for m in misses), misses


def test_doubles_stay() -> None:
    g = Graph(13, F64)
    prove(g, tanh_gelu(g, g.input("x", ROWS)), [])


def test_an_operator_of_another_slope_stays() -> None:
    g = Graph(17)
    prove(g, g.node("QuickGelu", g.input("x", ROWS), domain="com.microsoft", alpha=1.3), [])


def test_a_constant_that_callers_may_override_is_no_constant() -> None:
    g = Graph(13)
    x = g.input("x", ROWS)
    unit = g.weight(1.0, name="unit")
    g.input("unit", ())
    del g.feeds[0]["unit"]
    g.feeds[1]["unit"] = np.asarray(1.5, F32)
    prove(g, g.Mul(g.Mul(x, g.Add(g.Erf(g.Div(x, 2**0.5)), unit)), 0.5), [])


@pytest.mark.parametrize("operator", [("Add", False), ("Relu", True)])
def test_a_biased_channel_of_an_image_stays_outside(operator: tuple[str, bool]) -> None:
    """A bias of (1, C, 1, 1) goes along another axis than the last; here both have 8 elements."""
    g = Graph(13)
    z = g.Add(g.input("x", ("batch", 8, 8, 8)), normal((1, 8, 1, 1), 3))
    y = g.Relu(z) if operator[1] else g.Mul(z, g.Sigmoid(z))
    made, _ = prove(g, y, [] if operator[1] else [ACT])
    assert "bias" not in "".join(ops(made))


@pytest.mark.parametrize("spelling", ["silu", "erf (xa)h", "hardswish by clip"])
def test_no_rows(spelling: str) -> None:
    g = Graph(13)
    x = g.input("x", ("batch", 0, 32))
    prove(g, MATCH[spelling][0](g, g.Add(x, normal((32,), 3))), [ACT])


@pytest.mark.parametrize("operator", ["Erf", "Tanh", "Sigmoid", "Softplus"])
def test_half_precision_with_one_operator_in_fp32(operator: str) -> None:
    g = Graph(13, F16)
    x = g.input("x", ROWS, scale=2)

    def wide(op: str, t: str) -> str:
        return g.cast(g.node(op, g.cast(t, F32)), F16)

    y = {
        "Erf": lambda: ordered(g, x, g.Add(wide("Erf", g.Div(x, 2**0.5)), 1.0), 0.5, "(xa)h"),
        "Tanh": lambda: ordered(
            g,
            x,
            g.Add(wide("Tanh", g.Mul(g.Add(x, g.Mul(g.Pow(x, 3.0), 0.044715)), (2 / np.pi) ** 0.5)), 1.0),
            0.5,
            "(xa)h",
        ),
        "Sigmoid": lambda: g.Mul(x, wide("Sigmoid", x)),
        "Softplus": lambda: g.Mul(x, g.Tanh(wide("Softplus", x))),
    }[operator]()
    made, _ = prove(g, y, [ACT])
    assert ops(made)[0].endswith("_fp16")


def test_lstm_gates_are_no_silu() -> None:
    g = Graph(13)
    x, state = g.input("x", ("batch", 32)), g.input("state", ("batch", 32))
    gate = g.Sigmoid(g.Add(x, state))
    prove(g, g.Mul(gate, g.Tanh(g.Add(x, state))), [])


def test_onnx_runtimes_bias_gelu() -> None:
    g = Graph(13)
    y = g.node("BiasGelu", g.input("x", ROWS), normal((32,), 3), domain="com.microsoft")
    model = finish(g, y)
    made, sites, _ = fused(model)
    assert names(sites) == [ACT]
    assert ops(made) == [f"{ACT}_gelu_bias"]
    assert_same(model, made, g.feeds)
