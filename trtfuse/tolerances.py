"""How far an output may be from its reference: Polygraphy's options, and defaults by type."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto

from trtfuse.errors import InputError
from trtfuse.model import graphs

T = TypeVar("T")
STATISTICS = ("max", "mean", "median", "elemwise", "quantile")


class Default(NamedTuple):
    """rtol: of each element. scale: atol as a part of the output's largest magnitude. eps: the type's."""

    rtol: float
    scale: float
    eps: float


# An element passes within rtol of its own reference value, or within `scale` of the output's largest one. The
# first alone would refuse elements near zero, whose error comes from the large terms that cancelled in them;
# a fixed atol would pass whatever an output of small values holds.
# - float32: a fused chain rounds and sums in another order, worth some 10 to 100 eps (1.2e-7) at the output
#   of a deep network: fusing real models moved their outputs by 3e-7 (a sentence encoder) to 1e-5 (a detector
#   whose last sigmoid is steep) of the largest value, a fifth of what is allowed at most. Mistakes are
#   larger: in that encoder a norm's epsilon of 1e-6 for 1e-12 is 4 times what is allowed, GELU's tanh form
#   for erf's 30 times.
# - float16, bfloat16: chains that are rounded after each op against chains that are rounded once: some ten
#   eps (9.8e-4, 7.8e-3), more where norms follow each other.
# - quantized: a value that lands on the other side of a rounding boundary moves by one whole step, 1/127 of
#   its tensor's range, and its successors with it.
DEFAULTS = {
    "float64": Default(1e-8, 1e-9, 2.3e-16),
    "float32": Default(2e-4, 2e-5, 1.2e-7),
    "float16": Default(1e-2, 5e-3, 9.8e-4),
    "quantized": Default(2e-2, 2e-2, 1.2e-7),
    "bfloat16": Default(5e-2, 2e-2, 7.8e-3),
    "float8": Default(1e-1, 6e-2, 6.3e-2),
}
_LOOSER = list(DEFAULTS)  # tight to loose
# Of what an output varies over its elements and the inputs, this part is the most its tolerance may be: else
# an output that hardly varies (saturated, or a large constant with a little on it) would pass whatever the
# model does. Never below a few roundings of its type.
VARIATION = 0.25
ROUNDINGS = 8


@dataclass(frozen=True)
class Tolerances:
    """Tolerances by output name; "" is for outputs not named; what is absent has a default by type.

    atol: absolute. rtol: relative to the reference. As in Polygraphy an error passes within either.
    statistic: which error is checked: of each element ("elemwise", the default), or the "max", "mean",
    "median" or "quantile" (0.99) of the output's errors.
    """

    atol: Mapping[str, float] = field(default_factory=dict)
    rtol: Mapping[str, float] = field(default_factory=dict)
    statistic: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def default(cls) -> Tolerances:
        """Every output by its type."""
        return cls()

    @classmethod
    def parse(
        cls,
        atol: Sequence[str] | None = (),
        rtol: Sequence[str] | None = (),
        check_error_stat: Sequence[str] | None = (),
    ) -> Tolerances:
        """From Polygraphy's spelling: "1e-5" for all outputs, "name:1e-3" for one (a name may hold colons).

        Raises InputError for a tolerance that is no number from 0 on, or an unknown statistic.
        """
        statistics = dict(_split(check_error_stat or ()))
        for text in statistics.values():
            if text not in STATISTICS:
                raise InputError(
                    f"--check-error-stat {text!r} is none of {', '.join(STATISTICS)}: choose one"
                )
        return cls(_numbers("--atol", atol or ()), _numbers("--rtol", rtol or ()), statistics)

    def check_names(self, outputs: Sequence[str]) -> None:
        """Raises InputError where a tolerance is for an output that there is not."""
        for name in (*self.atol, *self.rtol, *self.statistic):
            if name and name not in outputs:
                raise InputError(
                    f"a tolerance names {name!r}, which is no output: there are {', '.join(outputs)}"
                )

    def given(self, name: str) -> bool:
        """Whether an absolute or relative tolerance was given for the output."""
        return _named(self.atol, name) is not None or _named(self.rtol, name) is not None

    def of(self, name: str, kind: str | None, largest: float, variation: float) -> tuple[float, float, str]:
        """(atol, rtol, statistic) for an output.

        kind: a key of DEFAULTS, or None for what must be equal (integers, booleans, text). largest: the
        largest magnitude of its reference; variation: how far the reference ranges (0 where unknown).
        """
        atol = _named(self.atol, name)
        rtol = _named(self.rtol, name)
        statistic = _named(self.statistic, name) or "elemwise"
        if kind is None:
            return atol or 0.0, rtol or 0.0, statistic
        default = DEFAULTS[kind]
        most = math.inf
        if variation > 0:
            most = max(VARIATION * variation, ROUNDINGS * default.eps * largest)
        if atol is None:
            atol = min(default.scale * largest, most)
        if rtol is None:
            rtol = min(default.rtol, most / largest) if largest > 0 else default.rtol
        return atol, rtol, statistic


def _named(values: Mapping[str, T], name: str) -> T | None:
    for key in (name, name.partition("[")[0], ""):
        if key in values:
            return values[key]
    return None


def _split(options: Sequence[str]) -> list[tuple[str, str]]:
    parts = [text.rpartition(":") for text in options]
    return [(name, value) for name, _, value in parts]


def _numbers(option: str, texts: Sequence[str]) -> dict[str, float]:
    numbers: dict[str, float] = {}
    for name, text in _split([str(t) for t in texts]):
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not number >= 0:
            where = f"{name}:{text}" if name else text
            raise InputError(f"{option} {where} is no tolerance: give 1e-5, or name:1e-5 for one output")
        numbers[name] = number
    return numbers


def kind_of(dtype: np.dtype | str, computed: str) -> str | None:
    """The key of DEFAULTS for an output of `dtype` in a model that computes in `computed`; None for what must
    be equal."""
    name = str(dtype)
    if "float8" in name:
        name = "float8"
    if name in ("complex64", "complex128"):
        name = "float32" if name == "complex64" else "float64"
    if name not in DEFAULTS:
        return None
    return max(name, computed, key=_LOOSER.index)


def computed_in(model: ModelProto) -> str:
    """The loosest type that a model computes in, whatever its outputs are of: a key of DEFAULTS."""
    found = {"float64"}
    types: dict[int, str] = {
        TensorProto.FLOAT: "float32",
        TensorProto.FLOAT16: "float16",
        TensorProto.BFLOAT16: "bfloat16",
    }
    for graph in graphs(model.graph):
        for tensor in graph.initializer:
            found.add(types.get(tensor.data_type, "float64"))
        for info in (*graph.input, *graph.output, *graph.value_info):
            found.add(types.get(info.type.tensor_type.elem_type, "float64"))
        _add_nodes(graph.node, types, found)
    for function in model.functions:
        _add_nodes(function.node, types, found)
    return max(found, key=_LOOSER.index)


def _add_nodes(nodes: Iterable[NodeProto], types: Mapping[int, str], found: set[str]) -> None:
    for node in nodes:
        if node.op_type in ("QuantizeLinear", "DynamicQuantizeLinear", "QLinearMatMul", "QLinearConv"):
            found.add("quantized")
        for attribute in node.attribute:
            if attribute.name == "to" and node.op_type == "Cast":
                found.add(types.get(attribute.i, "float64"))
            elif attribute.name == "value" and node.op_type == "Constant":
                found.add(types.get(attribute.t.data_type, "float64"))
