"""Engines on a GPU that is not there: what goes in and out, whose code may run, what a refusal says."""

from __future__ import annotations

import gc
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from fake_gpu import OnGpu, Runtime, TensorRT, cudaError_t

import trtfuse
from trtfuse import cuda, dlpack, loading, manifest, plugin_library
from trtfuse.errors import EnvironmentMissing, InputError, RunError
from trtfuse.manifest import FileHash, GpuInfo, Manifest, PluginsInfo
from trtfuse.targets import gpu, tensorrt


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[TensorRT]:
    runtime = Runtime()
    trt = TensorRT(runtime)
    monkeypatch.setattr(cuda, "runtime", lambda: runtime)
    monkeypatch.setattr(gpu, "count", lambda: 1)
    monkeypatch.setattr(tensorrt, "load", lambda: trt)
    monkeypatch.setattr(plugin_library, "find", lambda: None)
    yield trt
    gc.collect()
    assert runtime.memory == {}, "memory of the GPU is not given back"


DYNAMIC = {"profiles": [[[1, 4], [2, 4], [8, 4]], [[9, 4], [16, 4], [32, 4]]]}


def engine_file(folder: Path, **said: Any) -> Path:
    path = folder / "m.engine"
    path.write_text(json.dumps(said or DYNAMIC))
    return path


def described(path: Path, **changes: Any) -> None:
    """Writes the manifest of an engine."""
    words: dict[str, Any] = {
        "trtfuse": "0.1.0",
        "model": FileHash(path="m.onnx", sha256="0" * 64, bytes=1),
        "engine": manifest.hash_file(path),
        "target": "tensorrt",
        "tensorrt": "10.6.0",
        "gpu": GpuInfo(name="NVIDIA H200", compute_capability="9.0"),
        "compute_capabilities": ["9.0"],
        "flags": {"target": "tensorrt", "shapes": ["x:2x4"], "tf32": True},
    }
    manifest.write(Manifest(**{**words, **changes}), path)


def values(*shape: int, dtype: Any = np.float32) -> Any:
    return np.arange(np.prod(shape)).reshape(shape).astype(dtype)


def test_arrays_in_and_out_of_any_shape_that_a_profile_has(machine: TensorRT, tmp_path: Path) -> None:
    with trtfuse.Engine(engine_file(tmp_path)) as engine:
        assert engine.profiles == 2
        assert engine.opt_shapes() == {"x": (2, 4)}
        assert engine.opt_shapes(1) == {"x": (16, 4)}
        for rows in (1, 8, 9, 32, 3, 3):
            x = values(rows, 4)
            y = engine({"x": x})["y"]
            np.testing.assert_array_equal(y, 2 * x)
            assert isinstance(y, np.ndarray)
        assert engine._context()._context.profiles == [1, 0]
        strided = values(4, 6)[:, ::2][:, :3].T.copy().T
        with pytest.raises(InputError, match="has shape 4x3, and the engine takes from 1x4 to 8x4; build"):
            engine({"x": strided})
        np.testing.assert_array_equal(engine({"x": values(4, 8)[:, ::2]})["y"], 2 * values(4, 8)[:, ::2])


def test_a_feed_that_does_not_fit_says_what_does(machine: TensorRT, tmp_path: Path) -> None:
    engine = trtfuse.Engine(engine_file(tmp_path))
    good = values(2, 4)
    for feed, says in (
        ({}, "the input 'x' is missing: give it an array of float32"),
        ({"x": good, "z": good}, "has no input 'z': there are x"),
        ({"x": good.astype(np.float64)}, "'x' is of float64, and the engine takes float32: convert it"),
        ({"x": values(40, 4)}, "has shape 40x4, and the engine takes from 1x4 to 8x4"),
        ({"x": values(2, 4, 1)}, "has shape 2x4x1"),
    ):
        with pytest.raises(InputError, match=says):
            engine(feed)
    with pytest.raises(InputError, match="has no output 'z': there are y"):
        engine({"x": good}, outputs=["z"])
    with pytest.raises(InputError, match="has no profile 7: it has 2"):
        engine({"x": good}, profile=7)
    engine._context()._context.set_input_shape = lambda *_: False
    with pytest.raises(InputError, match="takes from 9x4 to 32x4"):
        engine({"x": good}, profile=1)


def test_a_fixed_shape_of_bfloat16_and_no_rows(machine: TensorRT, tmp_path: Path) -> None:
    engine = trtfuse.Engine(engine_file(tmp_path, shape=[0, 4], dtype="bfloat16"))
    assert engine({"x": np.zeros((0, 4), ml_dtypes.bfloat16)})["y"].shape == (0, 4)
    with pytest.raises(InputError, match=r"has shape 2x4, and the engine takes 0x4$"):
        engine({"x": np.zeros((2, 4), ml_dtypes.bfloat16)})
    with pytest.raises(InputError, match="of type INT4, which no array holds"):
        trtfuse.Engine(engine_file(tmp_path, shape=[2], dtype="int4"))


def test_a_tensor_on_the_gpu_stays_there(machine: TensorRT, tmp_path: Path) -> None:
    engine = trtfuse.Engine(engine_file(tmp_path))
    x = OnGpu(values(3, 4))
    y = engine({"x": x})["y"]
    assert isinstance(y, dlpack.DeviceTensor)
    assert (y.shape, y.dtype, y.__dlpack_device__()) == ((3, 4), np.float32, (2, 0))
    np.testing.assert_array_equal(y.numpy(), 2 * x.array)
    assert x.streams == [engine._context().stream.handle]  # who gives it makes our stream wait
    again = dlpack.consume(y, stream=7)
    assert machine.cuda.waits[-1][0] == 7  # and who takes it waits for ours
    assert (again.ptr, again.shape, again.strides) == (y.ptr, (3, 4), (4, 1))
    with pytest.raises(InputError, match="'x' is of float64"):
        engine({"x": OnGpu(values(3, 4, dtype=np.float64))})
    with pytest.raises(BufferError, match="copy it afterwards"):
        y.__dlpack__(copy=True)
    one = engine({"x": OnGpu(values(2, 4))})["y"]
    two = engine({"x": OnGpu(values(2, 4) + 1)})["y"]
    np.testing.assert_array_equal(one.numpy() + 2, two.numpy())  # each call's result is its own


def test_a_host_tensor_by_dlpack_is_an_array(machine: TensorRT, tmp_path: Path) -> None:
    class OnHost:
        def __init__(self, array: Any) -> None:
            self.array = array

        def __dlpack__(self, **words: Any) -> Any:
            return self.array.__dlpack__(**words)

        def __dlpack_device__(self) -> Any:
            return self.array.__dlpack_device__()

    y = trtfuse.Engine(engine_file(tmp_path))({"x": OnHost(values(2, 4))})["y"]
    np.testing.assert_array_equal(y, 2 * values(2, 4))


@pytest.mark.parametrize("on_gpu", [False, True])
def test_recorded_launches_replay_with_new_inputs(machine: TensorRT, tmp_path: Path, on_gpu: bool) -> None:
    engine = trtfuse.Engine(engine_file(tmp_path))
    results = []
    for start in (0, 5, 9):
        x = values(2, 4) + start
        y = engine({"x": OnGpu(x) if on_gpu else x}, cuda_graph=True)["y"]
        results.append((y, 2 * x))
    for rows in (6, 2):  # buffers that grow make the old recording void
        x = values(rows, 4)
        y = engine({"x": OnGpu(x) if on_gpu else x}, cuda_graph=True)["y"]
        results.append((y, 2 * x))
    for y, want in results:
        np.testing.assert_array_equal(y.numpy() if on_gpu else y, want)


def test_outputs_whose_size_the_data_decides(machine: TensorRT, tmp_path: Path) -> None:
    engine = trtfuse.Engine(engine_file(tmp_path, shape=[3, 2], data=True))
    for start in (0, 1):
        np.testing.assert_array_equal(engine({"x": values(3, 2) + start})["y"], 2 * (values(3, 2) + start))
    with pytest.raises(InputError, match="depend on the data: run this engine without a CUDA graph"):
        engine({"x": values(3, 2)}, cuda_graph=True)


def test_each_thread_has_a_context(machine: TensorRT, tmp_path: Path) -> None:
    engine = trtfuse.Engine(engine_file(tmp_path))
    wrong: list[Any] = []

    def work(seed: int) -> None:
        for _ in range(20):
            x = values(2, 4) + seed
            if not np.array_equal(engine({"x": x})["y"], 2 * x):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert wrong == []
    assert machine.contexts == 4


def test_what_tensorrt_refuses_is_said(machine: TensorRT, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"cannot run .*m.engine: the kernel failed"):
        trtfuse.Engine(engine_file(tmp_path, shape=[2], fails=True))({"x": values(2)})
    with pytest.raises(RunError, match=r"cannot make a context for .*: free GPU memory"):
        trtfuse.Engine(engine_file(tmp_path, shape=[2], full=True))({"x": values(2)})
    with pytest.raises(InputError, match="it gives no reason; build it again here with `trtfuse build`"):
        trtfuse.Engine(engine_file(tmp_path, bad=True))
    (tmp_path / "m.engine").write_bytes(b"\x00\x01 no engine")
    with pytest.raises(InputError, match="magicTag does not match; build it again here"):
        trtfuse.Engine(tmp_path / "m.engine")
    with pytest.raises(InputError, match=r"cannot read the engine .*absent.engine: No such file"):
        trtfuse.Engine(tmp_path / "absent.engine")


def test_cuda_failures_name_the_call(machine: TensorRT, tmp_path: Path) -> None:
    machine.cuda.fails = cudaError_t.cudaErrorMemoryAllocation
    with pytest.raises(RunError, match="cudaMalloc failed: out of memory: use smaller shapes, or free"):
        cuda.Buffer(8)
    machine.cuda.memory.clear()
    machine.cuda.fails = cudaError_t.cudaErrorNoDevice
    with pytest.raises(EnvironmentMissing, match="there is no NVIDIA GPU to run on"):
        trtfuse.Engine(engine_file(tmp_path))
    machine.cuda.fails = None
    assert cuda.driver_version() == "13.0"


# --- whose code may run ---


def carried(**changes: Any) -> PluginsInfo:
    words: dict[str, Any] = {
        "sha256": "a" * 64,
        "sources": "s" * 64,
        "embedded": True,
        "ops": ["TrtfuseSoftmax"],
    }
    return PluginsInfo(**{**words, **changes})


def test_an_engine_with_code_of_its_own_is_refused_unless_allowed(machine: TensorRT, tmp_path: Path) -> None:
    path = engine_file(tmp_path, shape=[2], code=True)
    with pytest.raises(
        InputError, match=r"no manifest says that it is trtfuse's plugin library.*--allow-host"
    ):
        trtfuse.Engine(path)
    engine = trtfuse.Engine(path, allow_host_code=True)
    np.testing.assert_array_equal(engine({"x": values(2)})["y"], 2 * values(2))


@pytest.mark.parametrize("by", ["library", "sources"])
def test_our_own_library_inside_is_trusted(
    machine: TensorRT, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    path, library = engine_file(tmp_path, shape=[2], code=True), tmp_path / "libtrtfuse_plugins.so"
    library.write_bytes(b"library")
    sha = manifest.hash_file(library).sha256
    described(path, plugins=carried(sha256=sha if by == "library" else "b" * 64))
    with pytest.raises(InputError, match="carries code that is not this trtfuse's plugin library"):
        trtfuse.Engine(path)
    if by == "library":
        monkeypatch.setattr(plugin_library, "find", lambda: library)
    else:
        monkeypatch.setattr(plugin_library, "sources_hash", lambda: "s" * 64)
    assert trtfuse.Engine(path).manifest is not None
    assert machine.libraries == []  # it is in the engine
    path.write_text(path.read_text() + " ")  # another file than the manifest describes
    with pytest.raises(InputError, match="is not the file that its manifest describes"):
        trtfuse.Engine(path)


def test_a_library_beside_the_engine_is_loaded_first(machine: TensorRT, tmp_path: Path) -> None:
    path, library = engine_file(tmp_path, shape=[2]), tmp_path / "lib.so"
    library.write_bytes(b"library")
    sha = manifest.hash_file(library).sha256
    described(path, plugins=carried(sha256=sha, embedded=False))
    with pytest.raises(EnvironmentMissing, match="needs the plugin library, which is not here: get it with"):
        trtfuse.Engine(path)
    with pytest.raises(InputError, match=r"there is no plugin library .*absent.so: correct the path"):
        trtfuse.Engine(path, plugin_library=tmp_path / "absent.so")
    trtfuse.Engine(path, plugin_library=library)
    assert machine.libraries == [str(library)]
    library.write_bytes(b"another")
    with pytest.raises(EnvironmentMissing, match=r"was built with another plugin library than .*lib.so"):
        trtfuse.Engine(path, plugin_library=library)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tensorrt": "10.7.0"}, "was built with TensorRT 10.7.0, and 10.6.0 is installed"),
        ({"compute_capabilities": ["8.9"]}, r"compute capability 8.9, and this is NVIDIA H200 \(9.0\)"),
        ({"target": "tensorrt-9"}, "names the target 'tensorrt-9', which this version does not know"),
    ],
)
def test_the_manifest_speaks_before_tensorrt_does(
    machine: TensorRT, tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    path = engine_file(tmp_path, shape=[2], bad=True)
    described(path, **changes)
    with pytest.raises((EnvironmentMissing, InputError), match=says):
        trtfuse.Engine(path)


def test_the_way_to_build_it_again_is_a_command(machine: TensorRT, tmp_path: Path) -> None:
    path = engine_file(tmp_path, shape=[2])
    described(path, tensorrt="11.0.0")
    with pytest.raises(EnvironmentMissing) as caught:
        trtfuse.Engine(path)
    command = f"trtfuse build m.onnx -o {path} --target tensorrt --shapes x:2x4 --tf32"
    assert str(caught.value).endswith(f"build it again here: {command}")


def test_a_patch_release_and_a_portable_engine_are_taken(machine: TensorRT, tmp_path: Path) -> None:
    path = engine_file(tmp_path, shape=[2])
    described(path, tensorrt="10.6.0.post2", compute_capabilities=["8.0"], portable=True)
    trtfuse.Engine(path)


def test_without_a_gpu_or_a_package_the_line_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime()
    monkeypatch.setattr(cuda, "runtime", lambda: runtime)
    monkeypatch.setattr(gpu, "count", lambda: 0)
    path = engine_file(tmp_path, shape=[2])
    with pytest.raises(EnvironmentMissing, match="the driver shows none here"):
        trtfuse.Engine(path)
    monkeypatch.setattr(gpu, "count", lambda: 1)

    def absent() -> Any:
        raise ImportError("No module named 'tensorrt'")

    monkeypatch.setattr(tensorrt, "load", absent)
    with pytest.raises(EnvironmentMissing, match=r"TensorRT cannot be loaded .*: pip install"):
        trtfuse.Engine(path)


def test_the_loader_hears_errors_alone() -> None:
    errors: list[str] = []
    logger = loading._logger(TensorRT(Runtime()), errors)
    logger.log("error", "bad")
    logger.log("info", "fine")
    assert errors == ["bad"]


# --- DLPack by itself ---


@pytest.mark.parametrize("dtype", ["float16", "float32", "int64", "uint8", "bool", "bfloat16"])
@pytest.mark.parametrize("versioned", [False, True])
def test_what_is_produced_is_consumed(dtype: str, versioned: bool) -> None:
    array = values(2, 3).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)

    class Held:
        def __dlpack_device__(self) -> tuple[int, int]:
            return (1, 0)

        def __dlpack__(self, **words: Any) -> Any:
            return dlpack.produce(
                array.ctypes.data, array.shape, array.dtype, (1, 0), array, versioned=versioned
            )

    count = len(dlpack._LENT)
    view = dlpack.consume(Held())
    assert (view.ptr, view.shape, view.strides) == (array.ctypes.data, (2, 3), (3, 1))
    assert (view.dtype, view.device_type, view.is_contiguous) == (array.dtype, 1, True)
    assert len(dlpack._LENT) == count + 1
    del view
    assert len(dlpack._LENT) == count
    if dtype != "bfloat16":
        np.testing.assert_array_equal(np.from_dlpack(Held()), array)  # numpy reads it too
    Held().__dlpack__()  # a capsule that nobody takes gives its memory back
    gc.collect()
    assert len(dlpack._LENT) == count


def test_strides_of_numpy_are_read() -> None:
    view = dlpack.consume(values(4, 6)[:, ::2])
    assert (view.shape, view.strides, view.is_contiguous) == ((4, 3), (6, 2), False)
    assert dlpack.consume(values(4, 1, 6)[:, :, :]).is_contiguous


def test_what_gives_no_memory_is_refused_in_one_line() -> None:
    class Odd:
        def __dlpack_device__(self) -> tuple[int, int]:
            return (1, 0)

        def __dlpack__(self, **words: Any) -> Any:
            if not self.capsule:
                raise BufferError("it is lazy")
            return object()

    odd = Odd()
    odd.capsule = False  # type: ignore[attr-defined]
    with pytest.raises(InputError, match="does not give its memory by DLPack: it is lazy"):
        dlpack.consume(odd)
    odd.capsule = True  # type: ignore[attr-defined]
    with pytest.raises(InputError, match="no capsule of DLPack"):
        dlpack.consume(odd)
    with pytest.raises(InputError, match="cannot be read: convert it first"):
        dlpack.consume(np.zeros(2, np.complex64))
