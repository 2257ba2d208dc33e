"""Pieces of spelling that the patterns of several fused ops share."""

from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs
from onnx import TensorProto

from trtfuse.pattern import Alt, Const, Match, Op, Pattern
from trtfuse.view import FLOATS, INSIDE, Dim, View


def soft(p: Pattern) -> Alt:
    """p, or p through a Cast between floating types (fp16 graphs that compute in fp32 or fp64)."""
    return Alt(Op("Cast", p, where=between_floats), p)


def between_floats(node: gs.Node, view: View) -> str | None:
    source = view.dtype(node.inputs[0])
    if node.attrs.get("to") not in INSIDE or source not in INSIDE:
        return f"'{node.outputs[0].name}' is cast to or from a type that is no fp64, fp32, fp16 or bf16"
    return None


def whole_shape(node: gs.Node, _: View) -> str | None:
    """Condition of Shape: of all axes."""
    return f"'{node.outputs[0].name}' is part of a shape" if node.attrs else None


def axes_of(node: gs.Node, view: View) -> list[int] | None:
    """The axes of a reduction, attribute or input; None when there are none or they are not constant."""
    if "axes" in node.attrs:
        return [int(a) for a in node.attrs["axes"]]
    if len(node.inputs) > 1 and not node.inputs[1].is_empty():
        value = view.value(node.inputs[1])
        return None if value is None else [int(a) for a in np.atleast_1d(value)]
    return None


def last_axis_kept(node: gs.Node, view: View) -> str | None:
    """Condition of a reduction: over the last axis alone, which is kept with size 1."""
    axes = axes_of(node, view)
    name = node.outputs[0].name
    if axes is None:
        return f"'{name}' is not reduced over constant axes"
    if node.attrs.get("keepdims", 1) != 1:
        return f"'{name}' does not keep the reduced axis"
    if axes == [-1]:
        return None
    return _last(axes, node, view, "axes")


def softmax_axis(node: gs.Node, view: View) -> str | None:
    """Condition of Softmax: over the last axis. Before opset 13 the default axis was 1, and flattening."""
    axis = int(node.attrs.get("axis", -1 if view.opset >= 13 else 1))
    return None if axis == -1 else _last([axis], node, view, "axis")


def _last(axes: list[int], node: gs.Node, view: View, word: str) -> str | None:
    rank = view.rank(node.inputs[0])
    if rank is None:
        rank = view.rank(node.outputs[0])
    if rank is None:
        return f"{word} {axes} of '{node.outputs[0].name}' of unknown rank"
    if {a % rank if -rank <= a < rank else None for a in axes} != {rank - 1}:
        return f"{word} {axes} is not the last axis of rank {rank}"
    return None


def mean_last(p: Pattern) -> Alt:
    """The mean over the last axis, kept; of three axes tf2onnx writes it as a pooling."""
    return Alt(
        Op("ReduceMean", p, where=last_axis_kept, rest=True), Op("GlobalAveragePool", p, where=three_axes)
    )


def three_axes(node: gs.Node, view: View) -> str | None:
    """Condition of a pooling that averages rows: over (N, C, length)."""
    rank = view.rank(node.inputs[0])
    return (
        None if rank == 3 else f"'{node.outputs[0].name}' pools {rank or 'an unknown number of'} axes, not 3"
    )


def square(p: Pattern) -> Alt:
    """p * p; the exponent may be of any type."""
    return Alt(Op("Mul", p, p), Op("Pow", p, Const(2.0)))


def product(*factors: Pattern) -> Alt:
    """a b c in any grouping (the matcher sees to the order)."""
    if len(factors) == 2:
        return Alt(Op("Mul", *factors))
    a, b, c = factors
    return Alt(Op("Mul", Op("Mul", a, b), c), Op("Mul", Op("Mul", a, c), b), Op("Mul", a, Op("Mul", b, c)))


def half_of(p: Pattern) -> Alt:
    return Alt(Op("Mul", p, Const(0.5, says="1/2")), Op("Div", p, Const(2.0)))


def row_vector(m: Match, name: str, main: str, view: View) -> str | None:
    """Condition of a weight: constant, one value for each element of the last axis of `main`, and no more."""
    tensor = m.tensors.get(name)
    if tensor is None:
        return None
    if not view.is_fixed(tensor):
        return f"'{tensor.name}' is not constant"
    shape, width = view.shape(tensor), view.last_dim(m.tensors[main])
    if not shape or any(d != 1 for d in shape[:-1]):
        return f"'{tensor.name}' of shape {show(shape)} is not a vector along the last axis"
    if not isinstance(width, int):
        return f"the last dimension of '{m.tensors[main].name}' is unknown"
    if shape[-1] != width:
        return f"'{tensor.name}' of shape {show(shape)} does not fit rows of {width}"
    rank = view.rank(m.tensors[main])
    if rank is None or len(shape) > rank:
        return f"'{tensor.name}' of rank {len(shape)} raises the rank of '{m.tensors[main].name}'"
    return None


def row_or_scalar(m: Match, name: str, main: str, view: View) -> str | None:
    """Condition of a bias: constant, and one value for all or one for each element of the last axis."""
    tensor = m.tensors.get(name)
    if tensor is None:
        return None
    if not view.is_fixed(tensor):
        return f"'{tensor.name}' is not constant"
    shape, full = view.shape(tensor), view.shape(m.tensors[main])
    if shape is None or any(d != 1 for d in shape[:-1]):
        return f"'{tensor.name}' of shape {show(shape)} is not a vector along the last axis"
    if full is None:
        return f"the rank of '{m.tensors[main].name}' is unknown"
    if len(shape) > len(full):
        return f"'{tensor.name}' of rank {len(shape)} raises the rank of '{m.tensors[main].name}'"
    if shape and shape[-1] != 1 and full[-1] != shape[-1]:
        return f"'{tensor.name}' of shape {show(shape)} does not fit rows of {full[-1] or 'unknown size'}"
    return None


def same_shape(a: gs.Tensor, b: gs.Tensor, view: View) -> str | None:
    """Condition of a residual: neither side is known to be broadcast."""
    x, y = view.shape(a), view.shape(b)
    if x is None or y is None:
        return f"the rank of '{(a if x is None else b).name}' is unknown"
    if len(x) != len(y) or any(not same_dim(p, q) for p, q in zip(x, y, strict=True)):
        return f"'{a.name}' {show(x)} and '{b.name}' {show(y)} are not of one shape"
    return None


def fits_into(tensor: gs.Tensor, full: tuple[Dim, ...], view: View) -> str | None:
    """Condition of a mask: that it broadcasts to `full`, and as far as is known does not enlarge it."""
    shape = view.shape(tensor)
    if shape is None:
        return f"the rank of the mask '{tensor.name}' is unknown"
    if len(shape) > len(full):
        return f"the mask '{tensor.name}' raises the rank of the scores"
    for own, whole in zip(reversed(shape), reversed(full), strict=False):
        known = isinstance(own, int) and isinstance(whole, int)
        if own not in (1, whole) and (known or whole == 1):
            return f"the mask '{tensor.name}' {show(shape)} does not broadcast to {show(full)}"
    return None


def same_dim(a: Dim, b: Dim) -> bool:
    """Whether two dimensions may be taken as one: equal sizes, or both only known when the engine runs."""
    return a == b if isinstance(a, int) or isinstance(b, int) else True


def show(shape: tuple[Dim, ...] | None) -> str:
    return "?" if shape is None else "(" + ", ".join("?" if d is None else str(d) for d in shape) + ")"


def rows_known(m: Match, name: str, view: View) -> str | None:
    """Condition of a norm: the length of its rows is known."""
    width = view.last_dim(m.tensors[name])
    if not isinstance(width, int):
        return f"the last dimension of '{m.tensors[name].name}' is unknown"
    return None


def fixed(tensor: gs.Tensor, view: View) -> str | None:
    """Condition of a weight: the same in every run."""
    return None if view.is_fixed(tensor) else f"'{tensor.name}' is not constant"


def varies(tensor: gs.Tensor, view: View) -> str | None:
    """Condition of a tensor that a fused op works on: not a constant."""
    return f"'{tensor.name}' is constant" if view.is_fixed(tensor) else None


def floating(tensor: gs.Tensor, view: View) -> str | None:
    """Condition of an additive mask: not boolean, which would choose and not add."""
    return None if view.dtype(tensor) in FLOATS else f"'{tensor.name}' is not of a floating type"


def boolean(tensor: gs.Tensor, view: View) -> str | None:
    """Condition of a mask that chooses."""
    return None if view.dtype(tensor) == TensorProto.BOOL else f"'{tensor.name}' is not boolean"
