"""Writes the standard operators that a fused op stands for: its reference semantics.

The same text serves twice: as the body of the model-local function that travels with a fused file, and, in
place, as the native lowering. Arithmetic is in fp32 whatever the type of inputs and outputs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

# The opsets from which a norm and an activation are one operator.
LAYER_NORM_OPSET, GELU_OPSET = 17, 20


@dataclass
class Body:
    """Collects nodes. opset: of the standard domain; dtype: ONNX element type of the fused op's main input.

    prefix: of every tensor and node name made, so that a body can be put into a graph as it is.
    """

    opset: int
    dtype: int = TensorProto.FLOAT
    prefix: str = ""
    nodes: list[NodeProto] = field(default_factory=list)
    wishes: int = 0

    def has(self, opset: int) -> bool:
        """Whether operators of that opset may be used; `wishes` remembers the opset that would offer more."""
        if self.opset < opset:
            self.wishes = max(self.wishes, opset)
        return self.opset >= opset

    def name(self, stem: str) -> str:
        return f"{self.prefix}{stem}_{len(self.nodes)}"

    def op(self, kind: str, *inputs: str | float, outputs: int = 1, **attributes: Any) -> str:
        """Adds a node; numbers among the inputs become fp32 constants. Returns its (first) output's name."""
        names = [i if isinstance(i, str) else self.const(i) for i in inputs]
        outs = [self.name(kind.lower()) + ("" if k == 0 else f"_{k}") for k in range(outputs)]
        self.nodes.append(helper.make_node(kind, names, outs, name=outs[0], **attributes))
        return outs[0]

    def const(self, value: float | Sequence[int], dtype: Any = np.float32) -> str:
        out = self.name("constant")
        array = np.asarray(value, dtype)
        early = self.opset < 9 and array.dtype.kind != "f"  # when Constant was of floating types only
        tensor = numpy_helper.from_array(array.astype(np.float32) if early else array)
        self.nodes.append(helper.make_node("Constant", [], [out], name=out, value=tensor))
        return self.op("Cast", out, to=helper.np_dtype_to_tensor_dtype(array.dtype)) if early else out

    # --- types ---

    def wide(self, x: str) -> str:
        """x in fp32."""
        return x if self.dtype == TensorProto.FLOAT else self.op("Cast", x, to=TensorProto.FLOAT)

    def narrow(self, x: str) -> str:
        """x in the type of the fused op."""
        return x if self.dtype == TensorProto.FLOAT else self.op("Cast", x, to=self.dtype)

    # --- operators whose form changed between opsets ---

    def reduce(self, kind: str, x: str, axis: int = -1) -> str:
        """ReduceMean, ReduceSum or ReduceMax over one axis, kept."""
        as_input = self.opset >= (13 if kind == "ReduceSum" else 18)
        if as_input:
            return self.op(kind, x, self.const([axis], np.int64), keepdims=1)
        return self.op(kind, x, axes=[axis], keepdims=1)

    def clip(self, x: str, low: float, high: float) -> str:
        if self.opset < 11:
            return self.op("Clip", x, min=low, max=high)
        return self.op("Clip", x, low, high)

    def swap_last(self, x: str, rank: int) -> str:
        """x with its last two axes exchanged."""
        return self.op("Transpose", x, perm=[*range(rank - 2), rank - 1, rank - 2])

    # --- shared pieces ---

    def activation(self, kind: str, x: str, alpha: float | None = None) -> str:
        """act(x) in fp32; kinds as in `ACTIVATIONS`."""
        return ACTIVATIONS[kind](self, x) if alpha is None else self.op("LeakyRelu", x, alpha=alpha)

    def layer_norm(self, x: str, scale: str | None, bias: str | None, epsilon: float) -> str:
        """(x - mean) / sqrt(var + epsilon) * scale + bias over the last axis.

        Statistics are fp32. x, scale, bias and the result are of the body's type.
        """
        if scale is not None and self.has(LAYER_NORM_OPSET):
            inputs = [x, scale] + ([bias] if bias is not None else [])
            return self.op("LayerNormalization", *inputs, axis=-1, epsilon=epsilon, stash_type=1)
        wide = self.wide(x)
        centred = self.op("Sub", wide, self.reduce("ReduceMean", wide))
        variance = self.reduce("ReduceMean", self.op("Mul", centred, centred))
        y = self.op("Div", centred, self.op("Sqrt", self.op("Add", variance, epsilon)))
        return self.narrow(self._affine(y, scale, bias))

    def rms_norm(self, x: str, scale: str | None, epsilon: float) -> str:
        """x / sqrt(mean(x * x) + epsilon) * scale over the last axis, in fp32 inside.

        Always spelled out: TensorRT-RTX expands RMSNormalization in the type of x, and fp16 squares overflow.
        """
        wide = self.wide(x)
        mean = self.reduce("ReduceMean", self.op("Mul", wide, wide))
        y = self.op("Div", wide, self.op("Sqrt", self.op("Add", mean, epsilon)))
        return self.narrow(self._affine(y, scale, None))

    def _affine(self, y: str, scale: str | None, bias: str | None) -> str:
        if scale is not None:
            y = self.op("Mul", y, self.wide(scale))
        if bias is not None:
            y = self.op("Add", y, self.wide(bias))
        return y

    def rename(self, names: dict[str, str]) -> None:
        """Gives results their final names."""
        for node in self.nodes:
            node.input[:] = [names.get(i, i) for i in node.input]
            node.output[:] = [names.get(o, o) for o in node.output]


def _gelu(b: Body, x: str) -> str:
    if b.has(GELU_OPSET):
        return b.op("Gelu", x)
    erf = b.op("Erf", b.op("Mul", x, math.sqrt(0.5)))
    return b.op("Mul", b.op("Mul", x, 0.5), b.op("Add", erf, 1.0))


def _gelu_tanh(b: Body, x: str) -> str:
    if b.has(GELU_OPSET):
        return b.op("Gelu", x, approximate="tanh")
    cube = b.op("Mul", b.op("Mul", x, x), x)
    inner = b.op("Mul", b.op("Add", x, b.op("Mul", cube, 0.044715)), math.sqrt(2 / math.pi))
    return b.op("Mul", b.op("Mul", x, 0.5), b.op("Add", b.op("Tanh", inner), 1.0))


def _hardswish(b: Body, x: str) -> str:
    return b.op("Mul", x, b.op("Div", b.clip(b.op("Add", x, 3.0), 0.0, 6.0), 6.0))


# act(x), by the name that files carry
ACTIVATIONS = {
    "relu": lambda b, x: b.op("Relu", x),
    "sigmoid": lambda b, x: b.op("Sigmoid", x),
    "tanh": lambda b, x: b.op("Tanh", x),
    "gelu": _gelu,  # x / 2 * (1 + erf(x / sqrt(2)))
    "gelu_tanh": _gelu_tanh,  # x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))
    "quick_gelu": lambda b, x: b.op("Mul", x, b.op("Sigmoid", b.op("Mul", x, 1.702))),
    "silu": lambda b, x: b.op("Mul", x, b.op("Sigmoid", x)),
    "hardswish": _hardswish,  # x * clip(x + 3, 0, 6) / 6
    "mish": lambda b, x: b.op("Mul", x, b.op("Tanh", b.op("Softplus", x))),
    "leaky_relu": lambda b, x: b.op("LeakyRelu", x),
}


def function(
    op_type: str, inputs: Sequence[str], outputs: Sequence[str], attributes: Sequence[str], body: Body
) -> onnx.FunctionProto:
    """The model-local function of a fused op: domain `trtfuse`, of the model's opset, attributes declared."""
    opsets = [helper.make_opsetid("", body.opset)]
    return helper.make_function(
        "trtfuse", op_type, list(inputs), list(outputs), body.nodes, opsets, list(attributes)
    )
