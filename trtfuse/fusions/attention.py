"""TrtfuseAttention: scaled dot-product attention, the scores never in memory.

Layouts are letters, as the graph has them: b batch, h heads, s sequence, d head size, or n (batch times
heads), s, d. A Transpose around the attention is part of it and shows in the layout.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_graphsurgeon as gs
from onnx import TensorProto

from trtfuse.body import Body
from trtfuse.fusion import Attribute, Fusion, Names, Site, word
from trtfuse.fusions._spelling import boolean, fits_into, floating, last_axis_kept, soft
from trtfuse.fusions.softmax import (
    MASK,
    apply_mask,
    fill_attributes,
    mask_words,
    masked,
    normalised,
    numbers_usable,
    scale_of,
    scaled,
)
from trtfuse.pattern import Alt, Const, Match, Op, Pattern, Tag, Var, Where
from trtfuse.view import Dim, View

PLAIN = {4: "bhsd", 3: "nsd"}
FACTORS = (1e-6, 1e6)  # the size of a factor of q or k that is moved to the scores


def permutes(*perm: int) -> Where:
    """Condition of Transpose: exactly this permutation."""

    def where(node: gs.Node, view: View) -> str | None:
        have = node.attrs.get("perm")
        return (
            None
            if have is not None and tuple(have) == perm
            else f"'{node.outputs[0].name}' is permuted by {have}"
        )

    return where


def _from_layout(name: str) -> Alt:
    """A tensor in (b, h, s, d), by a Transpose from (b, s, h, d) where there is one."""
    var = Var(name)
    return Alt(
        Tag(f"{name}_layout", "bshd", Op("Transpose", var, where=permutes(0, 2, 1, 3))),
        Tag(f"{name}_layout", "plain", var),
    )


def _key() -> Alt:
    """k with its last two axes exchanged, as the product of the scores reads it."""
    k = Var("k")
    return Alt(
        Tag("k_layout", "bshd", Op("Transpose", k, where=permutes(0, 2, 3, 1))),
        Op("Transpose", _from_layout("k"), where=permutes(0, 1, 3, 2)),
        Tag("k_layout", "plain", Op("Transpose", k, where=permutes(0, 2, 1))),
        Tag("k_layout", "swapped", k),
    )


def _scaled_key() -> Alt:
    before = scaled(Tag("k_layout", "plain", Var("k")), "k_", casts=False)
    return Alt(scaled(_key(), "k_", casts=False), Op("Transpose", before, where=permutes(0, 1, 3, 2)))


SCORES = Op("MatMul", scaled(_from_layout("q"), "q_", casts=False), _scaled_key(), name="scores")
_SCALED = scaled(SCORES)
# T5's and Swin's bias of relative positions, ALiBi's of distances: added before the mask
_BIASED = Op("Add", _SCALED, soft(Var("bias", floating)))


def _guarded(p: Pattern) -> Alt:
    """The exporter's guard: rows whose softmax is NaN (all masked by -inf) become 0."""
    odd = Op("IsNaN", p)
    guard = Alt(Op("Where", odd, Const(0.0), p), Op("Where", Op("Not", odd), p, Const(0.0)))
    return Alt(Tag("guard", "1", guard), p)


def _guarded_by_mask(p: Pattern) -> Tag:
    """The guard of ONNX's own function: rows whose mask is -inf throughout."""
    whole = Op("Equal", Op("ReduceMax", MASK, where=last_axis_kept, rest=True), Const(-np.inf))
    return Tag("guard", "1", Op("Where", whole, Const(0.0), p))


def _attended(scores: Pattern, guarded: Callable[[Pattern], Pattern] = _guarded) -> Alt:
    # twice: TorchScript leaves the Casts of softmax(scores, dtype=float32).half() behind a softmax in fp16
    chances = soft(soft(normalised(soft(scores))))
    core = Op("MatMul", soft(guarded(chances)), _from_layout("v"), name="attended")
    return Alt(Tag("out_layout", "bshd", Op("Transpose", core, where=permutes(0, 2, 1, 3))), core)


def one_op(node: gs.Node, view: View) -> str | None:
    """Condition of the standard Attention: four axes, no cache, no soft cap, scores not read."""
    name = node.name or node.outputs[0].name
    if view.rank(node.inputs[0]) != 4:
        return f"'{name}' is not over four axes"
    if any(not i.is_empty() for i in node.inputs[4:]):
        return f"'{name}' has a cache or key lengths"
    if view.opset >= 24 and len(node.inputs) > 3 and not _as_long(node.inputs[3], node.inputs[1], view):
        return f"the mask '{node.inputs[3].name}' may be shorter than the keys, which '{name}' then pads"
    if any(not o.is_empty() for o in node.outputs[1:]):
        return f"the cache or the scores of '{name}' are outputs"
    if node.attrs.get("is_causal", 0) or node.attrs.get("softcap", 0.0) or "softmax_precision" in node.attrs:
        return f"'{name}' is causal, has a soft cap or a softmax type of its own"
    if any(node.attrs.get(f"{side}_window_size", -1) != -1 for side in ("left", "right")):
        return f"'{name}' looks at a window of the keys"
    heads = [(view.shape(i) or (None, None))[1] for i in node.inputs[:3]]
    if not all(isinstance(h, int) and h == heads[0] for h in heads):
        return f"'{name}' groups its heads"
    if not isinstance(view.last_dim(node.inputs[0]), int) and "scale" not in node.attrs:
        return f"the head size of '{name}' is unknown"
    return None


def _as_long(mask: gs.Tensor, keys: gs.Tensor, view: View) -> bool:
    """Whether a mask is known to have a value for every key; from opset 24 on it may have fewer."""
    if mask.is_empty():
        return True
    shape = view.shape(keys)
    length = shape[-2] if shape is not None and len(shape) > 1 else None
    return length is not None and view.last_dim(mask) == length


def _standard(*inputs: Pattern, rest: bool = False) -> Alt:
    q, k, v = (_from_layout(n) for n in ("q", "k", "v"))
    op = Op("Attention", q, k, v, *inputs, where=one_op, name="attended", rest=rest, whole=True)
    core = Tag("standard", "1", op)
    return Alt(Tag("out_layout", "bshd", Op("Transpose", core, where=permutes(0, 2, 1, 3))), core)


def _layouts(m: Match, view: View) -> dict[str, str]:
    """The layout of q, k, v and the output in letters."""
    rank = view.rank(m.tensors["q"])
    assert rank in PLAIN
    plain = PLAIN[rank]
    letters = {"plain": plain, "bshd": "bshd", "swapped": plain[:-2] + "ds"}
    return {n: letters[m.tags.get(f"{n}_layout", "plain")] for n in ("q", "k", "v", "out")}


def _sizes(m: Match, view: View, name: str) -> dict[str, Dim]:
    shape = view.shape(m.tensors[name])
    assert shape is not None
    return dict(zip(_layouts(m, view)[name], shape, strict=True))


def _where(m: Match, view: View) -> str | None:
    ranks = [view.rank(m.tensors[n]) for n in ("q", "k", "v")]
    if ranks[0] not in PLAIN or len(set(ranks)) != 1:
        return f"q, k and v are of ranks {', '.join(str(r) for r in ranks)}, not all 4 or 3"
    q, k, v = (_sizes(m, view, n) for n in ("q", "k", "v"))
    for axis in q:
        if axis == "s":
            continue
        for other, name in ((k, "k"), (v, "v")):
            if axis == "d" and name == "v":
                continue
            a, b = q[axis], other[axis]
            if axis == "h" and b == 1:  # one head of k and v for all of q, as the products broadcast it
                continue
            known = isinstance(a, int) and isinstance(b, int)
            if a != b and (known or (axis != "d" and 1 in (a, b))):  # 1: the product would broadcast it
                return (
                    f"'{m.tensors['q'].name}' and '{m.tensors[name].name}' differ in axis {axis} ({a}, {b})"
                )
    if isinstance(k["s"], int) and isinstance(v["s"], int) and k["s"] != v["s"]:
        return f"k and v differ in length ({k['s']}, {v['s']})"
    return _mask_fits(m, q, k, view)


def _mask_fits(m: Match, q: dict[str, Dim], k: dict[str, Dim], view: View) -> str | None:
    full = (*(q[a] for a in q if a in "bhn"), q["s"], k["s"])
    if "h" in q:
        full = (q["b"], q["h"], q["s"], k["s"])
    for name in ("mask", "condition", "bias"):
        tensor = m.tensors.get(name)
        if tensor is not None and (reason := fits_into(tensor, full, view)) is not None:
            return reason
    return _scales_usable(m)


def _scales_usable(m: Match) -> str | None:
    """Condition of the factors: their product may be applied to the scores without an overflow of its own."""
    before = {n: scale_of(m, f"{n}_") for n in ("q", "k")}
    for name, scale in before.items():
        if not FACTORS[0] <= abs(scale) <= FACTORS[1] and scale != 0 and np.isfinite(scale):
            return f"'{m.tensors[name].name}' is scaled by {scale:g}, which the scores may not bear"
    return numbers_usable(m, scale_of(m), *before.values())


def _attributes(m: Match, view: View) -> dict[str, Attribute]:
    layouts: dict[str, Attribute] = {f"{n}_layout": text for n, text in _layouts(m, view).items()}
    if "standard" in m.tags:
        node = next(n for n in m.nodes if n.op == "Attention")
        width = view.last_dim(m.tensors["q"])
        scale = node.attrs["scale"] if "scale" in node.attrs else float(width) ** -0.5  # type: ignore[arg-type]
        keep: dict[str, Attribute] = {"fill": float("-inf"), "keep": 1} if "condition" in m.tensors else {}
        # the operator gives 0 for a row that is masked whole, where softmax alone would give NaN
        guard = int("condition" in m.tensors or "mask" in m.tensors)
        early = _before_product(m, view, float(scale))  # the operator's definition scales q and k
        return {"scale": float(scale), **early, **keep, **layouts, "guard": guard}
    before = scale_of(m, "q_") * scale_of(m, "k_")
    scale = scale_of(m) * before
    return {
        "scale": scale,
        **_before_product(m, view, before),
        **fill_attributes(m),
        **layouts,
        "guard": int("guard" in m.tags),
    }


def _before_product(m: Match, view: View, scale: float) -> dict[str, Attribute]:
    """How much of the scale q takes before the product: the model's part of it, for fp16 scores overflow."""
    half = view.dtype(m.tensors["q"]) == TensorProto.FLOAT16
    return {"prescale": scale} if half and scale != 1.0 else {}


def _without_guard(m: Match, view: View, attributes: dict[str, Attribute]) -> dict[str, Attribute]:
    """Drops the guard where no row can be masked whole: TensorRT then finds its own fused attention."""
    masks = [n for n in ("mask", "condition", "bias") if n in m.tensors]
    if len(masks) > 1:  # two that are finite may overflow together
        open_row = False
    elif "mask" in m.tensors:
        open_row = view.is_finite(m.tensors["mask"]) or _open_rows(view.value(m.tensors["mask"]))
    else:
        finite = not masks or bool(np.isfinite(m.values.get("fill", -np.inf)))
        open_row = finite or _kept_rows(view.value(m.tensors["condition"]), bool(attributes["keep"]))
    return {**attributes, "guard": 0} if open_row else attributes


def _kept_rows(condition: np.ndarray | None, keep: bool) -> bool:
    """Whether a constant condition, a causal one say, keeps something of every row."""
    return condition is not None and condition.ndim > 0 and bool((condition == keep).any(axis=-1).all())


def _open_rows(mask: np.ndarray | None) -> bool:
    """Whether a constant mask leaves something of every row."""
    if mask is None or not mask.ndim:
        return False
    values = mask.astype(np.float32)
    return bool(np.isfinite(values).any(axis=-1).all() and not np.isnan(values).any())


def _body(b: Body, attributes: dict[str, Attribute], names: Names, _: tuple[str, ...]) -> tuple[str, ...]:
    def arranged(name: str, plain: list[int]) -> str:
        perm = {"bshd": [0, 2, 1, 3], "bhds": [0, 1, 3, 2], "nds": [0, 2, 1]}.get(
            str(attributes[f"{name}_layout"])
        )
        axes = perm if perm is not None else list(range(len(plain)))
        axes = [axes[i] for i in plain]
        return names[name] if axes == sorted(axes) else b.op("Transpose", names[name], perm=axes)

    rank = len(str(attributes["q_layout"]))
    straight = list(range(rank))
    swapped = [*straight[:-2], rank - 1, rank - 2]
    q, k = arranged("q", straight), arranged("k", swapped)
    before = float(attributes.get("prescale", 1.0))
    if before != 1.0:
        q = b.op("Mul", q, b.narrow(b.const(before)))
    scores = b.wide(b.op("MatMul", q, k))
    if (rest := float(attributes["scale"]) / before) != 1.0:
        scores = b.op("Mul", scores, rest)
    if "bias" in names:
        scores = b.op("Add", scores, b.wide(names["bias"]))
    p = b.op("Softmax", apply_mask(b, scores, attributes, names), axis=-1)
    p = b.narrow(p)
    if attributes["guard"]:  # narrow: TensorRT-RTX 1.7 fails on an fp32 guard between a softmax and fp16
        p = b.op("Where", b.op("IsNaN", p), b.narrow(b.const(0.0)), p)
    y = b.op("MatMul", p, arranged("v", straight))
    if attributes["out_layout"] == "bshd":
        y = b.op("Transpose", y, perm=[0, 2, 1, 3])
    return (y,)


def _variant(site: Site) -> tuple[str, ...]:
    layouts = [str(site.attributes[f"{n}_layout"]) for n in ("q", "k", "v", "out")]
    same = tuple(dict.fromkeys(layouts))
    arranged = () if same == ("bhsd",) else same if len(same) == 1 else tuple(layouts)
    guard = ("guard",) if site.attributes["guard"] else ()
    bias = ("bias",) if "bias" in site.tensors else ()
    scales = (*_word(site, "scale"), *_word(site, "prescale"))
    return (*bias, *mask_words(site), *guard, *arranged, *scales)


def _word(site: Site, scale: str) -> tuple[str, ...]:
    return word(scale, float(site.attributes.get(scale, 1.0)), 1.0)


# y = softmax(scale * q k^T + bias + mask) v, in the layouts that the attributes name
ATTENTION = Fusion(
    op="TrtfuseAttention",
    patterns=(
        *(_attended(p) for p in (*masked(_SCALED), *masked(_BIASED), _SCALED)),
        _attended(Op("Add", _SCALED, MASK), _guarded_by_mask),
        _standard(Var("mask", floating), rest=True),  # rest: so that `one_op` can tell of a cache
        _standard(Var("condition", boolean)),
        _standard(),
    ),
    inputs=("q", "k", "v", "mask", "condition", "bias"),
    outputs=("y",),
    where=_where,
    attributes=_attributes,
    body=_body,
    variant=_variant,
    flops=8,
    minimum=3,
    simplify=_without_guard,
)
