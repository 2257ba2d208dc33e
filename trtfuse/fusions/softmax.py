"""TrtfuseSoftmax: scale, mask and softmax in one pass over each row."""

from __future__ import annotations

import math

from trtfuse.body import Body
from trtfuse.fusion import Attribute, Fusion, Names, Site, word
from trtfuse.fusions._spelling import fits_into, last_axis_kept, soft, softmax_axis, whole_shape
from trtfuse.pattern import UNTOLD, Alt, Const, Match, Op, Pattern, Tag, Var
from trtfuse.view import View

MASK, CONDITION = Var("mask"), Var("condition")


def scaled(x: Pattern, stem: str = "", casts: bool = True) -> Alt:
    """x times or divided by a constant, or x as it is; bound to `<stem>factor` or `<stem>divisor`."""
    x = soft(x) if casts else x
    return Alt(Op("Mul", x, Const(name=f"{stem}factor")), Op("Div", x, Const(name=f"{stem}divisor")), x)


def scale_of(m: Match, stem: str = "") -> float:
    """The factor that `scaled` found, 1 if none; NaN for a division by 0."""
    divisor = m.values.get(f"{stem}divisor", 1.0)
    return m.values.get(f"{stem}factor", 1.0) / divisor if divisor else math.nan


def masked(scores: Pattern) -> tuple[Pattern, ...]:
    """scores with an additive mask, with a boolean mask that fills, with both (GPT-2)."""
    # DistilBERT gives its mask the shape of the scores first, as Where does by itself
    condition = Alt(Op("Expand", CONDITION, Op("Shape", scores, where=whole_shape)), CONDITION)
    filled = (
        Tag("fill", "where", Op("Where", condition, scores, Const(name="fill"))),
        Tag("fill", "where_not", Op("Where", condition, Const(name="fill"), scores)),
    )
    return *(Op("Add", soft(p), soft(MASK)) for p in filled), Op("Add", scores, soft(MASK)), *filled


def normalised(scores: Pattern) -> Alt:
    """softmax(scores) over the last axis, as one operator or spelled out."""
    top = Op("ReduceMax", scores, where=last_axis_kept, rest=True)
    exp = Op("Exp", Op("Sub", scores, top))
    total = Op("ReduceSum", exp, where=last_axis_kept, rest=True)
    return Alt(Op("Softmax", scores, where=softmax_axis), Op("Div", exp, total))


def mask_fits(m: Match, main: str, view: View) -> str | None:
    """Condition of a mask: that it broadcasts to the scores and does not enlarge them."""
    full = view.shape(m.tensors[main])
    if full is None:
        return f"the rank of '{m.tensors[main].name}' is unknown"
    masks = (m.tensors[n] for n in ("mask", "condition") if n in m.tensors)
    return next((reason for t in masks if (reason := fits_into(t, full, view))), None)


def numbers_usable(m: Match, *scales: float) -> str | None:
    """Condition of the constants: scales that are finite and not 0, a mask that does not fill with NaN."""
    for scale in scales:
        if scale == 0 or not math.isfinite(scale):
            return f"the scale is {scale:g}"
    return "the mask fills with NaN" if math.isnan(m.values.get("fill", 0.0)) else None


def fill_attributes(m: Match) -> dict[str, Attribute]:
    """What a boolean mask writes, and where: `keep` 1 keeps the scores where it is true."""
    if "fill" not in m.tags:
        return {}
    return {"fill": m.values["fill"], "keep": int(m.tags["fill"] == "where")}


def apply_mask(b: Body, scores: str, attributes: dict[str, Attribute], names: Names) -> str:
    """The scores in fp32 with the site's mask."""
    if "condition" in names:
        fill = b.const(float(attributes["fill"]))
        chosen = (scores, fill) if attributes["keep"] else (fill, scores)
        scores = b.op("Where", names["condition"], *chosen)
    return b.op("Add", scores, b.wide(names["mask"])) if "mask" in names else scores


def mask_words(site: Site) -> tuple[str, ...]:
    """The variant's words of a mask."""
    words: tuple[str, ...] = ()
    if "condition" in site.tensors:
        stem = "where" if site.attributes["keep"] else "wherenot"
        words = (stem, *word("fill", float(site.attributes["fill"])))
    return (*words, "mask") if "mask" in site.tensors else words


def _where(m: Match, view: View) -> str | None:
    x = m.tensors["x"]
    if view.rank(x) in (None, 0):
        return f"the rank of '{x.name}' is unknown"
    if len(m.nodes) < 2:
        return UNTOLD  # a softmax alone
    if view.is_fixed(x):
        return f"'{x.name}' is constant"
    return mask_fits(m, "x", view) or numbers_usable(m, scale_of(m))


def _attributes(m: Match, _: View) -> dict[str, Attribute]:
    return {"scale": scale_of(m), **fill_attributes(m)}


def _body(b: Body, attributes: dict[str, Attribute], names: Names, _: tuple[str, ...]) -> tuple[str, ...]:
    x = b.wide(names["x"])
    if attributes["scale"] != 1.0:
        x = b.op("Mul", x, float(attributes["scale"]))
    x = apply_mask(b, x, attributes, names)
    return (b.narrow(b.op("Softmax", x, axis=-1)),)


def _variant(site: Site) -> tuple[str, ...]:
    return (*mask_words(site), *word("scale", float(site.attributes["scale"]), 1.0))


_X = scaled(Var("x"))

# y = softmax(scale * x + mask) over the last axis
SOFTMAX = Fusion(
    op="TrtfuseSoftmax",
    patterns=tuple(soft(normalised(soft(p))) for p in (*masked(_X), _X)),
    inputs=("x", "mask", "condition"),
    outputs=("y",),
    where=_where,
    attributes=_attributes,
    body=_body,
    variant=_variant,
    flops=8,
    minimum=2,
)
