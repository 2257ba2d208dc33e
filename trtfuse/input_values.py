"""Values for an input of a known role and shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import ValueInfoProto

from trtfuse.input_roles import SMALL_TABLE, Role
from trtfuse.input_types import is_sequence, numpy_dtype, tensor_type

Shape = tuple[int, ...]
SEQUENCE_LENGTH = 2  # elements of a sequence input
MASKED = -10000.0  # an additive mask's "not here": far below any score, and inside float16


@dataclass(frozen=True)
class Context:
    """What values depend on beside their role."""

    rng: np.random.Generator
    number: int  # of the feed
    choice: int  # which of an input's choices
    full: bool  # masks without padding
    longest: int  # length that an input of lengths may name
    seed: int


def make_value(info: ValueInfoProto, role: Role, shape: Shape, context: Context) -> Any:
    """An array for an input, or a list of them for a sequence."""
    dtype = numpy_dtype(tensor_type(info).elem_type)
    if is_sequence(info):
        return [_array(role, shape, dtype, context) for _ in range(SEQUENCE_LENGTH)]
    return _array(role, shape, dtype, context)


def _array(role: Role, shape: Shape, dtype: np.dtype, context: Context) -> np.ndarray:
    rng = context.rng
    values: np.ndarray
    if role.kind == "text":
        values = np.array(rng.choice(np.array(role.choices, dtype=object), size=shape), dtype=object)
    elif role.kind == "image":
        values = _image(rng, shape)
    elif role.kind == "bytes" and len(shape) == 4:  # pixels
        image = _image(rng, shape)
        values = (image - image.min()) / (np.ptp(image) + 1e-9) * 255 + np.iinfo(dtype).min
    elif role.kind == "bytes":
        limits = np.iinfo(dtype)
        values = rng.integers(limits.min, int(limits.max) + 1, size=shape)
    elif role.kind in _MAKERS:
        values = np.asarray(_MAKERS[role.kind](role, shape, context))
    else:
        values = _float(role, shape, context)
    typed: np.ndarray = np.ascontiguousarray(values).reshape(shape).astype(dtype)
    return typed


def _ids(role: Role, shape: Shape, context: Context) -> np.ndarray:
    if role.high - role.low <= SMALL_TABLE and shape and shape[-1] > 1 and role.high - role.low > 1:
        # Kinds come in runs, as segments do: the first part of a row is of the first kind.
        cuts = np.sort(context.rng.integers(1, shape[-1] + 1, size=(*shape[:-1], role.high - role.low - 1)))
        kinds: np.ndarray = role.low + (np.arange(shape[-1]) >= cuts[..., None]).sum(axis=-2)
        return kinds
    return context.rng.integers(role.low, max(role.high, role.low + 1), size=shape)


def _positions(role: Role, shape: Shape, context: Context) -> np.ndarray:
    count = shape[-1] if shape else 1
    steps = np.arange(count) % max(role.high - role.low, 1) + role.low
    return np.broadcast_to(steps if shape else steps[0], shape)


def _mask(role: Role, shape: Shape, context: Context) -> np.ndarray:
    """Rows of ones with a tail of zeros, of different lengths by the first axis; at least a one a row."""
    if not shape:
        return np.ones(shape)
    rows, last = (shape[0] if len(shape) > 1 else 1), shape[-1]
    lengths = np.full(rows, last)
    if not context.full and last > 1:
        # The same for every mask of the feed: they speak of the same rows.
        turn = np.random.default_rng([context.seed, context.number, rows, last])
        lengths = 1 + (turn.permutation(rows) * max((last - 1) // rows, 1) + turn.integers(last)) % last
        if (lengths == last).all():
            lengths[0] = max(1, last // 2)
    mask = (np.arange(last) < lengths[:, None]).astype(np.float64)
    if len(shape) == 1:
        return mask[0]
    return np.broadcast_to(mask.reshape(rows, *(1,) * (len(shape) - 2), last), shape)


def _additive_mask(role: Role, shape: Shape, context: Context) -> np.ndarray:
    return np.where(_mask(role, shape, context) > 0, 0.0, MASKED)


def _choice(role: Role, shape: Shape, context: Context) -> np.ndarray:
    return np.full(shape, role.choices[context.choice % len(role.choices)])


def _size_value(role: Role, shape: Shape, context: Context) -> np.ndarray:
    value = {"one": 1, "zero": 0, "size": 4, "axis": 0, "reshape": 1}[role.how]
    values = np.full(shape, value)
    if role.how == "axis" and len(shape) == 1:
        return np.arange(shape[0])
    if role.how == "reshape" and shape:
        values[..., -1] = -1  # the last dimension takes what there is: fits any number of elements
    return values


def _lengths(role: Role, shape: Shape, context: Context) -> np.ndarray:
    values = context.rng.integers(1, context.longest + 1, size=shape)
    return np.full(shape, context.longest) if context.full else values


def _image(rng: np.random.Generator, shape: Shape) -> np.ndarray:
    """Pages of print-like strokes on a light ground, with patches of tint and a little noise; mean near 0, in
    [-2.5, 2.5]. A network sees edges, objects and ground, where white noise is one flat texture to it and
    drives its answers to 0 or 1."""
    channels_first = len(shape) != 4 or shape[1] <= 4
    batch, channels, height, width = shape if channels_first else (shape[0], shape[3], *shape[1:3])
    image = 0.05 * rng.standard_normal((batch, channels, height, width))
    tint = 0.3 * rng.standard_normal((batch, channels, -(-height // 32), -(-width // 32)))
    image += tint.repeat(32, 2).repeat(32, 3)[:, :, :height, :width]
    for page in image:
        page += _page(rng, height, width)
    image = np.clip(image, -2.5, 2.5)
    return image if channels_first else np.moveaxis(image, 1, 3)


def _page(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    """Lines of glyphs made of three strokes each, dark (-1.8) on light (1.8)."""
    page = np.full((height, width), 1.8)
    size = max(4, min(24, height // 5, width // 5))
    stroke, wide = max(1, size // 6), max(2, int(size * 0.6))
    y = int(rng.integers(0, 4))
    while y + size <= height:
        for x in range(int(rng.integers(0, 6)), width - wide, wide + stroke):
            for _ in range(3 if rng.random() < 0.85 else 0):  # else a space
                if rng.random() < 0.5:
                    left = x + int(rng.integers(wide))
                    page[y : y + size, left : left + stroke] = -1.8
                else:
                    top = y + int(rng.integers(size))
                    page[top : top + stroke, x : x + wide] = -1.8
        y += size + int(rng.integers(size // 2, size * 2))
    return page


def _float(role: Role, shape: Shape, context: Context) -> np.ndarray:
    """N(0, 1); where the last axis is long, in part by row and slowly along it, as features of signals are:
    white noise averages out in what pools over them, and every input gets the same answer."""
    rng = context.rng
    values = rng.standard_normal(shape)
    if len(shape) < 3 or shape[-1] < 64:
        return values
    rows = rng.standard_normal((*shape[:-1], 1))
    steps = rng.standard_normal((*shape[:-1], -(-shape[-1] // 16))).repeat(16, -1)[..., : shape[-1]]
    return np.sqrt(1 / 3) * (values + rows + steps)


def _audio(role: Role, shape: Shape, context: Context) -> np.ndarray:
    """A few harmonics that swell and fade, and noise: about 0.3 RMS, in [-1, 1], as recordings are."""
    rng = context.rng
    axis = int(np.argmax(shape)) if shape else 0
    count = shape[axis] if shape else 1
    time = np.arange(count)
    rest = int(np.prod(shape)) // max(count, 1)
    pitch = rng.uniform(0.005, 0.02, size=(rest, 1))
    wave = sum(np.sin(2 * np.pi * k * pitch * time + rng.uniform(0, 6.3, (rest, 1))) / k for k in range(1, 6))
    swell = 0.6 + 0.4 * np.sin(2 * np.pi * time / max(count, 1) * rng.uniform(0.5, 3, (rest, 1)))
    signal = np.clip(0.35 * wave * swell + 0.03 * rng.standard_normal((rest, count)), -1, 1)
    moved = [d for i, d in enumerate(shape) if i != axis]
    return np.moveaxis(np.reshape(signal, (*moved, count)), -1, axis) if shape else signal.reshape(())


def _state(role: Role, shape: Shape, context: Context) -> np.ndarray:
    return 0.5 * context.rng.standard_normal(shape)


def _positive(role: Role, shape: Shape, context: Context) -> np.ndarray:
    return 0.1 + np.abs(context.rng.standard_normal(shape))


def _timestep(role: Role, shape: Shape, context: Context) -> np.ndarray:
    return context.rng.integers(0, 1000, size=shape)


_MAKERS = {
    "ids": _ids,
    "positions": _positions,
    "mask": _mask,
    "additive_mask": _additive_mask,
    "choice": _choice,
    "size": _size_value,
    "lengths": _lengths,
    "audio": _audio,
    "state": _state,
    "positive": _positive,
    "timestep": _timestep,
}
