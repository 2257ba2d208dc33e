"""Generated models, the same bytes for the same arguments:

    python models/generate.py transformer --nodes 4000 -o t4k.onnx
    python models/generate.py chain --nodes 4000 -o c4k.onnx
    python models/generate.py large -o large.onnx        (2.4 GB of weights in large.onnx.data)

`transformer` is spelled as PyTorch's TorchScript exporter spells a BERT encoder at opset 13: LayerNorm in
nine nodes, GELU through Erf, scores divided by a constant, an additive mask, shapes computed in the graph.
`chain` is one long line of elementwise nodes, where a pass that rescans the graph per site shows.
Every bias and norm weight is perturbed, so that a rewrite that loses one gives other answers.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

OPSET = 13
IR_VERSION = 8
ALIGNMENT = 4096  # of a weight inside the external file, so that it can be mapped
NODES_PER_LAYER = 109  # of `transformer`
NODES_AROUND_LAYERS = 31  # its embeddings and mask


class Graph:
    """A graph under construction: nodes in order, weights held in memory or appended to a file.

    `data` is an open binary file for weights of 1 KiB and more, and `location` its name beside the model.
    """

    def __init__(self, seed: int, data: BinaryIO | None = None, location: str = "") -> None:
        self.rng = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[TensorProto] = []
        self.data = data
        self.location = location

    def op(self, kind: str, *inputs: str, **attributes: Any) -> str:
        """Appends a node with one output and returns that output's name."""
        name = f"{kind}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [f"{name}_output_0"], name=name, **attributes))
        return f"{name}_output_0"

    def constant(self, value: object, dtype: str = "float32") -> str:
        """A Constant node, as the exporter writes numbers of the source code."""
        return self.op("Constant", value=numpy_helper.from_array(np.array(value, dtype=dtype)))

    def weight(self, name: str, values: NDArray[np.float32]) -> str:
        """An initializer; returns its name."""
        if self.data is None or values.nbytes < 1024:
            self.weights.append(numpy_helper.from_array(values, name))
            return name
        offset = -(-self.data.tell() // ALIGNMENT) * ALIGNMENT
        self.data.seek(offset)
        values.tofile(self.data)
        tensor = TensorProto(name=name, dims=values.shape, data_type=TensorProto.FLOAT)
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in (("location", self.location), ("offset", offset), ("length", values.nbytes)):
            tensor.external_data.add(key=key, value=str(value))
        self.weights.append(tensor)
        return name

    def normal(self, name: str, shape: tuple[int, ...], scale: float, mean: float = 0.0) -> str:
        """A weight of normal values."""
        values = self.rng.standard_normal(shape, dtype=np.float32)
        values *= np.float32(scale)
        if mean:
            values += np.float32(mean)
        return self.weight(name, values)

    def model(
        self, inputs: list[onnx.ValueInfoProto], outputs: list[onnx.ValueInfoProto], name: str
    ) -> onnx.ModelProto:
        """The finished model."""
        graph = helper.make_graph(self.nodes, name, inputs, outputs, self.weights)
        return helper.make_model(
            graph,
            producer_name="trtfuse-models",
            ir_version=IR_VERSION,
            opset_imports=[helper.make_opsetid("", OPSET)],
        )


def _linear(g: Graph, x: str, name: str, rows: int, columns: int) -> str:
    # y = x W + b, the bias on the left as the exporter writes it
    product = g.op("MatMul", x, g.normal(f"{name}.weight", (rows, columns), rows**-0.5))
    return g.op("Add", g.normal(f"{name}.bias", (columns,), 0.1), product)


def _layer_norm(g: Graph, x: str, name: str, width: int) -> str:
    # y = (x - mean) / sqrt(mean((x - mean)^2) + eps) * gamma + beta
    centred = g.op("Sub", x, g.op("ReduceMean", x, axes=[-1]))
    squared = g.op("Pow", centred, g.constant(2.0))
    variance = g.op("Add", g.op("ReduceMean", squared, axes=[-1]), g.constant(1e-12))
    normed = g.op("Div", centred, g.op("Sqrt", variance))
    scaled = g.op("Mul", normed, g.normal(f"{name}.weight", (width,), 0.1, mean=1.0))
    return g.op("Add", scaled, g.normal(f"{name}.bias", (width,), 0.1))


def _gelu(g: Graph, x: str) -> str:
    # y = x * (erf(x / sqrt(2)) + 1) * 0.5
    gate = g.op("Add", g.op("Erf", g.op("Div", x, g.constant(2**0.5))), g.constant(1.0))
    return g.op("Mul", g.op("Mul", x, gate), g.constant(0.5))


def _extent(g: Graph, x: str, axis: int) -> str:
    # the size of one axis, as a tensor of shape [1]
    size = g.op("Gather", g.op("Shape", x), g.constant(axis, "int64"), axis=0)
    return g.op("Unsqueeze", size, g.constant([0], "int64"))


def _reshaped(g: Graph, x: str, *rest: int) -> str:
    # x with its batch and sequence sizes and then `rest`
    sizes = [_extent(g, x, 0), _extent(g, x, 1), *(g.constant([size], "int64") for size in rest)]
    return g.op("Reshape", x, g.op("Concat", *sizes, axis=0))


def _attention(g: Graph, x: str, mask: str, name: str, hidden: int, heads: int) -> str:
    # softmax(q k^T / sqrt(d) + mask) v, then the output projection without its residual
    width = hidden // heads
    q, k, v = (
        g.op(
            "Transpose",
            _reshaped(g, _linear(g, x, f"{name}.{part}", hidden, hidden), heads, width),
            perm=perm,
        )
        for part, perm in (("query", [0, 2, 1, 3]), ("key", [0, 2, 3, 1]), ("value", [0, 2, 1, 3]))
    )
    scores = g.op("Div", g.op("MatMul", q, k), g.constant(width**0.5))
    weights = g.op("Softmax", g.op("Add", scores, mask), axis=-1)
    context = g.op("Transpose", g.op("MatMul", weights, v), perm=[0, 2, 1, 3])
    return _linear(g, _reshaped(g, context, hidden), f"{name}.output", hidden, hidden)


def _encoder(g: Graph, layers: int, hidden: int, heads: int, vocabulary: int, positions: int) -> str:
    words = g.op("Gather", g.normal("embeddings.word", (vocabulary, hidden), 1.0), "input_ids")
    end = _extent(g, "input_ids", 1)
    table = g.constant([range(positions)], "int64")
    steps = g.op("Slice", table, g.constant([0], "int64"), end, g.constant([1], "int64"))
    x = g.op("Add", words, g.op("Gather", g.normal("embeddings.position", (positions, hidden), 1.0), steps))
    x = _layer_norm(g, x, "embeddings.norm", hidden)
    keep = g.op("Unsqueeze", "attention_mask", g.constant([1, 2], "int64"))
    mask = g.op("Sub", g.constant(1.0), g.op("Cast", keep, to=TensorProto.FLOAT))
    mask = g.op("Mul", mask, g.constant(-10000.0))
    for layer in range(layers):
        name = f"layer.{layer}"
        x = _layer_norm(
            g,
            g.op("Add", _attention(g, x, mask, f"{name}.attention", hidden, heads), x),
            f"{name}.attention.norm",
            hidden,
        )
        inner = _gelu(g, _linear(g, x, f"{name}.intermediate", hidden, 4 * hidden))
        x = _layer_norm(
            g, g.op("Add", _linear(g, inner, f"{name}.output", 4 * hidden, hidden), x), f"{name}.norm", hidden
        )
    return x


def _encoder_model(
    g: Graph, layers: int, hidden: int, heads: int, vocabulary: int, positions: int
) -> onnx.ModelProto:
    if hidden % heads:
        raise ValueError(f"hidden {hidden} is not a multiple of heads {heads}")
    tokens: list[str | int | None] = ["batch", "sequence"]
    result = _encoder(g, layers, hidden, heads, vocabulary, positions)
    g.nodes.append(helper.make_node("Identity", [result], ["last_hidden_state"], name="output"))
    return g.model(
        [
            helper.make_tensor_value_info(n, TensorProto.INT64, tokens)
            for n in ("input_ids", "attention_mask")
        ],
        [helper.make_tensor_value_info("last_hidden_state", TensorProto.FLOAT, [*tokens, hidden])],
        "encoder",
    )


def transformer(
    layers: int,
    hidden: int = 64,
    heads: int = 4,
    *,
    vocabulary: int = 1000,
    positions: int = 512,
    seed: int = 0,
) -> onnx.ModelProto:
    """A BERT encoder: int64 `input_ids`, `attention_mask` [batch, sequence] to `last_hidden_state`, float32
    [batch, sequence, hidden].

    Has 2 * layers + 1 norms (2 * layers of them after bias and residual), `layers` bias + GELU and `layers`
    attentions. Raises ValueError where heads do not divide hidden.
    """
    return _encoder_model(Graph(seed), layers, hidden, heads, vocabulary, positions)


def layers_for(nodes: int) -> int:
    """How many layers of `transformer` come nearest to a number of nodes."""
    return max(1, round((nodes - NODES_AROUND_LAYERS) / NODES_PER_LAYER))


def chain(nodes: int, width: int = 64, *, seed: int = 0) -> onnx.ModelProto:
    """A line of `nodes` nodes, bias and tanh by turns: float32 `x` [batch, width] to `y` of that shape.

    Has nodes // 2 chains of bias + activation.
    """
    g = Graph(seed)
    x = "x"
    for index in range(nodes):
        x = g.op("Tanh", x) if index % 2 else g.op("Add", x, g.normal(f"bias.{index // 2}", (width,), 0.5))
    g.nodes[-1].output[0] = "y"
    shape: list[str | int | None] = ["batch", width]
    return g.model(
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
        "chain",
    )


@contextmanager
def _replaced(path: Path) -> Iterator[BinaryIO]:
    part = path.with_name(f".{path.name}.part")
    try:
        with part.open("wb") as file:
            yield file
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def write_large(path: Path, layers: int = 3, hidden: int = 4096, heads: int = 32, *, seed: int = 0) -> int:
    """Writes a `transformer` of more than 2 GB with its weights in `path`.data, and returns their bytes.

    Weights go to the file one by one: memory stays at the largest of them (4 * hidden * 4 * hidden bytes).
    """
    data_path = path.with_name(path.name + ".data")
    with _replaced(data_path) as data:
        g = Graph(seed, data, data_path.name)
        model = _encoder_model(g, layers, hidden, heads, vocabulary=1000, positions=512)
        size = data.tell()
    with _replaced(path) as file:
        file.write(model.SerializeToString())
    return size


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(":", 1)[0])
    parser.add_argument("kind", choices=["transformer", "chain", "large"])
    parser.add_argument("--nodes", type=int, default=1000, help="about how many nodes (default: 1000)")
    parser.add_argument("--hidden", type=int, help="width (default: 64, large: 4096)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args(argv)
    if options.kind == "large":
        write_large(options.output, hidden=options.hidden or 4096, seed=options.seed)
        return 0
    width = options.hidden or 64
    if options.kind == "transformer":
        model = transformer(layers_for(options.nodes), width, seed=options.seed)
    else:
        model = chain(options.nodes, width, seed=options.seed)
    with _replaced(options.output) as file:
        file.write(model.SerializeToString())
    print(f"{options.output}: {len(model.graph.node)} nodes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
