"""NVIDIA GPUs of this machine, asked of the driver alone: no framework, no crash where there is none."""

from __future__ import annotations

import ctypes
import functools
import sys

_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR


@functools.cache
def capabilities() -> tuple[str, ...]:
    """The compute capability of every GPU the driver shows ("8.9"); empty without driver or GPU."""
    try:
        cuda = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        if cuda.cuInit(0) != 0:
            return ()
        number = ctypes.c_int(0)
        if cuda.cuDeviceGetCount(ctypes.byref(number)) != 0:
            return ()
        return tuple(_capability(cuda, index) for index in range(number.value))
    except (OSError, AttributeError):  # no driver, or a stub of one
        return ()


def count() -> int:
    """How many NVIDIA GPUs the driver shows."""
    return len(capabilities())


def _capability(cuda: ctypes.CDLL, index: int) -> str:
    device, value = ctypes.c_int(0), ctypes.c_int(0)
    cuda.cuDeviceGet(ctypes.byref(device), index)
    parts = []
    for attribute in (_MAJOR, _MINOR):
        cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
        parts.append(str(value.value))
    return ".".join(parts)
