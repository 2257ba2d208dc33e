"""Inputs for an engine, from a file or made up; its outputs into a file or in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trtfuse.errors import InputError
from trtfuse.files import atomic_write
from trtfuse.shapes import parse_shapes

if TYPE_CHECKING:
    from trtfuse.engine import Engine, Tensor

_SEED = 0
Array = np.ndarray[Any, Any]


def of(engine: Engine, file: Path | None, shapes: Sequence[str]) -> list[dict[str, Array]]:
    """Feeds for an engine: those in a file, or one that is made up, of `shapes` or the preferred ones.

    Raises InputError for what does not fit the engine.
    """
    if file is not None:
        from trtfuse import inputs

        return [_chosen(engine, feed, file) for feed in inputs.load_inputs(file)]
    given = parse_shapes(shapes)
    if unknown := [n for n in given if n not in engine.inputs]:
        raise InputError(f"--shapes names {unknown[0]!r}, and the inputs are {', '.join(engine.inputs)}")
    wanted = {**engine.opt_shapes(), **given}
    generator = np.random.default_rng(_SEED)
    return [{name: _made(tensor, wanted[name], generator) for name, tensor in engine.inputs.items()}]


def _chosen(engine: Engine, feed: Mapping[str, Array], file: Path) -> dict[str, Array]:
    missing = [n for n in engine.inputs if n not in feed]
    if missing:
        raise InputError(f"{file} has no input {missing[0]!r}: it has {', '.join(feed)}")
    return {n: feed[n] for n in engine.inputs}


def _made(tensor: Tensor, shape: Sequence[int], generator: np.random.Generator) -> Array:
    """Random values: floats around 0, integers and booleans that are ones, since they are masks, sizes or
    indices, which must not be out of range."""
    if tensor.dtype.kind in "iub":
        return np.ones(shape, tensor.dtype)
    return np.asarray(generator.standard_normal(shape), np.float32).astype(tensor.dtype)


def save(path: Path, results: Sequence[Mapping[str, Array]]) -> None:
    """Outputs as .npz, bfloat16 and float8 as float32: by name, or `name.0`, `name.1` of several feeds."""
    arrays = {
        name if len(results) == 1 else f"{name}.{number}": _plain(array)
        for number, outputs in enumerate(results)
        for name, array in outputs.items()
    }
    with atomic_write(path) as f:
        np.savez(f, **dict[str, Any](arrays))


def _plain(array: Array) -> Array:
    return array.astype(np.float32) if array.dtype.kind == "V" or "float8" in str(array.dtype) else array


def summary(outputs: Mapping[str, Array]) -> dict[str, dict[str, Any]]:
    """By output: type, shape, smallest, largest and mean value, how many are not finite."""
    return {name: _summary(array) for name, array in outputs.items()}


def _summary(array: Array) -> dict[str, Any]:
    values = _plain(array).astype(np.float64).ravel()
    finite = values[np.isfinite(values)]
    return {
        "dtype": str(array.dtype),
        "shape": list(array.shape),
        "min": float(finite.min()) if finite.size else None,
        "max": float(finite.max()) if finite.size else None,
        "mean": float(finite.mean()) if finite.size else None,
        "not_finite": int(values.size - finite.size),
    }
