"""Spellings that exporters write, each as it stands in their files, with numbers."""

from __future__ import annotations

import numpy as np
import pytest
from graphs import BOOL, F16, F32, F64, I64, Graph, finish, fused, layer_norm, names, normal, prove
from onnx import TensorProto, helper

WIDTH, HEADS, SIZE = 32, 2, 8


def vector(
    seed: int, dtype: type = F32, around: float = 0.0, shape: tuple[int, ...] = (WIDTH,)
) -> np.ndarray:
    return (around + normal(shape, seed, F32, 0.3)).astype(dtype)


# --- norms ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("opset", [12, 14, 18])
def test_torchscript_takes_the_square_of_a_half_norm_in_double(opset: int) -> None:
    g = Graph(opset, F16)
    x = g.input("x", ("b", 5, WIDTH))
    centred = g.Sub(x, g.reduce("ReduceMean", x))
    wide = g.cast(centred, F64)
    variance = g.reduce("ReduceMean", g.Pow(wide, np.asarray(2, F64)))
    normed = g.cast(g.Div(wide, g.Sqrt(g.Add(variance, np.asarray(1e-12, F64)))), F16)
    prove(g, g.Add(g.Mul(normed, vector(1, F16, 1)), vector(2, F16)), ["TrtfuseLayerNorm"])


def mean_of_rows(g: Graph, x: str, pooled: bool) -> str:
    """tf2onnx writes the mean over the last of three axes as a pooling before opset 18."""
    return str(g.GlobalAveragePool(x)) if pooled else g.reduce("ReduceMean", x)


def keras_norm(
    g: Graph,
    x: str,
    *,
    pooled: bool = False,
    scale: bool = True,
    bias: bool = True,
    negated: bool = True,
    other_mean: str = "",
) -> str:
    """x * slope + (bias - mean * slope), slope = scale / std."""
    mean = mean_of_rows(g, x, pooled)
    centred = g.Sub(x, mean)
    variance = mean_of_rows(g, g.Mul(centred, centred), pooled)
    slope = g.Reciprocal(g.Sqrt(g.Add(variance, 1e-3)))
    if scale:
        slope = g.Mul(slope, vector(1, around=1, shape=(1, 1, WIDTH)))
    steep, beta = g.Mul(x, slope), vector(2, shape=(1, 1, WIDTH))
    mean = other_mean or mean
    if negated:
        shift = g.Mul(g.Neg(mean), slope)
        return str(g.Add(steep, g.Add(shift, beta) if bias else shift))
    shift = g.Mul(mean, slope)
    return str(g.Add(steep, g.Sub(beta, shift)) if bias else g.Sub(steep, shift))


@pytest.mark.parametrize("negated", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("scale", [True, False])
@pytest.mark.parametrize("pooled", [True, False])
def test_keras_multiplies_by_a_slope(pooled: bool, scale: bool, bias: bool, negated: bool) -> None:
    g = Graph(13)
    x = g.input("x", ("b", "s", WIDTH))
    y = keras_norm(g, x, pooled=pooled, scale=scale, bias=bias, negated=negated)
    prove(g, y, ["TrtfuseLayerNorm"])


def test_keras_norm_of_a_sum() -> None:
    g = Graph(17)
    x, skip = (g.input(n, ("b", "s", WIDTH)) for n in ("x", "skip"))
    prove(g, keras_norm(g, g.Add(x, skip), pooled=True), ["TrtfuseSkipLayerNorm"])


def test_a_slope_with_the_mean_of_something_else_is_no_norm() -> None:
    g = Graph(13)
    x, z = (g.input(n, ("b", 5, WIDTH)) for n in ("x", "z"))
    prove(g, keras_norm(g, x, other_mean=g.reduce("ReduceMean", z)), [])


def test_a_pooling_over_an_image_is_no_mean_of_rows() -> None:
    g = Graph(13)
    x = g.input("x", ("b", 3, 4, WIDTH))
    centred = g.Sub(x, g.GlobalAveragePool(x))
    deviation = g.Sqrt(g.Add(g.GlobalAveragePool(g.Mul(centred, centred)), 1e-5))
    prove(g, g.Add(g.Mul(g.Div(centred, deviation), vector(1, around=1)), vector(2)), [])


@pytest.mark.parametrize("pooled", [True, False])
def test_keras_rms_norm_multiplies_the_scale_into_the_deviation(pooled: bool) -> None:
    g = Graph(17)
    x = g.input("x", ("b", "s", WIDTH))
    deviation = g.Sqrt(g.Add(mean_of_rows(g, g.Mul(x, x), pooled), 1e-6))
    y = g.Mul(x, g.Mul(g.Reciprocal(deviation), vector(1, around=1)))
    prove(g, y, ["TrtfuseRmsNorm"])


@pytest.mark.parametrize("dtype", [F32, F16])
@pytest.mark.parametrize("silu", [True, False])
def test_dynamo_writes_group_norm_as_one_operator(silu: bool, dtype: type) -> None:
    g = Graph(21, dtype)
    x = g.input("x", ("b", 8, "h", "w"))
    scale, bias = vector(1, dtype, 1, (8,)), vector(2, dtype, shape=(8,))
    y = g.GroupNormalization(x, scale, bias, num_groups=4, epsilon=1e-6)
    made, _ = prove(g, g.Mul(y, g.Sigmoid(y)) if silu else y, ["TrtfuseGroupNorm"])
    assert len([n for n in made.graph.node if n.op_type != "Identity"]) == 1


def test_group_norm_with_a_scale_for_each_group_stays() -> None:
    g = Graph(18)
    x = g.input("x", ("b", 8, 3, 3))
    y = g.GroupNormalization(x, vector(1, around=1, shape=(4,)), vector(2, shape=(4,)), num_groups=4)
    g.output(y, ["b", 8, 3, 3])
    _, sites, _ = fused(g.model())
    assert names(sites) == []


# --- attention -----------------------------------------------------------------------------------------


def heads(g: Graph, length: int | str = "s", dtype: type | None = None) -> tuple[str, str, str]:
    """q, k and v of shape (batch, heads, length, size)."""
    q, k, v = (g.input(n, ("b", HEADS, length, SIZE), dtype) for n in ("q", "k", "v"))
    return q, k, v


def product(g: Graph, q: str, k: str) -> str:
    return str(g.MatMul(q, g.Transpose(k, perm=[0, 1, 3, 2])))


def attended(g: Graph, scores: str, v: str) -> str:
    return str(g.MatMul(g.Softmax(scores, axis=-1), v))


def padding(g: Graph, rows: int = 1, length: int = 6) -> str:
    """A boolean mask (batch, 1, rows, length), true for some places and for the first of every row."""
    some = g.Greater(g.input("keep", ("b", 1, rows, length), F32), np.asarray(0.3, F32))
    return str(g.Or(some, g.weight(np.arange(length) == 0, BOOL)))


@pytest.mark.parametrize("dtype", [F32, F16])
@pytest.mark.parametrize("opset", [14, 20])
def test_t5_adds_a_bias_of_positions_before_the_mask(opset: int, dtype: type) -> None:
    g = Graph(opset, dtype)
    q, k, v = heads(g)
    bias, mask = g.input("bias", (1, HEADS, "s", "s")), g.input("mask", ("b", 1, 1, "s"), scale=5)
    prove(g, attended(g, g.Add(g.Add(product(g, q, k), bias), mask), v), ["TrtfuseAttention"])


def test_swin_scales_q_and_adds_a_constant_bias_before_the_mask() -> None:
    g = Graph(17)
    q, k, v = heads(g, 6)
    scores = product(g, g.Mul(q, SIZE**-0.5), k)
    biased = g.Add(scores, normal((1, HEADS, 6, 6), 3))
    prove(g, attended(g, g.Add(biased, g.input("mask", ("b", 1, 6, 6))), v), ["TrtfuseAttention"])


def test_a_bias_that_raises_the_rank_is_no_attention() -> None:
    g = Graph(17)
    q, k, v = heads(g, 6)
    scores = g.Add(g.Add(product(g, q, k), normal((2, 1, HEADS, 6, 6), 3)), normal((6, 6), 4))
    _, sites, _ = fused(finish(g, attended(g, scores, v)))
    assert "TrtfuseAttention" not in names(sites)


def test_a_bias_and_a_boolean_mask() -> None:
    g = Graph(17)
    q, k, v = heads(g, 6)
    scores = g.Add(g.Div(product(g, q, k), SIZE**0.5), normal((HEADS, 6, 6), 3))
    prove(g, attended(g, g.Where(padding(g), scores, -1e9), v), ["TrtfuseAttention"])


@pytest.mark.parametrize("dtype", [F32, F16])
def test_gpt2_fills_by_a_causal_mask_and_adds_the_padding(dtype: type) -> None:
    g = Graph(14, dtype)
    q, k, v = heads(g, 6)
    scores = g.Div(product(g, q, k), SIZE**0.5)
    causal = g.weight(np.tril(np.ones((1, 1, 6, 6), bool)), BOOL)
    filled = g.Where(causal, scores, np.asarray(np.finfo(dtype).min, dtype))
    prove(g, attended(g, g.Add(filled, g.input("mask", ("b", 1, 1, 6))), v), ["TrtfuseAttention"])


@pytest.mark.parametrize("keeps", [True, False])
def test_distilbert_expands_its_mask_to_the_scores(keeps: bool) -> None:
    g = Graph(14)
    q, k, v = heads(g, 6)
    scores = product(g, g.Div(q, SIZE**0.5), k)
    condition = g.Expand(padding(g) if keeps else g.Not(padding(g)), g.Shape(scores))
    fill = np.asarray(np.finfo(F32).min, F32)
    masked = g.Where(condition, scores, fill) if keeps else g.Where(condition, fill, scores)
    prove(g, attended(g, masked, v), ["TrtfuseAttention"])


def test_a_softmax_takes_the_filled_and_the_added_mask() -> None:
    g = Graph(14)
    scores = g.Mul(g.input("x", ("b", HEADS, 6, 6)), 0.25)
    filled = g.Where(padding(g), scores, -1e9)
    made, _ = prove(g, g.Softmax(g.Add(filled, g.input("mask", (6,))), axis=-1), ["TrtfuseSoftmax"])
    assert "Where" not in [n.op_type for n in made.graph.node]


def test_scores_whose_shape_is_read_outside_stay() -> None:
    g = Graph(14)
    q, k, v = heads(g, 6)
    scores = product(g, q, k)
    condition = g.Not(g.Expand(padding(g), g.Shape(scores)))
    _, sites, _ = fused(finish(g, attended(g, g.Where(condition, -1e9, scores), v)))
    assert "TrtfuseAttention" not in names(sites)


def test_a_mask_expanded_to_the_shape_of_something_else() -> None:
    g = Graph(14)
    q, k, v = heads(g, 6)
    scores = product(g, q, k)
    condition = g.Expand(padding(g), g.Shape(g.input("other", ("b", HEADS, 6, 6))))
    prove(g, attended(g, g.Where(condition, scores, -1e9), v), ["TrtfuseAttention"])


def test_falcon_shares_one_head_of_k_and_v() -> None:
    g = Graph(17)
    q = g.input("q", ("b", HEADS, 6, SIZE))
    k, v = (g.input(n, ("b", 1, 6, SIZE)) for n in ("k", "v"))
    scores = g.Add(g.Mul(product(g, q, k), SIZE**-0.5), g.input("mask", ("b", 1, 6, 6)))
    prove(g, attended(g, scores, v), ["TrtfuseAttention"])


def test_one_head_of_q_for_many_of_k_is_no_attention() -> None:
    g = Graph(17)
    q = g.input("q", ("b", 1, 6, SIZE))
    k, v = (g.input(n, ("b", HEADS, 6, SIZE)) for n in ("k", "v"))
    _, sites, _ = fused(finish(g, attended(g, g.Mul(product(g, q, k), 0.25), v)))
    assert "TrtfuseAttention" not in names(sites)


def test_torchscript_leaves_two_casts_behind_a_softmax_in_half() -> None:
    g = Graph(17, F16)
    q, k, v = heads(g)
    chances = g.Softmax(g.Mul(product(g, q, k), SIZE**-0.5), axis=-1)
    prove(g, g.MatMul(g.cast(g.cast(chances, F32), F16), v), ["TrtfuseAttention"])


@pytest.mark.parametrize("narrow_first", [True, False])
def test_the_guard_of_a_half_attention_before_and_after_the_cast(narrow_first: bool) -> None:
    g = Graph(17, F16)
    q, k, v = heads(g, 6)
    scores = g.Mul(product(g, q, k), SIZE**-0.5)
    hidden = g.weight(np.where(np.tril(np.ones((6, 6), bool), -1), 0, -np.inf).astype(F16))
    chances = g.Softmax(g.cast(g.Add(scores, hidden), F32), axis=-1)
    if narrow_first:
        chances = g.cast(chances, F16)
    guarded = g.Where(g.IsNaN(chances), np.asarray(0, F16 if narrow_first else F32), chances)
    prove(g, g.MatMul(guarded if narrow_first else g.cast(guarded, F16), v), ["TrtfuseAttention"])


def test_the_operator_takes_its_transposes_with_it() -> None:
    g = Graph(23)
    rows = [g.input(n, ("b", 6, HEADS, SIZE)) for n in ("q", "k", "v")]
    q, k, v = (g.Transpose(r, perm=[0, 2, 1, 3]) for r in rows)
    made, _ = prove(g, g.Transpose(g.Attention(q, k, v), perm=[0, 2, 1, 3]), ["TrtfuseAttention"])
    assert [n.op_type for n in made.graph.node if n.op_type == "Transpose"] == []


@pytest.mark.parametrize("dtype", [F32, F16])
@pytest.mark.parametrize("boolean", [True, False])
def test_the_operator_gives_zero_for_a_row_that_is_masked_whole(boolean: bool, dtype: type) -> None:
    g = Graph(23, dtype)
    q, k, v = heads(g, 6)
    open_places = np.tril(np.ones((6, 6), bool), -1)  # nothing is left of the first row
    mask = open_places if boolean else np.where(open_places, 0, -np.inf).astype(dtype)
    made, _ = prove(g, g.Attention(q, k, v, g.weight(mask), scale=0.25), ["TrtfuseAttention"])
    (node,) = (n for n in made.graph.node if n.domain == "trtfuse")
    assert {a.name: helper.get_attribute_value(a) for a in node.attribute}["guard"] == 1


@pytest.mark.parametrize("boolean", [True, False])
def test_the_operator_takes_masks_of_both_kinds_from_outside(boolean: bool) -> None:
    g = Graph(23)
    q, k, v = heads(g, 6)
    mask = padding(g, rows=6) if boolean else g.input("mask", ("b", 1, 6, 6))
    made, _ = prove(g, g.Attention(q, k, v, mask), ["TrtfuseAttention"])
    (node,) = (n for n in made.graph.node if n.domain == "trtfuse")
    assert ("where" if boolean else "mask") in node.op_type.split("_")


# --- shapes that only the values of other tensors tell -------------------------------------------------


def test_a_reshape_by_products_and_larger_sizes_has_a_rank() -> None:
    """tf2onnx writes einsum so: the batch is the product of some sizes, the result's the larger of two."""
    g = Graph(13)
    a, b = (g.input(n, ("b", HEADS, "s", SIZE)) for n in ("a", "b"))
    leading = [g.Gather(g.Shape(t), np.array([0, 1], I64)) for t in (a, b)]
    flat = [
        g.Reshape(t, g.Concat(g.ReduceProd(n, keepdims=1), np.array([-1, SIZE], I64), axis=0))
        for t, n in zip((a, b), leading, strict=True)
    ]
    scores = g.MatMul(flat[0], g.Transpose(flat[1], perm=[0, 2, 1]))
    lengths = [g.Gather(g.Shape(t), np.array([2], I64)) for t in (a, b)]
    shape = g.Concat(g.Max(*leading), *lengths, np.array([1], I64), axis=0)
    full = g.Squeeze(g.Reshape(scores, shape), np.array([4], I64))
    mask = g.input("mask", ("b", 1, 1, "s"))
    prove(g, g.Softmax(g.Add(g.Mul(full, 0.25), mask), axis=-1), ["TrtfuseSoftmax"])


def test_a_reshape_by_sizes_of_a_tensor_of_unknown_rank_has_a_rank() -> None:
    """DeBERTa before opset 13: what comes of an If has no rank, and sizes are taken from its end."""
    g = Graph(12)
    x, flag = g.input("x", ("b", 5, WIDTH)), g.input("flag", (1,))
    branches = []
    for op in ("Abs", "Squeeze"):  # no axes: the rank is known when it runs
        output = helper.make_tensor_value_info(f"{op}_result", TensorProto.FLOAT, None)
        branches.append(helper.make_graph([helper.make_node(op, [x], [output.name])], op, [], [output]))
    positive = g.Squeeze(g.Greater(flag, 0.0), axes=[0])
    chosen = g.If(positive, then_branch=branches[0], else_branch=branches[1])
    length = g.Slice(g.Shape(chosen), np.array([-2], I64), np.array([-1], I64), np.array([0], I64))
    size = g.Unsqueeze(g.Squeeze(length, axes=[0]), axes=[0])
    y = g.Reshape(chosen, g.Concat(np.array([-1], I64), size, np.array([WIDTH], I64), axis=0))
    prove(g, layer_norm(g, y, WIDTH), ["TrtfuseLayerNorm"])


def test_a_reshape_that_repeats_unknown_sizes_knows_the_rest() -> None:
    """Swin's merging of patches: leading sizes are taken from the tensor itself, the row is what is left."""
    g = Graph(12)
    x = g.input("x", ("b", "n", WIDTH // 2))
    twice = g.Concat(x, x, axis=1)
    pairs = g.Div(g.Gather(g.Shape(twice), np.array([1], I64)), np.array([2], I64))
    shape = g.Concat(np.array([0], I64), pairs, np.array([2, WIDTH // 2], I64), axis=0)
    split = g.Reshape(twice, shape)
    leading = g.Slice(g.Shape(split), np.array([0], I64), np.array([2], I64), np.array([0], I64))
    rows = g.Reshape(split, g.Concat(leading, np.array([-1], I64), axis=0))
    prove(g, layer_norm(g, rows, WIDTH), ["TrtfuseLayerNorm"])
