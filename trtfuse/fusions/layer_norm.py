"""TrtfuseLayerNorm and TrtfuseSkipLayerNorm.

Both are one reduction: a row is read once, mean and variance are taken in fp32 whatever the type, and the
normalised row is written once. The skip form adds two tensors (and a bias) on the way in and can give the
sum back, which is what a transformer block reads next.
"""

from __future__ import annotations

import onnx_graphsurgeon as gs

from trtfuse.body import Body
from trtfuse.fusion import Attribute, Fusion, Names, Site, word
from trtfuse.fusions._spelling import (
    fixed,
    mean_last,
    row_or_scalar,
    row_vector,
    rows_known,
    same_shape,
    soft,
    square,
    varies,
)
from trtfuse.pattern import Alt, Const, Match, Op, Pattern, Var
from trtfuse.view import View

EPSILON = 1e-5
MICROSOFT, MICROSOFT_EPSILON = "com.microsoft", 1e-12  # ONNX Runtime's own operators and their default
SCALE, BIAS, EPS = Var("scale"), Var("bias"), Const(name="epsilon")


def inverse(std: Pattern, squared: Pattern) -> Alt:
    """1 / std, std = sqrt(squared)."""
    return Alt(
        Op("Reciprocal", std),
        Op("Div", Const(1.0), std),
        Op("Pow", squared, Const(-0.5)),
        Op("Reciprocal", soft(std)),
    )


def decomposed(x: Pattern) -> tuple[Pattern, ...]:
    """The spellings of (x - mean) / sqrt(var + epsilon) * scale + bias, the longer ones first."""
    wide = soft(x)
    mean = mean_last(wide)
    centred = Op("Sub", wide, mean)
    wide_centred = soft(centred)
    variance = Alt(
        mean_last(square(wide_centred)),
        Op("Sub", mean_last(square(wide)), square(mean)),
    )
    shifted = Op("Add", variance, EPS)
    std = Op("Sqrt", shifted)
    inv = inverse(std, shifted)
    normal = soft(Alt(Op("Div", wide_centred, soft(std)), Op("Mul", wide_centred, soft(inv))))
    scaled = Alt(Op("Mul", normal, SCALE), Op("Mul", wide_centred, Op("Mul", inv, SCALE)))
    keras = (soft(p) for slope in (Op("Mul", inv, SCALE), inv) for p in _by_slope(wide, mean, slope))
    return soft(Op("Add", soft(scaled), BIAS)), *keras, soft(scaled), normal


def _by_slope(wide: Pattern, mean: Pattern, slope: Pattern) -> tuple[Pattern, ...]:
    """Keras' way: x * slope + (bias - mean * slope), slope = scale / std; 2 subtracts, 3 negates the mean."""
    steep, offset = Op("Mul", wide, slope), Op("Mul", mean, slope)
    negated = Op("Mul", Op("Neg", mean), slope)
    return (
        Op("Add", steep, Op("Sub", BIAS, offset)),
        Op("Add", steep, Op("Add", negated, BIAS)),
        Op("Add", steep, negated),
        Op("Sub", steep, offset),
    )


def one_op(x: Pattern) -> tuple[Pattern, ...]:
    """The norm as one operator."""
    return (
        Op("LayerNormalization", x, SCALE, BIAS, where=last_axis, whole=True),
        Op("LayerNormalization", x, SCALE, where=last_axis, whole=True),
    )


def last_axis(node: gs.Node, view: View) -> str | None:
    axis = int(node.attrs.get("axis", -1))
    rank = view.rank(node.inputs[0])
    if axis != -1 and (rank is None or axis != rank - 1):
        return f"axis {axis} is not the last axis of rank {'unknown' if rank is None else rank}"
    extra = [o.name for o in node.outputs[1:] if view.readers(o) or view.is_exposed(o)]
    return f"its statistics '{extra[0]}' are read" if extra else None


# s = x + skip (+ preset), the bias of the projection before it added first, last, or not at all
PRESET, ADDED, SKIP = Var("preset", fixed), Var("x", varies), Var("skip", varies)
SUM = Alt(
    Op("Add", SKIP, Op("Add", ADDED, PRESET), name="sum"),
    Op("Add", Op("Add", ADDED, SKIP), PRESET, name="sum"),
    Op("Add", ADDED, SKIP, name="sum"),
    Op("Sum", ADDED, SKIP, PRESET, name="sum"),
)


def contrib(op: str, *inputs: Pattern) -> tuple[Pattern, ...]:
    """ONNX Runtime's skip norm of x, skip and `inputs`, of which the later ones may be left out."""
    kind = f"{MICROSOFT}.{op}"
    return tuple(
        Op(kind, ADDED, SKIP, *inputs[:n], extra=(None, None, "sum"), where=contrib_statistics)
        for n in range(len(inputs), 0, -1)
    )


def contrib_statistics(node: gs.Node, view: View) -> str | None:
    read = [o.name for o in node.outputs[1:3] if view.readers(o) or view.is_exposed(o)]
    return f"its statistics '{read[0]}' are read" if read else None


def epsilon(m: Match) -> float:
    """The epsilon of a decomposed norm, or the attribute of an operator (absent: 1e-5)."""
    if "epsilon" in m.values:
        return m.values["epsilon"]
    node = next(n for n in m.nodes if n.op.endswith("Normalization"))
    return float(node.attrs.get("epsilon", MICROSOFT_EPSILON if node.domain == MICROSOFT else EPSILON))


def epsilon_usable(m: Match) -> str | None:
    value = epsilon(m)
    return None if 1e-30 < value < 1 else f"epsilon {value:g} is not between 1e-30 and 1"


def _where(m: Match, view: View) -> str | None:
    return (
        rows_known(m, "x", view)
        or row_vector(m, "scale", "x", view)
        or row_vector(m, "bias", "x", view)
        or epsilon_usable(m)
    )


def where_skip(m: Match, view: View) -> str | None:
    """Conditions of the sum that a norm absorbs: two tensors of one shape."""
    return same_shape(m.tensors["x"], m.tensors["skip"], view) or row_or_scalar(m, "preset", "x", view)


def _where_skip(m: Match, view: View) -> str | None:
    return where_skip(m, view) or _where(m, view)


def _attributes(m: Match, _: View) -> dict[str, Attribute]:
    return {"epsilon": epsilon(m)}


def _body(b: Body, attributes: dict[str, Attribute], names: Names, _: tuple[str, ...]) -> tuple[str, ...]:
    return (b.layer_norm(names["x"], names.get("scale"), names.get("bias"), float(attributes["epsilon"])),)


def add_up(b: Body, names: Names) -> str:
    """x (+ preset) + skip, in the type of the fused op, as the second output gives it."""
    x = b.op("Add", names["x"], names["preset"]) if "preset" in names else names["x"]
    return b.op("Add", x, names["skip"])


def _body_skip(
    b: Body, attributes: dict[str, Attribute], names: Names, outputs: tuple[str, ...]
) -> tuple[str, ...]:
    total = add_up(b, names)
    y = b.layer_norm(total, names.get("scale"), names.get("bias"), float(attributes["epsilon"]))
    return (y, total)[: len(outputs)]


def _variant(site: Site) -> tuple[str, ...]:
    missing = [f"no{n}" for n in ("scale", "bias") if n not in site.tensors]
    return (*missing, *word("eps", float(site.attributes["epsilon"]), EPSILON))


def skip_words(site: Site) -> tuple[str, ...]:
    """Words of a skip norm: the bias it adds, the sum it gives."""
    return (("bias",) if "preset" in site.tensors else ()) + (("sum",) if "sum" in site.results else ())


def _variant_skip(site: Site) -> tuple[str, ...]:
    return (*skip_words(site), *_variant(site))


# s = x (+ preset) + skip; y = (s - mean(s)) / sqrt(var(s) + epsilon) * scale + bias; second output: s
SKIP_LAYER_NORM = Fusion(
    op="TrtfuseSkipLayerNorm",
    patterns=(*decomposed(SUM), *one_op(SUM), *contrib("SkipLayerNormalization", SCALE, BIAS, PRESET)),
    inputs=("x", "skip", "scale", "bias", "preset"),
    outputs=("y", "sum"),
    where=_where_skip,
    attributes=_attributes,
    body=_body_skip,
    variant=_variant_skip,
    flops=10,
    minimum=5,
    vectors=("scale", "bias"),
)

# y = (x - mean(x)) / sqrt(var(x) + epsilon) * scale + bias
LAYER_NORM = Fusion(
    op="TrtfuseLayerNorm",
    patterns=(*decomposed(Var("x")), *one_op(Var("x"))),
    inputs=("x", "scale", "bias"),
    outputs=("y",),
    where=_where,
    attributes=_attributes,
    body=_body,
    variant=_variant,
    flops=8,
    minimum=5,
    vectors=("scale", "bias"),
)
