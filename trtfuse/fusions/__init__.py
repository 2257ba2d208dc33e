"""The fused ops, in the order in which overlapping sites are preferred: the larger region first."""

from __future__ import annotations

from trtfuse.fusion import Fusion
from trtfuse.fusions.attention import ATTENTION
from trtfuse.fusions.bias_act import BIAS_ACT
from trtfuse.fusions.gated_act import GATED_ACT
from trtfuse.fusions.group_norm import GROUP_NORM
from trtfuse.fusions.layer_norm import LAYER_NORM, SKIP_LAYER_NORM
from trtfuse.fusions.linear_act import LINEAR_ACT
from trtfuse.fusions.rms_norm import RMS_NORM, SKIP_RMS_NORM
from trtfuse.fusions.softmax import SOFTMAX

FUSIONS: tuple[Fusion, ...] = (
    ATTENTION,
    SKIP_LAYER_NORM,
    SKIP_RMS_NORM,
    GROUP_NORM,
    LAYER_NORM,
    RMS_NORM,
    GATED_ACT,
    LINEAR_ACT,
    BIAS_ACT,
    SOFTMAX,
)

NAMES = frozenset(f.op for f in FUSIONS)
