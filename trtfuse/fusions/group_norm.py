"""TrtfuseGroupNorm: GroupNorm over N,C,H,W, with the SiLU that follows it in diffusion models."""

from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs

from trtfuse.body import Body
from trtfuse.fusion import Attribute, Fusion, Names, Site, word
from trtfuse.fusions._spelling import show, whole_shape
from trtfuse.pattern import Alt, Match, Op, Pattern, Tag, Var
from trtfuse.view import Dim, View

EPSILON = 1e-5
PER_CHANNEL = 21  # the opset from which GroupNormalization has a scale and a bias for each channel


def into_groups(node: gs.Node, view: View) -> str | None:
    """Condition of the first Reshape: to (N, groups, -1)."""
    shape = view.value(node.inputs[1])
    if shape is None or len(shape) != 3 or shape[0] not in (0, *_batch(node, view)) or shape[1] < 1:
        return f"'{node.outputs[0].name}' is not reshaped to (N, groups, -1)"
    if shape[2] != -1 or node.attrs.get("allowzero", 0):
        return f"'{node.outputs[0].name}' is not reshaped to (N, groups, -1)"
    return None


def _batch(node: gs.Node, view: View) -> tuple[int, ...]:
    full = view.shape(node.inputs[0])
    return (full[0],) if full and isinstance(full[0], int) else ()


def whole_groups(node: gs.Node, view: View) -> str | None:
    """Condition of the InstanceNormalization inside: scale 1 and bias 0."""
    scale, bias = view.value(node.inputs[1]), view.value(node.inputs[2])
    if scale is None or bias is None or (scale != 1).any() or (bias != 0).any():
        return f"'{node.outputs[0].name}' has a scale that is not 1 or a bias that is not 0 for each group"
    return None


def _decomposed() -> Pattern:
    grouped = Op("Reshape", Var("x"), Var("to_groups"), where=into_groups)
    normal = Op("InstanceNormalization", grouped, Var("ones"), Var("zeros"), where=whole_groups)
    back = Alt(
        Op("Reshape", normal, Op("Shape", Var("x"), where=whole_shape)),
        Op("Reshape", normal, Var("back")),
    )
    return Op("Add", Op("Mul", back, Var("scale")), Var("bias"))


def _one_op() -> Pattern:
    norm = Op("GroupNormalization", Var("x"), Var("scale"), Var("bias"), where=per_channel)
    return Tag("standard", "1", norm)


def per_channel(node: gs.Node, view: View) -> str | None:
    """Condition of GroupNormalization: a scale for each channel (before opset 21: for each group)."""
    if view.opset < PER_CHANNEL:
        return f"GroupNormalization '{node.outputs[0].name}' before opset {PER_CHANNEL} scales whole groups"
    stash = node.attrs.get("stash_type", 1)
    return None if stash == 1 else f"the statistics of '{node.outputs[0].name}' are not in fp32"


def _with_silu(p: Pattern) -> tuple[Pattern, ...]:
    return (
        Tag("activation", "silu", Alt(Op("Mul", p, Op("Sigmoid", p)), Op("Swish", p, where=_plain_swish))),
        p,
    )


def _plain_swish(node: gs.Node, _: View) -> str | None:
    return None if node.attrs.get("alpha", 1.0) == 1.0 else "Swish with a slope of its own"


def _where(m: Match, view: View) -> str | None:
    x = m.tensors["x"]
    full = view.shape(x)
    if full is None or len(full) < 3:
        return f"'{x.name}' {show(full)} is not of shape (N, C, ...)"
    channels = full[1]
    if not isinstance(channels, int):
        return f"the number of channels of '{x.name}' is unknown"
    groups = _groups(m, view)
    if channels % groups:
        return f"{channels} channels are not {groups} equal groups"
    wanted = (channels,) if "standard" in m.tags else (channels, *[1] * (len(full) - 2))
    for name in ("scale", "bias"):
        tensor = m.tensors[name]
        shape = view.shape(tensor)
        allowed = (wanted,) if "standard" in m.tags else (wanted, (1, *wanted))
        if not view.is_fixed(tensor) or shape not in allowed:
            return f"'{tensor.name}' {show(shape)} is not constant of shape {show(wanted)}"
    if "back" in m.tensors:
        shape_back = view.value(m.tensors["back"])
        if shape_back is None or not _restores(shape_back, full):
            return f"the second reshape does not restore {show(full)}"
    return None


def _restores(shape: np.ndarray, full: tuple[Dim, ...]) -> bool:
    """Whether a reshape gives back the dimensions of x; the batch may be written as 0 or -1."""
    sizes = [int(s) for s in shape]
    return len(sizes) == len(full) and sizes[1:] == list(full[1:]) and sizes[0] in (0, -1, full[0])


def _groups(m: Match, view: View) -> int:
    if "standard" in m.tags:
        return int(_norm(m).attrs["num_groups"])
    to = view.value(m.tensors["to_groups"])
    assert to is not None  # `into_groups` has read it
    return int(to[1])


def _norm(m: Match) -> gs.Node:
    return next(n for n in m.nodes if n.op in ("InstanceNormalization", "GroupNormalization"))


def _attributes(m: Match, view: View) -> dict[str, Attribute]:
    return {
        "epsilon": float(_norm(m).attrs.get("epsilon", EPSILON)),
        "num_groups": _groups(m, view),
        "activation": m.tags.get("activation", "none"),
        "vectors": int("standard" in m.tags),
    }


def _body(b: Body, attributes: dict[str, Attribute], names: Names, _: tuple[str, ...]) -> tuple[str, ...]:
    groups = int(attributes["num_groups"])
    if attributes["vectors"]:
        epsilon = float(attributes["epsilon"])
        inputs = (names["x"], names["scale"], names["bias"])
        y = b.op("GroupNormalization", *inputs, num_groups=groups, epsilon=epsilon, stash_type=1)
        return (b.narrow(b.activation("silu", b.wide(y))) if attributes["activation"] == "silu" else y,)
    x = b.wide(names["x"])
    grouped = b.op("Reshape", x, b.const([0, groups, -1], np.int64))
    centred = b.op("Sub", grouped, b.reduce("ReduceMean", grouped))
    variance = b.reduce("ReduceMean", b.op("Mul", centred, centred))
    y = b.op("Div", centred, b.op("Sqrt", b.op("Add", variance, float(attributes["epsilon"]))))
    y = b.op("Reshape", y, b.op("Shape", names["x"]))
    y = b.op("Add", b.op("Mul", y, b.wide(names["scale"])), b.wide(names["bias"]))
    if attributes["activation"] == "silu":
        y = b.activation("silu", y)
    return (b.narrow(y),)


def _variant(site: Site) -> tuple[str, ...]:
    silu = ("silu",) if site.attributes["activation"] == "silu" else ()
    return (
        f"groups{site.attributes['num_groups']}",
        *silu,
        *(("vectors",) if site.attributes["vectors"] else ()),
        *word("eps", float(site.attributes["epsilon"]), EPSILON),
    )


# y = (x - mean_g(x)) / sqrt(var_g(x) + epsilon) * scale + bias, mean and variance over each group; then SiLU
GROUP_NORM = Fusion(
    op="TrtfuseGroupNorm",
    patterns=_with_silu(Alt(_decomposed(), _one_op())),
    inputs=("x", "scale", "bias"),
    outputs=("y",),
    where=_where,
    attributes=_attributes,
    body=_body,
    variant=_variant,
    flops=12,
    minimum=5,
)
