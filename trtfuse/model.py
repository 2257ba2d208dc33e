"""The model: read, held, and written whole.

`Model` owns the ModelProto. Everything a graph library would drop (metadata, denotations, quantization
annotations, non-tensor types, defaults of overridable inputs) stays in it. Large weights are set aside: the
proto that passes work on is a skeleton whose large tensors are marks (`MARK`), so that copying, shape
inference and graph surgery cost nothing for the weights, and a model of many gigabytes never has to be in
memory. `save` puts the weights back, stored once each.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import onnx
import onnx.shape_inference
from google.protobuf.message import DecodeError, EncodeError
from onnx import GraphProto, ModelProto, TensorProto
from onnx.external_data_helper import ExternalDataInfo, load_external_data_for_tensor

from trtfuse.errors import InputError
from trtfuse.files import atomic_path, beside, explain_os_error, put

MARK = "trtfuse-set-aside"
SMALL = 1024  # bytes: tensors up to this size stay in the skeleton (constants that patterns read)
PROTOBUF_LIMIT = 2**31 - 1
INLINE_LIMIT = 1_800_000_000  # bytes of weights that one file may hold beside its graph (protobuf: 2 GiB)
CHECKER_ERRORS = (onnx.checker.ValidationError, onnx.shape_inference.InferenceError)
# Types of which a byte holds several.
PACKED = frozenset(
    v for n, v in TensorProto.DataType.items() if n in ("INT4", "UINT4", "FLOAT4E2M1", "INT2", "UINT2")
)
ALIGN = 4096  # external tensors begin on pages, so that ONNX Runtime can map them


@dataclass
class Model:
    """An ONNX model whose large weights are set aside.

    proto: the skeleton. path: where it came from. weights: the tensors that were set aside, by the number
    their mark carries; inline ones hold their data, external ones say where it lies. external: whether the
    file kept weights outside.
    """

    proto: ModelProto
    path: Path
    weights: list[TensorProto] = field(default_factory=list)
    external: bool = False

    @property
    def folder(self) -> Path:
        """The folder that external data is relative to."""
        return self.path.resolve().parent

    @property
    def opset(self) -> int:
        """The version of the standard domain that the model imports."""
        return next((o.version for o in self.proto.opset_import if o.domain in ("", "ai.onnx")), 1)

    def copy(self) -> Model:
        """An independent skeleton over the same weights."""
        proto = ModelProto()
        proto.CopyFrom(self.proto)
        return Model(proto, self.path, self.weights, self.external)

    def tensor(self, mark: TensorProto) -> TensorProto:
        """The tensor behind a mark with its data loaded, or `mark` itself where it holds its own."""
        number = mark_of(mark)
        if number is None:
            return mark
        whole = self.weights[number]
        if whole.data_location != TensorProto.EXTERNAL:
            return whole
        loaded = TensorProto()
        loaded.CopyFrom(whole)
        load_external_data_for_tensor(loaded, str(self.folder))
        return loaded


def mark_of(tensor: TensorProto) -> int | None:
    """The number that a mark carries; None for a tensor that is no mark."""
    for entry in tensor.external_data:
        if entry.key == MARK:
            return int(entry.value)
    return None


def one_line(error: BaseException | str, limit: int = 300) -> str:
    """The first meaningful words of an error of another library, on one line."""
    text = str(error)
    text = re.sub(r"\s+", " ", text.split("==> Context:")[0]).strip()
    return text if len(text) <= limit else text[: limit - 3] + "..."


def graphs(graph: GraphProto) -> Iterator[GraphProto]:
    """The graph and every graph inside it (bodies of If, Loop, Scan), outermost first."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from graphs(attribute.g)
            elif attribute.type == onnx.AttributeProto.GRAPHS:
                for inner in attribute.graphs:
                    yield from graphs(inner)


def tensors(graph: GraphProto) -> Iterator[TensorProto]:
    """Every dense tensor that a graph holds: weights and Constant values, in inner graphs too."""
    for g in graphs(graph):
        yield from g.initializer
        for node in g.node:
            for attribute in node.attribute:
                if attribute.type == onnx.AttributeProto.TENSOR:
                    yield attribute.t


def load(path: str | os.PathLike[str]) -> Model:
    """Reads and checks an ONNX file; external data stays where it is.

    Raises InputError when there is no such file, it is not a whole ONNX model, its external data is missing
    or the checker refuses it.
    """
    path = Path(path)
    if not path.exists():
        raise InputError(f"there is no file {path}; check the path")
    if path.is_dir():
        raise InputError(f"{path} is a folder; name the .onnx file in it")
    try:
        proto = onnx.load(str(path), format="protobuf", load_external_data=False)
    except (DecodeError, UnicodeDecodeError, ValueError) as e:
        raise InputError(
            f"{path} is not a whole ONNX model (cut off, or another format): export or download it again"
        ) from e
    except OSError as e:
        raise InputError(f"cannot read {path}: {e.strerror or e}") from e
    if not proto.HasField("graph") or not proto.ir_version or not (proto.graph.node or proto.graph.output):
        raise InputError(f"{path} holds no ONNX graph (another format, or empty): export it again as ONNX")
    if not proto.opset_import:
        raise InputError(
            f"{path} imports no opset, so its operators have no meaning: export it again with an opset"
        )
    _check_external(proto, path)
    try:
        onnx.checker.check_model(str(path))
    except (onnx.checker.ValidationError, ValueError, RuntimeError, TypeError) as e:
        raise InputError(f"{path} is not a valid ONNX model: {one_line(e)}: fix the export") from e
    _check_types(proto, path)
    try:
        return hold(proto, path)
    except UnicodeDecodeError as e:
        raise InputError(f"{path} holds text that is not UTF-8 (damaged): export or download it again") from e


def _check_types(proto: ModelProto, path: Path) -> None:
    """What onnx's checker does not see: types that are unknown, weights of another size than their shape."""
    known = set(TensorProto.DataType.values())
    values = (v for g in graphs(proto.graph) for v in (*g.input, *g.output, *g.value_info))
    for name, kind in (
        *((v.name, v.type.tensor_type.elem_type) for v in values),
        *((t.name, t.data_type) for t in tensors(proto.graph)),
    ):
        if kind not in known:
            raise InputError(
                f"{path} gives {name!r} the unknown type {kind} (damaged, or of a newer onnx): export or "
                "download it again"
            )
    for tensor in tensors(proto.graph):
        if not tensor.HasField("raw_data") or tensor.data_type in PACKED:
            continue
        size = math.prod(tensor.dims) * onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
        if len(tensor.raw_data) != size:
            raise InputError(
                f"{path} has {len(tensor.raw_data)} bytes for the weight {tensor.name!r}, and its shape "
                f"needs {size} (damaged): export or download it again"
            )


def _check_external(proto: ModelProto, path: Path) -> None:
    for tensor in tensors(proto.graph):
        if tensor.data_location != TensorProto.EXTERNAL:
            continue
        info = ExternalDataInfo(tensor)
        file = path.resolve().parent / info.location
        if not file.is_file():
            raise InputError(
                f"{path} keeps the weight {tensor.name!r} in {info.location}, which is missing: "
                f"put that file into {path.parent}"
            )
        end = (info.offset or 0) + (info.length or 0)
        if file.stat().st_size < end:
            raise InputError(
                f"{file} is too short for the weight {tensor.name!r} ({file.stat().st_size} bytes, {end} "
                "needed): copy or download it again"
            )


def hold(proto: ModelProto, path: Path) -> Model:
    """The model of a proto that is whole, or whose external data lies beside `path`.

    Its large weights move out of the proto without being copied.
    """
    skeleton = ModelProto()
    for descriptor, value in proto.ListFields():
        if descriptor.name != "graph":
            _copy_field(skeleton, descriptor.name, value)
    for descriptor, value in proto.graph.ListFields():
        if descriptor.name != "initializer":
            _copy_field(skeleton.graph, descriptor.name, value)
    model = Model(skeleton, path)
    for tensor in proto.graph.initializer:
        kept = skeleton.graph.initializer.add()
        external = tensor.data_location == TensorProto.EXTERNAL
        model.external |= external
        size = (ExternalDataInfo(tensor).length or SMALL + 1) if external else tensor.ByteSize()
        if size <= SMALL or tensor.data_type == TensorProto.STRING:
            kept.CopyFrom(tensor)
            if external:
                _load_inline(kept, model)
            continue
        kept.name, kept.data_type = tensor.name, tensor.data_type
        kept.dims.extend(tensor.dims)
        if tensor.HasField("doc_string"):
            kept.doc_string = tensor.doc_string
        kept.metadata_props.extend(tensor.metadata_props)
        set_mark(kept, len(model.weights))
        model.weights.append(tensor)
    for tensor in tensors(
        skeleton.graph
    ):  # external data inside subgraphs and Constant nodes: rare, made inline
        if tensor.data_location == TensorProto.EXTERNAL and mark_of(tensor) is None:
            _load_inline(tensor, model)
    return model


def _copy_field(target: object, name: str, value: object) -> None:
    field_ = getattr(target, name)
    if hasattr(field_, "MergeFrom"):
        field_.MergeFrom(value)
    elif hasattr(field_, "extend"):
        field_.extend(value)
    else:
        setattr(target, name, value)


def _load_inline(tensor: TensorProto, model: Model) -> None:
    load_external_data_for_tensor(tensor, str(model.folder))
    tensor.ClearField("data_location")
    tensor.ClearField("external_data")


def set_mark(tensor: TensorProto, number: int) -> None:
    """Makes `tensor` (name, type and dims set, no data) the mark of weight `number`."""
    tensor.data_location = TensorProto.EXTERNAL
    del tensor.external_data[:]
    for key, value in (("location", MARK), (MARK, str(number))):
        entry = tensor.external_data.add()
        entry.key, entry.value = key, value


def whole(model: Model) -> ModelProto:
    """The complete ModelProto in memory, inline. Raises InputError where it would pass 2 GiB."""
    proto = ModelProto()
    proto.CopyFrom(model.proto)
    if _weight_bytes(model) > INLINE_LIMIT:
        raise InputError("the model is too large for one protobuf message: use a file with external data")
    for tensor in proto.graph.initializer:
        _restore(tensor, model)
    return proto


def _restore(tensor: TensorProto, model: Model) -> None:
    if mark_of(tensor) is None:
        return
    loaded = model.tensor(tensor)
    tensor.ClearField("external_data")
    tensor.ClearField("data_location")
    for descriptor, value in loaded.ListFields():
        if descriptor.name.endswith("_data") and descriptor.name != "external_data":
            _copy_field(tensor, descriptor.name, value)


def _weight_bytes(model: Model) -> int:
    """Bytes of all weights that are set aside and still used, each counted once."""
    used = {mark_of(t) for t in model.proto.graph.initializer} - {None}
    total = 0
    for number in used:
        assert number is not None
        tensor = model.weights[number]
        external = tensor.data_location == TensorProto.EXTERNAL
        total += (ExternalDataInfo(tensor).length or 0) if external else tensor.ByteSize()
    return total


def save(model: Model, path: str | os.PathLike[str], *, check: bool = True) -> list[Path]:
    """Writes the model to `path`; returns the files written.

    Weights go into the file, or, where the original kept them outside or they pass what protobuf holds, into
    a file beside it; it stands alone either way. That file's name says its content (`<path>.<hash>.data`), so
    that a model that is replaced keeps its own weights until the new one is there. With `check`, onnx's
    checker with full_check must pass first. Raises InputError when the place cannot be written; nothing is
    then left behind.
    """
    path = Path(path)
    path = path.resolve() if path.is_symlink() else path  # weights go beside the file, not beside the link
    outside = model.external or _weight_bytes(model) > INLINE_LIMIT
    before = _own_data(path)
    data: Path | None = None
    with atomic_path(path) as temporary, contextlib.ExitStack() as undo:
        if outside:
            proto, data, is_new = _with_external(model, path)
            if is_new:
                undo.callback(data.unlink, missing_ok=True)
        else:
            proto = whole(model)
        try:
            temporary.write_bytes(proto.SerializeToString())
        except (EncodeError, ValueError) as e:
            raise InputError(f"{path} would pass the 2 GiB that one ONNX file can hold: {one_line(e)}") from e
        del proto
        if check:
            _check_whole(temporary, model)
        undo.pop_all()
    kept = {_source(model, w) for w in model.weights} | {data}
    _remove([old for old in before if old.resolve() not in kept and old not in kept])
    return [path] if data is None else [path, data]


def move(made: str | os.PathLike[str], final: str | os.PathLike[str]) -> None:
    """Puts a model that `save` wrote, of the same name in another folder, under its final name, its weights
    first. Raises InputError where that cannot be."""
    made, final = Path(made), Path(final)
    before = _own_data(final)
    try:
        for data in _own_data(made):
            os.replace(data, final.with_name(data.name))
        os.replace(made, final)
    except OSError as e:
        raise explain_os_error(final, e) from e
    _remove([old for old in before if old not in _own_data(final)])


def _own_data(path: Path) -> list[Path]:
    """The files of weights that `save` wrote for the model that is at `path`, as far as it can be read."""
    name = re.compile(re.escape(path.name) + r"\.[0-9a-f]{12}\.data")
    try:
        if not any(name.fullmatch(n) for n in os.listdir(path.parent)):
            return []
        proto = onnx.load(str(path), format="protobuf", load_external_data=False)
    except Exception:  # whatever is there: nothing of ours
        return []
    external = (t for t in tensors(proto.graph) if t.data_location == TensorProto.EXTERNAL)
    locations = dict.fromkeys(e.value for t in external for e in t.external_data if e.key == "location")
    return [path.with_name(at) for at in locations if name.fullmatch(at) and path.with_name(at).is_file()]


def _remove(files: list[Path]) -> None:
    for file in files:
        with contextlib.suppress(OSError):
            file.unlink()


def _check_whole(made: Path, model: Model) -> None:
    """onnx's full check of a file that was made. Raises InputError where the original fails it as well."""
    try:
        onnx.checker.check_model(str(made), full_check=True)
    except CHECKER_ERRORS as e:
        if model.path.is_file():
            try:
                onnx.checker.check_model(str(model.path), full_check=True)
            except CHECKER_ERRORS as own:
                raise InputError(
                    f"types or shapes in {model.path} contradict each other: {one_line(own)}: fix the export"
                ) from e
        raise


def _source(model: Model, tensor: TensorProto) -> Path | None:
    if tensor.data_location != TensorProto.EXTERNAL:
        return None
    return (model.folder / ExternalDataInfo(tensor).location).resolve()


class _Hashed:
    """A file that is written in order, and the hash of what was written."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.hash, self.size = file, hashlib.sha256(), 0

    def write(self, data: bytes) -> None:
        self.file.write(data)
        self.hash.update(data)
        self.size += len(data)


def _with_external(model: Model, path: Path) -> tuple[ModelProto, Path, bool]:
    """Streams every weight that is set aside, once each, into a file beside `path`, named by its content.

    The proto that points there, the file, and whether it was not there before.
    """
    proto = ModelProto()
    proto.CopyFrom(model.proto)
    places: dict[int, tuple[int, int]] = {}
    with beside(path) as waiting:
        with open(waiting, "wb") as file:
            out = _Hashed(file)
            for tensor in proto.graph.initializer:
                number = mark_of(tensor)
                if number is None or number in places:
                    continue
                out.write(b"\0" * (-out.size % ALIGN))
                start = out.size
                _copy_data(model, model.weights[number], out)
                places[number] = (start, out.size - start)
        data = path.with_name(f"{path.name}.{out.hash.hexdigest()[:12]}.data")
        is_new = not data.exists()
        put(waiting, data)
    for tensor in proto.graph.initializer:
        number = mark_of(tensor)
        if number is None:
            continue
        offset, length = places[number]
        del tensor.external_data[:]
        for key, value in (("location", data.name), ("offset", str(offset)), ("length", str(length))):
            entry = tensor.external_data.add()
            entry.key, entry.value = key, value
    return proto, data, is_new


def _copy_data(model: Model, tensor: TensorProto, out: _Hashed) -> None:
    if tensor.data_location == TensorProto.EXTERNAL:
        info = ExternalDataInfo(tensor)
        with open(model.folder / info.location, "rb") as source:
            source.seek(info.offset or 0)
            left = info.length if info.length is not None else os.fstat(source.fileno()).st_size
            while left > 0 and (block := source.read(min(left, 1 << 24))):
                out.write(block)
                left -= len(block)
    elif tensor.HasField("raw_data"):
        out.write(tensor.raw_data)
    else:
        out.write(onnx.numpy_helper.to_array(tensor).tobytes())
