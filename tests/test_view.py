"""What a view knows of constants, shapes and finiteness, and what it does not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_graphsurgeon as gs
import pytest
from graphs import F32, I64, Graph, finish, normal

from trtfuse import model as models
from trtfuse import normalise
from trtfuse.view import View


def seen(g: Graph, y: str) -> tuple[View, gs.Tensor]:
    view = normalise.view(models.hold(finish(g, g.cast(y, F32)), Path("m.onnx")))
    return view, next(o for n in view.nodes for o in n.outputs if o.name == y)


@pytest.mark.parametrize("constants", ["initializer", "node", "identity"])
def test_constants_are_known_however_they_are_held(constants: str) -> None:
    g = Graph(constants=constants)
    y = g.Mul(g.Sqrt(4.0), 3.0)
    view, tensor = seen(g, y)
    assert view.is_fixed(tensor)
    assert view.scalar(tensor) == 6.0


def test_a_size_that_is_static_among_dynamic_ones() -> None:
    g = Graph()
    shape = g.Shape(g.input("x", ("batch", 4, 16)))
    view, last = seen(g, g.Gather(shape, np.array(-1, I64), axis=0))
    assert view.scalar(last) == 16
    g = Graph()
    shape = g.Shape(g.input("x", ("batch", 4, 16)))
    view, tail = seen(g, g.Slice(shape, np.array([1], I64), np.array([3], I64)))
    np.testing.assert_array_equal(view.value(tail), [4, 16])
    g = Graph()
    shape = g.Shape(g.input("x", ("batch", 4, 16)))
    view, first = seen(g, g.Gather(shape, np.array(0, I64), axis=0))
    assert view.value(first) is None


def test_large_weights_are_not_read_but_are_fixed() -> None:
    g = Graph()
    y = g.Add(g.weight(np.zeros((1 << 12, (1 << 10) + 1), F32)), 1.0)
    view, tensor = seen(g, y)
    assert view.is_fixed(tensor)
    assert view.value(tensor) is None


def test_a_scalar_is_of_one_element() -> None:
    for value, wanted in ((np.float32(2), 2.0), ([2.0], 2.0), ([[2.0]], 2.0), ([2.0, 2.0], None)):
        g = Graph()
        view, tensor = seen(g, g.Neg(g.Neg(np.asarray(value, F32))))
        assert view.scalar(tensor) == wanted


def test_random_numbers_are_not_fixed() -> None:
    g = Graph()
    view, tensor = seen(g, g.RandomNormal(shape=[3]))
    assert not view.is_fixed(tensor)


FINITE = {
    "cast of integers": (lambda g: g.cast(g.input("m", (3,), I64), F32), True),
    "bert mask": (lambda g: g.Mul(g.Sub(1.0, g.cast(g.input("m", (3,), I64), F32)), -10000.0), True),
    "times the lowest": (lambda g: g.Mul(g.Sub(1.0, g.cast(g.input("m", (3,), I64), F32)), -3e38), False),
    "where": (lambda g: g.Where(g.Equal(g.input("m", (3,), I64), np.array(1)), 0.0, -1e9), True),
    "where of -inf": (lambda g: g.Where(g.Equal(g.input("m", (3,), I64), np.array(1)), 0.0, -np.inf), False),
    "an input": (lambda g: g.Neg(g.input("m", (3,))), False),
    "exponential": (lambda g: g.Exp(g.cast(g.input("m", (3,), I64), F32)), False),
    "constant": (lambda g: g.Add(normal((3,), 1), 1.0), True),
    "constant infinity": (lambda g: g.Add(np.array([1, np.inf], F32), 1.0), False),
}


@pytest.mark.parametrize("case", FINITE)
def test_what_is_proven_finite(case: str) -> None:
    make, wanted = FINITE[case]
    g = Graph()
    view, tensor = seen(g, make(g))
    assert view.is_finite(tensor) is wanted
