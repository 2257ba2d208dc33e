"""Softmax with scale and mask: the spellings that must match and those that must not, by numbers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from graphs import BOOL, F16, F32, Graph, normal, ops, prove

SOFTMAX = "TrtfuseSoftmax"
SCORES = ("batch", 4, 8, 8)


def spelled_out(g: Graph, x: str) -> str:
    exp = g.Exp(g.Sub(x, g.reduce("ReduceMax", x)))
    return str(g.Div(exp, g.reduce("ReduceSum", exp)))


def softmax(g: Graph, x: str) -> str:
    return str(g.Softmax(x, axis=3))


MATCH: dict[str, tuple[Callable[[Graph, str], str], str]] = {
    "mask": (lambda g, x: softmax(g, g.Add(x, normal((1, 1, 8, 8), 3))), "mask"),
    "mask-first": (lambda g, x: softmax(g, g.Add(normal((8,), 3), x)), "mask"),
    "mask-of-heads": (lambda g, x: softmax(g, g.Add(x, normal((4, 1, 8), 3))), "mask"),
    "scale": (lambda g, x: softmax(g, g.Mul(x, 0.5)), "scale0p5"),
    "scale-first": (lambda g, x: softmax(g, g.Mul(0.5, x)), "scale0p5"),
    "divided": (lambda g, x: softmax(g, g.Div(x, 4.0)), "scale0p25"),
    "both": (lambda g, x: softmax(g, g.Add(g.Div(x, 4.0), normal((1, 1, 8, 8), 3))), "mask_scale0p25"),
    "spelled-out": (spelled_out, ""),
    "spelled-out-masked": (lambda g, x: spelled_out(g, g.Add(x, normal((8, 8), 3))), "mask"),
}


@pytest.mark.parametrize("opset", [7, 11, 12, 13, 17, 18, 23])
@pytest.mark.parametrize("spelling", MATCH)
def test_spellings_that_match(spelling: str, opset: int) -> None:
    spelled, variant = MATCH[spelling]
    g = Graph(opset)
    made, _ = prove(g, g.Sin(spelled(g, g.input("x", SCORES))), [SOFTMAX])
    assert ops(made) == [f"TrtfuseSoftmax_{variant}" if variant else SOFTMAX]


@pytest.mark.parametrize("fill", [-1e4, float("-inf")])
@pytest.mark.parametrize("keep", [True, False])
def test_a_boolean_mask(fill: float, keep: bool) -> None:
    g = Graph(13)
    x, condition = g.input("x", SCORES), g.input("condition", ("batch", 1, 8, 8), BOOL)
    for k, feed in enumerate(g.feeds):
        mask = np.random.default_rng(k).random((2 + k, 1, 8, 8)) < 0.7
        mask[..., 0] = True
        feed["condition"] = mask if keep else ~mask
    chosen = g.Where(condition, x, fill) if keep else g.Where(condition, fill, x)
    made, _ = prove(g, g.Sin(softmax(g, chosen)), [SOFTMAX])
    assert ops(made)[0].startswith("TrtfuseSoftmax_where" if keep else "TrtfuseSoftmax_wherenot")


def test_a_row_that_is_masked_whole_is_nan_as_in_the_original() -> None:
    g = Graph(13)
    mask = np.zeros((8, 8), F32)
    mask[3] = -np.inf
    prove(g, softmax(g, g.Add(g.input("x", SCORES), mask)), [SOFTMAX])


def test_a_mask_at_run_time() -> None:
    g = Graph(13)
    x, mask = g.input("x", SCORES), g.input("mask", ("batch", 1, 1, 8))
    prove(g, softmax(g, g.Add(g.Mul(x, 0.125), mask)), [SOFTMAX])


@pytest.mark.parametrize("casts", [False, True])
def test_half_precision(casts: bool) -> None:
    g = Graph(13, F16)
    scaled = g.Add(g.Mul(g.input("x", SCORES), 0.25), normal((8, 8), 3, F16))
    y = g.cast(softmax(g, g.cast(scaled, F32)), F16) if casts else softmax(g, scaled)
    prove(g, y, [SOFTMAX])


DECOYS: dict[str, tuple[Callable[[Graph, str], str], int]] = {
    "alone": (softmax, 13),
    "another-axis": (lambda g, x: str(g.Softmax(g.Mul(x, 0.5), axis=2)), 13),
    "default-axis-before-13": (lambda g, x: str(g.Softmax(g.Mul(x, 0.5))), 11),
    "mask-that-raises-the-rank": (
        lambda g, x: str(g.Softmax(g.Add(x, normal((2, 1, 1, 1, 8), 3)), axis=-1)),
        13,
    ),
    "scale-at-run-time": (lambda g, x: str(g.Sin(softmax(g, g.Mul(x, g.reduce("ReduceMean", x))))), 13),
    "sum-over-another-axis": (
        lambda g, x: str(g.Div(g.Exp(x), g.reduce("ReduceSum", g.Exp(x), (2,)))),
        13,
    ),
    "no-maximum": (lambda g, x: str(g.Div(g.Exp(x), g.reduce("ReduceSum", g.Exp(x)))), 13),
}


@pytest.mark.parametrize("decoy", DECOYS)
def test_decoys_that_must_not_match(decoy: str) -> None:
    spelled, opset = DECOYS[decoy]
    g = Graph(opset)
    prove(g, spelled(g, g.input("x", SCORES)), [])


def test_scores_that_are_read_keep_their_mask_outside() -> None:
    g = Graph(13)
    masked = g.Add(g.Mul(g.input("x", SCORES), 0.5), normal((8, 8), 3))
    _, misses = prove(g, g.Add(softmax(g, masked), g.Sin(masked)), [])
    assert any("is read by" in m.reason for m in misses)
