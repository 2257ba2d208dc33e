"""Random graphs of exporters' spellings mixed with decoys: fused = original, valid, and fusing is idempotent.

HYPOTHESIS_PROFILE=explore TRTFUSE_EXAMPLES=10000 tries ten thousand new ones.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
from graphs import F16, F32, Graph, assert_same, finish, fused, layer_norm, normal
from hypothesis import given, settings
from hypothesis import strategies as st

WIDTH = 16
Draw = Callable[[Any], Any]


class Maker:
    """Grows a graph from one tensor; remembers tensors inside its pieces, for decoys to read or expose."""

    def __init__(self, draw: Draw) -> None:
        self.draw = draw
        self.g = Graph(
            draw(st.sampled_from([9, 11, 13, 17, 18, 20])),
            draw(st.sampled_from([F32, F32, F16])),
            draw(st.sampled_from(["initializer", "node", "identity"])),
        )
        self.shape = draw(st.sampled_from([("batch", 4, WIDTH), (2, 3, WIDTH), ("batch", WIDTH)]))
        self.x = self.g.input("x", self.shape)
        self.y = self.x
        self.inside: list[str] = []
        self.seed = 0

    def vector(self, around: float = 0.0) -> np.ndarray:
        self.seed += 1
        shape = self.draw(st.sampled_from([(WIDTH,), (WIDTH,), (1, WIDTH), (1,), ()]))
        return (around + normal(shape, self.seed, F32, 0.3)).astype(self.g.dtype)

    def constant(self, value: float) -> float:
        """The value that the formula wants; now and then one that is nearly it."""
        return value * self.draw(st.sampled_from([1.0] * 9 + [1.001]))

    def either(self, op: str, a: Any, b: Any) -> str:
        return str(self.g.node(op, *((b, a) if self.draw(st.booleans()) else (a, b))))

    # --- pieces ---

    def norm(self) -> None:
        keep: dict[str, str] = {}
        self.y = layer_norm(
            self.g,
            self.y,
            WIDTH,
            square=self.draw(st.sampled_from(["pow", "mul"])),
            divide=self.draw(st.sampled_from(["div", "reciprocal", "one_over"])),
            axes=self.draw(st.sampled_from([(-1,), (-1,), (len(self.shape) - 1,), (0,)])),
            scale=self.draw(st.booleans()),
            bias=self.draw(st.booleans()),
            swapped=self.draw(st.booleans()),
            two_subs=self.draw(st.booleans()),
            shape=self.draw(st.sampled_from([(WIDTH,), (WIDTH,), (1, WIDTH), (1,)])),
            keep=keep,
        )
        self.inside += list(keep.values())

    def rms(self) -> None:
        g = self.g
        squared = g.Mul(self.y, self.y)
        mean = g.reduce("ReduceMean" if self.draw(st.integers(0, 5)) else "ReduceSum", squared)
        root = g.Sqrt(self.either("Add", mean, 1e-3))
        unit = g.Div(self.y, root) if self.draw(st.booleans()) else g.Mul(self.y, g.Reciprocal(root))
        self.inside += [squared, mean, root, unit]
        self.y = self.either("Mul", unit, self.vector(1))

    def gelu(self) -> None:
        g = self.g
        inner = g.Div(self.y, self.constant(2**0.5))
        one = self.either("Add", g.Erf(inner), self.constant(1.0))
        product = self.either("Mul", self.y, one)
        self.inside += [inner, one, product]
        self.y = self.either("Mul", product, self.constant(0.5))

    def silu(self) -> None:
        gate = self.g.Sigmoid(self.y if self.draw(st.integers(0, 4)) else self.x)
        self.inside.append(gate)
        self.y = self.either("Mul", self.y, gate)

    def hardswish(self) -> None:
        g = self.g
        clipped = g.clip(self.either("Add", self.y, self.constant(3.0)), 0, 6)
        self.inside.append(clipped)
        self.y = str(g.Div(self.either("Mul", self.y, clipped), self.constant(6.0)))

    def bias(self) -> None:
        self.y = self.either("Add", self.y, self.vector())
        self.inside.append(self.y)

    def residual(self) -> None:
        self.y = self.either("Add", self.y, self.x)
        self.inside.append(self.y)

    def linear(self) -> None:
        self.seed += 1
        weight = normal((WIDTH, WIDTH), self.seed, self.g.dtype, WIDTH**-0.5)
        self.y = self.either("Add", self.g.MatMul(self.y, weight), self.vector())

    def softmax(self) -> None:
        g = self.g
        scaled = g.Div(self.y, self.draw(st.sampled_from([2.0, 4.0])))
        masked = self.either("Add", scaled, self.vector())
        self.inside += [scaled, masked]
        axis = len(self.shape) - self.draw(st.sampled_from([1, 1, 1, 2]))
        self.y = str(g.Softmax(masked, axis=axis))

    def attention(self) -> None:
        if len(self.shape) != 3:
            return
        g = self.g
        scores = g.Mul(g.MatMul(self.y, g.Transpose(self.x, perm=[0, 2, 1])), 0.25)
        chances = g.Softmax(scores, axis=2)
        self.inside += [scores, chances]
        self.y = str(g.MatMul(chances, self.y))

    def gated(self) -> None:
        self.y = self.either("Mul", self.g.Mul(self.y, self.g.Sigmoid(self.y)), self.g.Sin(self.x))

    def pause(self) -> None:
        self.y = str(self.g.Identity(self.y))

    def single(self) -> None:
        self.y = str(self.g.node(self.draw(st.sampled_from(["Relu", "Tanh", "Sigmoid", "Neg"])), self.y))


PIECES = [n for n in vars(Maker) if n not in ("vector", "constant", "either") and not n.startswith("_")]


@st.composite
def graphs(draw: Draw) -> tuple[Any, Graph]:
    maker = Maker(draw)
    for piece in draw(st.lists(st.sampled_from(PIECES), min_size=2, max_size=8)):
        getattr(maker, piece)()
    for inner in (
        draw(st.lists(st.sampled_from(maker.inside), max_size=2, unique=True)) if maker.inside else ()
    ):
        if draw(st.booleans()):
            maker.g.output(inner)
        else:
            maker.y = str(maker.g.Add(maker.y, maker.g.reduce("ReduceMean", inner, (0,))))
    try:
        return finish(maker.g, maker.y), maker.g
    except Exception:  # ONNX Runtime refuses what the pieces make together
        return None, maker.g


@settings(max_examples=int(os.environ.get("TRTFUSE_EXAMPLES", "150")))
@given(graphs())
def test_random_graphs(made: tuple[Any, Graph]) -> None:
    model, g = made
    if model is None:
        return
    candidate, _, _ = fused(model)
    assert_same(model, candidate, g.feeds, tolerance=3e-2 if g.dtype is F16 else 1e-4)
    again, _, _ = fused(candidate)
    assert again.SerializeToString() == candidate.SerializeToString()
