"""What an engine's layers say: read from the inspector's JSON, and every plugin asked for must be there."""

from __future__ import annotations

import json

import pytest

from trtfuse.errors import BuildError
from trtfuse.targets.layers import Layer, parse, require_plugins

DETAILED = {
    "Layers": [
        {
            "Name": "gemm_1",
            "LayerType": "gemm",
            "Metadata": "[ONNX Layer: /fc/MatMul]\x1e[ONNX Layer: /fc/Add]",
        },
        {"Name": "TrtfuseSoftmax_0", "LayerType": "PluginV3", "Metadata": "[ONNX Layer: a[b]c]"},
        {"Name": "moved", "LayerType": "PluginV3", "Metadata": "[ONNX Layer: TrtfuseBiasAct_1]"},
        "a name alone",
    ]
}


def test_layers_with_the_nodes_that_they_compute() -> None:
    assert parse(json.dumps(DETAILED)) == [
        Layer("gemm_1", "gemm", ("/fc/MatMul", "/fc/Add")),
        Layer("TrtfuseSoftmax_0", "PluginV3", ("a[b]c",)),
        Layer("moved", "PluginV3", ("TrtfuseBiasAct_1",)),
        Layer("a name alone", "", ()),
    ]
    assert parse("{}") == []


def test_a_plugin_may_be_named_by_its_layer_or_its_node() -> None:
    require_plugins(parse(json.dumps(DETAILED)), ["TrtfuseSoftmax_0", "TrtfuseBiasAct_1"])


def test_a_plugin_that_is_lost_fails_the_build() -> None:
    with pytest.raises(BuildError, match=r"without the plugin of gemm_1: choose native for it by --select"):
        require_plugins(parse(json.dumps(DETAILED)), ["gemm_1"])
    with pytest.raises(BuildError, match="a, b, c and 2 more"):
        require_plugins([], list("abcde"))
