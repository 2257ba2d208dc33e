"""The kernels by their C interface, on torch's tensors; every test here needs an NVIDIA GPU and torch.

TRTFUSE_TEST_KERNELS names a library to test; without it libtrtfuse_kernels.so is built for the GPU at hand.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

import pytest

ACTIVATIONS = "relu sigmoid tanh gelu gelu_tanh quick_gelu silu hardswish mish leaky_relu".split()
COLUMNS = (1, 7, 64, 127, 128, 768, 1000, 1024, 3072, 4096, 8192, 16384, 100003)
ROWS = (0, 1, 3, 1024, 65536)
DTYPES = ("float32", "float16", "bfloat16")
# Of the largest tensor of a case, so that the fp64 reference beside it fits any GPU.
MOST_ELEMENTS = int(os.environ.get("TRTFUSE_TEST_ELEMENTS", 2**28))


def cases() -> list[tuple[int, int]]:
    """Every (rows, columns) within MOST_ELEMENTS."""
    return [(r, c) for r in ROWS for c in COLUMNS if r * c <= MOST_ELEMENTS]


class Kernels:
    """The launchers. Tensors are contiguous, of one type; None for one that is not there."""

    def __init__(self, path: Path, torch: Any, device: str) -> None:
        self.torch, self.device = torch, device
        self.library = ctypes.CDLL(str(path))
        self.library.trtfuse_error.restype = ctypes.c_char_p
        self.types = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}

    def dtype(self, name: str) -> Any:
        return getattr(self.torch, name)

    def randn(
        self, *shape: int, dtype: str = "float32", mean: float = 0.0, std: float = 1.0, seed: int = 0
    ) -> Any:
        """Normal numbers rounded to `dtype`; the same for the same seed."""
        generator = self.torch.Generator(device=self.device).manual_seed(seed)
        x = self.torch.randn(*shape, generator=generator, device=self.device)
        return (x * std + mean).to(self.dtype(dtype))

    def poisoned(self, like: Any) -> Any:
        """A result that shows every element that no one wrote."""
        return self.torch.full_like(like, float("nan"))

    def call(self, name: str, *arguments: Any) -> None:
        stream = self.torch.cuda.current_stream().cuda_stream if self.device == "cuda" else 0
        function = getattr(self.library, f"trtfuse_test_{name}")
        status = function(*(self._native(a) for a in arguments), ctypes.c_void_p(stream))
        if status == 0 and self.device == "cuda":
            self.torch.cuda.synchronize()
        assert status == 0, self.library.trtfuse_error(status).decode()

    def _native(self, value: Any) -> Any:
        if value is None:
            return ctypes.c_void_p(0)
        if isinstance(value, self.torch.Tensor):
            assert value.is_contiguous()
            return ctypes.c_void_p(value.data_ptr())
        if isinstance(value, float):
            return ctypes.c_float(value)
        if isinstance(value, self.torch.Size):
            return (ctypes.c_int64 * max(len(value), 1))(*value)
        return value  # int, wrapped by the caller where 64 bits wide

    # --- one method a launcher; results are returned ---

    def bias_act(self, x: Any, bias: Any, activation: str, alpha: float = 0.01, out: Any = None) -> Any:
        y = self.poisoned(x) if out is None else out
        rows, columns = _matrix(x)
        scalar = int(bias is not None and bias.numel() == 1 and x.shape[-1] != 1)
        kind = ACTIVATIONS.index(activation)
        self.call("bias_act", self.types[x.dtype], kind, alpha, x, bias, y, rows, columns, scalar)
        return y

    def gated_act(self, gate: Any, up: Any, activation: str, alpha: float = 0.01) -> Any:
        y = self.poisoned(gate)
        kind = ACTIVATIONS.index(activation)
        count = ctypes.c_int64(gate.numel())
        self.call("gated_act", self.types[gate.dtype], kind, alpha, gate, up, y, count)
        return y

    def layer_norm(
        self, x: Any, scale: Any = None, bias: Any = None, *, skip: Any = None, preset: Any = None,
        epsilon: float = 1e-5, with_sum: bool = False,
    ) -> tuple[Any, Any]:  # fmt: skip
        y, total = self.poisoned(x), self.poisoned(x) if with_sum else None
        rows, columns = _matrix(x)
        scalar = int(preset is not None and preset.numel() == 1)
        self.call("layer_norm", self.types[x.dtype], x, skip, preset, scale, bias, y, total, rows, columns,
                  epsilon, scalar)  # fmt: skip
        return y, total

    def rms_norm(
        self, x: Any, scale: Any = None, *, skip: Any = None, preset: Any = None, epsilon: float = 1e-6,
        with_sum: bool = False,
    ) -> tuple[Any, Any]:  # fmt: skip
        y, total = self.poisoned(x), self.poisoned(x) if with_sum else None
        rows, columns = _matrix(x)
        scalar = int(preset is not None and preset.numel() == 1)
        self.call("rms_norm", self.types[x.dtype], x, skip, preset, scale, y, total, rows, columns, epsilon,
                  scalar)  # fmt: skip
        return y, total

    def softmax(
        self, x: Any, *, mask: Any = None, condition: Any = None, scale: float = 1.0,
        fill: float = float("-inf"), keep: int = 1,
    ) -> Any:  # fmt: skip
        y = self.poisoned(x)
        other = mask if mask is not None else condition
        own = self.torch.Size([]) if other is None else other.shape
        size = 1 if condition is None else condition.element_size()
        self.call("softmax", self.types[x.dtype], x, mask, condition, size, y, x.shape, x.dim(), own,
                  len(own), scale, fill, keep)  # fmt: skip
        return y

    # --- judging ---

    def agree(self, have: Any, want: Any, scale: float = 1.0) -> None:
        """have within its type's rounding of the fp64 want, and NaN and infinities in the same places.

        scale: of the terms that were added up, where they are larger than the result.
        """
        torch, wide = self.torch, have.double()
        assert have.shape == want.shape
        # What rounds to infinity in the type is infinite; fp64 has it finite.
        want = want.to(have.dtype).double() if have.dtype == torch.float16 else want
        assert torch.equal(wide.isnan(), want.isnan()), "NaN in other places"
        assert torch.equal(wide.isinf(), want.isinf()), "infinities in other places"
        finite = want.isfinite()
        error = (wide - want).abs()[finite]
        if error.numel() == 0:
            return
        relative, absolute = {
            torch.float32: (2e-6, 2e-6),
            torch.float16: (1.1e-3, 2e-6),
            torch.bfloat16: (8.5e-3, 2e-6),
        }[have.dtype]
        allowed = relative * want.abs()[finite] + absolute * scale
        worst = (error / allowed).max().item()
        assert worst <= 1, f"{worst:.3g} times the allowed error, largest {error.max().item():.3g}"


def _matrix(x: Any) -> tuple[ctypes.c_int64, ctypes.c_int64]:
    columns = x.shape[-1]
    return ctypes.c_int64(x.numel() // columns if columns else 0), ctypes.c_int64(columns)


@pytest.fixture(scope="session")
def kernels() -> Kernels:
    device = os.environ.get("TRTFUSE_TEST_DEVICE", "cuda")
    torch = pytest.importorskip("torch", reason="torch is not installed: it holds and checks the tensors")
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no NVIDIA GPU: the kernels cannot run here")
    path = os.environ.get("TRTFUSE_TEST_KERNELS")
    if path is None:
        from trtfuse.errors import EnvironmentMissing
        from trtfuse.plugin_library import build

        major, minor = torch.cuda.get_device_capability()
        try:
            path = str(build(architectures=[f"{major}{minor}"], kernels_only=True))
        except EnvironmentMissing as e:
            pytest.skip(str(e))
    return Kernels(Path(path), torch, device)
