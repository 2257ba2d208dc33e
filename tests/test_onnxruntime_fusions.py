"""The graph shapes that ONNX Runtime's own tests of its norm fusions are about, rebuilt, with what must fuse.

Facts from microsoft/onnxruntime, onnxruntime/test/optimizer/graph_transform_test_layernorm.cc and the models
that it loads. Where the expectation here is another than there, the test says why.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from graphs import F16, F32, F64, I64, Graph, assert_same, finish, fused, layer_norm, names, normal, prove

LN, SKIP = "TrtfuseLayerNorm", "TrtfuseSkipLayerNorm"
RMS, SKIP_RMS = "TrtfuseRmsNorm", "TrtfuseSkipRmsNorm"
ROWS = (2, 3, 32)


def affine(g: Graph, dtype: Any = None, seed: int = 7) -> tuple[Any, Any]:
    dtype = dtype or g.dtype
    return (1 + normal((32,), seed, F32, 0.3)).astype(dtype), normal((32,), seed + 1, dtype, 0.3)


def joined(g: Graph, *results: str) -> str:
    """One output that depends on all results."""
    y = results[0]
    for other in results[1:]:
        y = g.Add(g.Sin(y), g.Cos(other))
    return str(y)


# --- LayerNorm ---


def test_layer_norm_is_one() -> None:
    g = Graph(12)
    prove(g, layer_norm(g, g.input("x", ROWS), two_subs=True), [LN])


def test_two_of_one_input_are_two() -> None:
    g = Graph(12)
    x = g.input("x", ROWS)
    prove(g, joined(g, layer_norm(g, x), layer_norm(g, x, eps=1e-3)), [LN, LN])


def test_two_that_share_their_statistics_are_none() -> None:
    """What one would take away the other still reads."""
    g = Graph(12)
    x = g.input("x", ROWS)
    mean = g.reduce("ReduceMean", x)
    centred = g.Sub(x, mean)
    std = g.Sqrt(g.Add(g.reduce("ReduceMean", g.Pow(centred, 2.0)), 1e-5))
    unit = g.Div(centred, std)
    results = []
    for seed in (1, 3):
        scale, bias = affine(g, seed=seed)
        results.append(g.Add(g.Mul(unit, scale), bias))
    model = finish(g, joined(g, *results))
    made, sites, _ = fused(model)
    assert names(sites) in ([], [LN])  # the part without scale and bias may go
    assert_same(model, made, g.feeds)


def test_a_cast_to_double_inside_is_none() -> None:
    """layer_norm_with_cast: the squares are computed in fp64, which no norm of ours does."""
    g = Graph(12)
    x = g.input("x", ROWS)
    centred = g.Sub(x, g.reduce("ReduceMean", x))
    squared = g.Pow(g.cast(centred, F64), np.asarray(2, F64))
    std = g.Sqrt(g.Add(g.reduce("ReduceMean", squared), np.asarray(1e-12, F64)))
    y = g.cast(g.Div(g.cast(centred, F64), std), F32)
    scale, bias = affine(g)
    prove(g, g.Add(g.Mul(y, scale), bias), [])


@pytest.mark.parametrize("form", [2, 3, 4])
def test_casts_to_fp32_inside_are_one(form: int) -> None:
    """2: behind the subtraction, 3: before the first mean, 4: of the squares' tensor alone."""
    g = Graph(12, F16)
    x = g.input("x", ROWS)
    wide = g.cast(x, F32) if form == 3 else x
    centred = g.Sub(wide, g.reduce("ReduceMean", wide))
    top = g.cast(centred, F32) if form != 3 else centred
    std = g.Sqrt(g.Add(g.reduce("ReduceMean", g.Pow(top, np.asarray(2, F32))), np.asarray(1e-5, F32)))
    if form == 4:
        y = g.Div(centred, g.cast(std, F16))
    else:
        y = g.cast(g.Div(top, std), F16)
    scale, bias = affine(g)
    prove(g, g.Add(g.Mul(y, scale), bias), [LN])


def test_scale_and_bias_behind_identities_are_one() -> None:
    g = Graph(12, constants="identity")
    prove(g, layer_norm(g, g.input("x", ROWS)), [LN])


def test_means_without_axes_are_none() -> None:
    """layer_norm_sub_dup: ReduceMean over everything."""
    g = Graph(12)
    x = g.input("x", ROWS)
    mean = g.ReduceMean(x)
    one, two = g.Sub(x, mean), g.Sub(x, mean)
    std = g.Sqrt(g.Add(g.ReduceMean(g.Pow(one, 2.0)), 1e-5))
    scale, bias = affine(g)
    prove(g, g.Add(g.Mul(g.Div(two, std), scale), bias), [])


AXES: list[tuple[tuple[int, ...], tuple[int, ...], list[str]]] = [
    ((-1,), (-1,), [LN]),
    ((2,), (-1,), [LN]),
    ((-2,), (-1,), [RMS]),  # of what is centred along the other axis: no LayerNorm
    ((-1,), (-2,), []),
    ((-2, -1), (-1, -2), []),
    ((-3, -2, -1), (-1, -2), []),
    ((1, -1), (-1, -2), []),
]


@pytest.mark.parametrize("opset", [14, 18])
@pytest.mark.parametrize(("first", "second", "expected"), AXES)
def test_axes(first: tuple[int, ...], second: tuple[int, ...], expected: list[str], opset: int) -> None:
    g = Graph(opset)
    x = g.input("x", ROWS)
    centred = g.Sub(x, g.reduce("ReduceMean", x, first))
    std = g.Sqrt(g.Add(g.reduce("ReduceMean", g.Pow(centred, 2.0), second), 1e-5))
    scale, bias = affine(g)
    prove(g, g.Add(g.Mul(g.Div(centred, std), scale), bias), expected)


def test_epsilon_first_keeps_its_value() -> None:
    g = Graph(14)
    x = g.input("x", ROWS, scale=1e-3)
    made, _ = prove(g, layer_norm(g, x, eps=1e-4, swapped=True), [LN])
    assert made.functions[0].name == "TrtfuseLayerNorm_eps1em04"


@pytest.mark.parametrize("rms", [False, True])
def test_an_epsilon_that_fp32_has_not_is_none(rms: bool) -> None:
    g = Graph(14, F64)
    x = g.input("x", ROWS)
    centred = x if rms else g.Sub(x, g.reduce("ReduceMean", x))
    std = g.Sqrt(g.Add(g.reduce("ReduceMean", g.Pow(centred, 2.0)), 1e-50))
    prove(g, g.Mul(g.Div(centred, std), affine(g)[0]), [])


def test_an_epsilon_that_rounds_to_nothing_is_none() -> None:
    """In fp32: 1e-50 is 0 there, and 1e-40 no normal number."""
    for eps in (0.0, 1e-40):
        g = Graph(14)
        prove(g, layer_norm(g, g.input("x", ROWS), eps=eps), [])


# --- RMS norm ---


def rms(
    g: Graph, x: str, exponent: Any = 2.0, eps: float = 1e-5, swapped: bool = False, scale: bool = True
) -> str:
    mean = g.reduce("ReduceMean", g.Pow(x, exponent))
    root = g.Sqrt(g.Add(eps, mean) if swapped else g.Add(mean, eps))
    y = g.Div(x, root)
    return str(g.Mul(y, affine(g)[0]) if scale else y)


def test_t5_is_one_rms_norm() -> None:
    g = Graph(12)
    prove(g, rms(g, g.input("x", ROWS)), [RMS])


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_an_integer_two_is_two(dtype: Any) -> None:
    g = Graph(17)
    prove(g, rms(g, g.input("x", ROWS), np.asarray(2, dtype)), [RMS])


@pytest.mark.parametrize("cast", [False, True])
def test_an_exponent_of_three_is_none(cast: bool) -> None:
    g = Graph(17)
    exponent = g.cast(g.weight(np.asarray(4, F16)), F32) if cast else 4.0
    prove(g, rms(g, g.input("x", ROWS), exponent), [])


def test_two_that_share_a_cast_exponent_are_two() -> None:
    g = Graph(17)
    exponent = g.cast(g.weight(np.asarray(2, F16)), F32)
    results = [rms(g, g.input(name, ROWS), exponent) for name in ("x", "z")]
    prove(g, joined(g, *results), [RMS, RMS])


def test_rms_epsilon_first_keeps_its_value() -> None:
    g = Graph(17)
    made, _ = prove(g, rms(g, g.input("x", ROWS), eps=1e-4, swapped=True), [RMS])
    assert made.functions[0].name.startswith("TrtfuseRmsNorm_eps1em04")


# --- SkipLayerNorm ---


def skip(g: Graph, form: int, keep: dict[str, str]) -> str:
    """1: Add(Add(x, bias), skip), 2: Add(skip, Add(x, bias)), 3: Add(x, skip)."""
    x, other = g.input("x", ROWS), g.input("skip", ROWS)
    if form == 3:
        total = g.Add(x, other)
    else:
        keep["biased"] = g.Add(x, normal((32,), 5, g.dtype))
        total = g.Add(*((keep["biased"], other) if form == 1 else (other, keep["biased"])))
    keep["sum"] = total
    return layer_norm(g, total)


@pytest.mark.parametrize("form", [1, 2, 3])
@pytest.mark.parametrize("dtype", [F32, F16])
def test_skip_formats_are_one(form: int, dtype: Any) -> None:
    g = Graph(12, dtype)
    keep: dict[str, str] = {}
    made, _ = prove(g, skip(g, form, keep), [SKIP])
    words = made.functions[0].name.split("_")
    assert ("bias" in words) == (form != 3)
    assert "sum" not in words


@pytest.mark.parametrize("form", [1, 2])
@pytest.mark.parametrize("way", ["read", "exposed"])
def test_where_the_biased_tensor_is_needed_the_rest_fuses(form: int, way: str) -> None:
    """The partial variants: the first Add stays, the second and the norm become one."""
    g = Graph(12)
    keep: dict[str, str] = {}
    y = skip(g, form, keep)
    if way == "exposed":
        g.output(keep["biased"])
    else:
        y = joined(g, y, keep["biased"])
    made, _ = prove(g, y, [SKIP])
    assert "bias" not in made.functions[0].name.split("_")


@pytest.mark.parametrize("form", [1, 2, 3])
@pytest.mark.parametrize("way", ["read", "exposed"])
def test_where_the_sum_is_needed_it_is_a_second_output(form: int, way: str) -> None:
    """ONNX Runtime leaves these; here the fused op gives the sum back."""
    g = Graph(12)
    keep: dict[str, str] = {}
    y = skip(g, form, keep)
    if way == "exposed":
        g.output(keep["sum"])
    else:
        y = joined(g, y, keep["sum"])
    made, _ = prove(g, y, [SKIP])
    assert "sum" in made.functions[0].name.split("_")


@pytest.mark.parametrize("shape", [(1, 3, 32), (3, 32), (32,), (2, 3, 1)])
def test_a_skip_that_broadcasts_leaves_a_plain_norm(shape: tuple[int, ...]) -> None:
    g = Graph(12)
    total = g.Add(g.input("x", ROWS), g.input("skip", shape))
    prove(g, layer_norm(g, total), [LN])


def test_one_add_that_two_norms_read() -> None:
    """The sum goes to both: one takes the Add and gives the sum, the other reads that."""
    g = Graph(12)
    total = g.Add(g.input("x", ROWS), g.input("skip", ROWS))
    model = finish(g, joined(g, layer_norm(g, total), layer_norm(g, total, eps=1e-3)))
    made, sites, _ = fused(model)
    assert sorted(names(sites)) == [LN, SKIP]
    assert_same(model, made, g.feeds)


def test_no_beta_is_still_one() -> None:
    g = Graph(12)
    total = g.Add(g.input("x", ROWS), g.input("skip", ROWS))
    prove(g, layer_norm(g, total, bias=False), [SKIP])


def test_a_residual_before_an_rms_norm() -> None:
    g = Graph(17)
    total = g.Add(g.input("x", ROWS), g.input("skip", ROWS))
    made, _ = prove(g, joined(g, rms(g, total), total), [SKIP_RMS])
    assert "sum" in made.functions[0].name.split("_")


def test_the_operators_own_two_axes_stay() -> None:
    g = Graph(17)
    scale, bias = normal((3, 32), 1, F32), normal((3, 32), 2, F32)
    prove(g, g.LayerNormalization(g.input("x", ROWS), scale, bias, axis=1), [])


def test_axes_that_a_tensor_gives_at_run_time_stay() -> None:
    g = Graph(18)
    x, axes = g.input("x", ROWS), g.input("axes", (1,), I64)
    g.feeds = [{**feed, "axes": np.array([-1], I64)} for feed in g.feeds]
    centred = g.Sub(x, g.ReduceMean(x, axes))
    std = g.Sqrt(g.Add(g.ReduceMean(g.Pow(centred, 2.0), axes), 1e-5))
    prove(g, g.Div(centred, std), [])
