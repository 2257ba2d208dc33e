"""The kernel of softmax(scale * x + mask) against fp64."""

from __future__ import annotations

import math

import pytest

from .conftest import DTYPES, cases

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns"), cases())
def test_shapes(kernels, rows, columns, dtype):
    x = kernels.randn(rows, columns, dtype=dtype, std=3)
    kernels.agree(kernels.softmax(x, scale=0.7), (x.double() * 0.7).softmax(-1))


MASKS = (
    (2, 3, 5, 0),
    (1, 3, 5, 0),
    (2, 1, 1, 0),
    (2, 1, 5, 0),
    (1, 1, 5, 0),
    (0,),
    (5, 0),
    (2, 3, 5, 1),
    (1,),
)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1, 7, 64, 127, 512, 3072, 20000])
@pytest.mark.parametrize("shape", MASKS)
def test_additive_mask_of_any_broadcast(kernels, shape, columns, dtype):
    """A 0 in the shape stands for the columns."""
    x = kernels.randn(2, 3, 5, columns, dtype=dtype)
    mask = kernels.randn(*(d or columns for d in shape), dtype=dtype, seed=1, std=2)
    want = (x.double() * 0.125 + mask.double()).softmax(-1)
    kernels.agree(kernels.softmax(x, mask=mask, scale=0.125), want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["bool", "int32"])
@pytest.mark.parametrize("columns", [1, 7, 64, 127, 512, 3072, 20000])
@pytest.mark.parametrize(("shape", "keep"), [(s, n % 2) for n, s in enumerate(MASKS)])
def test_boolean_condition(kernels, shape, keep, columns, kind, dtype):
    torch = kernels.torch
    x = kernels.randn(2, 3, 5, columns, dtype=dtype)
    condition = kernels.randn(*(d or columns for d in shape), seed=1) > 0
    fill = -1e4 if keep else -math.inf
    scores = x.double() * 0.5
    kept = condition if keep else ~condition
    want = torch.where(kept, scores, torch.full_like(scores, fill)).softmax(-1)
    given = condition.to(torch.int32) if kind == "int32" else condition
    kernels.agree(kernels.softmax(x, condition=given, scale=0.5, fill=fill, keep=keep), want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [8, 64, 127, 768, 3072, 40000, 100003])
def test_infinities_and_nan_stay_in_their_rows(kernels, columns, dtype):
    x = kernels.randn(7, columns, dtype=dtype)
    x[1, 5], x[2, 6], x[4, 7], x[5] = math.inf, math.nan, -math.inf, -math.inf
    kernels.agree(kernels.softmax(x), x.double().softmax(-1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_whose_mask_is_the_lowest_number(kernels, dtype):
    x = kernels.randn(3, 64, dtype=dtype)
    mask = kernels.torch.zeros_like(x)
    mask[1] = kernels.torch.finfo(mask.dtype).min
    mask[2, 10:] = kernels.torch.finfo(mask.dtype).min
    want = (x.float() + mask.float()).double().softmax(-1)
    kernels.agree(kernels.softmax(x, mask=mask), want)


def test_mask_that_begins_anywhere(kernels):
    x = kernels.randn(4, 6, 96, dtype="float16")
    mask = kernels.randn(6 * 96 + 1, dtype="float16", seed=1)[1:].reshape(6, 96)
    kernels.agree(kernels.softmax(x, mask=mask), (x.double() + mask.double()).softmax(-1))
