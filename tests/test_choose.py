"""Overlaps, policies and selection files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from graphs import Graph, finish, fused, layer_norm, names, normal

from trtfuse.choose import choose, read_selection
from trtfuse.errors import InputError
from trtfuse.fusion import Site


def sites() -> list[Site]:
    g = Graph()
    x = g.input("x", ("b", 4, 32))
    y = layer_norm(g, g.Add(x, g.Sin(x)))
    return fused(finish(g, g.Relu(g.Add(g.MatMul(y, normal((32, 32), 1)), normal((32,), 2)))))[1]


def test_the_larger_region_wins_and_ids_count_by_op() -> None:
    assert [(s.id, s.fusion.op) for s in sites()] == [
        ("TrtfuseSkipLayerNorm_0", "TrtfuseSkipLayerNorm"),
        ("TrtfuseLinearAct_0", "TrtfuseLinearAct"),
    ]


def test_a_bias_that_a_norm_took_leaves_the_activation_alone() -> None:
    """GELU straight after a norm: the norm's own bias is no bias of the activation."""
    g = Graph()
    y = layer_norm(g, g.input("x", ("b", 4, 32)))
    assert names(fused(finish(g, g.Mul(y, g.Sigmoid(y))))[1]) == ["TrtfuseLayerNorm", "TrtfuseBiasAct"]


@pytest.mark.parametrize(("policy", "chosen"), [("all", 2), ("auto", 2), ("none", 0)])
def test_policies(policy: str, chosen: int) -> None:
    found = sites()
    assert len(choose(found, policy)) == chosen
    assert all(s.reason for s in found)


def write(path: Path, **content: Any) -> Path:
    path.write_text(json.dumps({"schema": "trtfuse/select/1", **content}))
    return path


def test_a_site_wins_over_its_op(tmp_path: Path) -> None:
    found = sites()
    file = write(
        tmp_path / "s.json",
        ops={"TrtfuseLinearAct": "keep", "TrtfuseSkipLayerNorm": "keep"},
        sites={"TrtfuseLinearAct_0": "native"},
    )
    assert [s.id for s in choose(found, file)] == ["TrtfuseLinearAct_0"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ('{"schema": "other"}', 'its "schema" must be'),
        ("[]", 'its "schema" must be'),
        ('{"schema": "trtfuse/select/1", "ops": {"TrtfuseSoftmax": "maybe"}}', "must map names to one of"),
        ('{"schema": "trtfuse/select/1", "ops": {"Flubber": "keep"}}', "Flubber"),
        ('{"schema": "trtfuse/select/1", "sites": 3}', "must map names"),
    ],
)
def test_bad_files_are_refused_in_one_line(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "s.json").write_text(content)
    with pytest.raises(InputError, match=message) as caught:
        read_selection(tmp_path / "s.json")
    assert "\n" not in str(caught.value)


def test_a_site_that_the_model_has_not(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"trtfuse explain"):
        choose(sites(), write(tmp_path / "s.json", sites={"TrtfuseLayerNorm_9": "keep"}))
