"""Shapes that only follow when sizes are followed element by element."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from graphs import F32, I64, Graph, finish

from trtfuse.infer import dims_of
from trtfuse.normalise import infer_shapes


def shape_of(g: Graph, y: str) -> list[Any] | None:
    proto = infer_shapes(finish(g, y))
    infos = {v.name: v.type for v in (*proto.graph.value_info, *proto.graph.output)}
    return dims_of(infos.get(y))


def size(g: Graph, x: str, axis: int) -> str:
    """One size of x as a vector of one element, as TorchScript writes it."""
    return str(g.Unsqueeze(g.Gather(g.Shape(x), np.array(axis, I64), axis=0), np.array([0], I64)))


def test_heads_split_by_a_reshape_of_computed_sizes() -> None:
    g = Graph(13)
    x = g.input("x", ("batch", "sequence", 32))
    target = g.Concat(size(g, x, 0), size(g, x, 1), np.array([4, 8], I64), axis=0)
    y = g.Reshape(x, target)
    assert shape_of(g, y) == ["batch", "sequence", 4, 8]


def test_minus_one_is_the_rest_where_the_symbols_agree() -> None:
    g = Graph(13)
    x = g.input("x", ("batch", "sequence", 4, 8))
    y = g.Reshape(x, g.Concat(size(g, x, 0), size(g, x, 1), np.array([-1], I64), axis=0))
    assert shape_of(g, y) == ["batch", "sequence", 32]


def test_minus_one_is_unknown_where_they_do_not() -> None:
    g = Graph(13)
    x = g.input("x", ("batch", "sequence", 4, 8))
    y = g.Reshape(x, g.Concat(size(g, x, 0), np.array([-1, 32], I64), axis=0))
    assert shape_of(g, y) == ["batch", None, 32]


def test_zero_copies_a_size() -> None:
    g = Graph(13)
    y = g.Reshape(g.input("x", ("batch", 6, 4)), np.array([0, 3, 8], I64))
    assert shape_of(g, y) == ["batch", 3, 8]


@pytest.mark.parametrize("opset", [11, 13])
def test_expand_to_computed_sizes(opset: int) -> None:
    g = Graph(opset)
    x, w = g.input("x", ("batch", 5)), normal_row()
    shape = g.Concat(g.Slice(g.Shape(x), np.array([0], I64), np.array([1], I64)), np.array([7], I64), axis=0)
    y = g.Expand(w, shape)
    assert shape_of(g, y) == ["batch", 7]


def normal_row() -> np.ndarray:
    return np.arange(7, dtype=F32)[None]


def test_arithmetic_on_sizes() -> None:
    g = Graph(13)
    x = g.input("x", ("batch", 32))
    half = g.Div(size(g, x, 1), np.array([2], I64))
    y = g.Reshape(x, g.Concat(size(g, x, 0), np.array([2], I64), half, axis=0))
    assert shape_of(g, y) == ["batch", 2, 16]


def test_where_and_equal_as_expand_is_exported() -> None:
    """Sizes of -1 are replaced by those of the tensor: a symbol is never -1."""
    g = Graph(13)
    x = g.input("x", ("batch", 1, 4))
    wanted = g.Concat(size(g, x, 0), np.array([3, -1], I64), axis=0)
    shape = g.Where(g.Equal(wanted, np.array([-1, -1, -1], I64)), np.array([1, 1, 4], I64), wanted)
    y = g.Expand(x, shape)
    assert shape_of(g, y) == ["batch", 3, 4]


def test_onnx_runtimes_own_activations_keep_the_shape() -> None:
    g = Graph(13)
    y = g.node("QuickGelu", g.input("x", ("batch", 4)), domain="com.microsoft", alpha=1.3)
    assert shape_of(g, y) == ["batch", 4]


def test_what_cannot_be_known_is_not_guessed() -> None:
    g = Graph(13)
    x, target = g.input("x", (4, 6)), g.input("target", (2,), I64)
    for feed in g.feeds:
        feed["target"] = np.array([8, 3], I64)
    y = g.Reshape(x, target)
    assert shape_of(g, y) in (None, [None, None])


def test_shapes_that_the_file_states_stay() -> None:
    g = Graph(13)
    x = g.input("x", ("batch", 4))
    model = finish(g, g.Relu(x))
    assert dims_of(infer_shapes(model).graph.output[0].type) == dims_of(model.graph.output[0].type)
