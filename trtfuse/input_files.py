"""Inputs from files, and their validation against a model."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto, ValueInfoProto

from trtfuse.errors import InputError
from trtfuse.input_types import describe, is_sequence, numpy_dtype, tensor_type

Feed = dict[str, Any]  # input name -> numpy array, or a list of them for a sequence


def load_inputs(path: Path) -> list[Feed]:
    """Inputs from a file.

    An .npz holds one array for each input under the input's name; for several feeds the names end in `@0`,
    `@1`, ... (`input_ids@0`), each feed whole. A .json is Polygraphy's (`polygraphy run --save-inputs`, or
    `polygraphy.json.save_json` of a list of feeds). Raises InputError for anything else, and for no inputs.
    """
    path = Path(path)
    if not path.is_file():
        raise InputError(f"there is no file {path}: check the path of the inputs")
    with open(path, "rb") as f:
        head = f.read(64)
    if head[:2] == b"PK":
        feeds = _load_npz(path)
    elif head.lstrip()[:1] in (b"[", b"{"):
        feeds = _load_json(path)
    else:
        raise InputError(
            f"{path} holds no inputs: give an .npz (arrays by input name) or Polygraphy's JSON of inputs"
        )
    if not feeds or not all(feeds):
        raise InputError(f"{path} holds no inputs: save at least one array for each input of the model in it")
    return feeds


def _load_npz(path: Path) -> list[Feed]:
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except (ValueError, OSError, zipfile.BadZipFile, KeyError, EOFError) as e:
        raise InputError(f"{path} is not a whole .npz of plain arrays ({e}): save it again") from e
    numbered = {name: re.fullmatch(r"(.+)@(\d+)", name) for name in arrays}
    if not all(numbered.values()):
        return [arrays] if arrays else []
    feeds: dict[int, Feed] = {}
    for name, match in numbered.items():
        assert match is not None
        feeds.setdefault(int(match[2]), {})[match[1]] = arrays[name]
    if sorted(feeds) != list(range(len(feeds))) or len({frozenset(f) for f in feeds.values()}) > 1:
        raise InputError(
            f"{path} does not hold whole feeds: number them from 0 (name@0, name@1), each with all inputs"
        )
    return [feeds[n] for n in sorted(feeds)]


def _load_json(path: Path) -> list[Feed]:
    from polygraphy.exception import PolygraphyException
    from polygraphy.json import load_json
    from polygraphy.logger import G_LOGGER

    try:
        with G_LOGGER.verbosity(G_LOGGER.CRITICAL + 1):
            data = load_json(str(path))
    except (PolygraphyException, ValueError, KeyError, TypeError, OSError, AttributeError) as e:
        words = re.sub(r"\s+", " ", str(e))[:200]
        raise InputError(f"{path} is not Polygraphy's JSON of inputs ({words}): save it again") from e
    feeds = [data] if isinstance(data, Mapping) else data
    good = isinstance(feeds, Sequence) and all(
        isinstance(feed, Mapping) and all(isinstance(v, (np.ndarray, list)) for v in feed.values())
        for feed in feeds
    )
    if not good:
        raise InputError(
            f"{path} holds no list of inputs by name: make it with `polygraphy run --save-inputs`"
        )
    return [dict(feed) for feed in feeds]


def validate(inputs: Sequence[Mapping[str, Any]], model: ModelProto) -> None:
    """Checks feeds against the model's inputs: names, dtypes, ranks, fixed and shared dimensions.

    Raises InputError, one line about the first thing that is wrong.
    """
    if not inputs:
        raise InputError("there are no inputs to run the model on: give at least one")
    optional = {i.name for i in model.graph.initializer} | {
        i.name for i in model.graph.input if i.type.HasField("optional_type")
    }
    infos = {i.name: i for i in model.graph.input}
    names = ", ".join(n for n in infos if n not in optional)
    for number, feed in enumerate(inputs):
        where = f"input {number}" if len(inputs) > 1 else "the input"
        for name in feed:
            if name not in infos:
                raise InputError(f"{where} has {name!r}, which the model does not take: it takes {names}")
        for name in infos:
            if name not in feed and name not in optional:
                raise InputError(f"{where} lacks {name!r}: add an array of {describe(infos[name])}")
        sizes: dict[str, tuple[int, str]] = {}
        for name, value in feed.items():
            _validate_value(where, infos[name], value, sizes)


def _validate_value(where: str, info: ValueInfoProto, value: Any, sizes: dict[str, tuple[int, str]]) -> None:
    want = f"give {describe(info)}"
    if is_sequence(info) != isinstance(value, (list, tuple)):
        raise InputError(f"{where}: {info.name!r} is {'no list' if is_sequence(info) else 'a list'}: {want}")
    tensor = tensor_type(info)
    dtype = numpy_dtype(tensor.elem_type)
    for array in value if isinstance(value, (list, tuple)) else (value,):
        if not isinstance(array, np.ndarray):
            raise InputError(f"{where}: {info.name!r} is {type(array).__name__}, no numpy array: {want}")
        text = dtype.kind == "O" and array.dtype.kind in "OUS"
        if array.dtype != dtype and not text:
            raise InputError(f"{where}: {info.name!r} holds {array.dtype}: {want}")
        if not tensor.HasField("shape"):
            continue
        dims = tensor.shape.dim
        if array.ndim != len(dims):
            raise InputError(f"{where}: {info.name!r} has rank {array.ndim} {list(array.shape)}: {want}")
        for axis, (dim, size) in enumerate(zip(dims, array.shape, strict=True)):
            if dim.dim_value > 0 and dim.dim_value != size:
                raise InputError(
                    f"{where}: {info.name!r} has {size} on axis {axis}, not {dim.dim_value}: {want}"
                )
            if dim.dim_param and dim.dim_param != "?" and not is_sequence(info):
                known, other = sizes.setdefault(dim.dim_param, (size, info.name))
                if known != size:
                    raise InputError(
                        f"{where}: {dim.dim_param} is {known} in {other!r} and {size} in {info.name!r}: "
                        "make them equal"
                    )
