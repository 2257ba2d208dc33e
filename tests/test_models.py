"""The catalogue, the generated models and the lock: all without a network."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import fetch
import generate
from catalogue import CATALOGUE, Input

ROOT = Path(__file__).resolve().parent.parent


def run(model: onnx.ModelProto | Path, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    source = str(model) if isinstance(model, Path) else model.SerializeToString()
    return ort.InferenceSession(source, options, providers=["CPUExecutionProvider"]).run(None, feeds)


def sentences(batch: int, length: int, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    mask = np.ones((batch, length), np.int64)
    mask[-1, length // 2 :] = 0
    return {"input_ids": rng.integers(0, 1000, (batch, length)), "attention_mask": mask}


@pytest.mark.parametrize("model", CATALOGUE.values(), ids=list(CATALOGUE))
def test_catalogue_entry_is_complete(model):
    assert re.fullmatch(r"[0-9a-f]{64}", model.sha256)
    assert model.member.endswith(model.file)
    assert model.file.endswith(".onnx")
    assert model.version
    assert model.licence
    assert 7 <= model.opset <= 25
    assert model.nodes > 0
    assert (":" in model.package) == (model.registry == "maven")
    assert model.inputs
    assert set(model.sites) <= {"norm", "skip_norm", "sum", "attention", "gelu", "hardswish", "silu"}
    assert model.sites.get("skip_norm", 0) <= model.sites.get("norm", 0)


@pytest.mark.parametrize("model", CATALOGUE.values(), ids=list(CATALOGUE))
def test_feeds_have_the_declared_shapes_and_repeat(model):
    first, again = model.feeds(3), model.feeds(3)
    for name, spec in model.inputs.items():
        assert first[name].shape == spec.shape
        assert first[name].dtype == spec.dtype
        np.testing.assert_array_equal(first[name], again[name])


def test_a_mask_is_ones_then_zeros_and_never_empty():
    for seed in range(20):
        mask = Input((4, 7), "int64", "mask").make(np.random.default_rng(seed))
        assert (mask[:, 0] == 1).all()
        assert (mask[0] == 1).all()
        assert (np.diff(mask, axis=1) <= 0).all()


def test_catalogue_names_and_files_are_unique():
    assert len({model.file for model in CATALOGUE.values()}) == len(CATALOGUE)
    assert all(name == model.name for name, model in CATALOGUE.items())


def test_a_fetched_file_is_not_fetched_again(tmp_path, monkeypatch):
    model = CATALOGUE["basic-pitch"]
    monkeypatch.setattr(fetch, "sha256", lambda path: model.sha256)
    monkeypatch.setattr(fetch, "_download", lambda *_: pytest.fail("downloaded what was there"))
    (tmp_path / model.file).write_bytes(b"the file")
    assert fetch.fetch("basic-pitch", tmp_path) == tmp_path / model.file


def test_another_digest_is_refused_and_leaves_no_file(tmp_path, monkeypatch):
    model = CATALOGUE["basic-pitch"]

    def package(_, folder):
        import zipfile

        with zipfile.ZipFile(folder / "package.whl", "w") as archive:
            archive.writestr(model.member, b"not the model")
        return folder / "package.whl"

    monkeypatch.setattr(fetch, "_download", package)
    with pytest.raises(fetch.FetchError, match="sha256"):
        fetch.fetch("basic-pitch", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_unknown_model_is_one_line_and_exit_1(capsys):
    assert fetch.main(["no-such-model"]) == 1
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert "all-minilm-l6-v2" in message


@pytest.mark.parametrize("layers", [1, 3])
def test_transformer_is_valid_and_runs_at_several_sizes(layers):
    model = generate.transformer(layers)
    onnx.checker.check_model(model, full_check=True)
    for batch, length in ((1, 1), (2, 9), (3, 128)):
        (states,) = run(model, sentences(batch, length))
        assert states.shape == (batch, length, 64)
        assert np.isfinite(states).all()
        assert 0.3 < states.std() < 3


def test_padding_does_not_reach_the_other_tokens():
    feeds = sentences(2, 10)
    (states,) = run(generate.transformer(2), feeds)
    other = dict(feeds, input_ids=np.where(feeds["attention_mask"] == 0, 7, feeds["input_ids"]))
    (again,) = run(generate.transformer(2), other)
    np.testing.assert_allclose(states[-1, :5], again[-1, :5], atol=1e-5)


def test_transformer_has_the_sites_it_promises():
    ops = [node.op_type for node in generate.transformer(4).graph.node]
    assert ops.count("Sqrt") == 2 * 4 + 1
    assert ops.count("Erf") == 4
    assert ops.count("Softmax") == 4


def test_transformer_depends_on_every_bias_and_norm_weight():
    model = generate.transformer(1)
    feeds = sentences(2, 6)
    (expected,) = run(model, feeds)
    vectors = [w for w in model.graph.initializer if len(w.dims) == 1]
    assert len(vectors) == 12
    for weight in vectors:
        changed = onnx.ModelProto()
        changed.CopyFrom(model)
        values = onnx.numpy_helper.to_array(weight)
        neutral = np.ones_like(values) if "norm.weight" in weight.name else np.zeros_like(values)
        index = [w.name for w in model.graph.initializer].index(weight.name)
        changed.graph.initializer[index].CopyFrom(onnx.numpy_helper.from_array(neutral, weight.name))
        difference = np.abs(run(changed, feeds)[0] - expected).max()
        # softmax is the same for any bias of the keys: no output can show that one
        assert difference > 1e-3 or weight.name.endswith("key.bias"), weight.name


def test_same_seed_same_bytes_other_seed_other_bytes():
    def made(seed):
        return generate.transformer(1, seed=seed).SerializeToString(deterministic=True)

    assert made(1) == made(1)
    assert made(1) != made(2)


def test_heads_that_do_not_divide_hidden_are_refused():
    with pytest.raises(ValueError, match="not a multiple"):
        generate.transformer(1, hidden=64, heads=5)


@pytest.mark.parametrize("nodes", [1000, 4000, 16000])
def test_layers_for_comes_near(nodes):
    layers = generate.layers_for(nodes)
    assert generate.NODES_PER_LAYER * layers + generate.NODES_AROUND_LAYERS == pytest.approx(nodes, rel=0.06)
    if nodes == 1000:
        made = generate.transformer(layers).graph.node
        assert len(made) == generate.NODES_PER_LAYER * layers + generate.NODES_AROUND_LAYERS


@pytest.mark.parametrize("nodes", [1, 2, 7, 1000])
def test_chain_is_valid_and_does_not_saturate(nodes):
    model = generate.chain(nodes)
    onnx.checker.check_model(model, full_check=True)
    assert len(model.graph.node) == nodes
    x = np.random.default_rng(0).standard_normal((3, 64), dtype=np.float32)
    (y,) = run(model, {"x": x})
    assert y.shape == x.shape
    assert y.std() > 0.1
    assert np.abs(y).mean() < 2


def test_external_weights_give_the_same_answers(tmp_path):
    path = tmp_path / "external.onnx"
    size = generate.write_large(path, layers=2, hidden=64, heads=4)
    data = tmp_path / "external.onnx.data"
    assert data.stat().st_size == size
    assert path.stat().st_size < size / 4
    onnx.checker.check_model(str(path), full_check=True)
    feeds = sentences(2, 8)
    np.testing.assert_array_equal(run(path, feeds)[0], run(generate.transformer(2), feeds)[0])
    assert sorted(p.name for p in tmp_path.iterdir()) == [path.name, data.name]


def test_lock_pins_every_package_and_names_no_place():
    text = (ROOT / "requirements-dev.lock").read_text()
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert len(lines) > 30
    assert not re.search(r"://|--(extra-)?index|--find-links|@ ", text)
    for line in lines:
        assert re.fullmatch(r"[a-z0-9-]+==[^ ]+( ; .+)?", line), line


def test_lock_holds_what_the_project_asks_for():
    locked = {
        line.split("==")[0]
        for line in (ROOT / "requirements-dev.lock").read_text().splitlines()
        if line and not line.startswith("#")
    }
    project = (ROOT / "pyproject.toml").read_text()
    asked = re.findall(r'"([A-Za-z][A-Za-z0-9_-]*)>=', project.split("[project.scripts]")[0])
    extra = project.split("\ntensorrt = [")[1].split("]")[0]  # for machines with a GPU, so not in the lock
    on_gpu = set(re.findall(r'"([a-z-]+)>=', extra))
    assert len(on_gpu) == 3
    wanted = {name.lower().replace("_", "-") for name in asked} - {"hatchling"} - on_gpu
    assert len(wanted) > 15
    assert wanted <= locked
