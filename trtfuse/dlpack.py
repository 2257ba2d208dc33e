"""DLPack by ctypes: tensors of any framework in, tensors for any framework out, with none installed.

https://dmlc.github.io/dlpack/latest
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from trtfuse import cuda
from trtfuse.errors import InputError

CPU, CUDA = 1, 2  # DLDeviceType
LEGACY_STREAM = 1  # how the protocol names CUDA's default stream
_VERSION = (1, 0)
_READ_ONLY = 1  # DLPACK_FLAG_BITMASK_READ_ONLY
# DLDataTypeCode and bits -> the type. The 8-bit floats came with DLPack 1.1.
_TYPES: dict[tuple[int, int], np.dtype[Any]] = {
    **{(0, 8 * n): np.dtype(f"i{n}") for n in (1, 2, 4, 8)},
    **{(1, 8 * n): np.dtype(f"u{n}") for n in (1, 2, 4, 8)},
    **{(2, 8 * n): np.dtype(f"f{n}") for n in (2, 4, 8)},
    (4, 16): np.dtype(ml_dtypes.bfloat16),
    (6, 8): np.dtype(bool),
    (10, 8): np.dtype(ml_dtypes.float8_e4m3fn),
    (12, 8): np.dtype(ml_dtypes.float8_e5m2),
}
_CODES = {dtype: code for code, dtype in _TYPES.items()}


class _DataType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _Device(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int32), ("index", ctypes.c_int32)]


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Managed(ctypes.Structure):
    _fields_ = [("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", _Deleter)]


class _Versioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", _Deleter),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    ]


_PLAIN, _NEWER = b"dltensor", b"dltensor_versioned"
_api = ctypes.pythonapi
_Destructor = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_new = _api.PyCapsule_New
_new.restype, _new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, _Destructor]
_is_valid = _api.PyCapsule_IsValid
_is_valid.restype, _is_valid.argtypes = ctypes.c_int, [ctypes.py_object, ctypes.c_char_p]
_pointer = _api.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
_rename = _api.PyCapsule_SetName
_rename.restype, _rename.argtypes = ctypes.c_int, [ctypes.py_object, ctypes.c_char_p]
# The same for a destructor, which gets a capsule that is dying: it must not be counted again.
_dying_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_IsValid", _api)
)
_dying_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", _api)
)


class View:
    """Somebody's tensor, held until this object goes.

    ptr: of its first element. strides: in elements. device_type: 1 for the CPU, 2 for CUDA.
    """

    def __init__(self, tensor: _Tensor, release: Callable[[], None], read_only: bool) -> None:
        self._release: Callable[[], None] | None = release
        code = (tensor.dtype.code, tensor.dtype.bits)
        if tensor.dtype.lanes != 1 or code not in _TYPES:
            raise InputError(f"a tensor of DLPack's type {code} cannot be read: convert it first")
        self.dtype = _TYPES[code]
        self.shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
        given = tuple(tensor.strides[i] for i in range(tensor.ndim)) if tensor.strides else None
        self.strides = given if given is not None else _row_major(self.shape)
        self.ptr = (tensor.data or 0) + int(tensor.byte_offset)
        self.device_type, self.device_id = int(tensor.device.type), int(tensor.device.index)
        self.read_only = read_only

    @property
    def is_contiguous(self) -> bool:
        """Whether its elements lie one behind the other, the last axis fastest."""
        if 0 in self.shape:
            return True
        pairs = zip(self.shape, self.strides, _row_major(self.shape), strict=True)
        return all(size == 1 or have == want for size, have, want in pairs)

    def __del__(self) -> None:
        release, self._release = getattr(self, "_release", None), None
        if release is not None:
            release()


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def consume(tensor: Any, stream: int | None = None) -> View:
    """The memory behind an object with __dlpack__. stream: the CUDA stream that will read it.

    Raises InputError for an object that gives none, or a type that is not known.
    """
    device, _ = tensor.__dlpack_device__()
    words: dict[str, Any] = {"stream": stream or LEGACY_STREAM} if int(device) == CUDA else {}
    try:
        try:
            capsule = tensor.__dlpack__(max_version=_VERSION, **words)
        except TypeError:  # older than DLPack 1.0
            capsule = tensor.__dlpack__(**words)
    except (BufferError, RuntimeError, ValueError) as e:
        raise InputError(f"a tensor does not give its memory by DLPack: {e}") from e
    name = next((n for n in (_NEWER, _PLAIN) if _is_valid(capsule, n)), None)
    if name is None:
        raise InputError("what __dlpack__ gave is no capsule of DLPack: update the package it comes from")
    address = _pointer(capsule, name)
    managed: Any = ctypes.cast(address, ctypes.POINTER(_Versioned if name == _NEWER else _Managed)).contents
    _rename(capsule, _USED[name])  # from here on its memory is ours to give back

    def release() -> None:
        if managed.deleter:
            managed.deleter(address)

    return View(managed.tensor, release, name == _NEWER and bool(managed.flags & _READ_ONLY))


_USED = {_PLAIN: b"used_dltensor", _NEWER: b"used_dltensor_versioned"}  # kept: a capsule does not copy names


class _Lent:
    """What one capsule refers to; alive in _LENT until its consumer gives it back."""

    def __init__(self, managed: Any, shape: Any, strides: Any, owner: Any) -> None:
        self.parts = (managed, shape, strides, owner)


_LENT: dict[int, _Lent] = {}


def _give_back_(address: int) -> None:
    _LENT.pop(address, None)


def _drop_(capsule: int) -> None:
    """The end of a capsule: one that nobody consumed still holds its memory."""
    for name in (_PLAIN, _NEWER):
        if _dying_is_valid(capsule, name):
            _LENT.pop(_dying_pointer(capsule, name), None)


_give_back, _drop = _Deleter(_give_back_), _Destructor(_drop_)  # kept: C calls them at any time


def produce(
    ptr: int,
    shape: tuple[int, ...],
    dtype: Any,
    device: tuple[int, int],
    owner: Any,
    *,
    versioned: bool = True,
) -> Any:
    """A capsule of contiguous memory that `owner` keeps alive. device: (type, index), both DLPack's."""
    dtype = np.dtype(dtype)
    if dtype not in _CODES:
        raise InputError(f"DLPack has no type for {dtype}")
    sizes = (ctypes.c_int64 * max(len(shape), 1))(*shape)
    strides = (ctypes.c_int64 * max(len(shape), 1))(*_row_major(shape))
    code, bits = _CODES[dtype]
    tensor = _Tensor(
        data=ptr,
        device=_Device(*device),
        ndim=len(shape),
        dtype=_DataType(code, bits, 1),
        shape=sizes,
        strides=strides,
        byte_offset=0,
    )
    managed: Any
    if versioned:
        managed = _Versioned(major=_VERSION[0], minor=_VERSION[1], deleter=_give_back, flags=0, tensor=tensor)
    else:
        managed = _Managed(tensor=tensor, deleter=_give_back)
    address = ctypes.addressof(managed)
    _LENT[address] = _Lent(managed, sizes, strides, owner)
    return _new(address, _NEWER if versioned else _PLAIN, _drop)


class DeviceTensor:
    """A contiguous tensor on a GPU, for whatever takes DLPack: torch.from_dlpack(t), cupy.from_dlpack(t).

    ptr: the address. stream: the one that writes it; who takes it waits for that. numpy() copies it to the
    host.
    """

    def __init__(
        self, ptr: int, shape: tuple[int, ...], dtype: Any, device: int, *, owner: Any, stream: cuda.Stream
    ) -> None:
        self.ptr = ptr
        self.shape = tuple(shape)
        self.dtype = np.dtype(dtype)
        self.device = device
        self.stream = stream
        self._owner = owner

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __dlpack_device__(self) -> tuple[int, int]:
        return CUDA, self.device

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """The capsule. stream: the consumer's, None for CUDA's default one, -1 to wait for nothing."""
        if dl_device not in (None, (CUDA, self.device)) or copy:
            raise BufferError("the tensor is given as it is, on its GPU: copy it afterwards")
        if stream != -1:
            event = cuda.Event()
            event.record(self.stream.handle)
            event.hold(LEGACY_STREAM if stream is None else stream)
        versioned = max_version is not None and max_version >= (1, 0)
        return produce(
            self.ptr, self.shape, self.dtype, (CUDA, self.device), self._owner, versioned=versioned
        )

    def numpy(self) -> np.ndarray[Any, Any]:
        """A copy on the host."""
        array = np.empty(self.shape, self.dtype)
        if self.nbytes:
            cuda.copy_async(array.ctypes.data, self.ptr, self.nbytes, self.stream)
        self.stream.synchronize()
        return array
