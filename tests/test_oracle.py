"""onnxscript's rewriter as an oracle: wherever its rule finds a fused op, so do we, on the same graph."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from graphs import Graph, finish, fused, layer_norm, names, normal
from onnx import ModelProto
from onnx.shape_inference import infer_shapes

ir = pytest.importorskip("onnx_ir", reason="onnxscript is not installed")
pytest.importorskip("onnxscript", reason="onnxscript is not installed")
rewriter = "onnxscript.rewriter"
ROWS = (2, 4, 32)


def apply(model: ModelProto, *rules: str) -> ModelProto:
    """The model after the rule sets named "module:attribute"."""
    held = ir.serde.deserialize_model(infer_shapes(model))
    for rule in rules:
        module, name = rule.split(":")
        found: Any = getattr(importlib.import_module(f"{rewriter}.{module}"), name)
        if callable(found) and not hasattr(found, "apply_to_model"):
            found = found() if name.endswith("_rules") else found
        found.apply_to_model(held) if hasattr(found, "apply_to_model") else found(held)
    return ir.serde.serialize_model(held)


def count(model: ModelProto, *ops: str) -> int:
    return sum(n.op_type in ops for n in model.graph.node)


def norm(g: Graph, x: str, **how: Any) -> str:
    return layer_norm(g, x, **how)


def rms(g: Graph, x: str, swapped: bool = False) -> str:
    mean = g.ReduceMean(g.Pow(x, 2.0), np.array([-1]), keepdims=1, noop_with_empty_axes=0)
    unit = g.Mul(x, g.Reciprocal(g.Sqrt(g.Add(mean, 1e-6))))
    weight = 1 + normal((32,), 1, scale=0.3)
    return str(g.Mul(weight, unit) if swapped else g.Mul(unit, weight))


def skip_norm(g: Graph, x: str) -> str:
    total = g.Add(x, g.Sin(x))
    y = g.LayerNormalization(total, 1 + normal((32,), 1, scale=0.3), normal((32,), 2), axis=-1)
    return str(g.Add(y, g.Cos(total)))


def gelu_tanh(g: Graph, x: str) -> str:
    inner = g.Mul(0.7978845608028654, g.Add(x, g.Mul(0.044715, g.Pow(x, 3.0))))
    return str(g.Mul(x, g.Mul(0.5, g.Add(g.Tanh(inner), 1.0))))


def gelu_erf(g: Graph, x: str) -> str:
    return str(g.Mul(0.5, g.Mul(x, g.Add(g.Erf(g.Div(x, 1.4142135623730951)), 1.0))))


def hardswish(g: Graph, x: str) -> str:
    return str(g.Mul(g.Div(g.clip(g.Add(x, 3.0), 0, 6), 6.0), x))


LN_RULE = "rules.fusion._layer_norm:fuse_layer_normalization"
RMS_RULE = "rules.fusion._rms_normalization:fuse_rms_normalization"
CASES: dict[str, tuple[Callable[[Graph, str], str], tuple[str, ...], tuple[str, ...], str]] = {
    "layer norm": (norm, (LN_RULE,), ("LayerNormalization",), "TrtfuseLayerNorm"),
    "layer norm by reciprocal": (
        lambda g, x: norm(g, x, square="mul", divide="reciprocal"),
        (LN_RULE,),
        ("LayerNormalization",),
        "TrtfuseLayerNorm",
    ),
    "rms norm": (rms, (RMS_RULE,), ("RMSNormalization",), "TrtfuseRmsNorm"),
    "rms norm, weight first": (
        lambda g, x: rms(g, x, True),
        (RMS_RULE,),
        ("RMSNormalization",),
        "TrtfuseRmsNorm",
    ),
    "skip layer norm": (
        skip_norm,
        ("ort_fusions.skip_normalization:fuse_skip_layer_normalization",),
        ("SkipLayerNormalization",),
        "TrtfuseSkipLayerNorm",
    ),
    "gelu by tanh": (gelu_tanh, ("ort_fusions.gelu:fuse_gelu",), ("FastGelu", "Gelu"), "TrtfuseBiasAct"),
    "gelu by erf": (gelu_erf, ("ort_fusions.erfgelu:fuse_erfgelu",), ("Gelu",), "TrtfuseBiasAct"),
    "hardswish": (
        hardswish,
        ("rules.common._fuse_hardswish:fuse_hardswish_rules",),
        ("HardSwish",),
        "TrtfuseBiasAct",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_the_oracle_finds_we_find(case: str) -> None:
    spelled, rules, theirs, ours = CASES[case]
    g = Graph(18)
    x = g.input("x", ROWS)
    model = finish(g, spelled(g, g.Add(g.Relu(x), spelled(g, x))))
    oracle = count(apply(model, *rules), *theirs)
    assert oracle >= 1  # else the rule judges nothing
    found = names(fused(model)[1])
    with_residual = ours.replace("Trtfuse", "TrtfuseSkip")  # the larger op takes the sum before a norm
    assert found.count(ours) + found.count(with_residual) >= oracle


@pytest.mark.parametrize("case", ["layer norm", "rms norm", "gelu by erf"])
def test_what_the_oracle_refuses_we_refuse(case: str) -> None:
    """The same spelling over another axis, or with another constant."""
    _, rules, theirs, ours = CASES[case]
    g = Graph(18)
    x = g.input("x", (2, 32, 32))
    if case == "layer norm":
        y = norm(g, x, axes=(1,))
    elif case == "rms norm":
        unit = g.Mul(x, g.Reciprocal(g.Sqrt(g.Add(g.reduce("ReduceMean", g.Pow(x, 2.0), (1,)), 1e-6))))
        y = g.Mul(unit, normal((32,), 1))
    else:
        y = g.Mul(0.5, g.Mul(x, g.Add(g.Erf(g.Div(x, 1.5)), 1.0)))
    model = finish(g, y)
    assert count(apply(model, *rules), *theirs) == 0
    assert names(fused(model)[1]).count(ours) == 0
