"""What holds for every fused op, whatever its pattern: conditions of a match, and near-misses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from graphs import BOOL, F16, F32, Graph, finish, fused, names, normal, ops, prove, run
from onnx import ModelProto, helper
from onnx.reference import ReferenceEvaluator

I32 = np.int32
ROWS = ("batch", 8, 32)
HEADS = ("batch", 2, 8, 16)


def silu(g: Graph, x: str) -> str:
    return str(g.Mul(x, g.Sigmoid(x)))


def erf_gelu(g: Graph, x: str, half: Any = 0.5, one: Any = 1.0, two: Any = 2**0.5) -> str:
    return str(g.Mul(g.Mul(x, g.Add(g.Erf(g.Div(x, two)), one)), half))


def linear(g: Graph, x: str) -> str:
    return str(g.Add(g.MatMul(x, normal((32, 32), 3, g.dtype, 0.2)), normal((32,), 4, g.dtype)))


def qkv(g: Graph) -> tuple[str, str, str]:
    return g.input("q", HEADS), g.input("k", HEADS), g.input("v", HEADS)


def product(g: Graph, q: str, k: str) -> str:
    return str(g.MatMul(q, g.Transpose(k, perm=[0, 1, 3, 2])))


# --- a fused op never reads what only it makes ---------------------------------------------------------


def residual_of_itself(g: Graph) -> str:
    z = linear(g, g.input("x", ROWS))
    return str(g.Add(g.Relu(z), z))


def residual_of_its_product(g: Graph) -> str:
    p = g.MatMul(g.input("x", ROWS), normal((32, 32), 3, scale=0.2))
    return str(g.Add(g.Relu(g.Add(p, normal((32,), 4))), p))


def gated_by_its_sigmoid(g: Graph) -> str:
    x = g.input("x", ROWS)
    s = g.Sigmoid(x)
    return str(g.Mul(g.Mul(x, s), s))


def gated_by_itself(g: Graph) -> str:
    y = silu(g, g.input("x", ROWS))
    return str(g.Mul(y, y))


def masked_by_its_scores(g: Graph) -> str:
    q, k, v = qkv(g)
    scores = product(g, q, k)
    return str(g.MatMul(g.Softmax(g.Add(g.Div(scores, 4.0), scores), axis=-1), v))


def values_of_its_probabilities(g: Graph) -> str:
    q, k = g.input("q", (2, 8, 8)), g.input("k", (2, 8, 8))
    p = g.Softmax(g.MatMul(q, g.Transpose(k, perm=[0, 2, 1])), axis=-1)
    return str(g.MatMul(p, p))


LOOPS: dict[str, tuple[Callable[[Graph], str], list[str]]] = {
    "residual of itself": (residual_of_itself, []),
    "residual of its product": (residual_of_its_product, ["TrtfuseBiasAct"]),
    "gated by its sigmoid": (gated_by_its_sigmoid, []),
    "gated by itself": (gated_by_itself, ["TrtfuseBiasAct"]),
    "masked by its scores": (masked_by_its_scores, ["TrtfuseSoftmax"]),
    "values of its probabilities": (values_of_its_probabilities, []),
}


@pytest.mark.parametrize("case", LOOPS)
def test_a_site_never_reads_what_it_makes(case: str) -> None:
    build, expected = LOOPS[case]
    g = Graph(13)
    prove(g, build(g), expected)


# --- constants of one element keep the rank ------------------------------------------------------------


@pytest.mark.parametrize("rank", [1, 2])
def test_a_constant_of_no_more_axes_than_its_operand_is_a_number(rank: int) -> None:
    g = Graph(13)
    half, one, two = (np.full([1] * rank, v, F32) for v in (0.5, 1, 2**0.5))
    prove(g, erf_gelu(g, g.input("x", ("batch", 32)), half, one, two), ["TrtfuseBiasAct"])


@pytest.mark.parametrize("which", ["half", "one", "two"])
def test_a_constant_of_more_axes_adds_them(which: str) -> None:
    g = Graph(13)
    values = {"half": 0.5, "one": 1.0, "two": 2**0.5}
    constants: dict[str, Any] = {
        n: np.full((1, 1, 1), v, F32) if n == which else v for n, v in values.items()
    }
    _, misses = prove(g, erf_gelu(g, g.input("x", ("batch", 32)), **constants), [])
    assert any("of rank 3 raises the rank" in m.reason for m in misses)


def test_a_scale_of_more_axes_adds_them() -> None:
    g = Graph(13)
    q, k, v = qkv(g)
    scores = g.Mul(product(g, q, k), np.full((1, 1, 1, 1, 1), 0.25, F32))
    prove(g, g.MatMul(g.Softmax(scores, axis=-1), v), [])


def test_a_fill_of_more_axes_adds_them() -> None:
    g = Graph(13)
    causal = g.weight(np.tril(np.ones((8, 8), bool)), BOOL)
    filled = g.Where(causal, g.input("x", (2, 8, 8)), np.full((1, 1, 1, 1), -1e4, F32))
    prove(g, g.Softmax(filled, axis=-1), [])


# --- rounding inside -----------------------------------------------------------------------------------


def by_definition(model: ModelProto, feed: dict[str, np.ndarray]) -> np.ndarray:
    """The last output by onnx's reference, which computes fp16 in fp16 (ONNX Runtime on a CPU does not)."""
    with np.errstate(all="ignore"):
        return np.asarray(ReferenceEvaluator(model).run(None, feed)[-1])


def test_a_cast_to_a_narrower_type_inside_stays() -> None:
    """The fp16 part is a site of fp16: a value beyond its range is still infinite."""
    g = Graph(13)
    narrow = g.cast(g.input("x", ROWS, scale=1e5), F16)
    g.dtype = F16
    y = silu(g, narrow)
    g.dtype = F32
    model = finish(g, g.cast(y, F32))
    made, sites, _ = fused(model)
    assert [s.op_type for s in sites] == ["TrtfuseBiasAct_silu_fp16"]
    for feed in g.feeds:
        wanted, have = by_definition(model, feed), by_definition(made, feed)
        assert np.isinf(wanted).any()
        np.testing.assert_array_equal(np.isinf(have), np.isinf(wanted))


def test_scores_that_are_rounded_inside_stay() -> None:
    g = Graph(13)
    q, k, v = qkv(g)
    scores = g.cast(product(g, q, k), F16)
    _, sites, misses = fused(finish(g, g.MatMul(g.cast(g.Softmax(scores, axis=-1), F32), v)))
    assert names(sites) == []
    assert any("is rounded to fp16 inside it" in m.reason for m in misses)


def test_wider_types_inside_are_fused() -> None:
    g = Graph(13, F16)
    x = g.input("x", ROWS)
    erf = g.cast(g.Erf(g.cast(g.Div(x, 2**0.5), F32)), F16)
    made, _ = prove(g, g.Mul(g.Mul(x, g.Add(erf, 1.0)), 0.5), ["TrtfuseBiasAct"])
    assert ops(made) == ["TrtfuseBiasAct_gelu_fp16"]


# --- opsets --------------------------------------------------------------------------------------------


def test_before_opset_7_nothing_is_fused() -> None:
    """Operators then broadcast by attributes: this bias goes along axis 1."""
    g = Graph(6)
    z = g.Add(g.input("x", (2, 32, 32)), normal((32,), 3), broadcast=1, axis=1)
    g.output(g.Relu(z), (2, 32, 32))
    made, sites, _ = fused(g.model())
    assert sites == []
    assert [n.op_type for n in made.graph.node] == ["Add", "Relu"]


# --- which near-misses are told ------------------------------------------------------------------------


def squeeze_and_excite(g: Graph) -> str:
    x = g.input("x", ("batch", 8, 6, 6))
    y = silu(g, g.Conv(x, normal((8, 8, 1, 1), 3)))
    gate = g.Sigmoid(g.Conv(g.GlobalAveragePool(y), normal((8, 8, 1, 1), 4)))
    return str(g.Mul(y, gate))


def times_a_weight(g: Graph) -> str:
    return str(g.Mul(silu(g, g.input("x", ROWS)), normal((32,), 3)))


def plain_softmax(g: Graph) -> str:
    return str(g.Softmax(g.Sin(g.input("x", ROWS)), axis=-1))


def convolution_with_relu(g: Graph) -> str:
    z = g.Conv(g.input("x", ("batch", 8, 6, 6)), normal((8, 8, 1, 1), 3))
    return str(g.Relu(g.Add(z, normal((1, 8, 1, 1), 4))))


def convolution_with_silu(g: Graph) -> str:
    z = g.Conv(g.input("x", ("batch", 8, 6, 6)), normal((8, 8, 1, 1), 3))
    return silu(g, g.Add(z, normal((1, 8, 1, 1), 4)))


def activated_weight(g: Graph) -> str:
    return str(g.Add(g.input("x", ROWS), g.Relu(g.Add(g.weight(normal((8, 32), 3)), normal((32,), 4)))))


QUIET = {
    f.__name__: f
    for f in (
        squeeze_and_excite,
        times_a_weight,
        plain_softmax,
        convolution_with_relu,
        convolution_with_silu,
        activated_weight,
    )
}


@pytest.mark.parametrize("case", QUIET)
def test_what_nobody_would_be_glad_to_know_is_no_near_miss(case: str) -> None:
    g = Graph(13)
    _, _, misses = fused(finish(g, QUIET[case](g)))
    assert misses == []


def test_a_near_miss_names_its_node_and_the_failed_condition() -> None:
    g = Graph(13)
    y = erf_gelu(g, g.input("x", ROWS), two=1.4137)
    (miss,) = fused(finish(g, y))[2]
    assert (miss.op, miss.node) == ("TrtfuseBiasAct", y)
    assert miss.reason == "1.4137 is not sqrt(2)"


def test_an_inner_tensor_that_is_read_is_told_with_its_reader() -> None:
    g = Graph(13)
    x = g.input("x", ROWS)
    erf = g.Erf(g.Div(x, 2**0.5))
    reader = g.Sin(erf)
    y = g.Mul(g.Mul(x, g.Add(erf, 1.0)), 0.5)
    reasons = [m.reason for m in fused(finish(g, g.Add(y, reader)))[2]]
    assert reasons == [f"'{erf}' inside it is read by '{reader}' (Sin)"]


def test_an_inner_tensor_that_is_an_output_is_told() -> None:
    g = Graph(13)
    x = g.input("x", ROWS)
    erf = g.Erf(g.Div(x, 2**0.5))
    g.output(erf)
    _, misses = prove(g, g.Mul(g.Mul(x, g.Add(erf, 1.0)), 0.5), [])
    assert [m.reason for m in misses] == [f"'{erf}' inside it is a graph output"]


def test_sites_of_an_inner_graph_read_the_outer_one() -> None:
    """The weights and the input of both branches come from outside; the bias of one is made outside."""
    g = Graph(13)
    x, flag = g.input("x", ROWS), g.input("flag", (), BOOL)
    for k, feed in enumerate(g.feeds):
        feed["flag"] = np.array(bool(k))
    outside = g.Add(x, normal((32,), 3))
    branches = []
    for name, source in (("then", x), ("else", outside)):
        h = Graph(13)
        h.count = 100 if name == "then" else 200
        h.output(h.Identity(erf_gelu(h, h.Add(source, normal((32,), 5)) if name == "then" else source)), ROWS)
        branches.append(helper.make_graph(h.nodes, name, [], h.outputs, h.weights))
    y = g.If(flag, then_branch=branches[0], else_branch=branches[1])
    made, _ = prove(g, y, ["TrtfuseBiasAct", "TrtfuseBiasAct"])
    assert sorted(ops(made)) == ["TrtfuseBiasAct_gelu", "TrtfuseBiasAct_gelu_bias"]
    assert run(made, g.feeds[0], optimized=True)[0].shape == (2, 8, 32)


def test_integers_are_no_activations() -> None:
    g = Graph(14)
    y = g.Relu(g.Add(g.input("x", (2, 8), I32), g.weight(np.arange(8, dtype=I32))))
    g.output(y, (2, 8), I32)
    assert names(fused(g.model())[1]) == []
