"""TensorRT-RTX: built ahead of time on any machine, finished for the GPU where it runs."""

from __future__ import annotations

from typing import Any

from trtfuse.errors import InputError
from trtfuse.targets import capability, gpu

NAME = "tensorrt-rtx"
INSPECTS = False  # an engine is finished where it runs
TIMES_KERNELS = False  # its timing caches do nothing, and are deprecated
INSTALL = "pip install --force-reinstall 'tensorrt-rtx>=1.7'"
# What an engine runs on when no compute capability is set; so it is portable, to later GPUs too.
PORTABLE = ("8.0", "8.6", "8.9", "12.0")


def load() -> Any:
    """The python package. Raises ImportError or OSError where it or a library of it is missing."""
    import tensorrt_rtx

    return tensorrt_rtx


def network_flags(trt: Any) -> int:
    """Strongly typed: the only kind of network that it has."""
    flag = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
    return 1 << int(flag) if flag is not None else 0


def set_capabilities(
    trt: Any, config: Any, wanted: tuple[str, ...]
) -> tuple[tuple[str, ...], bool, list[str]]:
    """Sets the GPU architectures; returns them ("8.9"), whether later ones run it too, and what to say.

    Raises InputError for one that this release does not know.
    """
    offered = {
        f"{name[2:-1]}.{name[-1]}": value
        for name, value in trt.ComputeCapability.__members__.items()
        if name.startswith("SM")
    }
    chosen = capability.read(wanted, tuple(offered))
    if "current" in chosen:
        if len(chosen) > 1:
            raise InputError(
                "--compute-capability current stands alone: name the others instead, or leave it out"
            )
        if not gpu.count():
            raise InputError(
                "--compute-capability current needs an NVIDIA GPU, which is not here: "
                f"name one of {', '.join(offered)}"
            )
        config.num_compute_capabilities = 1
        config.set_compute_capability(trt.ComputeCapability.CURRENT, 0)
        return gpu.capabilities()[:1], False, []
    if not chosen or "portable" in chosen:
        known = tuple(c for c in PORTABLE if c in offered)
        return (
            known,
            True,
            [
                f"the engine runs on NVIDIA GPUs of compute capability {', '.join(known)} and later, "
                "not on 9.0 (Hopper: --target tensorrt there); "
                "Turing needs one of its own (--compute-capability 7.5)"
            ],
        )
    config.num_compute_capabilities = len(chosen)
    for index, name in enumerate(chosen):
        config.set_compute_capability(offered[name], index)
    return chosen, False, []
