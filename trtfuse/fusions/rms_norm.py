"""TrtfuseRmsNorm and TrtfuseSkipRmsNorm: LayerNorm without the mean, as T5 and Llama have it."""

from __future__ import annotations

from trtfuse.body import Body
from trtfuse.fusion import Attribute, Fusion, Names, Site, word
from trtfuse.fusions._spelling import mean_last, row_vector, rows_known, soft, square
from trtfuse.fusions.layer_norm import (
    EPS,
    PRESET,
    SCALE,
    SUM,
    add_up,
    contrib,
    epsilon,
    epsilon_usable,
    inverse,
    last_axis,
    skip_words,
    where_skip,
)
from trtfuse.pattern import Alt, Match, Op, Pattern, Var
from trtfuse.view import View

EPSILON = 1e-6


def spellings(x: Pattern) -> tuple[Pattern, ...]:
    """The spellings of x / sqrt(mean(x * x) + epsilon) * scale, and the norm as one operator."""
    wide = soft(x)
    shifted = Op("Add", mean_last(square(wide)), EPS)
    std = Op("Sqrt", shifted)
    normal = soft(Alt(Op("Mul", wide, inverse(std, shifted)), Op("Div", wide, soft(std))))
    return (
        soft(Op("Mul", normal, SCALE)),
        soft(Op("Mul", wide, Op("Mul", inverse(std, shifted), SCALE))),
        Op("RMSNormalization", x, SCALE, where=last_axis, whole=True),
    )


def _where(m: Match, view: View) -> str | None:
    return rows_known(m, "x", view) or row_vector(m, "scale", "x", view) or epsilon_usable(m)


def _where_skip(m: Match, view: View) -> str | None:
    return where_skip(m, view) or _where(m, view)


def _attributes(m: Match, _: View) -> dict[str, Attribute]:
    return {"epsilon": epsilon(m)}


def _body(b: Body, attributes: dict[str, Attribute], names: Names, _: tuple[str, ...]) -> tuple[str, ...]:
    return (b.rms_norm(names["x"], names["scale"], float(attributes["epsilon"])),)


def _body_skip(
    b: Body, attributes: dict[str, Attribute], names: Names, outputs: tuple[str, ...]
) -> tuple[str, ...]:
    total = add_up(b, names)
    return (b.rms_norm(total, names["scale"], float(attributes["epsilon"])), total)[: len(outputs)]


def _variant(site: Site) -> tuple[str, ...]:
    return word("eps", float(site.attributes["epsilon"]), EPSILON)


def _variant_skip(site: Site) -> tuple[str, ...]:
    return (*skip_words(site), *_variant(site))


# s = x (+ preset) + skip; y = s / sqrt(mean(s * s) + epsilon) * scale; second output: s
SKIP_RMS_NORM = Fusion(
    op="TrtfuseSkipRmsNorm",
    patterns=(*spellings(SUM), *contrib("SkipSimplifiedLayerNormalization", SCALE, PRESET)),
    inputs=("x", "skip", "scale", "preset"),
    outputs=("y", "sum"),
    where=_where_skip,
    attributes=_attributes,
    body=_body_skip,
    variant=_variant_skip,
    flops=7,
    minimum=4,
    vectors=("scale",),
)

# y = x / sqrt(mean(x * x) + epsilon) * scale
RMS_NORM = Fusion(
    op="TrtfuseRmsNorm",
    patterns=spellings(Var("x")),
    inputs=("x", "scale"),
    outputs=("y",),
    where=_where,
    attributes=_attributes,
    body=_body,
    variant=_variant,
    flops=5,
    minimum=4,
    vectors=("scale",),
)
