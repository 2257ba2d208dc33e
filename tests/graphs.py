"""Small graphs for tests: a builder, exporters' spellings of norms and activations, and the judge.

`g.Op(inputs..., attribute=...)` adds a node and returns its output's name; numbers and arrays become weights
of the graph's type, as initializers or (constants="node") as Constant nodes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import ModelProto, TensorProto, helper, numpy_helper

from trtfuse import model as models
from trtfuse.fusion import NearMiss, Site
from trtfuse.pipeline import fuse_model

F16, F32, F64, I64, BOOL = np.float16, np.float32, np.float64, np.int64, np.bool_
TOLERANCE = {2: 1e-2, 4: 2e-5, 8: 1e-10}  # relative to the largest value, by bytes of the type
Feeds = Mapping[str, np.ndarray]


def normal(shape: Sequence[int], seed: int = 0, dtype: Any = F32, scale: float = 1.0) -> np.ndarray:
    """Seeded normal values."""
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(dtype)


class Graph:
    """Collects nodes. opset: of the standard domain; dtype: of numbers that become weights."""

    def __init__(self, opset: int = 13, dtype: Any = F32, constants: str = "initializer"):
        self.opset, self.dtype, self.constants = opset, dtype, constants
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[TensorProto] = []
        self.inputs: list[onnx.ValueInfoProto] = []
        self.outputs: list[onnx.ValueInfoProto] = []
        self.domains: dict[str, int] = {}
        self.functions: list[onnx.FunctionProto] = []
        self.feeds: list[dict[str, np.ndarray]] = [{}, {}]
        self.count = 0

    def name(self, stem: str) -> str:
        self.count += 1
        return f"{stem}_{self.count}"

    def input(self, name: str, shape: Sequence[int | str], dtype: Any = None, scale: float = 1.0) -> str:
        """An input, with two random feeds; a dimension that is a name is 2 in the first, 3 in the second."""
        dtype = dtype or self.dtype
        kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
        self.inputs.append(helper.make_tensor_value_info(name, kind, list(shape)))
        for k, feed in enumerate(self.feeds):
            sizes = [d if isinstance(d, int) else 2 + k for d in shape]
            feed[name] = normal(sizes, 50 + 10 * len(self.inputs) + k, dtype, scale)
        return name

    def weight(self, value: Any, dtype: Any = None, name: str | None = None) -> str:
        name = name or self.name("weight")
        own = value.dtype if isinstance(value, np.ndarray) else self.dtype
        tensor = numpy_helper.from_array(np.asarray(value, dtype or own), name)
        if self.constants == "node":
            self.nodes.append(helper.make_node("Constant", [], [name], value=tensor))
        elif self.constants == "identity":
            tensor.name = f"{name}_source"
            self.weights.append(tensor)
            self.nodes.append(helper.make_node("Identity", [tensor.name], [name]))
        else:
            self.weights.append(tensor)
        return name

    def node(self, op: str, *inputs: Any, outputs: int = 1, domain: str = "", **attributes: Any) -> Any:
        names = [i if isinstance(i, str) else self.weight(i) for i in inputs]
        outs = [self.name(op.lower()) for _ in range(outputs)]
        if domain:
            self.domains[domain] = 1
        self.nodes.append(helper.make_node(op, names, outs, domain=domain, name=outs[0], **attributes))
        return outs[0] if outputs == 1 else outs

    def __getattr__(self, op: str) -> Callable[..., Any]:
        if not op[0].isupper():
            raise AttributeError(op)
        return lambda *inputs, **attributes: self.node(op, *inputs, **attributes)

    def output(self, name: str, shape: Sequence[Any] | None = None, dtype: Any = None) -> None:
        kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype or self.dtype))
        self.outputs.append(helper.make_tensor_value_info(name, kind, shape))

    def model(self) -> ModelProto:
        graph = helper.make_graph(self.nodes, "test", self.inputs, self.outputs, self.weights)
        imports = [
            helper.make_opsetid("", self.opset),
            *(helper.make_opsetid(d, v) for d, v in self.domains.items()),
        ]
        version = 8 if self.opset <= 18 else 10
        return helper.make_model(graph, opset_imports=imports, ir_version=version, functions=self.functions)

    # --- operators whose form changed ---

    def reduce(self, op: str, x: str, axes: Sequence[int] = (-1,), keepdims: int = 1) -> str:
        if self.opset >= (13 if op == "ReduceSum" else 18):
            return str(self.node(op, x, np.array(axes, I64), keepdims=keepdims))
        return str(self.node(op, x, axes=list(axes), keepdims=keepdims))

    def cast(self, x: str, dtype: Any) -> str:
        return str(self.Cast(x, to=helper.np_dtype_to_tensor_dtype(np.dtype(dtype))))

    def clip(self, x: str, low: float, high: float) -> str:
        if self.opset < 11:
            return str(self.Clip(x, min=float(low), max=float(high)))
        return str(self.Clip(x, np.asarray(low, self.dtype), np.asarray(high, self.dtype)))


def layer_norm(
    g: Graph,
    x: str,
    width: int = 32,
    *,
    axes: Sequence[int] = (-1,),
    square: str = "pow",
    divide: str = "div",
    eps: Any = 1e-5,
    scale: bool = True,
    bias: bool = True,
    shape: Sequence[int] | None = None,
    swapped: bool = False,
    casts: bool = False,
    two_subs: bool = False,
    keep: dict[str, str] | None = None,
) -> str:
    """The decomposed LayerNorm. keep: receives the names of tensors inside it."""
    inner = F32 if casts else g.dtype
    mean = g.reduce("ReduceMean", x, axes)
    centred = g.Sub(x, mean)
    other = g.Sub(x, mean) if two_subs else centred
    wide = g.cast(other, F32) if casts else other
    squared = (
        g.Mul(wide, wide)
        if square == "mul"
        else g.Pow(wide, np.asarray(2, I64 if square == "int" else inner))
    )
    variance = g.reduce("ReduceMean", squared, axes)
    e = np.asarray(eps, inner)
    deviation = g.Sqrt(g.Add(e, variance) if swapped else g.Add(variance, e))
    top = g.cast(centred, F32) if casts else centred
    if divide == "div":
        y = g.Div(top, deviation)
    elif divide == "reciprocal":
        y = g.Mul(top, g.Reciprocal(deviation))
    else:
        y = g.Mul(g.Div(np.asarray(1, inner), deviation), top)
    if casts:
        y = g.cast(y, g.dtype)
    if keep is not None:
        keep.update(mean=mean, centred=centred, variance=variance, deviation=deviation)
    shape = shape or (width,)
    if scale:
        gamma = (1 + normal(shape, 7, F32, 0.3)).astype(g.dtype)
        y = g.Mul(gamma, y) if swapped else g.Mul(y, gamma)
    if bias:
        beta = normal(shape, 8, g.dtype, 0.3)
        y = g.Add(beta, y) if swapped else g.Add(y, beta)
    return str(y)


def fused(model: ModelProto) -> tuple[ModelProto, list[Site], list[NearMiss]]:
    """The model with all its sites fused, its sites and its near-misses."""
    held, matched = fuse_model(models.hold(_copy(model), Path("test.onnx")))
    return models.whole(held), matched.sites, matched.near_misses


def _copy(model: ModelProto) -> ModelProto:
    copy = ModelProto()
    copy.CopyFrom(model)
    return copy


def ops(model: ModelProto) -> list[str]:
    """The fused ops of a model in order, with their variants, in inner graphs too."""
    return [n.op_type for g in models.graphs(model.graph) for n in g.node if n.domain == "trtfuse"]


def names(sites: Sequence[Site]) -> list[str]:
    """The op of each site, without its variant."""
    return [s.fusion.op for s in sites]


def run(model: ModelProto, feed: Feeds, *, optimized: bool) -> list[np.ndarray]:
    """The outputs in ONNX Runtime on the CPU."""
    level = onnxruntime.GraphOptimizationLevel
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = level.ORT_ENABLE_ALL if optimized else level.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return [np.asarray(o) for o in session.run(None, dict(feed))]


def assert_same(
    original: ModelProto, candidate: ModelProto, feeds: Sequence[Feeds], tolerance: float = 0
) -> None:
    """Both give the same outputs, and the candidate is a valid model.

    tolerance: relative to the largest value; by default by the type.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.onnx"
        onnx.save(candidate, path)
        onnx.checker.check_model(str(path), full_check=True)
    assert [i.SerializeToString() for i in candidate.graph.input] == [
        i.SerializeToString() for i in original.graph.input
    ]
    for feed in feeds:
        wanted = run(original, feed, optimized=False)
        for optimized in (False, True):
            for w, have in zip(wanted, run(candidate, feed, optimized=optimized), strict=True):
                assert (w.shape, w.dtype) == (have.shape, have.dtype)
                if w.dtype.kind != "f":
                    np.testing.assert_array_equal(have, w)
                    continue
                odd = ~np.isfinite(w)
                np.testing.assert_array_equal(have[odd], w[odd])
                assert np.isfinite(have[~odd]).all()
                size = float(np.abs(w[~odd].astype(F64)).max(initial=1e-6))
                allowed = (tolerance or TOLERANCE[w.dtype.itemsize]) * size
                error = np.abs(have[~odd].astype(F64) - w[~odd].astype(F64)).max(initial=0)
                assert error <= allowed, f"off by {error:.3g}, allowed {allowed:.3g}"


def finish(g: Graph, y: str) -> ModelProto:
    """The model whose (last) output is `y`, through an Identity, so that `y` is no output itself.

    The outputs get the shapes that they have on the feeds, with names where these differ.
    """
    g.output(g.Identity(y))
    model = g.model()
    results = [run(model, feed, optimized=False) for feed in g.feeds]
    for k, output in enumerate(model.graph.output):
        first, second = (r[k].shape for r in results)
        for axis, (a, b) in enumerate(zip(first, second, strict=True)):
            dim = output.type.tensor_type.shape.dim.add()
            if a == b:
                dim.dim_value = a
            else:
                dim.dim_param = f"{output.name}_{axis}"
        output.type.tensor_type.shape.SetInParent()
        output.type.tensor_type.elem_type = helper.np_dtype_to_tensor_dtype(results[0][k].dtype)
    return model


def prove(
    g: Graph, y: str, expected: Sequence[str], tolerance: float = 0
) -> tuple[ModelProto, list[NearMiss]]:
    """Fuses the graph that ends in `y`, and asserts its ops and its numbers. Fusing again changes nothing."""
    model = finish(g, y)
    made, sites, misses = fused(model)
    assert names(sites) == list(expected)
    assert_same(model, made, g.feeds, tolerance)
    again, _, _ = fused(made)
    assert again.SerializeToString() == made.SerializeToString()
    return made, misses
