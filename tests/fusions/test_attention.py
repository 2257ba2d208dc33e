"""Attention: the spellings that must match and those that must not, by numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from graphs import BOOL, F16, F32, F64, I64, Graph, finish, fused, normal, ops, prove
from onnx.reference import ReferenceEvaluator

ATTENTION, SOFTMAX = "TrtfuseAttention", "TrtfuseSoftmax"
B, H, S, D = "batch", 4, 8, 16
HEADS = (B, H, S, D)


def qkv(g: Graph, shape: tuple[Any, ...] = HEADS) -> tuple[str, str, str]:
    return g.input("q", shape), g.input("k", shape), g.input("v", shape)


def attend(
    g: Graph,
    q: str,
    k: str,
    v: str,
    *,
    scale: str = "div",
    mask: Any = None,
    where: tuple[str, float, bool] | None = None,
    guard: bool = False,
    casts: bool = False,
    swap: bool = True,
    rank: int = 4,
) -> str:
    """softmax(scale q k^T + mask) v in the given spelling; factor 1/4 for heads of 16."""
    axes = list(range(rank))
    kt = g.Transpose(k, perm=[*axes[:-2], rank - 1, rank - 2]) if swap else k
    if scale == "q":
        q = g.Mul(q, 0.25)
    if scale in ("both", "both by div"):
        q, kt = (g.Mul(t, 0.5) if scale == "both" else g.Div(t, 2.0) for t in (q, kt))
    if scale == "k":
        kt = g.Mul(kt, 0.25)
    scores = g.MatMul(q, kt)
    if scale == "div":
        scores = g.Div(scores, 4.0)
    if scale == "mul":
        scores = g.Mul(0.25, scores)
    if mask is not None:
        scores = g.Add(scores, mask)
    if where is not None:
        condition, fill, keep = where
        scores = g.Where(condition, scores, fill) if keep else g.Where(condition, fill, scores)
    if casts:
        scores = g.cast(scores, F32)
    p = g.Softmax(scores, axis=rank - 1)
    if guard:
        p = g.Where(g.IsNaN(p), np.asarray(0, F32 if casts else g.dtype), p)
    if casts:
        p = g.cast(p, g.dtype)
    return str(g.MatMul(p, v))


SCALES = ("div", "mul", "q", "k", "both", "both by div", "none")


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("opset", [9, 11, 13, 17, 18, 23])
def test_scales(scale: str, opset: int) -> None:
    g = Graph(opset)
    made, _ = prove(g, attend(g, *qkv(g), scale=scale), [ATTENTION])
    assert [n.op_type for n in made.graph.node] == [ops(made)[0], "Identity"]
    assert ("scale" in ops(made)[0]) == (scale != "none")


MASKS: dict[str, tuple[int, ...]] = {
    "of keys": (S,),
    "causal": (S, S),
    "of heads": (H, 1, 1),
    "per head": (1, H, S, S),
    "of queries": (S, 1),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("scale", ["div", "both", "none"])
def test_additive_masks(mask: str, scale: str) -> None:
    g = Graph(14)
    made, _ = prove(g, attend(g, *qkv(g), scale=scale, mask=normal(MASKS[mask], 9)), [ATTENTION])
    assert ops(made)[0].startswith("TrtfuseAttention_mask")


def test_a_key_mask_of_zeros_and_ones_as_bert_has_it() -> None:
    g = Graph(14)
    q, k, v = qkv(g)
    mask = g.input("mask", (B, S), I64)
    for feed in g.feeds:
        feed["mask"] = np.ones_like(feed["mask"])
        feed["mask"][:, 5:] = 0
    wide = g.cast(g.Unsqueeze(g.Unsqueeze(mask, np.array([1], I64)), np.array([2], I64)), F32)
    prove(g, attend(g, q, k, v, mask=g.Mul(g.Sub(1.0, wide), -10000.0)), [ATTENTION])


@pytest.mark.parametrize("fill", [-1e4, float("-inf")])
@pytest.mark.parametrize("keep", [True, False])
def test_boolean_masks(fill: float, keep: bool) -> None:
    g = Graph(14)
    q, k, v = qkv(g)
    condition = g.input("condition", (1, 1, S, S), BOOL)
    causal = np.tril(np.ones((1, 1, S, S), bool))
    for feed in g.feeds:
        feed["condition"] = causal if keep else ~causal
    made, _ = prove(g, attend(g, q, k, v, where=(condition, fill, keep)), [ATTENTION])
    assert ops(made)[0].startswith("TrtfuseAttention_where" if keep else "TrtfuseAttention_wherenot")


def masked_row(value: float = -np.inf) -> np.ndarray:
    mask = np.zeros((S, S), F32)
    mask[3] = value
    mask[2, 4:] = value
    return mask


@pytest.mark.parametrize("guard", [False, True])
def test_a_row_masked_whole_is_as_in_the_original(guard: bool) -> None:
    """NaN without the exporter's guard, 0 with it."""
    g = Graph(18)
    made, _ = prove(g, attend(g, *qkv(g), mask=masked_row(), guard=guard), [ATTENTION])
    assert ("guard" in ops(made)[0]) == guard


@pytest.mark.parametrize(
    ("mask", "kept"),
    [(None, False), (normal((S, S), 9), False), (masked_row(-1e4), False), (masked_row(), True)],
)
def test_the_native_lowering_drops_a_guard_that_guards_nothing(mask: Any, kept: bool) -> None:
    g = Graph(18)
    _, sites, _ = fused(finish(g, attend(g, *qkv(g), mask=mask, guard=True)))
    assert [n.op_type for n in sites[0].lowered().nodes].count("IsNaN") == int(kept)


def test_the_native_lowering_keeps_a_guard_under_a_mask_of_which_nothing_is_known() -> None:
    g = Graph(18)
    q, k, v = qkv(g)
    _, sites, _ = fused(finish(g, attend(g, q, k, v, mask=g.input("mask", (B, 1, S, S)), guard=True)))
    assert "IsNaN" in [n.op_type for n in sites[0].lowered().nodes]


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("open_rows", [True, False])
def test_the_native_lowering_drops_the_guard_under_a_causal_constant(keep: bool, open_rows: bool) -> None:
    g = Graph(18)
    causal = np.tril(np.ones((S, S), bool), 0 if open_rows else -1)
    condition = g.weight(causal if keep else ~causal, BOOL)
    y = attend(g, *qkv(g), where=(condition, float("-inf"), keep), guard=True)
    made, _ = prove(g, y, [ATTENTION])
    assert "guard" in ops(made)[0]
    _, sites, _ = fused(g.model())
    assert ("IsNaN" in [n.op_type for n in sites[0].lowered().nodes]) != open_rows


@pytest.mark.parametrize("fill", [-1e4, float("-inf")])
def test_the_native_lowering_drops_the_guard_under_a_finite_fill(fill: float) -> None:
    g = Graph(18)
    q, k, v = qkv(g)
    y = attend(g, q, k, v, where=(g.input("condition", (B, 1, S, S), BOOL), fill, True), guard=True)
    g.output(y, HEADS)
    _, sites, _ = fused(g.model())
    assert ("IsNaN" in [n.op_type for n in sites[0].lowered().nodes]) == np.isinf(fill)


def test_a_guard_the_other_way_round() -> None:
    g = Graph(18)
    q, k, v = qkv(g)
    p = g.Softmax(g.Add(g.Mul(product(g, q, k), 0.25), masked_row()), axis=-1)
    made, _ = prove(g, g.MatMul(g.Where(g.Not(g.IsNaN(p)), p, 0.0), v), [ATTENTION])
    assert "guard" in ops(made)[0]


@pytest.mark.parametrize("scale", ["q", "k", "both"])
def test_half_precision_scales_before_the_product_where_the_model_does(scale: str) -> None:
    """Scores of 100 000 overflow in fp16; the model scales q or k so that they do not."""
    g = Graph(18, F16)
    made, _ = prove(g, attend(g, *qkv(g), scale=scale), [ATTENTION])
    model = finish(g2 := Graph(18, F16), attend(g2, *qkv(g2), scale=scale))
    made, sites, _ = fused(model)
    feed = {n: (80 + normal((1, H, S, D), k, F32)).astype(F16) for k, n in enumerate("qk")}
    feed["v"] = normal((1, H, S, D), 3, F16)
    with np.errstate(all="ignore"):
        wanted, have = (np.asarray(ReferenceEvaluator(m).run(None, feed)[0], F32) for m in (model, made))
    assert np.isfinite(wanted).all()
    np.testing.assert_allclose(have, wanted, atol=0.1)
    lowered = [n.op_type for n in sites[0].lowered().nodes]
    assert lowered.index("Mul") < lowered.index("MatMul")


@pytest.mark.parametrize("dtype", [F32, F16])
def test_a_scale_of_the_scores_stays_there(dtype: type) -> None:
    g = Graph(18, dtype)
    g.output(attend(g, *qkv(g), scale="mul"), HEADS)
    _, sites, _ = fused(g.model())
    lowered = [n.op_type for n in sites[0].lowered().nodes]
    assert lowered.index("MatMul") < lowered.index("Mul")


def test_scales_before_and_behind_the_product() -> None:
    """Megatron divides q by more than sqrt(d) in fp16 and multiplies the scores back in fp32."""
    g = Graph(18, F16)
    q, k, v = qkv(g)
    scores = g.Mul(g.cast(product(g, g.Mul(q, 0.0625), k), F32), np.asarray(4, F32))
    made, _ = prove(g, g.MatMul(g.cast(g.Softmax(scores, axis=-1), F16), v), [ATTENTION])
    assert "scale0p25_prescale0p0625" in ops(made)[0]


def test_a_mask_that_may_be_shorter_than_the_keys_is_left_to_the_operator() -> None:
    """From opset 24 on the operator pads it; only a length that is known to be that of the keys will do."""
    for mask, expected in (((S, S), [ATTENTION]), ((S, "m"), [])):
        g = Graph(24)
        y = g.Attention(*qkv(g), g.input("mask", mask), scale=0.3)
        g.output(y, HEADS)
        assert [s.fusion.op for s in fused(g.model())[1]] == expected


def split(g: Graph, x: str, perm: list[int]) -> str:
    return str(g.Transpose(g.Reshape(x, np.array([0, S, H, D], I64)), perm=perm))


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("key", ["0231", "0213-0132", "given"])
def test_transposes_are_absorbed_into_layouts(key: str, merged: bool) -> None:
    g = Graph(14)
    rows = (B, S, H, D)
    q = g.Transpose(g.input("q", rows), perm=[0, 2, 1, 3])
    v = g.Transpose(g.input("v", rows), perm=[0, 2, 1, 3])
    if key == "0231":
        k = g.Transpose(g.input("k", rows), perm=[0, 2, 3, 1])
    elif key == "given":
        k = g.input("k", (B, H, D, S))
    else:
        k = g.Transpose(g.Transpose(g.input("k", rows), perm=[0, 2, 1, 3]), perm=[0, 1, 3, 2])
    y = attend(g, q, k, v, swap=False)
    made, _ = prove(g, g.Transpose(y, perm=[0, 2, 1, 3]) if merged else y, [ATTENTION])
    assert "Transpose" not in [n.op_type for n in made.graph.node]
    site = next(n for n in made.graph.node if n.domain == "trtfuse")
    layouts = {a.name: a.s.decode() for a in site.attribute if a.name.endswith("layout")}
    assert layouts == {
        "q_layout": "bshd",
        "k_layout": "bhds" if key == "given" else "bshd",
        "v_layout": "bshd",
        "out_layout": "bshd" if merged else "bhsd",
    }


def test_a_transpose_of_another_order_stays() -> None:
    g = Graph(14)
    q = g.Transpose(g.input("q", (H, B, S, D)), perm=[1, 0, 2, 3])
    made, _ = prove(g, attend(g, q, g.input("k", HEADS), g.input("v", HEADS)), [ATTENTION])
    assert "Transpose" in [n.op_type for n in made.graph.node]


def test_a_transposed_key_that_is_read_elsewhere_stays() -> None:
    """As in models that give their keys back for the next step."""
    g = Graph(14)
    q, rows, v = g.input("q", HEADS), g.input("k", (B, S, H, D)), g.input("v", HEADS)
    k = g.Transpose(rows, perm=[0, 2, 1, 3])
    g.output(k)
    prove(g, attend(g, q, k, v), [ATTENTION])


def test_cross_attention_with_its_own_length() -> None:
    g = Graph(14)
    q, k, v = g.input("q", HEADS), g.input("k", (B, H, 11, D)), g.input("v", (B, H, 11, 24))
    prove(g, attend(g, q, k, v, mask=normal((11,), 3)), [ATTENTION])


def test_batches_of_heads_of_rank_3() -> None:
    g = Graph(14)
    made, _ = prove(g, attend(g, *qkv(g, (12, S, D)), rank=3, mask=normal((S, S), 3)), [ATTENTION])
    assert "nsd" in ops(made)[0]


@pytest.mark.parametrize("casts", [False, True])
@pytest.mark.parametrize("guard", [False, True])
def test_half_precision(casts: bool, guard: bool) -> None:
    g = Graph(18, F16)
    prove(g, attend(g, *qkv(g), mask=normal((S, S), 3, F16), casts=casts, guard=guard), [ATTENTION])


def test_a_scale_computed_from_the_shape_as_torchscript_has_it() -> None:
    g = Graph(14)
    q, k, v = qkv(g)
    last = g.Slice(g.Shape(q), np.array([-1], I64), np.array([2**62], I64))
    scale = g.Sqrt(g.Div(np.ones(1, F32), g.Sqrt(g.cast(last, F32))))
    kt = g.Transpose(k, perm=[0, 1, 3, 2])
    p = g.Softmax(g.MatMul(g.Mul(q, scale), g.Mul(kt, scale)), axis=-1)
    made, _ = prove(g, g.MatMul(p, v), [ATTENTION])
    assert "scale0p25" in ops(made)[0]
    assert "Shape" not in [n.op_type for n in made.graph.node]


def test_grouped_heads_by_expand_stay_outside() -> None:
    g = Graph(14)
    q, few = g.input("q", HEADS), (B, 2, 1, S, D)
    shape = g.Concat(
        g.Slice(g.Shape(q), np.array([0], I64), np.array([1], I64)), np.array([2, 2, S, D], I64), axis=0
    )
    k, v = (g.Reshape(g.Expand(g.input(n, few), shape), np.array([0, H, S, D], I64)) for n in ("k", "v"))
    prove(g, attend(g, q, k, v), [ATTENTION])


@pytest.mark.parametrize("mask", [False, True])
def test_the_standard_operator(mask: bool) -> None:
    g = Graph(23)
    given = [normal((S, S), 3)] if mask else []
    made, _ = prove(g, g.Attention(*qkv(g), *given, scale=0.3), [ATTENTION])
    assert "scale0p3" in ops(made)[0]


@pytest.mark.parametrize("attributes", [{"is_causal": 1}, {"softcap": 20.0}])
def test_what_the_standard_operator_has_beside_stays(attributes: dict[str, Any]) -> None:
    g = Graph(23)
    prove(g, g.Attention(*qkv(g), scale=0.3, **attributes), [])


def over_another_axis(g: Graph) -> str:
    q, k, v = qkv(g)
    p = g.Softmax(g.Div(g.MatMul(q, g.Transpose(k, perm=[0, 1, 3, 2])), 4.0), axis=2)
    return str(g.MatMul(p, v))


def probabilities_read(g: Graph) -> str:
    q, k, v = qkv(g)
    p = g.Softmax(g.Div(g.MatMul(q, g.Transpose(k, perm=[0, 1, 3, 2])), 4.0), axis=-1)
    return str(g.Add(g.MatMul(p, v), g.reduce("ReduceMean", p)))


def probabilities_on_the_right(g: Graph) -> str:
    q, k, v = qkv(g, (B, H, S, S))
    return str(g.MatMul(v, g.Softmax(g.Div(g.MatMul(q, k), 4.0), axis=-1)))


def scale_at_run_time(g: Graph) -> str:
    q, k, v = qkv(g)
    scores = g.Mul(g.MatMul(q, g.Transpose(k, perm=[0, 1, 3, 2])), g.reduce("ReduceMean", q, (1, 2, 3)))
    return str(g.MatMul(g.Softmax(scores, axis=-1), v))


def mask_of_higher_rank(g: Graph) -> str:
    q, k, v = qkv(g)
    scores = g.Add(product(g, q, k), normal((2, 1, 1, S, S), 3))
    return str(g.MatMul(g.Softmax(scores, axis=-1), v))


def guard_of_one(g: Graph) -> str:
    q, k, v = qkv(g)
    p = g.Softmax(g.Div(g.MatMul(q, g.Transpose(k, perm=[0, 1, 3, 2])), 4.0), axis=-1)
    return str(g.MatMul(g.Where(g.IsNaN(p), 1.0, p), v))


def scale_of_zero(g: Graph) -> str:
    q, k, v = qkv(g)
    return str(g.MatMul(g.Softmax(g.Mul(product(g, q, k), 0.0), axis=-1), v))


def divided_by_zero(g: Graph) -> str:
    q, k, v = qkv(g)
    return str(g.MatMul(g.Softmax(g.Div(product(g, q, k), 0.0), axis=-1), v))


def huge_factors(g: Graph) -> str:
    """Their product is a usual scale, but the scores between them overflow."""
    q, k, v = qkv(g)
    scores = g.Mul(g.MatMul(g.Mul(q, 1e30), g.Transpose(g.Mul(k, 1e30), perm=[0, 1, 3, 2])), 1e-30)
    return str(g.MatMul(g.Softmax(g.Mul(scores, 1e-30), axis=-1), v))


def filled_with_nan(g: Graph) -> str:
    q, k, v = qkv(g)
    causal = g.weight(np.tril(np.ones((S, S), bool)), BOOL)
    return str(attend(g, q, k, v, where=(causal, float("nan"), True)))


def mask_that_enlarges(g: Graph) -> str:
    q, k, v = (g.input(n, (1, H, S, D)) for n in "qkv")
    return str(attend(g, q, k, v, mask=g.input("mask", (B, 1, 1, S))))


def values_of_more_batches(g: Graph) -> str:
    q, k = (g.input(n, (1, H, S, D)) for n in "qk")
    return str(attend(g, q, k, g.input("v", HEADS)))


def keys_of_one_batch(g: Graph) -> str:
    k, v = (g.input(n, (1, H, S, D)) for n in "kv")
    return str(attend(g, g.input("q", HEADS), k, v))


def of_two_axes(g: Graph) -> str:
    q, k, v = qkv(g, (S, D))
    return str(attend(g, q, k, v, rank=2))


def of_five_axes(g: Graph) -> str:
    q, k, v = qkv(g, (B, 2, H, S, D))
    return str(attend(g, q, k, v, rank=5))


def product(g: Graph, q: str, k: str) -> str:
    return str(g.MatMul(q, g.Transpose(k, perm=[0, 1, 3, 2])))


REASONS = {
    "probabilities read": "inside it is read by",
    "mask of higher rank": "raises the rank of the scores",
    "scale of zero": "the scale is 0",
    "divided by zero": "the scale is nan",
    "filled with NaN": "the mask fills with NaN",
    "mask that enlarges": "does not broadcast to (1, 4, 8, 8)",
    "values of more batches": "differ in axis b",
    "keys of one batch": "differ in axis b",
    "of two axes": "not all 4 or 3",
    "of five axes": "not all 4 or 3",
}
DECOYS: dict[str, tuple[Callable[[Graph], str], list[str]]] = {
    "over another axis": (over_another_axis, []),
    "probabilities read": (probabilities_read, [SOFTMAX]),
    "probabilities on the right": (probabilities_on_the_right, [SOFTMAX]),
    "scale at run time": (scale_at_run_time, []),
    "mask of higher rank": (mask_of_higher_rank, []),
    "guard of one": (guard_of_one, [SOFTMAX]),
    "scale of zero": (scale_of_zero, []),
    "divided by zero": (divided_by_zero, []),
    "huge factors": (huge_factors, [SOFTMAX]),
    "filled with NaN": (filled_with_nan, []),
    "mask that enlarges": (mask_that_enlarges, []),
    "values of more batches": (values_of_more_batches, [SOFTMAX]),
    "keys of one batch": (keys_of_one_batch, [SOFTMAX]),
    "of two axes": (of_two_axes, [SOFTMAX]),
    "of five axes": (of_five_axes, [SOFTMAX]),
}


@pytest.mark.parametrize("decoy", DECOYS)
def test_decoys_that_must_not_match(decoy: str) -> None:
    spelled, expected = DECOYS[decoy]
    g = Graph(14)
    _, misses = prove(g, spelled(g), expected)
    wanted = REASONS.get(decoy, "")
    assert not wanted or any(wanted in m.reason for m in misses if m.op == ATTENTION), misses


def test_doubles_stay() -> None:
    g = Graph(14, F64)
    prove(g, attend(g, *qkv(g)), [])


def test_fully_masked_rows_of_the_standard_operator_with_a_boolean_mask() -> None:
    g = Graph(23)
    q, k, v = qkv(g)
    condition = np.tril(np.ones((S, S), bool))
    prove(g, g.Attention(q, k, v, g.weight(condition, BOOL), scale=0.3), [ATTENTION])


def test_a_scaled_query_that_is_the_value_too_keeps_its_scale_outside() -> None:
    g = Graph(14)
    x = g.Mul(g.input("x", HEADS), 0.5)
    scores = g.MatMul(x, g.Transpose(g.input("k", HEADS), perm=[0, 1, 3, 2]))
    made, _ = prove(g, g.MatMul(g.Softmax(g.Mul(scores, 0.25), axis=-1), x), [ATTENTION])
    assert "Mul" in [n.op_type for n in made.graph.node]


def test_half_queries_that_are_widened_before_the_product_are_not_narrowed() -> None:
    """The scores of the original are fp32; in fp16 they could overflow."""
    g = Graph(14, F16)
    q, k, v = qkv(g)
    wide = g.MatMul(g.cast(q, F32), g.Transpose(g.cast(k, F32), perm=[0, 1, 3, 2]))
    p = g.cast(g.Softmax(g.Mul(wide, np.asarray(0.25, F32)), axis=-1), F16)
    _, sites, _ = fused(finish(g, g.MatMul(p, v)))
    assert ATTENTION not in [s.fusion.op for s in sites]


def test_a_guard_under_a_mask_that_fp16_makes_infinite_is_kept() -> None:
    g = Graph(14, F16)
    q, k, v = qkv(g)
    keys = g.cast(g.input("mask", (B, 1, 1, S), I64), F32)
    mask = g.cast(g.Mul(g.Sub(np.asarray(1, F32), keys), np.asarray(-1e9, F32)), F16)
    _, sites, _ = fused(finish(g, attend(g, q, k, v, mask=mask, guard=True)))
    assert "IsNaN" in [n.op_type for n in sites[0].lowered().nodes]
