"""The kernel of y = act(x + bias) against fp64."""

from __future__ import annotations

import math

import pytest

from .conftest import ACTIVATIONS, DTYPES, cases

pytestmark = pytest.mark.gpu


def reference(torch, x, activation, alpha=0.01):
    """act(x) in fp64."""
    f = torch.nn.functional
    return {
        "relu": f.relu,
        "sigmoid": torch.sigmoid,
        "tanh": torch.tanh,
        "gelu": lambda x: x * 0.5 * torch.special.erfc(-x / math.sqrt(2)),
        "gelu_tanh": lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
        "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
        "silu": lambda x: x * torch.sigmoid(x),
        "hardswish": lambda x: x * torch.clamp(x + 3, 0, 6) / 6,
        "mish": lambda x: x * torch.tanh(f.softplus(x)),
        "leaky_relu": lambda x: torch.where(x < 0, alpha * x, x),
    }[activation](x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns"), cases())
def test_shapes(kernels, rows, columns, dtype):
    x = kernels.randn(rows, columns, dtype=dtype, std=2)
    bias = kernels.randn(columns, dtype=dtype, seed=1)
    want = reference(kernels.torch, x.double() + bias.double(), "gelu")
    kernels.agree(kernels.bias_act(x, bias, "gelu"), want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(kernels, activation, dtype):
    x = (
        kernels.torch.linspace(-12, 12, 16000, device=kernels.device)
        .reshape(16, 1000)
        .to(kernels.dtype(dtype))
    )
    want = reference(kernels.torch, x.double(), activation)
    kernels.agree(kernels.bias_act(x, None, activation), want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_infinities_and_nan(kernels, activation, dtype):
    values = [math.inf, -math.inf, math.nan, 0.0, -0.0, 60.0, -60.0, 3e4, -3e4]
    x = kernels.torch.tensor([values], device=kernels.device, dtype=kernels.dtype(dtype))
    want = reference(kernels.torch, x.double(), activation)
    kernels.agree(kernels.bias_act(x, None, activation), want, scale=10)


@pytest.mark.parametrize("dtype", DTYPES)
def test_scalar_bias_and_slope(kernels, dtype):
    x, bias = kernels.randn(5, 130, dtype=dtype), kernels.randn(1, dtype=dtype, seed=1)
    want = reference(kernels.torch, x.double() + bias.double(), "leaky_relu", 0.3)
    kernels.agree(kernels.bias_act(x, bias, "leaky_relu", 0.3), want)


def test_in_place(kernels):
    x = kernels.randn(33, 129, dtype="float16")
    want = reference(kernels.torch, x.double(), "relu")
    kernels.agree(kernels.bias_act(x, None, "relu", out=x), want)


@pytest.mark.parametrize("offset", [1, 3, 8])
def test_tensors_that_begin_anywhere(kernels, offset):
    x = kernels.randn(40 * 100 + offset, dtype="float16")[offset:].reshape(40, 100)
    bias = kernels.randn(100 + offset, dtype="float16", seed=1)[offset:]
    want = reference(kernels.torch, x.double() + bias.double(), "silu")
    kernels.agree(kernels.bias_act(x, bias, "silu"), want)


@pytest.mark.slow
def test_more_than_two_to_the_31_elements(kernels):
    if kernels.device != "cuda" or kernels.torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("needs 40 GiB of free GPU memory")
    columns, rows = 1000, 2**31 // 1000 + 100
    x = kernels.torch.zeros(rows, columns, device="cuda", dtype=kernels.torch.float16)
    bias = kernels.randn(columns, dtype="float16")
    y = kernels.bias_act(x, bias, "tanh")
    want = bias.double().tanh()
    for at in (0, rows // 2, rows - 1):
        kernels.agree(y[at], want)
    assert bool((y == y[0]).all())
