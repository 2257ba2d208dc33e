"""The kernels of RmsNorm and SkipRmsNorm against fp64."""

from __future__ import annotations

import math

import pytest

from .conftest import DTYPES, cases

pytestmark = pytest.mark.gpu


def reference(s, scale=None, epsilon=1e-6):
    """RmsNorm of s over its last axis in fp64."""
    y = s / ((s**2).mean(-1, keepdim=True) + epsilon).sqrt()
    return y if scale is None else y * scale.double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns"), cases())
def test_shapes(kernels, rows, columns, dtype):
    x, scale = kernels.randn(rows, columns, dtype=dtype), kernels.randn(columns, dtype=dtype, seed=1)
    y, _ = kernels.rms_norm(x, scale)
    kernels.agree(y, reference(x.double(), scale), scale=4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns"), cases())
def test_skip_shapes(kernels, rows, columns, dtype):
    x, skip = kernels.randn(rows, columns, dtype=dtype), kernels.randn(rows, columns, dtype=dtype, seed=3)
    scale, preset = kernels.randn(columns, dtype=dtype, seed=1), kernels.randn(columns, dtype=dtype, seed=4)
    y, total = kernels.rms_norm(x, scale, skip=skip, preset=preset, with_sum=True)
    want = (x.float() + preset.float() + skip.float()).double()  # the sum is fp32, and is not rounded further
    kernels.agree(total, want)
    kernels.agree(y, reference(want, scale), scale=4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [64, 127, 768, 3072, 40000])
def test_infinities_and_nan_stay_in_their_rows(kernels, columns, dtype):
    x = kernels.randn(6, columns, dtype=dtype)
    x[1, 5], x[2, 6], x[4, 7] = math.inf, math.nan, -math.inf
    y, _ = kernels.rms_norm(x)
    kernels.agree(y, reference(x.double()), scale=4)


def test_no_overflow_in_fp16(kernels):
    x = kernels.randn(4, 4096, dtype="float16", std=1e4)
    y, _ = kernels.rms_norm(x)
    kernels.agree(y, reference(x.double()), scale=4)
