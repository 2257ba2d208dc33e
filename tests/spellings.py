"""The ways in which exporters spell a norm, a group norm and a softmax. Weights are never 1 and never 0.

`keep` receives the names of the tensors inside, for decoys that read or expose them. `swap` exchanges the
operands of Add and Mul.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from graphs import F16, F32, F64, I64, Graph, beta, gamma

UNSET: Any = object()


class _Writer:
    """Add and Mul with their operands in either order."""

    def __init__(self, g: Graph, swap: bool) -> None:
        self.g, self.swap = g, swap

    def add(self, a: Any, b: Any) -> str:
        return str(self.g.Add(b, a) if self.swap else self.g.Add(a, b))

    def mul(self, a: Any, b: Any) -> str:
        return str(self.g.Mul(b, a) if self.swap else self.g.Mul(a, b))

    def square(self, x: str, how: str, dtype: Any) -> str:
        if how == "mul":
            return str(self.g.Mul(x, x))
        exponent = (
            np.array(2, I64) if how == "pow_int" else np.array([2.0] if how == "pow_one" else 2.0, dtype)
        )
        return str(self.g.Pow(x, exponent))


def inverse(g: Graph, std: str, shifted: str, how: str, dtype: Any) -> str:
    """1 / std, std = sqrt(shifted)."""
    if how == "one_over":
        return str(g.Div(np.array(1, dtype), std))
    if how == "power":
        return str(g.Pow(shifted, np.array(-0.5, dtype)))
    return str(g.Reciprocal(std))


def root(g: Graph, shifted: str, how: str, dtype: Any) -> str:
    return str(g.Pow(shifted, np.array(0.5, dtype)) if how == "power" else g.Sqrt(shifted))


def layer_norm(
    g: Graph,
    x: str,
    width: int,
    *,
    axes: tuple[int, ...] = (-1,),
    variance_axes: tuple[int, ...] | None = None,
    eps: Any = 1e-5,
    square: str = "pow",
    variance: str = "centred",  # or "moments": E[x^2] - E[x]^2
    divide: str = "div",  # reciprocal, one_over, power, folded, keras, keras_neg, keras_sub
    sqrt: str = "sqrt",
    subs: int = 1,
    swap: bool = False,
    casts: str = "",  # "inside": statistics in fp32; "square": only the square, in fp64; "outside": all in fp32
    scale: Any = UNSET,
    bias: Any = UNSET,
    keep: dict[str, str] | None = None,
) -> str:
    """(x - mean) / sqrt(var + eps) * scale + bias, as it is spelled out."""
    w, inside = _Writer(g, swap), {} if keep is None else keep
    wide = {"inside": F32, "outside": F32}.get(casts, g.dtype)
    scale = gamma(width, dtype=g.dtype) if scale is UNSET else scale
    bias = beta(width, dtype=g.dtype) if bias is UNSET else bias
    if casts in ("inside", "outside"):
        x = g.cast(x, F32)
    mean = g.mean(x, *axes)
    centred = g.Sub(x, mean)
    again = g.Sub(x, mean) if subs == 2 else centred
    squared_of = g.cast(again, F64) if casts == "square" else again
    square_type = F64 if casts == "square" else wide
    if variance == "moments":
        var = g.Sub(g.mean(w.square(x, square, wide), *axes), w.square(mean, square, wide))
    else:
        var = g.mean(w.square(squared_of, square, square_type), *(variance_axes or axes))
    shifted = w.add(var, np.asarray(eps, square_type))
    std = root(g, shifted, sqrt, square_type)
    if casts == "square":
        std = g.cast(std, g.dtype)
    inside.update(mean=mean, centred=centred, variance=var, std=std)
    if divide.startswith("keras"):
        slope = g.Reciprocal(std) if scale is None else w.mul(g.Reciprocal(std), scale)
        steep = w.mul(x, slope)
        if divide == "keras_neg":
            negated = w.mul(g.Neg(mean), slope)
            return w.add(steep, negated if bias is None else w.add(negated, bias))
        offset = w.mul(mean, slope)
        return str(g.Sub(steep, offset)) if bias is None else w.add(steep, g.Sub(bias, offset))
    if divide == "div":
        normal = g.Div(centred, std)
    elif divide == "folded":
        inside["normalised"] = y = w.mul(centred, w.mul(g.Reciprocal(std), scale))
        return y if bias is None else w.add(y, bias)
    else:
        normal = w.mul(centred, inverse(g, std, shifted, divide, wide))
    if casts == "inside":
        normal = g.cast(normal, g.dtype)
    inside["normalised"] = y = normal
    if scale is not None:
        inside["scaled"] = y = w.mul(y, g.cast(g.weight(scale), F32) if casts == "outside" else scale)
    if bias is not None:
        y = w.add(y, g.cast(g.weight(bias), F32) if casts == "outside" else bias)
    return g.cast(y, g.dtype) if casts == "outside" else str(y)


def rms_norm(
    g: Graph,
    x: str,
    width: int,
    *,
    axes: tuple[int, ...] = (-1,),
    eps: Any = 1e-6,
    square: str = "pow",
    divide: str = "one_over",  # reciprocal, div, power, folded
    sqrt: str = "sqrt",
    swap: bool = False,
    casts: str = "",
    scale: Any = UNSET,
    keep: dict[str, str] | None = None,
) -> str:
    """x / sqrt(mean(x^2) + eps) * scale, as it is spelled out."""
    w, inside = _Writer(g, swap), {} if keep is None else keep
    wide = F32 if casts else g.dtype
    scale = gamma(width, dtype=g.dtype) if scale is UNSET else scale
    f = g.cast(x, F32) if casts else x
    mean = g.mean(w.square(f, square, wide), *axes)
    shifted = w.add(mean, np.asarray(eps, wide))
    std = root(g, shifted, sqrt, wide)
    inside.update(wide=f, mean=mean, std=std)
    if divide == "folded":
        return w.mul(f, w.mul(g.Reciprocal(std), scale))
    y = g.Div(f, std) if divide == "div" else w.mul(f, inverse(g, std, shifted, divide, wide))
    if casts == "inside":
        y = g.cast(y, g.dtype)
    inside["normalised"] = y
    if casts == "outside":
        return g.cast(w.mul(y, g.cast(g.weight(scale), F32)), g.dtype)
    return w.mul(y, scale)


def group_norm(
    g: Graph,
    x: str,
    channels: int,
    groups: int,
    *,
    back: Any = None,  # the shape of the second Reshape; None: that of x
    to: tuple[int, ...] | None = None,
    inner_scale: Any = None,
    inner_bias: Any = None,
    scale: Any = UNSET,
    bias: Any = UNSET,
    rank: int = 4,
    eps: float = 1e-5,
    swap: bool = False,
    allowzero: bool = False,
    keep: dict[str, str] | None = None,
) -> str:
    """GroupNorm as TorchScript spells it, by Reshape and InstanceNormalization."""
    w, inside = _Writer(g, swap), {} if keep is None else keep
    grouped = g.Reshape(x, np.array(to or (0, groups, -1), I64))
    ones = np.ones(groups, g.dtype) if inner_scale is None else inner_scale
    zeros = np.zeros(groups, g.dtype) if inner_bias is None else inner_bias
    normal = g.InstanceNormalization(grouped, ones, zeros, epsilon=eps)
    options = {"allowzero": 1} if allowzero else {}
    y = g.Reshape(normal, g.Shape(x) if back is None else np.array(back, I64), **options)
    inside.update(grouped=grouped, normalised=y)
    shape = (channels, *[1] * (rank - 2))
    y = w.mul(y, gamma(*shape, dtype=g.dtype) if scale is UNSET else scale)
    inside["scaled"] = y
    return w.add(y, beta(*shape, dtype=g.dtype) if bias is UNSET else bias)


def softmax_spelled(g: Graph, x: str, axis: int = -1, keep: dict[str, str] | None = None) -> str:
    """softmax(x) as tf2onnx spells it."""
    top = g.reduce("ReduceMax", x, axis)
    exp = g.Exp(g.Sub(x, top))
    total = g.reduce("ReduceSum", exp, axis)
    if keep is not None:
        keep.update(top=top, exp=exp, total=total)
    return str(g.Div(exp, total))


def widths(dtype: Any) -> float:
    """The largest error, relative to the largest result, of a norm computed in that type by another order."""
    return {np.dtype(F16): 8e-3, np.dtype(F32): 2e-5}[np.dtype(dtype)]
