"""LayerNorm and its skip form: the spellings that must match and those that must not, by numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from graphs import (
    F16,
    F32,
    F64,
    I64,
    Graph,
    assert_same,
    finish,
    fused,
    layer_norm,
    names,
    normal,
    ops,
    prove,
)

LN, SKIP = "TrtfuseLayerNorm", "TrtfuseSkipLayerNorm"
Spelling = Callable[[Graph, str], str]
ROWS = ("batch", 8, 32)


def affine(g: Graph, width: int = 32) -> tuple[np.ndarray, np.ndarray]:
    return (1 + normal((width,), 1, F32, 0.3)).astype(g.dtype), normal((width,), 2, g.dtype)


def tensorflow(g: Graph, x: str) -> str:
    """x * (rsqrt * gamma) + (beta - mean * rsqrt * gamma)"""
    gamma, beta = affine(g)
    mean = g.reduce("ReduceMean", x)
    centred = g.Sub(x, mean)
    root = g.Sqrt(g.Add(g.reduce("ReduceMean", g.Mul(centred, centred)), 1e-6))
    slope = g.Mul(g.Reciprocal(root), gamma)
    return str(g.Add(g.Mul(x, slope), g.Sub(beta, g.Mul(mean, slope))))


def moments(g: Graph, x: str) -> str:
    """Variance as E[x x] - E[x] E[x], as ONNX's own function body has it."""
    gamma, beta = affine(g)
    mean = g.reduce("ReduceMean", x)
    variance = g.Sub(g.reduce("ReduceMean", g.Mul(x, x)), g.Mul(mean, mean))
    y = g.Div(g.Sub(x, mean), g.Sqrt(g.Add(variance, 1e-5)))
    return str(g.Add(g.Mul(y, gamma), beta))


def through_identities(g: Graph, x: str) -> str:
    gamma, beta = affine(g)
    x = g.Identity(x)
    centred = g.Identity(g.Sub(x, g.Identity(g.reduce("ReduceMean", x))))
    variance = g.reduce("ReduceMean", g.Pow(centred, 2.0))
    y = g.Div(centred, g.Sqrt(g.Identity(g.Add(variance, 1e-5))))
    return str(g.Add(g.Mul(g.Dropout(y) if g.opset >= 7 else y, gamma), beta))


def to_the_minus_half(g: Graph, x: str) -> str:
    gamma, beta = affine(g)
    centred = g.Sub(x, g.reduce("ReduceMean", x))
    shifted = g.Add(g.reduce("ReduceMean", g.Mul(centred, centred)), 1e-5)
    return str(g.Add(g.Mul(g.Mul(centred, g.Pow(shifted, -0.5)), gamma), beta))


MATCH: dict[str, Spelling] = {
    "torchscript": lambda g, x: layer_norm(g, x),
    "square-mul": lambda g, x: layer_norm(g, x, square="mul"),
    "square-int": lambda g, x: layer_norm(g, x, square="int"),
    "reciprocal": lambda g, x: layer_norm(g, x, divide="reciprocal"),
    "one-over": lambda g, x: layer_norm(g, x, divide="one_over"),
    "two-subs": lambda g, x: layer_norm(g, x, two_subs=True),
    "swapped": lambda g, x: layer_norm(g, x, swapped=True),
    "positive-axis": lambda g, x: layer_norm(g, x, axes=(2,)),
    "eps-of-shape-1": lambda g, x: layer_norm(g, x, eps=[1e-3]),
    "no-bias": lambda g, x: layer_norm(g, x, bias=False),
    "no-affine": lambda g, x: layer_norm(g, x, scale=False, bias=False),
    "weights-1-1-h": lambda g, x: layer_norm(g, x, shape=(1, 1, 32)),
    "weights-1-h": lambda g, x: layer_norm(g, x, shape=(1, 32)),
    "tensorflow": tensorflow,
    "moments": moments,
    "identities": through_identities,
    "power": to_the_minus_half,
}


CASES = [
    (spelling, opset, constants)
    for spelling in MATCH
    for opset in (7, 9, 11, 13, 17, 18, 20, 23)
    for constants in ("initializer", "node", "identity")
    if constants == "initializer" or opset in (11, 18)
    if spelling != "square-int" or opset >= 12  # Pow of mixed types came with opset 12
]


@pytest.mark.parametrize(("spelling", "opset", "constants"), CASES)
def test_spellings_that_match(spelling: str, opset: int, constants: str) -> None:
    g = Graph(opset, constants=constants)
    prove(g, MATCH[spelling](g, g.input("x", ROWS)), [LN])


@pytest.mark.parametrize("opset", [13, 17, 20])
@pytest.mark.parametrize("casts", [True, False])
def test_half_precision(opset: int, casts: bool) -> None:
    g = Graph(opset, F16)
    made, _ = prove(g, layer_norm(g, g.input("x", ROWS, scale=3), casts=casts), [LN])
    # without casts epsilon is written in fp16, and it is that value that counts
    assert ops(made) == ["TrtfuseLayerNorm_fp16" if casts else "TrtfuseLayerNorm_eps1p001358em05_fp16"]


def test_fp32_statistics_stand_what_overflows_in_fp16() -> None:
    """|x| about 300: squares pass 65504, so statistics in fp16 would be infinite."""
    g = Graph(17, F16)
    model = finish(g, layer_norm(g, g.input("x", ROWS, scale=300), casts=True))
    made, _, _ = fused(model)
    assert_same(model, made, g.feeds)


@pytest.mark.parametrize("axis", [-1, 2])
def test_the_standard_operator(axis: int) -> None:
    g = Graph(17)
    gamma, beta = affine(g)
    made, _ = prove(g, g.LayerNormalization(g.input("x", ROWS), gamma, beta, axis=axis), [LN])
    assert ops(made) == ["TrtfuseLayerNorm"]  # epsilon 1e-5 is the operator's default


def test_epsilon_is_part_of_the_body() -> None:
    g = Graph(17)
    x = g.input("x", ROWS, scale=1e-3)
    y = g.Add(layer_norm(g, x, eps=1e-12), layer_norm(g, x, eps=1e-3))
    made, _ = prove(g, y, [LN, LN])
    assert ops(made) == ["TrtfuseLayerNorm_eps1em12", "TrtfuseLayerNorm_eps0p001"]
    assert len({f.name for f in made.functions}) == 2


# --- decoys ---


def variance_of(g: Graph, x: str, exponent: float = 2.0, axes: tuple[int, ...] = (-1,)) -> str:
    gamma, beta = affine(g)
    centred = g.Sub(x, g.reduce("ReduceMean", x))
    variance = g.reduce("ReduceMean", g.Pow(g.Abs(centred), exponent), axes)
    return str(g.Add(g.Mul(g.Div(centred, g.Sqrt(g.Add(variance, 1e-5))), gamma), beta))


def epsilon_outside(g: Graph, x: str) -> str:
    centred = g.Sub(x, g.reduce("ReduceMean", x))
    return str(g.Div(centred, g.Add(g.Sqrt(g.reduce("ReduceMean", g.Mul(centred, centred))), 1e-2)))


def centred_of_another(g: Graph, x: str) -> str:
    centred = g.Sub(x, g.reduce("ReduceMean", x))
    other = g.Sub(g.Sin(x), g.reduce("ReduceMean", x))
    return str(g.Div(other, g.Sqrt(g.Add(g.reduce("ReduceMean", g.Mul(centred, centred)), 1e-5))))


def epsilon_at_run_time(g: Graph, x: str) -> str:
    eps = g.Abs(g.reduce("ReduceMean", x, (0, 1, 2)))
    centred = g.Sub(x, g.reduce("ReduceMean", x))
    return str(g.Div(centred, g.Sqrt(g.Add(g.reduce("ReduceMean", g.Mul(centred, centred)), eps))))


DECOYS: dict[str, tuple[Spelling, str]] = {
    "wrong-axis": (lambda g, x: layer_norm(g, x, 32, axes=(1,)), "not the last axis of rank 3"),
    "two-axes": (lambda g, x: layer_norm(g, x, axes=(-2, -1)), "not the last axis of rank 3"),
    "exponent-3": (lambda g, x: variance_of(g, x, 3.0), ""),
    "exponent-2.001": (lambda g, x: variance_of(g, x, 2.001), ""),
    "epsilon-outside": (epsilon_outside, ""),
    "epsilon-at-run-time": (epsilon_at_run_time, ""),
    "centred-of-another": (centred_of_another, ""),
    "mixed-axes": (lambda g, x: variance_of(g, x, 2.0, (1,)), ""),
}


@pytest.mark.parametrize("decoy", DECOYS)
def test_decoys_that_must_not_match(decoy: str) -> None:
    spelled, reason = DECOYS[decoy]
    g = Graph(13)
    _, misses = prove(g, spelled(g, g.input("x", (2, 32, 32))), [])
    assert not reason or any(reason in m.reason for m in misses)


def test_doubles_stay() -> None:
    g = Graph(13, F64)
    prove(g, layer_norm(g, g.input("x", ROWS), eps=1e-50), [])


@pytest.mark.parametrize("inner", ["mean", "centred", "variance", "deviation"])
@pytest.mark.parametrize("way", ["exposed", "read"])
def test_a_tensor_inside_that_is_needed_outside_survives(inner: str, way: str) -> None:
    """What is left may still be an RMSNorm of the centred rows."""
    g = Graph(13)
    keep: dict[str, str] = {}
    y = layer_norm(g, g.input("x", ROWS), keep=keep)
    rest = ["TrtfuseRmsNorm"] if inner in ("mean", "centred") else []
    if way == "exposed":
        g.output(keep[inner])
        _, misses = prove(g, y, rest)
        said = "is a graph output"
    else:
        _, misses = prove(g, g.Add(y, g.Sin(keep[inner])), rest)
        said = "is read by"
    assert rest or any(said in m.reason for m in misses)


def test_a_scale_along_another_axis_is_not_taken() -> None:
    g = Graph(13)
    made, _ = prove(g, layer_norm(g, g.input("x", (2, 32, 32)), shape=(32, 1)), [LN])
    assert ops(made) == ["TrtfuseLayerNorm_noscale_nobias"]


def test_a_single_factor_is_no_vector() -> None:
    g = Graph(13)
    made, _ = prove(g, layer_norm(g, g.input("x", ROWS), shape=(1,)), [LN])
    assert ops(made) == ["TrtfuseLayerNorm_noscale_nobias"]


def test_a_scale_at_run_time_is_not_taken() -> None:
    g = Graph(13)
    x = g.input("x", ROWS)
    gamma = g.input("gamma", (32,))
    made, _ = prove(g, g.Mul(layer_norm(g, x, scale=False, bias=False), gamma), [LN])
    assert ops(made) == ["TrtfuseLayerNorm_noscale_nobias"]


def test_rows_of_unknown_length_stay() -> None:
    g = Graph(13)
    x = g.input("x", ("batch", "width"))
    for feed in g.feeds:
        feed["x"] = normal((2, 32), 3)
    _, misses = prove(g, layer_norm(g, x), [])
    assert any("the last dimension of 'x' is unknown" in m.reason for m in misses)


def test_statistics_of_the_operator_that_are_read() -> None:
    g = Graph(17)
    gamma, beta = affine(g)
    y, mean, _ = g.node("LayerNormalization", g.input("x", ROWS), gamma, beta, outputs=3, axis=-1)
    _, misses = prove(g, g.Add(y, mean), [])
    assert any("its statistics" in m.reason for m in misses)


def test_the_operator_over_two_axes_stays() -> None:
    g = Graph(17)
    x = g.input("x", ROWS)
    y = g.LayerNormalization(x, 1 + normal((8, 32), 1, F32, 0.3), normal((8, 32), 2), axis=1)
    _, misses = prove(g, y, [])
    assert any("axis 1 is not the last axis of rank 3" in m.reason for m in misses)


# --- with a residual ---


def residual(g: Graph) -> tuple[str, str]:
    return g.input("x", ROWS), g.input("skip", ROWS)


@pytest.mark.parametrize("opset", [7, 11, 13, 17, 18, 23])
@pytest.mark.parametrize("dtype", [F32, F16])
def test_a_residual_before_it(opset: int, dtype: Any) -> None:
    g = Graph(opset, dtype)
    prove(g, layer_norm(g, g.Add(*residual(g))), [SKIP])


@pytest.mark.parametrize("where", ["first", "last", "sum"])
@pytest.mark.parametrize("read", [False, True])
def test_the_bias_of_the_projection_and_the_sum(where: str, read: bool) -> None:
    g = Graph(13)
    x, skip = residual(g)
    bias = normal((32,), 9)
    if where == "first":
        total = g.Add(skip, g.Add(x, bias))
    elif where == "last":
        total = g.Add(g.Add(x, skip), bias)
    else:
        total = g.Sum(x, skip, bias)
    y = layer_norm(g, total)
    made, _ = prove(g, g.Add(g.Sin(y), total) if read else y, [SKIP])
    assert ops(made) == ["TrtfuseSkipLayerNorm_bias_sum" if read else "TrtfuseSkipLayerNorm_bias"]


def test_the_sum_as_an_output() -> None:
    g = Graph(13)
    total = g.Add(*residual(g))
    g.output(total)
    made, _ = prove(g, layer_norm(g, total), [SKIP])
    assert ops(made) == ["TrtfuseSkipLayerNorm_sum"]


def test_the_sum_read_before_the_norm_keeps_the_order_of_the_graph() -> None:
    g = Graph(13)
    total = g.Add(*residual(g))
    early = g.Sin(total)
    prove(g, g.Add(layer_norm(g, total), early), [SKIP])


def test_the_biased_tensor_read_elsewhere_keeps_its_add() -> None:
    g = Graph(13)
    x, skip = residual(g)
    biased = g.Add(x, normal((32,), 9))
    made, _ = prove(g, g.Add(layer_norm(g, g.Add(biased, skip)), g.Cos(biased)), [SKIP])
    assert ops(made) == ["TrtfuseSkipLayerNorm"]


def test_a_broadcast_residual_leaves_a_plain_norm() -> None:
    g = Graph(13)
    prove(g, layer_norm(g, g.Add(g.input("x", ROWS), normal((1, 8, 32), 4))), [LN])


def test_a_runtime_residual_of_another_shape_leaves_a_plain_norm() -> None:
    g = Graph(13)
    prove(g, layer_norm(g, g.Add(g.input("x", ROWS), g.input("skip", (1, 8, 32)))), [LN])


def test_ten_norms_of_one_scale_store_it_once() -> None:
    g = Graph(13)
    gamma, beta = g.weight(affine(g)[0], name="gamma"), g.weight(affine(g)[1], name="beta")
    x = g.input("x", ROWS)
    for _ in range(10):
        total = g.Add(x, g.Sin(x))
        centred = g.Sub(total, g.reduce("ReduceMean", total))
        spread = g.Sqrt(g.Add(g.reduce("ReduceMean", g.Pow(centred, 2.0)), 1e-5))
        x = g.Add(g.Mul(g.Div(centred, spread), gamma), beta)
    made, _ = prove(g, x, [SKIP] * 10, tolerance=1e-4)
    assert {t.name for t in made.graph.initializer} == {"gamma", "beta"}
    assert len(made.functions) == 1


def test_a_weight_of_rank_3_that_others_read_is_reshaped_and_not_copied() -> None:
    g = Graph(13)
    x = g.input("x", ROWS)
    gamma = g.weight(1 + normal((1, 1, 32), 1, F32, 0.3), name="gamma")
    y = g.Mul(layer_norm(g, x, scale=False, bias=False), gamma)
    made, _ = prove(g, g.Add(y, g.Mul(g.Sin(x), gamma)), [LN])
    assert [t.name for t in made.graph.initializer if t.dims and t.dims[-1] == 32] == ["gamma"]


CONTRIB = {
    "plain": (("gamma",), "TrtfuseSkipLayerNorm{sum}_nobias_eps1em12"),
    "beta": (("gamma", "beta"), "TrtfuseSkipLayerNorm{sum}_eps1em12"),
    "bias": (("gamma", "beta", "bias"), "TrtfuseSkipLayerNorm_bias{sum}_eps1em12"),
}


@pytest.mark.parametrize("kind", CONTRIB)
@pytest.mark.parametrize("read", [False, True])
def test_onnx_runtimes_own_operator(kind: str, read: bool) -> None:
    inputs, op = CONTRIB[kind]
    g = Graph(17)
    x, skip = residual(g)
    gamma, beta = affine(g)
    weights = {"gamma": gamma, "beta": beta, "bias": normal((32,), 9)}
    given = [weights[i] for i in inputs]
    outputs = g.node("SkipLayerNormalization", x, skip, *given, outputs=4, domain="com.microsoft")
    g.nodes[-1].output[1] = g.nodes[-1].output[2] = ""
    model = finish(g, g.Add(outputs[0], outputs[3]) if read else outputs[0])
    made, sites, _ = fused(model)
    assert names(sites) == [SKIP]
    assert ops(made) == [op.replace("{sum}", "_sum" if read else "")]
    assert_same(model, made, g.feeds)


def test_zero_rows() -> None:
    g = Graph(13)
    x = g.input("x", ("rows", 32))
    g.feeds[0]["x"] = np.zeros((0, 32), F32)
    prove(g, layer_norm(g, x), [LN])


def test_constants_that_callers_may_override_are_not_read() -> None:
    g = Graph(13)
    x = g.input("x", ROWS)
    eps = g.weight(1e-5, name="eps")
    g.input("eps", ())
    for feed in g.feeds:
        del feed["eps"]
    g.feeds[1]["eps"] = np.asarray(0.5, F32)
    centred = g.Sub(x, g.reduce("ReduceMean", x))
    prove(g, g.Div(centred, g.Sqrt(g.Add(g.reduce("ReduceMean", g.Mul(centred, centred)), eps))), [])


def test_integer_axes_computed_in_the_graph() -> None:
    """Axes from Range and Cast: the value is followed, however it is computed."""
    g = Graph(18)
    x = g.input("x", ROWS)
    axes = g.Range(np.array(2, I64), np.array(3, I64), np.array(1, I64))
    centred = g.Sub(x, g.ReduceMean(x, axes))
    y = g.Div(centred, g.Sqrt(g.Add(g.ReduceMean(g.Mul(centred, centred), axes), 1e-5)))
    prove(g, y, [LN])
