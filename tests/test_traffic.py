"""Bytes and launches of a site, by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from graphs import F16, Graph, finish, layer_norm, normal

from trtfuse import model as models
from trtfuse.pipeline import match
from trtfuse.traffic import FREE, sizes, traffic


@pytest.mark.parametrize(("dtype", "width"), [(None, 4), (F16, 2)])
def test_a_residual_norm(dtype: type | None, width: int) -> None:
    g = Graph(13, dtype or Graph().dtype)
    total = g.Add(g.input("x", ("batch", 4, 32)), g.input("skip", ("batch", 4, 32)))
    matched = match(models.hold(finish(g, layer_norm(g, total)), Path("m.onnx")))
    known = sizes(matched.model.proto, {"x": (3, 4, 32), "skip": (3, 4, 32)})
    cost = traffic(matched.sites[0], known)
    row, mean, weight, one = 3 * 4 * 32 * width, 3 * 4 * width, 32 * width, width
    assert cost.bytes_after == 3 * row + 2 * weight
    assert cost.launches_after == 1
    assert cost.launches_before == 10
    adds = 3 * row  # x, skip, total
    centre = (row + mean) + (2 * row + mean)
    variance = (2 * row + one) + (row + mean) + (2 * mean + one) + 2 * mean
    scale = (2 * row + mean) + 2 * (2 * row + weight)
    assert cost.bytes_before == adds + centre + variance + scale


def test_unknown_shapes_have_unknown_bytes_and_known_launches() -> None:
    g = Graph()
    x = g.input("x", ("batch", 4, 32))
    matched = match(models.hold(finish(g, g.Mul(x, g.Sigmoid(x))), Path("m.onnx")))
    cost = traffic(matched.sites[0], {})
    assert (cost.bytes_before, cost.bytes_after) == (None, None)
    assert (cost.launches_before, cost.launches_after) == (2, 1)


def test_views_are_free() -> None:
    assert {"Reshape", "Constant", "Unsqueeze"} <= FREE
    assert "Transpose" not in FREE


def test_one_symbol_has_one_size() -> None:
    g = Graph()
    x, other = g.input("x", ("batch", 4)), g.input("other", ("batch", 4))
    y = g.Add(g.Mul(x, g.Sigmoid(x)), normal((4,), 1))
    known = sizes(finish(g, g.Add(y, other)), {"x": (5, 4)})
    assert known[y] == 5 * 4 * 4
