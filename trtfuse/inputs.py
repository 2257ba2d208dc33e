"""Inputs to run a model on: made to suit what consumes them, in sizes that the model takes."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from onnx import ModelProto, TensorShapeProto, ValueInfoProto

from trtfuse.errors import InputError
from trtfuse.input_files import Feed, load_inputs, validate
from trtfuse.input_roles import Roles
from trtfuse.input_types import describe, tensor_type
from trtfuse.input_values import Context, Shape, make_value

__all__ = ["Feed", "ProfileLike", "load_inputs", "make_inputs", "runnable_inputs", "validate"]

# Sizes of dynamic dimensions where no profile says them, one for each of three inputs, by what the
# dimension is. Odd lengths catch kernels that assume a multiple; images keep to multiples of 32, which
# networks that halve five times and join again need.
_DEFAULTS = {
    "batch": (2, 1, 3),
    "sequence": (16, 7, 33),
    "audio": (512, 256, 576),
    "height": (64, 32, 96),
    "width": (96, 160, 64),
    "channel": (3, 3, 3),
}
# Sizes to try where a model refuses those: what models with a size fixed in their graph are mostly made for.
_COMMON = {
    "batch": (1, 1, 1),
    "sequence": (128, 64, 512),
    "audio": (16000, 1600, 480000),
    "height": (224, 640, 48),
    "width": (224, 640, 320),
    "channel": (3, 1, 4),
}


class ProfileLike(Protocol):
    """Smallest, usual and largest shape by input name."""

    @property
    def min(self) -> Mapping[str, Shape]: ...
    @property
    def opt(self) -> Mapping[str, Shape]: ...
    @property
    def max(self) -> Mapping[str, Shape]: ...


def make_inputs(
    model: ModelProto,
    shapes: Mapping[str, Shape] | None = None,
    count: int = 3,
    seed: int = 0,
    profile: ProfileLike | None = None,
) -> list[Feed]:
    """Inputs that suit the model, the same for the same seed.

    profile: where it has an input, its dynamic dimensions stay within min..max (the first feed has opt).
    shapes: fixed shapes by input name, of inputs that the profile does not have. Otherwise dynamic dimensions
    get usual sizes, several among the feeds.
    Dimensions of one name have one size in a feed. Weights that are also inputs keep their defaults.
    Returns `count` feeds: input name -> array of the input's dtype (ml_dtypes for bfloat16 and float8), or a
    list of arrays for a sequence. Raises InputError for a type it cannot make or shapes that do not fit.
    """
    return [feed for feed, _ in _Maker(model, shapes, seed, profile).feeds(count)]


def runnable_inputs(
    path: Path,
    model: ModelProto,
    shapes: Mapping[str, Shape] | None = None,
    count: int = 3,
    seed: int = 0,
    profile: ProfileLike | None = None,
) -> list[Feed]:
    """As make_inputs, but each feed is one that ONNX Runtime runs the model at `path` on.

    Sizes can be wrong together in ways no shape says (a size that must divide by 32, a signal too short for
    its transform). Where ONNX Runtime refuses a feed, the usual sizes and then the other ways of choosing are
    tried in its place. Raises InputError with ONNX Runtime's words where none runs.
    """
    from trtfuse.verify import reference_session

    session = reference_session(path)
    maker = _Maker(model, shapes, seed, profile)
    feeds: list[Feed] = []
    first_error: Exception | None = None
    for number, (feed, again) in enumerate(maker.feeds(count)):
        for candidate in itertools.chain((feed,), again):
            try:
                session.run(None, candidate)
            except Exception as e:  # ONNX Runtime's own classes share no base but this
                first_error = first_error or e
                continue
            feeds.append(candidate)
            break
        if number == 0 and not feeds:
            break
    if not feeds:
        words = re.sub(r"\s+", " ", str(first_error))[:300]
        raise InputError(
            f"ONNX Runtime runs {path} on none of the inputs made for it ({words}): "
            "give shapes that fit with --shapes, or real inputs with --load-inputs"
        )
    return feeds


@dataclass(frozen=True)
class _Dim:
    """A dimension: fixed, or dynamic with a key that dimensions of one size share."""

    fixed: int = 0
    key: str = ""
    terms: tuple[str, ...] = ()  # of a sum: "past_sequence_length + 1"


class _Maker:
    def __init__(
        self,
        model: ModelProto,
        shapes: Mapping[str, Shape] | None,
        seed: int,
        profile: ProfileLike | None,
    ) -> None:
        weights = {i.name for i in model.graph.initializer}
        weights |= {i.values.name for i in model.graph.sparse_initializer}
        self.infos = [i for i in model.graph.input if i.name not in weights]
        roles = Roles(model)
        self.roles = {i.name: roles.of(i) for i in self.infos}
        self.seed = seed
        self.shapes = dict(shapes or {})
        self.profile = profile
        self.dims = {i.name: self._dims(i) for i in self.infos}
        self.ranges: dict[str, tuple[int, int, int]] = {}
        self.category: dict[str, str] = {}
        self._bounds()

    def feeds(self, count: int) -> Iterator[tuple[Feed, Iterator[Feed]]]:
        """Each feed, with what may be tried in its place."""
        for number in range(count):
            tries = [(number, number), (number, 0), (0, number), (0, 0), (1, 1), (2, 2), (1, 0), (2, 0)]
            tries += [(common, 0) for common in (-1, -2, -3)]
            unique = list(dict.fromkeys(tries))
            full = number == 0 and count > 1  # one feed has no padding at all
            yield (
                self._feed(number, number, number, full),
                (self._feed(sizes, choice, number, full) for sizes, choice in unique[1:]),
            )

    def _feed(self, sizes_number: int, choice: int, number: int, full: bool) -> Feed:
        sizes = self._sizes(sizes_number)
        feed: Feed = {}
        for position, info in enumerate(self.infos):
            rng = np.random.default_rng([self.seed, number, position])
            shape = tuple(self._size(d, sizes) for d in self.dims[info.name])
            context = Context(rng, number, choice, full, self._lengths(sizes), self.seed)
            feed[info.name] = make_value(info, self.roles[info.name], shape, context)
        return feed

    def _lengths(self, sizes: Mapping[str, int]) -> int:
        """The longest length that an input of lengths may name: the smallest second dimension there is."""
        found = [
            self._size(dims[1], sizes)
            for name, dims in self.dims.items()
            if len(dims) >= 2 and self.roles[name].kind != "state"
        ]
        return min(found, default=4)

    def _dims(self, info: ValueInfoProto) -> list[_Dim]:
        tensor = tensor_type(info)
        ranged = self.profile is not None and info.name in self.profile.opt
        given = None if ranged else self.shapes.get(info.name)
        dims = list(tensor.shape.dim)
        if given is not None:
            fits = len(given) == len(dims) and all(
                not d.dim_value > 0 or d.dim_value == g for d, g in zip(dims, given, strict=True)
            )
            if not (fits and all(g > 0 for g in given)):
                raise InputError(
                    f"the shape {'x'.join(map(str, given))} does not fit the input {info.name!r} "
                    f"({describe(info)}): give one of that rank, with its fixed dimensions"
                )
            return [_Dim(fixed=g) for g in given]
        return [self._dim(info.name, axis, d, len(dims)) for axis, d in enumerate(dims)]

    def _dim(self, name: str, axis: int, dim: TensorShapeProto.Dimension, rank: int) -> _Dim:
        if dim.dim_value > 0:
            return _Dim(fixed=dim.dim_value)
        text = dim.dim_param
        if "+" in text:
            terms = tuple(t.strip() for t in text.split("+"))
            if all(re.fullmatch(r"\w+", t) for t in terms):
                return _Dim(key=text, terms=terms)
        if text and text != "?":
            return _Dim(key=text)
        # Exporters leave dimensions nameless: those of one kind are taken to be of one size.
        return _Dim(key=f"?{self._categorise(name, axis, rank, text)}")

    def _categorise(self, name: str, axis: int, rank: int, text: str) -> str:
        role = self.roles[name]
        text = text.lower()
        first = 1 if role.kind == "state" and rank == 3 else 0
        if "batch" in text or (axis == first and rank > 1):
            return "batch"
        if role.kind == "image" and rank == 4:
            dims = next(tensor_type(i) for i in self.infos if i.name == name).shape.dim
            last = dims[3].dim_value in (1, 3, 4) and dims[1].dim_value not in (1, 3, 4)
            return ("batch", "height", "width", "channel")[axis] if last else _NCHW[axis]
        return "audio" if role.kind == "audio" else "sequence"

    def _bounds(self) -> None:
        """For each key: smallest, usual and largest size from the profile, or what its kind defaults to."""
        clear: set[str] = set()
        for info in self.infos:
            dims = self.dims[info.name]
            known = self.profile is not None and info.name in self.profile.opt
            for axis, dim in enumerate(dims):
                if not dim.key:
                    continue
                kind = self._categorise(info.name, axis, len(dims), dim.key)
                # A vector's one dimension may be anything: what another input says of its size counts more.
                if len(dims) > 1 and dim.key not in clear:
                    clear.add(dim.key)
                    self.category[dim.key] = kind
                self.category.setdefault(dim.key, kind)
                if known and self.profile is not None:
                    p, n = self.profile, info.name
                    if len(p.opt[n]) != len(dims):
                        raise InputError(
                            f"the profile of {n!r} has rank {len(p.opt[n])}: give one of rank {len(dims)}"
                        )
                    low, opt, high = p.min[n][axis], p.opt[n][axis], p.max[n][axis]
                    if dim.key in self.ranges:
                        low, high = max(low, self.ranges[dim.key][0]), min(high, self.ranges[dim.key][2])
                    if low > high:
                        raise InputError(
                            f"the profile leaves no size for the dimension {dim.key!r} that inputs share: "
                            "make the ranges of these inputs overlap"
                        )
                    self.ranges[dim.key] = (max(low, 1), min(max(opt, low, 1), high), high)

    def _sizes(self, number: int) -> dict[str, int]:
        rng = np.random.default_rng([self.seed, abs(number)])
        sizes: dict[str, int] = {}
        for position, key in enumerate(sorted(self.category)):
            kind = self.category[key]
            if key not in self.ranges:
                sizes[key] = _DEFAULTS[kind][number % 3] if number >= 0 else _COMMON[kind][-number - 1]
                continue
            low, opt, high = self.ranges[key]
            # The first feed is the usual one; in the next ones the dimensions take turns at the extremes,
            # so that a batch of one meets a long sequence and the reverse.
            turn = number if number <= 0 else (number + position) % 3
            if turn in (0, -1):
                sizes[key] = opt
            elif turn in (1, -2):
                sizes[key] = low if low < opt else min(high, opt + 1)  # another size, if there is one
            elif turn == -3:
                sizes[key] = high
            else:
                sizes[key] = _between(rng, low, opt, high, kind)
        return sizes

    def _size(self, dim: _Dim, sizes: Mapping[str, int]) -> int:
        if dim.fixed:
            return dim.fixed
        if dim.terms and dim.key not in self.ranges:
            return sum(int(t) if t.isdigit() else sizes.get(t, 1) for t in dim.terms)
        return sizes[dim.key]


_NCHW = ("batch", "channel", "height", "width")


def _between(rng: np.random.Generator, low: int, opt: int, high: int, kind: str) -> int:
    """A size in [low, high], neither an extreme nor the usual one where there is room; not far above it."""
    top = min(high, max(2 * opt, 3))
    step = 1
    if kind in ("height", "width", "audio"):
        step = int(np.gcd(opt, high)) if opt != high else (int(np.gcd(opt, 32)) or 1)
    choices = [s for s in range(step * -(-low // step), top + 1, step) if s not in (low, opt, high)]
    return int(rng.choice(choices)) if choices else int(rng.integers(low, top + 1)) if step == 1 else opt
