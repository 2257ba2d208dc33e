"""TrtfuseBiasAct, and the activations' spellings that the gated and linear ops share.

An activation spelled in five operators is five passes over memory; fused with the bias before it, one.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import onnx_graphsurgeon as gs

from trtfuse.body import Body
from trtfuse.fusion import Attribute, Fusion, Names, Site, word
from trtfuse.fusions._spelling import half_of, product, row_or_scalar, soft, square
from trtfuse.pattern import UNTOLD, Alt, Const, Match, Op, Pattern, Tag, Var, Where, close
from trtfuse.view import View

ROOT_TWO = Const(math.sqrt(2), says="sqrt(2)")
HALF_ROOT = Const(math.sqrt(0.5), says="1/sqrt(2)")
TANH_SLOPE = Const(math.sqrt(2 / math.pi), says="sqrt(2/pi)")
CUBIC = Const(0.044715)
SIXTH = Const(1 / 6, says="1/6")
LARGEST = float(np.finfo(np.float32).max)  # the bounds of a Clip that has none


def _gelu(z: Pattern) -> Pattern:
    erf = soft(Op("Erf", soft(Alt(Op("Div", z, ROOT_TWO), Op("Mul", z, HALF_ROOT)))))
    one_plus = Op("Add", erf, Const(1.0))
    return Alt(
        Op("Mul", z, Op("Add", half_of(erf), Const(0.5, says="1/2"))),
        product(z, Const(0.5, says="1/2"), one_plus),
        Op("Mul", z, half_of(one_plus)),
        Op("Mul", half_of(z), one_plus),
        half_of(Op("Mul", z, one_plus)),
    )


def _gelu_tanh(z: Pattern) -> Pattern:
    cube = Alt(Op("Pow", z, Const(3.0)), Op("Mul", square(z), z))
    quadratic = Alt(product(CUBIC, z, z), Op("Mul", square(z), CUBIC))
    cubic = Alt(Op("Mul", cube, CUBIC), Op("Mul", quadratic, z), Op("Mul", Op("Mul", z, CUBIC), square(z)))
    plain = Op("Mul", Op("Add", z, cubic), TANH_SLOPE)
    factored = product(TANH_SLOPE, z, Op("Add", quadratic, Const(1.0)))
    one_plus = Op("Add", soft(Op("Tanh", soft(Alt(plain, factored)))), Const(1.0))
    return Alt(
        product(z, Const(0.5, says="1/2"), one_plus),
        Op("Mul", z, half_of(one_plus)),
        Op("Mul", half_of(z), one_plus),
        half_of(Op("Mul", z, one_plus)),
    )


def _hardswish(z: Pattern) -> Pattern:
    shifted = Op("Add", z, Const(3.0))
    below = Op("Min", shifted, Const(6.0))
    clip = Alt(
        Op("Clip", shifted, where=clips(0, 6), rest=True),
        Op("Clip", Op("Relu", shifted), where=clips(None, 6), rest=True),
        Op("Min", Alt(Op("Relu", shifted), Op("Max", shifted, Const(0.0))), Const(6.0)),
        Op("Relu", below),
        Op("Max", below, Const(0.0)),
    )
    sixth = Alt(Op("Mul", z, SIXTH), Op("Div", z, Const(6.0)))
    line = Op("Add", sixth, Const(0.5, says="1/2"))
    return Alt(
        Op("Div", Op("Mul", z, clip), Const(6.0)),
        Op("Mul", z, Op("Div", clip, Const(6.0))),
        product(z, clip, SIXTH),
        Op("Mul", z, Op("Clip", line, where=clips(0, 1), rest=True)),
        Op("Mul", z, Op("HardSigmoid", z, where=hard_sigmoid_sixth)),
        Op("HardSwish", z),
    )


def clips(low: float | None, high: float | None) -> Where:
    """Condition of Clip: these bounds. None for low: what comes in is not negative; for high: no bound."""
    lows = (low,) if low is not None else (0.0, -LARGEST)
    highs = (high,) if high is not None else (LARGEST,)

    def where(node: gs.Node, view: View) -> str | None:
        bottom, top = _bound(node, 1, "min", -LARGEST, view), _bound(node, 2, "max", LARGEST, view)
        if bottom in lows and top in highs:
            return None
        name, wanted = node.outputs[0].name, f"{lows[0]:g} and {highs[0]:g}"
        return f"'{name}' is clipped to {bottom:g} and {top:g}, not to {wanted}"

    return where


def _bound(node: gs.Node, position: int, attribute: str, absent: float, view: View) -> float:
    """A bound of Clip; NaN where it is not constant."""
    if len(node.inputs) > position and not node.inputs[position].is_empty():
        value = view.scalar(node.inputs[position])
        return math.nan if value is None else value
    return float(node.attrs.get(attribute, absent))


def hard_sigmoid_sixth(node: gs.Node, _: View) -> str | None:
    alpha, beta = node.attrs.get("alpha", 0.2), node.attrs.get("beta", 0.5)
    if not np.isclose(alpha, 1 / 6, rtol=1e-6) or beta != 0.5:
        return f"HardSigmoid of {alpha:.7g} and {beta:.7g} is not that of HardSwish (1/6 and 1/2)"
    return None


def _silu(z: Pattern) -> Pattern:
    return Alt(
        Op("Mul", z, silu_gate(z)),
        Op("Div", z, Op("Add", Op("Exp", Op("Neg", z)), Const(1.0))),
        Op("Swish", z, where=alpha_is(1.0)),
        Op("com.microsoft.QuickGelu", z, where=alpha_is(1.0, 1.702)),
    )


def silu_gate(z: Pattern) -> Alt:
    return soft(Op("Sigmoid", soft(Alt(z, Op("Mul", z, Const(1.0))))))


def _quick_gelu(z: Pattern) -> Pattern:
    return Alt(
        Op("Mul", z, quick_gelu_gate(z)),
        Op("Swish", z, where=alpha_is(1.702)),
        Op("com.microsoft.QuickGelu", z, where=alpha_is(1.702, 1.702)),
    )


def quick_gelu_gate(z: Pattern) -> Alt:
    return soft(Op("Sigmoid", soft(Op("Mul", z, Const(1.702)))))


def alpha_is(wanted: float, usual: float = 1.0) -> Where:
    """Condition of an operator with a slope: that it is the activation's."""

    def where(node: gs.Node, _: View) -> str | None:
        alpha = float(node.attrs.get("alpha", usual))
        return None if close(alpha, wanted, None) else f"alpha {alpha:.7g} of '{node.name}' is not {wanted:g}"

    return where


def _mish(z: Pattern) -> Pattern:
    softplus = soft(Alt(Op("Softplus", soft(z)), Op("Log", Op("Add", Op("Exp", soft(z)), Const(1.0)))))
    return Alt(Op("Mul", z, Op("Tanh", softplus)), Op("Mish", z))


def approximate_is(wanted: str) -> Where:
    """Condition of Gelu: exact ("none") or by tanh."""

    def where(node: gs.Node, _: View) -> str | None:
        have = node.attrs.get("approximate", "none")
        return None if have == wanted else f"approximate is {have!r}"

    return where


# Those that are worth a fused op by themselves: several passes in the spellings that exporters use.
COMPOSED: dict[str, Callable[[Pattern], Pattern]] = {
    "gelu": lambda z: Alt(_gelu(z), Op("Gelu", z, where=approximate_is("none")), Op("com.microsoft.Gelu", z)),
    "gelu_tanh": lambda z: Alt(
        _gelu_tanh(z), Op("Gelu", z, where=approximate_is("tanh")), Op("com.microsoft.FastGelu", z)
    ),
    "quick_gelu": _quick_gelu,
    "silu": _silu,
    "hardswish": _hardswish,
    "mish": _mish,
}
# Those of one operator: fused only with a bias.
SINGLE: dict[str, Callable[[Pattern], Pattern]] = {
    "relu": lambda z: Alt(
        Op("Relu", z), Op("Max", z, Const(0.0)), Op("Clip", z, where=clips(0, None), rest=True)
    ),
    "sigmoid": lambda z: Op("Sigmoid", z),
    "tanh": lambda z: Op("Tanh", z),
    "leaky_relu": lambda z: Op("LeakyRelu", z),
}

BIASED = Op("Add", Var("x"), Var("bias"), name="z")


def activated(z: Pattern, single: bool) -> Alt:
    """Every activation of z; those of one operator only with `single`."""
    table = {**COMPOSED, **(SINGLE if single else {})}
    return Alt(*(Tag("activation", name, soft(spelled(soft(z)))) for name, spelled in table.items()))


def activation_attributes(m: Match) -> dict[str, Attribute]:
    """The activation that a match found, with LeakyRelu's slope."""
    name = m.tags["activation"]
    if name != "leaky_relu":
        return {"activation": name}
    node = next(n for n in m.nodes if n.op == "LeakyRelu")
    return {"activation": name, "alpha": float(node.attrs.get("alpha", 0.01))}


def activation_words(site: Site) -> tuple[str, ...]:
    """The variant's words of an activation."""
    slope = word("alpha", float(site.attributes["alpha"]), 0.01) if "alpha" in site.attributes else ()
    return (str(site.attributes["activation"]), *slope)


def activate(b: Body, x: str, attributes: dict[str, Attribute]) -> str:
    """act(x) with x and the result in fp32."""
    alpha = attributes.get("alpha")
    return b.activation(str(attributes["activation"]), x, None if alpha is None else float(alpha))


def _where(m: Match, view: View) -> str | None:
    if view.is_fixed(m.tensors["x"]):
        return UNTOLD
    reason = row_or_scalar(m, "bias", "x", view)
    # of an operator and an Add, as after a convolution, TensorRT makes one by itself
    return UNTOLD if reason is not None and m.tags["activation"] in SINGLE else reason


def _body(b: Body, attributes: dict[str, Attribute], names: Names, _: tuple[str, ...]) -> tuple[str, ...]:
    z = b.wide(names["x"])
    if "bias" in names:
        z = b.op("Add", z, b.wide(names["bias"]))
    return (b.narrow(activate(b, z, attributes)),)


def _variant(site: Site) -> tuple[str, ...]:
    return (*activation_words(site), *(("bias",) if "bias" in site.tensors else ()))


# y = act(x + bias)
BIAS_ACT = Fusion(
    op="TrtfuseBiasAct",
    patterns=(
        activated(BIASED, single=True),
        Tag("activation", "gelu", Op("com.microsoft.BiasGelu", Var("x"), Var("bias"))),
        Tag("activation", "gelu_tanh", Op("com.microsoft.FastGelu", Var("x"), Var("bias"))),
        activated(Var("x"), single=False),
    ),
    inputs=("x", "bias"),
    outputs=("y",),
    where=_where,
    attributes=lambda m, _: activation_attributes(m),
    body=_body,
    variant=_variant,
    flops=12,
    minimum=3,
)
