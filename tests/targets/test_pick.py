"""Which target is taken, and what is said where it cannot be."""

from __future__ import annotations

import ctypes

import pytest

from trtfuse import targets
from trtfuse.errors import EnvironmentMissing, InputError
from trtfuse.targets import gpu


@pytest.fixture
def machine(monkeypatch):
    """Sets which packages and how many GPUs there are."""

    def has(*packages: str, gpus: int = 0) -> None:
        monkeypatch.setattr(targets, "installed", lambda target: target in packages)
        monkeypatch.setattr(gpu, "capabilities", lambda: ("8.9",) * gpus)

    return has


def test_auto_takes_tensorrt_only_with_a_gpu(machine):
    machine("tensorrt", "tensorrt-rtx", gpus=1)
    assert targets.pick("auto") == "tensorrt"
    machine("tensorrt", "tensorrt-rtx")
    assert targets.pick("auto") == "tensorrt-rtx"
    machine("tensorrt-rtx", gpus=1)
    assert targets.pick("auto") == "tensorrt-rtx"


def test_what_is_missing_is_named_with_its_command(machine):
    machine()
    for asked in ("auto", "tensorrt-rtx"):
        with pytest.raises(EnvironmentMissing, match=r"pip install 'tensorrt-rtx>=1\.7'"):
            targets.pick(asked)
    machine("tensorrt-rtx", gpus=1)
    with pytest.raises(EnvironmentMissing, match=r"pip install 'tensorrt>=10\.6'"):
        targets.pick("tensorrt")
    machine("tensorrt")
    with pytest.raises(EnvironmentMissing, match=r"needs an NVIDIA GPU.*--target tensorrt-rtx"):
        targets.pick("tensorrt")


def test_onnx_needs_nothing_and_other_names_are_refused(machine):
    machine()
    assert targets.pick("onnx") == "onnx"
    with pytest.raises(InputError, match="no target 'trt': use one of auto, tensorrt, tensorrt-rtx, onnx"):
        targets.pick("trt")


@pytest.mark.parametrize(
    ("target", "version", "opset"),
    [
        ("tensorrt", (10, 6), 20), ("tensorrt", (10, 15), 24), ("tensorrt", (11, 2), 25),
        ("tensorrt-rtx", (1, 7), 25), ("tensorrt-rtx", (1, 0), 20), ("onnx", (0, 0), 25),
    ],
)  # fmt: skip
def test_the_newest_opset_of_a_release(monkeypatch, target, version, opset):
    monkeypatch.setattr(targets, "version", lambda _: version)
    assert targets.newest_opset(target) == opset


class _Driver:
    """A CUDA driver as ctypes shows it: `gpus` by compute capability, or an error from cuInit."""

    def __init__(self, gpus=(), error=0):
        self.gpus, self.error = gpus, error

    def cuInit(self, flags):
        return self.error

    def cuDeviceGetCount(self, number):
        number._obj.value = len(self.gpus)
        return 0

    def cuDeviceGet(self, device, index):
        device._obj.value = index
        return 0

    def cuDeviceGetAttribute(self, value, attribute, device):
        value._obj.value = self.gpus[device.value][attribute - 75]
        return 0


@pytest.mark.parametrize(
    ("driver", "expected"),
    [
        (_Driver(((8, 9), (12, 0))), ("8.9", "12.0")),
        (_Driver(), ()),
        (_Driver(((9, 0),), error=100), ()),
        (None, ()),
        (object(), ()),
    ],
)
def test_gpus_are_asked_of_the_driver(monkeypatch, driver, expected):
    def load(name):
        if driver is None:
            raise OSError("no such library")
        return driver

    monkeypatch.setattr(ctypes, "CDLL", load)
    assert gpu.capabilities.__wrapped__() == expected
