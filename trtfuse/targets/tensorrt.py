"""TensorRT 10.6 to 11: built on the GPU it will run on, strongly typed."""

from __future__ import annotations

from typing import Any

from trtfuse.errors import EnvironmentMissing, InputError
from trtfuse.targets import capability, gpu

NAME = "tensorrt"
TIMES_KERNELS = True
INSPECTS = True  # deserializes what it built: the GPU is here
INSTALL = "pip install --force-reinstall 'tensorrt>=10.6'"
OLDEST = (10, 6)
AMPERE = 8  # the first major compute capability that the hardware compatible level covers


def load() -> Any:
    """The python package.

    Raises ImportError or OSError where it or a library of it is missing, EnvironmentMissing where it is too
    old or has no GPU to build on.
    """
    import tensorrt

    major, minor = (int(part) for part in tensorrt.__version__.split(".")[:2])
    if (major, minor) < OLDEST:
        raise EnvironmentMissing(
            f"TensorRT {tensorrt.__version__} is too old: pip install --upgrade 'tensorrt>=10.6'"
        )
    if not gpu.count():
        raise EnvironmentMissing(
            "TensorRT needs an NVIDIA GPU and its driver, which are not here: use --target tensorrt-rtx"
        )
    return tensorrt


def network_flags(trt: Any) -> int:
    """Strongly typed: a flag in TensorRT 10, the only kind of network where the flag is gone."""
    flag = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
    return 1 << int(flag) if flag is not None else 0


def set_capabilities(
    trt: Any, config: Any, wanted: tuple[str, ...]
) -> tuple[tuple[str, ...], bool, list[str]]:
    """Sets the GPU architectures; returns them ("8.9"), whether later ones run it too, and what to say.

    TensorRT times kernels on the GPU it builds on, so that is what an engine is for, unless it is to be
    portable ("portable", "all"): then it runs on every GPU from Ampere on, and is slower.
    Raises InputError for an architecture that is not this machine's.
    """
    here = gpu.capabilities()[0]
    chosen = capability.read(wanted, gpu.capabilities())
    if "portable" in chosen:
        if int(here.split(".")[0]) < AMPERE:
            raise InputError(f"a portable engine needs an Ampere GPU or newer to build on, this is {here}")
        config.hardware_compatibility_level = trt.HardwareCompatibilityLevel.AMPERE_PLUS
        return (here,), True, ["the engine runs on NVIDIA GPUs of compute capability 8.0 and later"]
    if any(c not in (here, "current") for c in chosen):
        raise InputError(
            f"TensorRT builds for the GPU it runs on, {here} here: leave --compute-capability out, "
            "say portable, or use --target tensorrt-rtx"
        )
    return (
        (here,),
        False,
        [f"the engine is for NVIDIA GPUs of compute capability {here}, on which it was built"],
    )
