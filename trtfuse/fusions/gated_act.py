"""TrtfuseGatedAct: the gate of SwiGLU and GeGLU."""

from __future__ import annotations

from trtfuse.body import Body
from trtfuse.fusion import Attribute, Fusion, Names, Site
from trtfuse.fusions._spelling import same_shape, show, soft
from trtfuse.fusions.bias_act import COMPOSED, activate, activation_attributes, activation_words
from trtfuse.pattern import Alt, Match, Op, Tag, Var
from trtfuse.view import View

GATE, UP = Var("gate"), Var("up")


def _where(m: Match, view: View) -> str | None:
    for name in ("gate", "up"):
        tensor = m.tensors[name]
        if view.is_fixed(tensor):
            return f"'{tensor.name}' is constant"
        if view.rank(tensor) is None:
            return f"the rank of '{tensor.name}' is unknown"
    if m.tensors["gate"] is m.tensors["up"]:
        return f"'{m.tensors['up'].name}' gates itself"
    if _constant_factor(m, view):
        return "the other factor is a mere scale"
    return same_shape(m.tensors["gate"], m.tensors["up"], view)


def _constant_factor(m: Match, view: View) -> bool:
    shape = view.shape(m.tensors["up"])
    return (
        shape is not None
        and all(d == 1 for d in shape)
        and show(shape) != show(view.shape(m.tensors["gate"]))
    )


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
                Tag("activation", name, Op("Mul", soft(spelled(soft(GATE))), UP))
                for name, spelled in COMPOSED.items()
            )
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
