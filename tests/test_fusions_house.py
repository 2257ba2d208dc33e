"""One fused op is one stem in each tree; every declaration is whole, every body valid at every opset."""

from __future__ import annotations

import itertools
from pathlib import Path

import onnx
import pytest
from graphs import F16, F32, Graph, finish, fused, layer_norm, normal
from onnx import TensorProto, helper

from trtfuse.body import ACTIVATIONS, Body, function
from trtfuse.fusions import FUSIONS, NAMES

ROOT = Path(__file__).resolve().parent.parent
STEMS = sorted(p.stem for p in (ROOT / "trtfuse" / "fusions").glob("[a-z]*.py"))
OPSETS = (7, 8, 9, 10, 11, 12, 13, 17, 18, 20, 23, 25)
TYPES = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)


@pytest.mark.parametrize("stem", STEMS)
def test_each_stem_has_its_tests(stem: str) -> None:
    assert (ROOT / "tests" / "fusions" / f"test_{stem}.py").is_file()


@pytest.mark.parametrize("fusion", FUSIONS, ids=lambda f: f.op)
def test_each_declaration_is_whole(fusion: object) -> None:
    from trtfuse.fusion import Fusion

    assert isinstance(fusion, Fusion)
    assert fusion.op.startswith("Trtfuse")
    assert "_" not in fusion.op  # what follows `_` in an op_type is the variant
    assert fusion.patterns
    assert len(set(fusion.inputs)) == len(fusion.inputs)
    assert set(fusion.vectors) <= set(fusion.inputs)
    home = ROOT / "trtfuse" / "fusions"
    assert sum(f'op="{fusion.op}"' in p.read_text() for p in home.glob("*.py")) == 1


def test_the_list_of_ops_has_no_name_twice() -> None:
    assert len(NAMES) == len(FUSIONS)


def check(made: onnx.FunctionProto, inputs: int, dtype: int, opset: int) -> None:
    """The function in a model of that opset, by onnx's checker with full_check."""
    shapes = [["n", 8]] + [[8]] * (inputs - 1)
    names = [f"i{k}" for k in range(inputs)]
    graph = helper.make_graph(
        [helper.make_node(made.name, names, ["y"], domain="trtfuse")],
        "g",
        [helper.make_tensor_value_info(n, dtype, s) for n, s in zip(names, shapes, strict=True)],
        [helper.make_tensor_value_info("y", dtype, ["n", 8])],
    )
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("trtfuse", 1)]
    model = helper.make_model(graph, opset_imports=imports, functions=[made], ir_version=10)
    onnx.checker.check_model(model, full_check=True)


@pytest.mark.parametrize(("opset", "dtype"), itertools.product(OPSETS, TYPES))
def test_norm_bodies_are_valid(opset: int, dtype: int) -> None:
    if dtype == TensorProto.BFLOAT16 and opset < 13:
        pytest.skip("operators take bfloat16 from opset 13 on")
    for norm in ("layer_norm", "rms_norm"):
        body = Body(opset, dtype)
        y = body.layer_norm("x", "s", "b", 1e-5) if norm == "layer_norm" else body.rms_norm("x", "s", 1e-5)
        body.rename({y: "y"})
        inputs = ["x", "s", "b"][: 3 if norm == "layer_norm" else 2]
        check(function(f"Trtfuse_{norm}", inputs, ["y"], [], body), len(inputs), dtype, opset)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("opset", OPSETS)
def test_activation_bodies_are_valid(activation: str, opset: int) -> None:
    if activation == "gelu" and opset < 9:
        pytest.skip("Erf came with opset 9")
    body = Body(opset)
    y = body.activation(activation, "x")
    body.rename({y: "y"})
    check(function(f"Trtfuse_{activation}", ["x"], ["y"], [], body), 1, TensorProto.FLOAT, opset)


@pytest.mark.parametrize("dtype", [F32, F16])
@pytest.mark.parametrize("opset", [11, 17, 20])
def test_the_native_lowering_is_the_function_written_out(opset: int, dtype: type) -> None:
    """Same operators in the same order: one source for both."""
    g = Graph(opset, dtype)
    total = g.Add(g.input("x", ("b", 4, 32)), g.input("skip", ("b", 4, 32)))
    y = layer_norm(g, total, casts=dtype is F16)
    model = finish(g, g.Add(g.Sigmoid(g.Add(y, normal((32,), 1, dtype))), total))
    made, sites, _ = fused(model)
    assert len(sites) == 2
    for site in sites:
        whole = next(f for f in made.functions if f.name == site.op_type)
        assert [n.op_type for n in whole.node] == [n.op_type for n in site.lowered().nodes]
