"""TrtfuseGatedAct: the gate of SwiGLU and GeGLU."""

from __future__ import annotations

import onnx_graphsurgeon as gs

from trtfuse.body import Body
from trtfuse.fusion import Attribute, Fusion, Names, Site
from trtfuse.fusions._spelling import same_shape, soft
from trtfuse.fusions.bias_act import (
    COMPOSED,
    activate,
    activation_attributes,
    activation_words,
    quick_gelu_gate,
    silu_gate,
)
from trtfuse.pattern import UNTOLD, Alt, Match, Op, Tag, Var
from trtfuse.view import View

GATE, UP = Var("gate"), Var("up")


def _where(m: Match, view: View) -> str | None:
    gate, up = m.tensors["gate"], m.tensors["up"]
    if gate is up or view.is_fixed(gate) or view.is_fixed(up) or _is_broadcast(gate, up, view):
        return UNTOLD  # an activation with a factor, such as a squeeze-and-excite block's: no gate at all
    return same_shape(gate, up, view)


def _is_broadcast(a: gs.Tensor, b: gs.Tensor, view: View) -> bool:
    """Whether one is known to be smaller than the other."""
    x, y = view.shape(a), view.shape(b)
    if x is None or y is None:
        return False
    return len(x) != len(y) or any(p != q and 1 in (p, q) for p, q in zip(x, y, strict=True))


# those of x * gate(x), which may multiply the gate first
GATES = {"silu": silu_gate, "quick_gelu": quick_gelu_gate}


def _body(b: Body, attributes: dict[str, Attribute], names: Names, _: tuple[str, ...]) -> tuple[str, ...]:
    gate = activate(b, b.wide(names["gate"]), attributes)
    return (b.narrow(b.op("Mul", gate, b.wide(names["up"]))),)


def _variant(site: Site) -> tuple[str, ...]:
    return activation_words(site)


# y = act(gate) * up
GATED_ACT = Fusion(
    op="TrtfuseGatedAct",
    patterns=(
        Alt(
            *(
                Tag("activation", name, soft(Op("Mul", soft(spelled(soft(GATE))), soft(UP))))
                for name, spelled in COMPOSED.items()
            ),
            *(
                Tag("activation", name, Op("Mul", GATE, Op("Mul", gate(GATE), UP)))
                for name, gate in GATES.items()
            ),
        ),
    ),
    inputs=("gate", "up"),
    outputs=("y",),
    where=_where,
    attributes=lambda m, _: activation_attributes(m),
    body=_body,
    variant=_variant,
    flops=13,
    minimum=4,
)
