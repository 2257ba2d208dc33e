"""Exports small Keras models with random weights by tf2onnx: a neighbour of export_zoo.py.

    pip install tensorflow-cpu tf2onnx          (in an environment of their own)
    python scripts/export_keras.py FOLDER       models and opsets; then scripts/count_exports.py FOLDER

Every vector among the weights is moved away from the 1 or 0 it starts with. Gelu is spelled by tf.math.erf:
newer TensorFlow writes Erfc for its own, which tf2onnx 1.17 cannot convert.
"""
# mypy: disable-error-code="import-not-found,import-untyped"
# trtfuse itself does without TensorFlow, so where mypy runs it may not be installed.

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

OPSETS = (13, 15, 17, 18)
HIDDEN, LAYERS, HEADS, INNER = 64, 2, 4, 128


def gelu(x: Any) -> Any:
    import tensorflow as tf

    return 0.5 * x * (1.0 + tf.math.erf(x * 0.5**0.5))


def gelu_tanh(x: Any) -> Any:
    import keras

    return keras.activations.gelu(x, approximate=True)


def quick_gelu(x: Any) -> Any:
    import keras

    return x * keras.ops.sigmoid(1.702 * x)


def transformer(activation: Callable[[Any], Any] = gelu, masked: bool = False) -> Any:
    """Two encoder layers, the norms after the sums."""
    import keras
    from keras import layers

    x = rows = layers.Input((None, HIDDEN))
    inputs, mask = [rows], None
    if masked:
        inputs.append(layers.Input((None,), dtype="int32", name="mask"))
        mask = keras.ops.cast(keras.ops.expand_dims(inputs[1], 1), "bool")
    x = layers.LayerNormalization(epsilon=1e-6)(x)
    for _ in range(LAYERS):
        attended = layers.MultiHeadAttention(HEADS, HIDDEN // HEADS)(x, x, attention_mask=mask)
        x = layers.LayerNormalization(epsilon=1e-6)(layers.Add()([x, attended]))
        inner = layers.Dense(INNER, activation=activation)(x)
        x = layers.LayerNormalization()(x + layers.Dense(HIDDEN)(inner))
    return keras.Model(inputs, x)


def convolutions() -> Any:
    import keras
    from keras import layers

    x = image = layers.Input((32, 32, 3))
    for activation in ("swish", gelu, "relu6", "hard_silu", "mish"):
        x = layers.Conv2D(16, 3, padding="same")(x)
        x = layers.Activation(activation)(layers.BatchNormalization()(x))
    x = layers.Activation("swish")(layers.GroupNormalization(4)(x))
    x = layers.GlobalAveragePooling2D()(layers.LayerNormalization()(x))
    return keras.Model(image, layers.Dense(10)(x))


def projections() -> Any:
    """Every activation after a projection, a gate, RMSNorm and a scaled softmax."""
    import keras
    from keras import layers

    x = rows = layers.Input((None, HIDDEN))
    named = ["swish", "mish", "hard_silu", "relu", "tanh", "sigmoid", "leaky_relu"]
    for activation in (gelu, gelu_tanh, quick_gelu, *named):
        x = layers.Activation(activation)(layers.Dense(HIDDEN)(x))
    x = keras.activations.silu(layers.Dense(96)(x)) * layers.Dense(96)(x)
    x = layers.RMSNormalization()(layers.Dense(HIDDEN)(x))
    return keras.Model(rows, layers.Softmax()(layers.Dense(20)(x) * 0.3))


MODELS: dict[str, Callable[[], Any]] = {
    "keras_transformer": transformer,
    "keras_transformer_mask": lambda: transformer(masked=True),
    "keras_transformer_tanh": lambda: transformer(gelu_tanh),
    "keras_convolutions": convolutions,
    "keras_projections": projections,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import keras
    import tensorflow as tf
    import tf2onnx

    for name, make in MODELS.items():
        keras.utils.set_random_seed(0)
        random = np.random.default_rng(0)
        model = make()
        for weight in model.weights:
            value = np.array(weight)
            if value.ndim == 1:
                weight.assign(value + 0.2 * np.abs(random.normal(size=value.shape)).astype(value.dtype))
        signature = [tf.TensorSpec([None, *i.shape[1:]], i.dtype, name=i.name) for i in model.inputs]
        call = tf.function(lambda *x, m=model: m(list(x) if len(x) > 1 else x[0]), input_signature=signature)
        for opset in OPSETS:
            path = folder / f"{name}.tf2onnx.{opset}.onnx"
            tf2onnx.convert.from_function(call, signature, opset=opset, output_path=str(path))
            print(path.name, flush=True)


if __name__ == "__main__":
    main()
