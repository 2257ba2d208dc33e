"""Shapes of dynamic inputs: read from the command line's two spellings, checked, derived where not given."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import onnx

from trtfuse import axes as _axes
from trtfuse.axes import Axis, Reading, Span
from trtfuse.errors import InputError

Shape = tuple[int, ...]

# A shape ends a specification or comes before a comma; the shortest name that leaves one is taken, so a name
# may itself hold colons ("serving_default:0:1x3").
_SPEC = re.compile(
    r"\s*(?P<name>[^,\s].*?)\s*:\s*(?P<shape>\[[^\[\]]*\]|\([^()]*\)|scalar|\d+(?:\s*[xX]\s*\d+)*)\s*(?:,|$)"
)
_HOW = "write x:1x128 or x:[1,128], several separated by commas or given one by one"
_LARGEST = 2**31 - 1  # TensorRT's limit on one dimension
# Image sizes that are tried, in this order: the first that contradicts nothing in the graph is taken.
_SQUARES = (224, 640, 256, 512, 384, 32)
_LINES = ((48, 320), (32, 320), (64, 320), (32, 100), (96, 640))  # height and width of a line of text
_DENSE = frozenset({"Resize", "Upsample", "ConvTranspose", "NonMaxSuppression"})
_TRIED_NODES = 3000  # above this trying sizes would take a second and more


@dataclass(frozen=True)
class Profile:
    """One optimization profile: the smallest, the preferred and the largest shape of every dynamic input.

    derived: the inputs for which at least one of the three was not given.
    """

    min: dict[str, Shape]
    opt: dict[str, Shape]
    max: dict[str, Shape]
    derived: tuple[str, ...] = field(default=())

    def chosen(self) -> list[str]:
        """A line for every input whose shapes were derived; empty if all were given."""
        return [
            f"{name}: min {_text(self.min[name])}, opt {_text(self.opt[name])}, max {_text(self.max[name])}"
            for name in self.derived
        ]


def _text(shape: Shape) -> str:
    return "x".join(map(str, shape)) if shape else "scalar"


def parse_shapes(specs: Sequence[str]) -> dict[str, Shape]:
    """Shapes by input name, from "x:1x128,y:1x3" (trtexec) or "x:[1,128]" (Polygraphy), mixed at will.

    Names may hold ':', '/' and spaces, and may stand in quotes; a scalar is "x:scalar" or "x:[]".
    Raises InputError on other text and on one name with two different shapes.
    """
    shapes: dict[str, Shape] = {}
    for spec in _words([specs] if isinstance(specs, str) else specs):
        at = 0
        while at < len(spec) or not spec:
            found = _SPEC.match(spec, at)
            if found is None:
                raise InputError(f"cannot read the shape {spec[at:].strip() or spec!r}: {_HOW}")
            name, shape = found["name"].strip("'\""), _shape(found["shape"], spec)
            if shapes.setdefault(name, shape) != shape:
                raise InputError(
                    f"input {name!r} is given two shapes, {_text(shapes[name])} and {_text(shape)}: keep one"
                )
            at = found.end()
    return shapes


def _words(specs: Sequence[str]) -> Iterator[str]:
    """Each specification by itself, also where one text holds several with blanks between them."""
    for spec in specs:
        parts = spec.split()
        several = len(parts) > 1 and all(_SPEC.fullmatch(p) for p in parts)
        yield from parts if several else (spec,)


def _shape(text: str, spec: str) -> Shape:
    if text == "scalar":
        return ()
    parts = [p.strip() for p in re.split(r"[xX]" if text[0] not in "[(" else ",", text.strip("[]()"))]
    if parts[-1] == "":  # "[]" and "(3,)"
        parts.pop()
    if not all(re.fullmatch(r"\d+", p) for p in parts):
        raise InputError(f"cannot read the shape {text} in {spec!r}: sizes are whole numbers; {_HOW}")
    shape = tuple(int(p) for p in parts)
    if 0 in shape:
        raise InputError(f"the shape {text} in {spec!r} is empty: a size is 1 or more")
    if any(d > _LARGEST for d in shape):
        raise InputError(f"the shape {text} in {spec!r} is too large: a size is at most {_LARGEST}")
    return shape


def derive_profile(
    model: onnx.ModelProto,
    min: Sequence[str] = (),
    opt: Sequence[str] = (),
    max: Sequence[str] = (),
    shapes: Sequence[str] = (),
) -> Profile:
    """The profile of a model: every dynamic input gets one, inputs of fixed shape are not listed.

    min, opt, max: specifications as `parse_shapes` reads them; shapes: the same for all three. What is not
    given is derived from the axes' names and places, from what consumes the input, and from what is given for
    axes of the same name. Reads no weights and changes nothing in `model`.
    Raises InputError for an input the model lacks, a wrong rank, a size the model fixes otherwise, and where
    min <= opt <= max does not hold.
    """
    weights = {t.name for t in model.graph.initializer} | {
        t.values.name for t in model.graph.sparse_initializer
    }
    infos = {i.name: i for i in model.graph.input if i.name not in weights}
    inputs = {name: axes for name, i in infos.items() if (axes := _axes.axes_of(i)) is not None}
    fixed = parse_shapes(shapes)
    given: dict[str, dict[str, Shape]] = {}
    for kind, specs in (("min", min), ("opt", opt), ("max", max)):
        given[kind] = {**fixed, **parse_shapes(specs)}
        for name, shape in given[kind].items():
            _check(name, shape, infos, inputs)
    for name in inputs:
        _ordered(name, [given[k].get(name) for k in ("min", "opt", "max")])
    dynamic = {name: axes for name, axes in inputs.items() if any(a.size is None for a in axes)}
    spans = _spans(model, infos, dynamic, given)
    profile = {
        kind: {n: given[kind].get(n, tuple(getattr(s, kind) for s in spans[n])) for n in dynamic}
        for kind in given
    }
    for name in dynamic:
        _ordered(name, [profile[k][name] for k in ("min", "opt", "max")])
    derived = tuple(n for n in dynamic if not all(n in given[k] for k in given))
    return Profile(profile["min"], profile["opt"], profile["max"], derived)


def _check(
    name: str, shape: Shape, infos: dict[str, onnx.ValueInfoProto], inputs: dict[str, list[Axis]]
) -> None:
    if name not in infos:
        have = ", ".join(repr(n) for n in list(infos)[:8]) or "none"
        raise InputError(
            f"a shape is given for {name!r}, which is no input of the model: its inputs are {have}"
        )
    if name not in inputs:
        raise InputError(f"a shape is given for {name!r}, which is no tensor of known rank: leave it out")
    axes = inputs[name]
    wanted = "x".join(str(a.size) if a.size is not None else (a.symbol or "?") for a in axes) or "scalar"
    if len(shape) != len(axes):
        raise InputError(
            f"the shape {_text(shape)} of {name!r} has {len(shape)} sizes, "
            f"the model has {len(axes)} ({wanted})"
        )
    for size, axis in zip(shape, axes, strict=True):
        if axis.size is not None and size != axis.size:
            raise InputError(
                f"the shape {_text(shape)} of {name!r} does not fit the model's {wanted}: "
                f"{axis.size} is fixed there, not {size}"
            )


def _ordered(name: str, given: Iterable[Shape | None]) -> None:
    have = [s for s in given if s is not None]
    for small, large in pairwise(have):
        if any(a > b for a, b in zip(small, large, strict=True)):
            raise InputError(
                f"the shapes of {name!r} are not in order: min <= opt <= max must hold in every size, "
                f"{_text(small)} is above {_text(large)}"
            )


def _spans(
    model: onnx.ModelProto,
    infos: dict[str, onnx.ValueInfoProto],
    dynamic: dict[str, list[Axis]],
    given: dict[str, dict[str, Shape]],
) -> dict[str, list[Span]]:
    """The sizes of every axis of the dynamic inputs."""
    if all(n in given[k] for k in given for n in dynamic):
        return {n: [] for n in dynamic}
    reading = Reading(model)
    streams = any((a := _axes.axes_of(i)) is not None and _axes.is_state(a) for i in infos.values())
    images = _images(model, infos, dynamic, given)
    symbols = _given_symbols(dynamic, given)
    spans: dict[str, list[Span]] = {}
    shared: dict[str, Span] = {}
    for name, axes in dynamic.items():
        spans[name] = []
        for index, axis in enumerate(axes):
            if axis.size is not None:
                span = Span(axis.size, axis.size, axis.size)
            elif axis.symbol is not None and axis.symbol in shared:
                span = shared[axis.symbol]
            else:
                span = images.get((name, index)) or _derived(reading, infos[name], axes, index, streams)
                if axis.symbol is not None:
                    span = shared[axis.symbol] = _adopted(span, symbols.get(axis.symbol, {}))
            own = {k: given[k][name][index] for k in given if name in given[k]}
            spans[name].append(_adopted(span, own))
    return _with_formulas(dynamic, spans, shared)


def _derived(
    reading: Reading, info: onnx.ValueInfoProto, axes: list[Axis], index: int, streams: bool
) -> Span:
    """The sizes of an axis. streams: whether the model carries a state from call to call."""
    dtype = info.type.tensor_type.elem_type
    if index == len(axes) - 1 and len(axes) > 1 and (size := reading.features(info.name)) is not None:
        return Span(size, size, size)
    role = _axes.role(info.name, dtype, axes, index)
    if role == "batch":
        return _axes.BATCH
    if role == "channels":
        size = reading.channels(info.name) or 3
        return Span(size, size, size)
    if role == "samples" or (role == "sequence" and len(axes) == 2 and index and dtype in _axes.FLOATS):
        return _axes.WINDOW if streams else _axes.SAMPLES
    if role in ("height", "width"):
        return Span(32, 224, 1024)
    if role == "depth":
        return _axes.DEPTH
    bound = reading.positions()
    span = _axes.PAST if role == "past" else _axes.SEQUENCE
    return span.clipped(bound) if bound is not None else span


def _adopted(span: Span, given: dict[str, int]) -> Span:
    """The span with the given sizes in it, and the derived ones moved to where the order still holds."""
    low = given.get("min")
    high = given.get("max")
    best = given.get("opt")
    if best is None:
        best = _between(span.opt, low, high)
    low = low if low is not None else _between(span.min, None, best)
    high = high if high is not None else _between(span.max, best, None)
    return Span(low, best, high)


def _between(value: int, low: int | None, high: int | None) -> int:
    if low is not None and value < low:
        return low
    return high if high is not None and value > high else value


def _given_symbols(
    dynamic: dict[str, list[Axis]], given: dict[str, dict[str, Shape]]
) -> dict[str, dict[str, int]]:
    """Sizes given for axes by the name that the model has for them. Raises InputError where they differ."""
    symbols: dict[str, dict[str, int]] = {}
    for kind, shapes in given.items():
        for name, shape in shapes.items():
            for axis, size in zip(dynamic.get(name, []), shape, strict=False):
                if axis.symbol is None:
                    continue
                old = symbols.setdefault(axis.symbol, {}).setdefault(kind, size)
                if old != size:
                    raise InputError(
                        f"the {kind} shapes give the axis {axis.symbol!r} the sizes {old} and {size} "
                        f"({name!r}): the model says that it is one size"
                    )
    return symbols


def _with_formulas(
    dynamic: dict[str, list[Axis]], spans: dict[str, list[Span]], shared: dict[str, Span]
) -> dict[str, list[Span]]:
    """Axes named by a formula of other axes ("past + sequence") take its value."""
    for name, axes in dynamic.items():
        for index, axis in enumerate(axes):
            if axis.symbol is None or axis.symbol.isidentifier():
                continue
            sizes = [
                _axes.evaluate(axis.symbol, {s: getattr(v, kind) for s, v in shared.items()})
                for kind in ("min", "opt", "max")
            ]
            if None not in sizes:
                spans[name][index] = Span(*(s for s in sizes if s is not None))
    return spans


def _images(
    model: onnx.ModelProto,
    infos: dict[str, onnx.ValueInfoProto],
    dynamic: dict[str, list[Axis]],
    given: dict[str, dict[str, Shape]],
) -> dict[tuple[str, int], Span]:
    """Height and width of inputs that are images, by trying which sizes contradict nothing in the graph."""
    spans: dict[tuple[str, int], Span] = {}
    for name, axes in dynamic.items():
        dtype = infos[name].type.tensor_type.elem_type
        roles = {
            _axes.role(name, dtype, axes, i): i
            for i, a in enumerate(axes)
            if a.size is None and len(axes) == 4 and dtype in (*_axes.FLOATS, onnx.TensorProto.UINT8)
        }
        roles = {place: i for place, i in roles.items() if place in ("height", "width")}
        if not roles or any(name in given[k] for k in given):  # what is given leads: the rest goes around it
            continue
        for place, span in _image(model, name, axes, roles).items():
            spans[name, roles[place]] = span
    return spans


def _image(model: onnx.ModelProto, name: str, axes: list[Axis], roles: dict[str, int]) -> dict[str, Span]:
    """The sizes of height and width, those of the two that `roles` has."""
    dense = any(node.op_type in _DENSE for node in model.graph.node)
    squares = (
        [(s, s) for s in sorted(_SQUARES, key=lambda s: s != 640)] if dense else [(s, s) for s in _SQUARES]
    )
    low, high = (32, 32), (1280, 1280) if dense else (1024, 1024)
    is_line = "height" not in roles and (axes[2].size or 0) in range(1, 97)  # low, and as wide as you like
    tried = [*_LINES, *squares] if is_line else [*squares[:2], *_LINES[:3], *squares[2:]]
    best = tried[0]
    if len(model.graph.node) <= _TRIED_NODES:
        lean = _axes.light(model)

        def known(pair: tuple[int, int]) -> int:
            own = dict(zip(("height", "width"), pair, strict=True))
            at = {index: own[place] for place, index in roles.items()}
            shape = tuple(at.get(i, a.size if a.size is not None else 1) for i, a in enumerate(axes))
            return _axes.known_sizes(lean, {name: shape})

        scores = {pair: known(pair) for pair in tried}
        best = next(pair for pair in tried if scores[pair] == max(scores.values()))
        if (
            best in _LINES and not is_line
        ):  # no square fits: the height is what the network reduces to one row
            return {p: _line(p, best) for p in roles}
        if known(low) < scores[best]:
            low = best
    if is_line:
        low, high = (32, 32), (4 * best[1], 4 * best[1])
    place = {"height": 0, "width": 1}
    return {p: Span(low[place[p]], best[place[p]], high[place[p]]) for p in roles}


def _line(place: str, best: tuple[int, int]) -> Span:
    height, width = best
    return Span(height, height, height) if place == "height" else Span(32, width, 4 * width)
