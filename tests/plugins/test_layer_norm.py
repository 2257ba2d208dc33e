"""The kernels of LayerNorm and SkipLayerNorm against fp64."""

from __future__ import annotations

import math

import pytest

from .conftest import DTYPES, cases

pytestmark = pytest.mark.gpu


def reference(s, scale=None, bias=None, epsilon=1e-5):
    """LayerNorm of s over its last axis in fp64."""
    centred = s - s.mean(-1, keepdim=True)
    y = centred / ((centred**2).mean(-1, keepdim=True) + epsilon).sqrt()
    y = y if scale is None else y * scale.double()
    return y if bias is None else y + bias.double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns"), cases())
def test_shapes(kernels, rows, columns, dtype):
    x = kernels.randn(rows, columns, dtype=dtype)
    scale, bias = kernels.randn(columns, dtype=dtype, seed=1), kernels.randn(columns, dtype=dtype, seed=2)
    y, _ = kernels.layer_norm(x, scale, bias)
    kernels.agree(y, reference(x.double(), scale, bias), scale=4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns"), cases())
def test_skip_shapes(kernels, rows, columns, dtype):
    x, skip = kernels.randn(rows, columns, dtype=dtype), kernels.randn(rows, columns, dtype=dtype, seed=3)
    scale, bias = kernels.randn(columns, dtype=dtype, seed=1), kernels.randn(columns, dtype=dtype, seed=2)
    preset = kernels.randn(columns, dtype=dtype, seed=4)
    y, total = kernels.layer_norm(x, scale, bias, skip=skip, preset=preset, with_sum=True)
    want = (x.float() + preset.float() + skip.float()).double()  # the sum is fp32, and is not rounded further
    kernels.agree(total, want)
    kernels.agree(y, reference(want, scale, bias), scale=4)


@pytest.mark.parametrize("columns", [64, 128, 768, 1000, 4096, 16384, 40000, 100003])
@pytest.mark.parametrize("rows", [1, 5])
def test_large_mean_costs_nothing(kernels, rows, columns):
    x = kernels.randn(rows, columns, mean=1000, std=0.1)
    y, _ = kernels.layer_norm(x)
    # The input itself is rounded to 6e-5; the reference has the same input, so only the arithmetic differs.
    kernels.agree(y, reference(x.double()), scale=10)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [96, 127, 3072, 20000])
@pytest.mark.parametrize("present", ["", "scale", "bias", "preset", "scalar", "scale bias scalar"])
def test_variants(kernels, present, columns, dtype):
    x, skip = kernels.randn(6, columns, dtype=dtype), kernels.randn(6, columns, dtype=dtype, seed=3)
    scale = kernels.randn(columns, dtype=dtype, seed=1) if "scale" in present else None
    bias = kernels.randn(columns, dtype=dtype, seed=2) if "bias" in present else None
    preset = kernels.randn(columns if "preset" in present else 1, dtype=dtype, seed=4)
    preset = preset if "preset" in present or "scalar" in present else None
    y, _ = kernels.layer_norm(x, scale, bias, skip=skip, preset=preset, epsilon=1e-3)
    total = (x.float() + (0 if preset is None else preset.float()) + skip.float()).double()
    kernels.agree(y, reference(total, scale, bias, 1e-3), scale=4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [64, 127, 768, 3072, 40000])
def test_infinities_and_nan_stay_in_their_rows(kernels, columns, dtype):
    x = kernels.randn(6, columns, dtype=dtype)
    x[1, 5], x[2, 6], x[4, 7] = math.inf, math.nan, -math.inf
    y, _ = kernels.layer_norm(x)
    kernels.agree(y, reference(x.double()), scale=4)


def test_no_overflow_in_fp16(kernels):
    x = kernels.randn(4, 768, dtype="float16", std=1e4)
    y, _ = kernels.layer_norm(x)
    kernels.agree(y, reference(x.double()), scale=4)


@pytest.mark.parametrize("offset", [1, 3, 8])
@pytest.mark.parametrize("columns", [64, 768, 1001, 3072, 40000])
def test_tensors_that_begin_anywhere(kernels, columns, offset):
    x = kernels.randn(5 * columns + offset, dtype="float16")[offset:].reshape(5, columns)
    scale = kernels.randn(columns + 1, dtype="float16", seed=1)[1:]
    y, _ = kernels.layer_norm(x, scale)
    kernels.agree(y, reference(x.double(), scale), scale=4)


@pytest.mark.slow
def test_more_than_two_to_the_31_elements(kernels):
    if kernels.device != "cuda" or kernels.torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("needs 40 GiB of free GPU memory")
    columns = 1024
    rows = 2**31 // columns + 100
    row = kernels.randn(1, columns, dtype="float16")
    y, _ = kernels.layer_norm(row.expand(rows, columns).contiguous())
    kernels.agree(y[-1:], reference(row.double()), scale=4)
    assert bool((y == y[0]).all())
