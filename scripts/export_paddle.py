"""Exports small Paddle models with random weights by paddle2onnx: a neighbour of export_zoo.py.

    pip install paddlepaddle paddle2onnx onnxruntime onnx_graphsurgeon sympy
    python scripts/export_paddle.py FOLDER      models and opsets; then scripts/count_exports.py FOLDER

Paddle wants an environment of its own; paddle2onnx installs what is missing of the last three by itself.
Every vector among the weights is moved away from the 1 or 0 it starts with.
"""
# mypy: disable-error-code="import-not-found,import-untyped,misc"
# trtfuse itself does without Paddle, so where mypy runs it may not be installed.

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

OPSETS = (11, 12, 14, 16, 17, 18, 20)
HIDDEN, LAYERS, HEADS, INNER = 64, 2, 4, 128


def models() -> dict[str, tuple[Any, list[list[int]]]]:
    """Each model with the shapes of its inputs, -1 where a size is dynamic."""
    import paddle.nn.functional as F
    from paddle import nn

    def encoder(before: bool) -> Any:
        layer = nn.TransformerEncoderLayer(
            HIDDEN, HEADS, INNER, activation="gelu", normalize_before=before, dropout=0.0
        )
        return nn.TransformerEncoder(layer, LAYERS, nn.LayerNorm(HIDDEN) if before else None)

    class Post(nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = encoder(before=False)

        def forward(self, x: Any) -> Any:
            return self.encoder(x)

    class Pre(nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = encoder(before=True)

        def forward(self, x: Any, mask: Any) -> Any:
            return self.encoder(x, mask)

    class Projections(nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.LayerList([nn.Linear(HIDDEN, HIDDEN) for _ in range(9)])
            self.gate, self.up, self.norm = nn.Linear(HIDDEN, 96), nn.Linear(HIDDEN, 96), nn.LayerNorm(96)

        def forward(self, x: Any) -> Any:
            tanh = lambda v: F.gelu(v, approximate=True)  # noqa: E731
            acts = (F.gelu, tanh, F.silu, F.swish, F.hardswish, F.mish, F.relu, F.sigmoid, F.tanh)
            for layer, act in zip(self.layers, acts):  # noqa: B905  (Paddle traces it without `strict`)
                x = act(layer(x))
            return F.softmax(self.norm(F.silu(self.gate(x)) * self.up(x)) * 0.3)

    class Convolutions(nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.convolutions = nn.LayerList([nn.Conv2D(16 if k else 3, 16, 3, padding=1) for k in range(4)])
            self.norms = nn.LayerList([nn.BatchNorm2D(16) for _ in range(4)])
            self.groups = nn.GroupNorm(4, 16)

        def forward(self, x: Any) -> Any:
            acts = (F.silu, F.hardswish, F.mish, F.gelu)
            for convolution, norm, act in zip(self.convolutions, self.norms, acts):  # noqa: B905
                x = act(norm(convolution(x)))
            return F.silu(self.groups(x))

    rows = [-1, -1, HIDDEN]
    return {
        "paddle_post": (Post(), [rows]),
        "paddle_pre": (Pre(), [rows, [-1, 1, -1, -1]]),
        "paddle_projections": (Projections(), [rows]),
        "paddle_convolutions": (Convolutions(), [[-1, 3, 24, 24]]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    import paddle

    paddle.seed(0)
    for name, (model, shapes) in models().items():
        model.eval()
        for parameter in model.parameters():
            if len(parameter.shape) == 1:
                parameter.set_value(parameter + 0.2 * paddle.randn(parameter.shape))
        specs = [paddle.static.InputSpec(s, "float32") for s in shapes]
        for opset in OPSETS:
            path = folder / f"{name}.paddle2onnx.{opset}"
            paddle.onnx.export(model, str(path), input_spec=specs, opset_version=opset)
            print(f"{path.name}.onnx", flush=True)


if __name__ == "__main__":
    main()
