"""The kernel of y = act(gate) * up against fp64."""

from __future__ import annotations

import math

import pytest

from .conftest import ACTIVATIONS, DTYPES, cases
from .test_bias_act import reference

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns"), cases())
def test_shapes(kernels, rows, columns, dtype):
    gate = kernels.randn(rows, columns, dtype=dtype, std=2)
    up = kernels.randn(rows, columns, dtype=dtype, seed=1)
    want = reference(kernels.torch, gate.double(), "silu") * up.double()
    kernels.agree(kernels.gated_act(gate, up, "silu"), want, scale=4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(kernels, activation, dtype):
    gate, up = kernels.randn(17, 129, dtype=dtype, std=4), kernels.randn(17, 129, dtype=dtype, seed=1)
    want = reference(kernels.torch, gate.double(), activation) * up.double()
    kernels.agree(kernels.gated_act(gate, up, activation), want, scale=4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_infinities_and_nan(kernels, dtype):
    special = [math.inf, -math.inf, math.nan, 0.0, 1.0, -1.0]
    gate = kernels.torch.tensor([[a for a in special for _ in special]], device=kernels.device)
    up = kernels.torch.tensor([special * len(special)], device=kernels.device)
    gate, up = gate.to(kernels.dtype(dtype)), up.to(kernels.dtype(dtype))
    want = reference(kernels.torch, gate.double(), "gelu_tanh") * up.double()
    kernels.agree(kernels.gated_act(gate, up, "gelu_tanh"), want)
