"""The architectures of `export_zoo.py`: small, with random weights, and what each holds that can be fused.

Needs torch, transformers and timm, imported only where a module is made: `count_exports.py` reads the table
without them.
"""
# mypy: disable-error-code="import-not-found,import-untyped,misc"
# trtfuse itself does without torch, transformers and timm, so where mypy runs they may not be installed.

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

HIDDEN, LAYERS, HEADS, INNER, VOCABULARY, LONGEST = 64, 2, 4, 128, 99, 64
BATCH, SEQUENCE = 2, 9  # what the exporters trace; nothing in the architectures has these sizes


@dataclass(frozen=True)
class Holds:
    """What an architecture has that can be fused. skips: norms that read the sum of two tensors directly."""

    norms: int = 0
    skips: int = 0
    activations: int = 0
    gates: int = 0
    attentions: int = 0


@dataclass(frozen=True)
class Example:
    """A module ready to be exported: its inputs in order by name, and the dynamic axes of each."""

    module: Any
    inputs: dict[str, Any]
    axes: dict[str, dict[int, str]]


@dataclass(frozen=True)
class Entry:
    """make: for an attention implementation ("eager", "sdpa"); attention: whether the two differ.

    half_skips: of `holds` in fp16, where some architectures clamp the sum before the norm.
    """

    make: Callable[[str], Example]
    holds: Holds
    attention: bool = True
    half_skips: int | None = None

    def held(self, dtype: str) -> Holds:
        """What a file of that type ("fp32", "fp16") holds."""
        return (
            self.holds
            if dtype == "fp32" or self.half_skips is None
            else replace(self.holds, skips=self.half_skips)
        )


# --- making modules ------------------------------------------------------------------------------------


def perturbed(module: Any) -> Any:
    """The module in evaluation mode, every vector among its parameters and statistics moved at random."""
    import torch

    torch.manual_seed(0)
    for parameter in module.parameters():
        if parameter.ndim == 1:
            parameter.data += 0.2 * torch.randn_like(parameter)
    for name, statistic in module.named_buffers():
        if name.endswith("running_mean"):
            statistic += 0.1 * torch.randn_like(statistic)
        elif name.endswith("running_var"):
            statistic += 0.3 * torch.rand_like(statistic)
    return module.eval()


def _first_output(model: Any, names: Iterable[str], **fixed: Any) -> Any:
    """A module that takes tensors in order and gives the model's first output alone."""
    import torch

    keys = list(names)

    class First(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, *tensors: Any) -> Any:
            return self.model(**dict(zip(keys, tensors, strict=True)), **fixed)[0]

    return First()


TOKENS = {0: "batch", 1: "sequence"}


def _tokens(*names: str) -> dict[str, Any]:
    """Token ids, and a mask that pads the end of the second row."""
    import torch

    torch.manual_seed(1)
    ids = torch.randint(1, VOCABULARY, (BATCH, SEQUENCE))
    mask = torch.ones_like(ids)
    mask[1, -3:] = 0
    made = {"input_ids": ids, "attention_mask": mask, "token_type_ids": torch.zeros_like(ids)}
    return {n: made[n] for n in names}


def _text(
    kind: str, attention: str, *names: str, fixed: dict[str, Any] | None = None, **config: Any
) -> Example:
    """A text model of transformers; kind: the stem of its classes ("Bert": BertModel and BertConfig)."""
    import transformers

    stem = kind.removesuffix("EncoderModel").removesuffix("Model")
    settings = getattr(transformers, f"{stem}Config")(vocab_size=VOCABULARY, **config)
    model = perturbed(getattr(transformers, kind)._from_config(settings, attn_implementation=attention))
    inputs = _tokens(*names)
    return Example(_first_output(model, names, **(fixed or {})), inputs, dict.fromkeys(names, TOKENS))


def _image(module: Any, height: int, width: int, channels: int = 3) -> Example:
    import torch

    torch.manual_seed(1)
    return Example(perturbed(module), {"x": torch.randn(BATCH, channels, height, width)}, {"x": {0: "batch"}})


BERT: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": INNER,
    "max_position_embeddings": LONGEST,
}


def bert(attention: str) -> Example:
    return _text("BertModel", attention, "input_ids", "attention_mask", "token_type_ids", **BERT)


def distilbert(attention: str) -> Example:
    sizes: dict[str, Any] = {"dim": HIDDEN, "n_layers": LAYERS, "n_heads": HEADS, "hidden_dim": INNER}
    return _text(
        "DistilBertModel", attention, "input_ids", "attention_mask", **sizes, max_position_embeddings=LONGEST
    )


def deberta(attention: str) -> Example:
    config: dict[str, Any] = {
        **BERT,
        "relative_attention": True,
        "pos_att_type": ["p2c", "c2p"],
        "position_biased_input": False,
        "norm_rel_ebd": "layer_norm",
        "share_att_key": True,
        "position_buckets": 8,
        "max_relative_positions": -1,
    }
    return _text("DebertaV2Model", "eager", "input_ids", "attention_mask", **config)


def gpt2(attention: str) -> Example:
    sizes: dict[str, Any] = {
        "n_embd": HIDDEN,
        "n_layer": LAYERS,
        "n_head": HEADS,
        "n_inner": INNER,
        "n_positions": LONGEST,
    }
    return _text("GPT2Model", attention, "input_ids", "attention_mask", fixed={"use_cache": False}, **sizes)


def llama(attention: str) -> Example:
    config: dict[str, Any] = {**BERT, "num_key_value_heads": 2}
    return _text("LlamaModel", attention, "input_ids", "attention_mask", fixed={"use_cache": False}, **config)


def qwen3(attention: str) -> Example:
    config: dict[str, Any] = {**BERT, "num_key_value_heads": 2, "head_dim": 16}
    return _text("Qwen3Model", attention, "input_ids", "attention_mask", fixed={"use_cache": False}, **config)


def t5(attention: str) -> Example:
    sizes: dict[str, Any] = {
        "d_model": HIDDEN,
        "num_layers": LAYERS,
        "num_heads": HEADS,
        "d_ff": INNER,
        "d_kv": 16,
    }
    return _text("T5EncoderModel", attention, "input_ids", "attention_mask", **sizes)


def t5_gated(attention: str) -> Example:
    sizes: dict[str, Any] = {
        "d_model": HIDDEN,
        "num_layers": LAYERS,
        "num_heads": HEADS,
        "d_ff": INNER,
        "d_kv": 16,
    }
    return _text(
        "T5EncoderModel",
        attention,
        "input_ids",
        "attention_mask",
        **sizes,
        feed_forward_proj="gated-gelu",
    )


def _vision(kind: str, attention: str, **config: Any) -> Example:
    import transformers

    settings = getattr(transformers, f"{kind}Config")(
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=INNER,
        image_size=32,
        patch_size=8,
        **config,
    )
    model = getattr(transformers, f"{kind}Model")._from_config(settings, attn_implementation=attention)
    return _image(_first_output(model, ["pixel_values"]), 32, 32)


def vit(attention: str) -> Example:
    return _vision("ViT", attention)


def clip_vision(attention: str) -> Example:
    return _vision("CLIPVision", attention)


def clip_text(attention: str) -> Example:
    return _text("CLIPTextModel", attention, "input_ids", "attention_mask", **BERT, eos_token_id=2)


def whisper(attention: str) -> Example:
    import torch
    import transformers
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    settings = transformers.WhisperConfig(
        d_model=HIDDEN,
        encoder_layers=LAYERS,
        encoder_attention_heads=HEADS,
        encoder_ffn_dim=INNER,
        num_mel_bins=16,
        max_source_positions=24,
    )
    model = perturbed(WhisperEncoder._from_config(settings, attn_implementation=attention))
    features = torch.randn(BATCH, 16, 48)
    return Example(
        _first_output(model, ["input_features"]),
        {"input_features": features},
        {"input_features": {0: "batch"}},
    )


def _timm_attention(attention: str) -> None:
    from timm.layers import set_fused_attn

    set_fused_attn(attention == "sdpa")


def convnext(_: str) -> Example:
    from timm.models.convnext import ConvNeXt

    return _image(ConvNeXt(num_classes=10, depths=(1, 1, 1, 1), dims=(16, 32, 48, 64)), 64, 64)


def convnext_mlp(_: str) -> Example:
    from timm.models.convnext import ConvNeXt

    return _image(
        ConvNeXt(num_classes=10, depths=(1, 1, 1, 1), dims=(16, 32, 48, 64), conv_mlp=True, use_grn=True),
        64,
        64,
    )


def swin(attention: str) -> Example:
    from timm.models.swin_transformer import SwinTransformer

    _timm_attention(attention)
    return _image(
        SwinTransformer(
            img_size=64,
            patch_size=4,
            window_size=4,
            embed_dim=32,
            depths=(2, 2),
            num_heads=(2, 4),
            num_classes=10,
        ),
        64,
        64,
    )


def timm_vit(attention: str) -> Example:
    from timm.models.vision_transformer import VisionTransformer

    _timm_attention(attention)
    return _image(
        VisionTransformer(
            img_size=32,
            patch_size=8,
            embed_dim=HIDDEN,
            depth=LAYERS,
            num_heads=HEADS,
            num_classes=10,
            init_values=0.1,
            qk_norm=True,
        ),
        32,
        32,
    )


def mixer(_: str) -> Example:
    from timm.models.mlp_mixer import MlpMixer

    return _image(
        MlpMixer(num_classes=10, img_size=32, patch_size=8, num_blocks=LAYERS, embed_dim=HIDDEN), 32, 32
    )


def mobilenet(_: str) -> Example:
    import timm

    return _image(timm.create_model("mobilenetv3_small_050", num_classes=10), 64, 64)


def efficientnet(_: str) -> Example:
    import timm

    return _image(timm.create_model("efficientnet_b0", num_classes=10), 64, 64)


# --- blocks of our own, as diffusion models and language models have them ------------------------------


def unet_block(_: str) -> Example:
    """Two residual blocks of a UNet: GroupNorm, SiLU, convolution, and the time embedding between."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.GroupNorm(8, HIDDEN), nn.GroupNorm(4, HIDDEN, eps=1e-6)
            self.conv1, self.conv2 = (nn.Conv2d(HIDDEN, HIDDEN, 3, padding=1) for _ in range(2))
            self.time = nn.Linear(32, HIDDEN)

        def forward(self, x: Any, t: Any) -> Any:
            h = self.conv1(nn.functional.silu(self.norm1(x)))
            h = h + self.time(nn.functional.silu(t))[:, :, None, None]
            return x + self.conv2(nn.functional.silu(self.norm2(h)))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Block(), Block()
            self.last = nn.GroupNorm(8, HIDDEN)

        def forward(self, x: Any, t: Any) -> Any:
            return self.last(self.second(self.first(x, t), t))

    axes = {"x": {0: "batch", 2: "height", 3: "width"}, "t": {0: "batch"}}
    torch.manual_seed(1)
    inputs = {"x": torch.randn(BATCH, HIDDEN, 12, 20), "t": torch.randn(BATCH, 32)}
    return Example(perturbed(Net()), inputs, axes)


def _sequence(module: Any) -> Example:
    import torch

    torch.manual_seed(1)
    return Example(
        perturbed(module), {"x": torch.randn(BATCH, SEQUENCE, HIDDEN)}, {"x": {0: "batch", 1: "sequence"}}
    )


def gated_mlps(_: str) -> Example:
    """SwiGLU with two projections, GeGLU with one that is split, and GeGLU by tanh."""
    from torch import nn

    class Two(nn.Module):
        def __init__(self, act: Any) -> None:
            super().__init__()
            self.gate, self.up, self.down = (
                nn.Linear(HIDDEN, INNER),
                nn.Linear(HIDDEN, INNER),
                nn.Linear(INNER, HIDDEN),
            )
            self.act = act

        def forward(self, x: Any) -> Any:
            return self.down(self.act(self.gate(x)) * self.up(x))

    class Split(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.both, self.down = nn.Linear(HIDDEN, 2 * INNER), nn.Linear(INNER, HIDDEN)

        def forward(self, x: Any) -> Any:
            up, gate = self.both(x).chunk(2, dim=-1)
            return self.down(up * nn.functional.gelu(gate))

    return _sequence(nn.Sequential(Two(nn.SiLU()), Split(), Two(nn.GELU(approximate="tanh"))))


def activations(_: str) -> Example:
    """Every activation after a projection with a bias."""
    from torch import nn

    class QuickGelu(nn.Module):
        def forward(self, x: Any) -> Any:
            return x * (1.702 * x).sigmoid()

    acts = [
        nn.GELU(), nn.GELU(approximate="tanh"), QuickGelu(), nn.SiLU(), nn.Hardswish(), nn.Mish(),
        nn.ReLU(), nn.Sigmoid(), nn.Tanh(), nn.LeakyReLU(0.2),
    ]  # fmt: skip
    return _sequence(nn.Sequential(*(m for act in acts for m in (nn.Linear(HIDDEN, HIDDEN), act))))


def convolutions(_: str) -> Example:
    """Activations after convolutions, whose bias is theirs: the composed ones are fused alone."""
    from torch import nn

    acts = [nn.SiLU(), nn.Hardswish(), nn.Mish(), nn.GELU(), nn.ReLU6()]
    layers = [m for act in acts for m in (nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), act)]
    return _image(nn.Sequential(nn.Conv2d(3, 16, 3), *layers), 24, 24)


ZOO: dict[str, Entry] = {
    "bert": Entry(bert, Holds(5, 4, 2, 0, 2)),
    "distilbert": Entry(distilbert, Holds(5, 4, 2, 0, 2)),
    "deberta": Entry(deberta, Holds(6, 4, 2, 0, 2), attention=False),
    "gpt2": Entry(gpt2, Holds(5, 4, 2, 0, 2)),
    "llama": Entry(llama, Holds(5, 4, 0, 2, 2)),
    "qwen3": Entry(qwen3, Holds(9, 4, 0, 2, 2)),
    "t5": Entry(t5, Holds(5, 4, 0, 0, 2), half_skips=0),
    "t5_gated": Entry(t5_gated, Holds(5, 4, 0, 2, 2), half_skips=0),
    "vit": Entry(vit, Holds(5, 4, 2, 0, 2)),
    "clip_vision": Entry(clip_vision, Holds(5, 3, 2, 0, 2)),
    "clip_text": Entry(clip_text, Holds(5, 4, 2, 0, 2)),
    "whisper": Entry(whisper, Holds(5, 4, 4, 0, 2), half_skips=2),
    "convnext": Entry(convnext, Holds(9, 0, 4, 0, 0), attention=False),
    "convnext_mlp": Entry(convnext_mlp, Holds(9, 0, 4, 0, 0), attention=False),
    "swin": Entry(swin, Holds(11, 0, 4, 0, 4)),  # a reshape of windows stands before each norm
    "timm_vit": Entry(timm_vit, Holds(9, 4, 2, 0, 2)),
    "mixer": Entry(mixer, Holds(5, 4, 4, 0, 0), attention=False),
    "mobilenet": Entry(mobilenet, Holds(0, 0, 19, 0, 0), attention=False),
    "efficientnet": Entry(efficientnet, Holds(0, 0, 49, 0, 0), attention=False),
    "unet_block": Entry(unet_block, Holds(5, 0, 5, 0, 0), attention=False),
    "gated_mlps": Entry(gated_mlps, Holds(0, 0, 0, 3, 0), attention=False),
    "activations": Entry(activations, Holds(0, 0, 10, 0, 0), attention=False),
    "convolutions": Entry(convolutions, Holds(0, 0, 4, 0, 0), attention=False),
}

# What the models of export_keras.py and export_paddle.py hold.
ELSEWHERE: dict[str, Holds] = {
    "keras_transformer": Holds(5, 4, 2, 0, 2),
    "keras_transformer_mask": Holds(5, 4, 2, 0, 2),
    "keras_transformer_tanh": Holds(5, 4, 2, 0, 2),
    "keras_convolutions": Holds(2, 0, 5, 0, 0),
    "keras_projections": Holds(1, 0, 10, 1, 0),
    "paddle_post": Holds(4, 4, 2, 0, 2),
    "paddle_pre": Holds(5, 4, 2, 0, 2),
    "paddle_projections": Holds(1, 0, 9, 1, 0),
    "paddle_convolutions": Holds(1, 0, 5, 0, 0),
}


def held_by(model: str, dtype: str) -> Holds:
    """What a model holds in fp32 or fp16; nothing for one that is not of ours."""
    if model in ZOO:
        return ZOO[model].held(dtype)
    return ELSEWHERE.get(model, Holds())
