"""The model on disk and in hand: what is kept, what is refused, weights stored once."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import onnx
import pytest
from graphs import F32, Graph, finish, normal
from onnx import TensorProto, helper, numpy_helper

from trtfuse import model as models
from trtfuse.errors import InputError


def big(g: Graph, name: str = "w") -> str:
    """A weight that is set aside."""
    return g.weight(normal((64, 64), 1), name=name)


def example() -> onnx.ModelProto:
    g = Graph(17)
    return finish(g, g.MatMul(g.input("x", ("batch", 64)), big(g)))


def test_what_is_loaded_and_saved_is_the_same(tmp_path: Path) -> None:
    model = example()
    model.domain, model.model_version, model.doc_string, model.producer_name = "d", 3, "text", "p"
    model.metadata_props.add(key="k", value="v")
    model.graph.doc_string = "of the graph"
    model.graph.node[0].metadata_props.add(key="a", value="b")
    model.graph.input[0].type.denotation = "IMAGE"
    note = model.graph.quantization_annotation.add(tensor_name="x")
    note.quant_parameter_tensor_names.add(key="SCALE_TENSOR", value="w")
    model.graph.initializer[0].doc_string = "weights"
    model.ir_version = 10
    onnx.save(model, tmp_path / "in.onnx")
    held = models.load(tmp_path / "in.onnx")
    assert not held.proto.graph.initializer[0].raw_data  # set aside
    assert models.save(held, tmp_path / "out.onnx") == [tmp_path / "out.onnx"]
    assert onnx.load(tmp_path / "out.onnx") == model


def only_data(folder: Path) -> Path:
    """The one file of weights in a folder, named by its content."""
    (found,) = folder.glob("*.data")
    content = hashlib.sha256(found.read_bytes()).hexdigest()[:12]
    assert found.name == f"out.onnx.{content}.data"
    return found


def test_external_data_stays_outside_and_stands_alone(tmp_path: Path) -> None:
    model = example()
    source = tmp_path / "in"
    source.mkdir()
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    onnx.save(copy, source / "in.onnx", save_as_external_data=True, location="w", size_threshold=0)
    held = models.load(source / "in.onnx")
    files = models.save(held, tmp_path / "out.onnx")
    assert files == [tmp_path / "out.onnx", only_data(tmp_path)]
    source.rename(tmp_path / "gone")
    back = onnx.load(tmp_path / "out.onnx")
    np.testing.assert_array_equal(
        numpy_helper.to_array(back.graph.initializer[0]), numpy_helper.to_array(model.graph.initializer[0])
    )


def test_a_weight_that_two_names_share_is_stored_once(tmp_path: Path) -> None:
    held = models.hold(example(), tmp_path / "m.onnx")
    held.external = True
    second = held.proto.graph.initializer.add()
    second.CopyFrom(held.proto.graph.initializer[0])
    second.name = "again"
    models.save(held, tmp_path / "out.onnx", check=False)
    assert only_data(tmp_path).stat().st_size == 64 * 64 * 4


def outside(path: Path, seed: int) -> models.Model:
    """A model that keeps its weights outside; another seed, other weights."""
    held = models.hold(example(), path)
    held.external = True
    values = np.random.default_rng(seed).standard_normal((64, 64)).astype(F32)
    held.weights[0] = numpy_helper.from_array(values, held.weights[0].name)
    return held


def weight_of(path: Path) -> np.ndarray:
    return numpy_helper.to_array(onnx.load(path).graph.initializer[0])


def test_a_model_that_is_replaced_leaves_no_weights_behind(tmp_path: Path) -> None:
    out = tmp_path / "out.onnx"
    for seed in (1, 2, 2):
        held = outside(tmp_path / "m.onnx", seed)
        models.save(held, out)
        np.testing.assert_array_equal(weight_of(out), numpy_helper.to_array(held.weights[0]))
        only_data(tmp_path)
    other = tmp_path / "out.onnx.data"
    other.write_bytes(b"the user's")
    models.save(models.hold(example(), tmp_path / "m.onnx"), out)  # inline: it is another's file
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.onnx", "out.onnx.data"]


@pytest.mark.parametrize("stage", ["put", "_check_whole"])
def test_a_failure_leaves_the_old_model_with_its_own_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    """Whether the new weights cannot be put there, or the new model is refused when they are."""
    out = tmp_path / "out.onnx"
    models.save(outside(tmp_path / "m.onnx", 1), out)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}

    def fails(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(models, stage, fails)
    with pytest.raises(InputError, match="No space left"):
        models.save(outside(tmp_path / "m.onnx", 2), out)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_a_link_to_a_model_is_followed_and_its_weights_lie_beside_it(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    link = tmp_path / "out.onnx"
    link.symlink_to(tmp_path / "real" / "m.onnx")
    models.save(outside(tmp_path / "x.onnx", 1), link)
    assert link.is_symlink()
    assert weight_of(tmp_path / "real" / "m.onnx").shape == (64, 64)


def test_a_model_is_moved_with_its_weights(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    for seed in (1, 2):
        held = outside(tmp_path / "m.onnx", seed)
        models.save(held, work / "out.onnx")
        models.move(work / "out.onnx", tmp_path / "out.onnx")
        assert list(work.iterdir()) == []
        np.testing.assert_array_equal(
            weight_of(tmp_path / "out.onnx"), numpy_helper.to_array(held.weights[0])
        )
        only_data(tmp_path)


def test_weights_that_are_read_may_lie_where_the_new_ones_go(tmp_path: Path) -> None:
    """A file fused from one that trtfuse wrote beside it, with the same weights."""
    models.save(outside(tmp_path / "m.onnx", 1), tmp_path / "out.onnx")
    held = models.load(tmp_path / "out.onnx")
    models.save(held, tmp_path / "out.onnx")
    assert weight_of(tmp_path / "out.onnx").shape == (64, 64)
    only_data(tmp_path)


def test_weights_of_any_type_are_bit_exact(tmp_path: Path) -> None:
    import ml_dtypes

    rng = np.random.default_rng(0)
    types = [ml_dtypes.bfloat16, np.float16, np.float64, np.uint8, np.int64, ml_dtypes.float8_e4m3fn]
    weights = []
    for k, dtype in enumerate(types):
        bits = rng.integers(0, 120, 4096 * np.dtype(dtype).itemsize, np.uint8)
        weights.append(numpy_helper.from_array(bits.view(dtype), f"w{k}"))
    weights.append(
        helper.make_tensor("typed", TensorProto.FLOAT, [4096], np.arange(4096, dtype=F32).tolist())
    )
    weights.append(helper.make_tensor("words", TensorProto.STRING, [2], [b"a", b"\xc3\xa9"]))
    nodes = [helper.make_node("Identity", [w.name], [f"o_{w.name}"]) for w in weights]
    outputs = [helper.make_tensor_value_info(f"o_{w.name}", w.data_type, list(w.dims)) for w in weights]
    graph = helper.make_graph(nodes, "g", [], outputs, weights)
    model = helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 21)])
    onnx.save(model, tmp_path / "in.onnx")
    models.save(models.load(tmp_path / "in.onnx"), tmp_path / "out.onnx")
    for was, now in zip(weights, onnx.load(tmp_path / "out.onnx").graph.initializer, strict=True):
        assert was.SerializeToString() == now.SerializeToString()


def test_a_message_of_many_lines_becomes_one() -> None:
    assert models.one_line("a\n  b\n\n==> Context: long") == "a b"
    assert len(models.one_line("x" * 1000)) == 300


def test_inner_graphs_are_walked() -> None:
    inner = helper.make_graph(
        [helper.make_node("Constant", [], ["c"], value=numpy_helper.from_array(np.ones(3, F32)))],
        "inner",
        [],
        [helper.make_tensor_value_info("c", TensorProto.FLOAT, [3])],
    )
    node = helper.make_node("If", ["flag"], ["y"], then_branch=inner, else_branch=inner)
    graph = helper.make_graph([node], "outer", [], [])
    assert [g.name for g in models.graphs(graph)] == ["outer", "inner", "inner"]
    assert len(list(models.tensors(graph))) == 2


def test_a_model_without_a_graph_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(onnx.ModelProto(ir_version=8).SerializeToString())
    with pytest.raises(InputError, match="holds no ONNX graph"):
        models.load(tmp_path / "m.onnx")


def test_a_model_that_contradicts_itself_is_said_to(tmp_path: Path) -> None:
    model = example()
    model.graph.output[0].type.tensor_type.shape.dim[1].dim_value = 7  # the product has 64 columns
    onnx.save(model, tmp_path / "in.onnx")
    with pytest.raises(InputError, match="contradict each other"):
        models.save(models.load(tmp_path / "in.onnx"), tmp_path / "out.onnx")
    assert not (tmp_path / "out.onnx").exists()
