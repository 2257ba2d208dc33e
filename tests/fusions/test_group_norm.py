"""GroupNorm: the spellings that must match and those that must not, by numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from graphs import F16, F32, I64, Graph, normal, ops, prove

GROUP = "TrtfuseGroupNorm"
IMAGE = ("batch", 8, 6, 5)


def group_norm(
    g: Graph,
    x: str,
    *,
    groups: int = 4,
    to: Any = None,
    back: Any = None,
    ones: Any = None,
    zeros: Any = None,
    shape: tuple[int, ...] = (8, 1, 1),
    eps: float = 1e-5,
) -> str:
    """Reshape to groups, InstanceNormalization, Reshape back, scale and shift: as TorchScript exports it."""
    grouped = g.Reshape(x, np.array([0, groups, -1] if to is None else to, I64))
    ones = np.ones(groups) if ones is None else np.asarray(ones)
    zeros = np.zeros(groups) if zeros is None else np.asarray(zeros)
    y = g.InstanceNormalization(grouped, ones.astype(g.dtype), zeros.astype(g.dtype), epsilon=eps)
    y = g.Reshape(y, g.Shape(x) if back == "shape" else np.array(back or [0, 8, 6, 5], I64))
    y = g.Mul(y, (1 + normal(shape, 1, F32, 0.3)).astype(g.dtype))
    return str(g.Add(y, normal(shape, 2, g.dtype)))


@pytest.mark.parametrize("opset", [7, 11, 13, 17, 18, 20])
@pytest.mark.parametrize("back", [[0, 8, 6, 5], [-1, 8, 6, 5], "shape"])
@pytest.mark.parametrize("silu", [False, True])
def test_spellings_that_match(opset: int, back: Any, silu: bool) -> None:
    g = Graph(opset)
    y = group_norm(g, g.input("x", IMAGE), back=back)
    made, _ = prove(g, g.Mul(y, g.Sigmoid(y)) if silu else y, [GROUP])
    assert ops(made) == ["TrtfuseGroupNorm_groups4_silu" if silu else "TrtfuseGroupNorm_groups4"]


def test_weights_of_rank_4() -> None:
    g = Graph(13)
    prove(g, group_norm(g, g.input("x", IMAGE), shape=(1, 8, 1, 1)), [GROUP])


def test_half_precision() -> None:
    g = Graph(13, F16)
    prove(g, group_norm(g, g.input("x", IMAGE)), [GROUP])


DECOYS: dict[str, dict[str, Any]] = {
    "scale-of-groups": {"ones": [1, 2, 3, 4]},
    "bias-of-groups": {"zeros": [0, 0, 0, 1]},
    "other-shape-back": {"back": [0, 8, 5, 6], "shape": (8, 1, 1)},
    "scale-along-width": {"shape": (1, 1, 5)},
    "merged-batch": {"to": [1, 4, -1], "back": [-1, 8, 6, 5]},
}


@pytest.mark.parametrize("decoy", DECOYS)
def test_decoys_that_must_not_match(decoy: str) -> None:
    g = Graph(13)
    prove(g, group_norm(g, g.input("x", IMAGE), **DECOYS[decoy]), [])


def test_a_normalised_tensor_that_is_read_survives() -> None:
    g = Graph(13)
    grouped = g.Reshape(g.input("x", IMAGE), np.array([0, 4, -1], I64))
    normalised = g.InstanceNormalization(grouped, np.ones(4, F32), np.zeros(4, F32))
    back = g.Reshape(normalised, np.array([0, 8, 6, 5], I64))
    y = g.Add(g.Mul(back, normal((8, 1, 1), 1)), normal((8, 1, 1), 2))
    prove(g, g.Add(y, g.Sin(back)), [])
