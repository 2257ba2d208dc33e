"""What the machine is found to have, and what is said where it lacks something."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from pathlib import Path

import pytest

from trtfuse import doctor, plugin_library
from trtfuse.doctor import Check
from trtfuse.errors import EnvironmentMissing


@pytest.fixture(autouse=True)
def fresh() -> None:
    doctor.gpus.cache_clear()
    doctor._gpu_probe.cache_clear()


def by_name(checks: list[Check]) -> dict[str, Check]:
    return {c.name: c for c in checks}


def test_this_machine_is_examined_and_whatever_is_missing_has_a_remedy() -> None:
    checks = doctor.examine()
    names = by_name(checks)
    assert len(names) == len(checks)
    for name in ("Python", "onnx", "onnxruntime", "onnx-graphsurgeon", "polygraphy"):
        assert names[name].ok, names[name].detail
        assert names[name].needed
    assert "CPUExecutionProvider" in names["onnxruntime"].detail
    for check in checks:
        assert check.detail
        assert "\n" not in check.detail
        assert check.ok or check.remedy, check.name
    text = json.dumps(doctor.as_dict(checks))
    assert json.loads(text)["builds_engines"] is doctor.builds_engines(checks)


def test_an_engine_is_built_by_one_of_the_two() -> None:
    needed = Check("onnx", True, "1.23", needed=True)
    rtx, full = Check("tensorrt-rtx", True, "builds"), Check("tensorrt", True, "builds")
    assert doctor.builds_engines([needed, rtx])
    assert doctor.builds_engines([needed, full, Check("tensorrt-rtx", False, "absent")])
    assert not doctor.builds_engines([needed, Check("g++", True, "there")])
    assert not doctor.builds_engines([Check("onnx", False, "absent", needed=True), rtx])


def test_a_driver_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_child", lambda code, *args: ("", "OSError: libcuda.so.1: cannot open"))
    assert doctor.gpus() == ()
    check = doctor._gpu()
    assert not check.ok
    assert "no driver" in check.detail


def test_a_driver_without_gpu_and_one_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        doctor, "_child", lambda code, *args: ('{"status": 0, "cuda": 13000, "gpus": []}', "")
    )
    assert "no GPU" in doctor._gpu().detail
    fresh_probe = '{"status": 999, "cuda": 0, "gpus": []}'
    doctor.gpus.cache_clear()
    doctor._gpu_probe.cache_clear()
    monkeypatch.setattr(doctor, "_child", lambda code, *args: (fresh_probe, ""))
    assert "error 999" in doctor._gpu().detail


def test_a_gpu_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = {"status": 0, "cuda": 13010, "gpus": [["NVIDIA L4", "8.9", 24 * 2**30]]}
    monkeypatch.setattr(doctor, "_child", lambda code, *args: (json.dumps(probe), ""))
    monkeypatch.setattr(doctor, "_driver_version", lambda: "580.65.06")
    assert doctor.gpus() == (doctor.Gpu("NVIDIA L4", "8.9", 24 * 2**30, "580.65.06"),)
    detail = doctor._gpu().detail
    assert detail == "NVIDIA L4 (compute capability 8.9, 24.0 GiB), driver 580.65.06, CUDA 13.1"


def test_the_probe_of_the_driver_runs_on_a_library_of_the_same_interface(tmp_path: Path) -> None:
    """The probe's calls against a stand-in libcuda, so that they are tried without a GPU too."""
    source = tmp_path / "cuda.c"
    source.write_text(
        """#include <string.h>
        int cuInit(unsigned f) { return 0; }
        int cuDriverGetVersion(int* v) { *v = 12090; return 0; }
        int cuDeviceGetCount(int* n) { *n = 2; return 0; }
        int cuDeviceGet(int* d, int i) { *d = i; return 0; }
        int cuDeviceGetName(char* s, int n, int d) { strncpy(s, d ? "second" : "first", n); return 0; }
        int cuDeviceGetAttribute(int* v, int a, int d) { *v = a == 75 ? 9 : d; return 0; }
        int cuDeviceTotalMem_v2(size_t* n, int d) { *n = 1ul << 37; return 0; }
        """
    )
    library = tmp_path / "libcuda.so.1"
    try:
        subprocess.run(["g++", "-x", "c", "-shared", "-fPIC", "-o", library, source], check=True)
    except OSError:
        pytest.skip("no compiler here")
    probe = doctor.GPU_PROBE.replace("libcuda.so.1", str(library))
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["gpus"] == [["first", "9.0", 2**37], ["second", "9.1", 2**37]]
    assert (found["status"], found["cuda"]) == (0, 12090)


def test_a_library_that_aborts_takes_only_its_child_along() -> None:
    text, why = doctor._child('print(\'{"version": "1"}\', flush=True); import os; os.abort()')
    assert "version" in text
    assert why.startswith("ended with status -")


def test_tensorrt_absent_broken_and_without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "gpus", tuple)
    absent = doctor._tensorrt("tensorrt", "no_such_module_at_all")
    assert (absent.ok, absent.detail, absent.remedy) == (False, "not installed", "pip install tensorrt")
    monkeypatch.setattr(doctor, "_child", lambda code, *args: ("", "OSError: libnvinfer.so.10: bad ELF"))
    assert "cannot be loaded: OSError" in doctor._tensorrt("tensorrt", "tensorrt").detail
    monkeypatch.setattr(doctor, "_child", lambda code, *args: ('{"version": "10.13"}', "no CUDA device"))
    check = doctor._tensorrt("tensorrt", "tensorrt")
    assert check.detail == "10.13: cannot build here (it builds only where an NVIDIA GPU is)"
    assert check.remedy is not None
    assert "--target tensorrt-rtx" in check.remedy
    check = doctor._tensorrt("tensorrt-rtx", "tensorrt_rtx")
    assert check.detail == "10.13: cannot build here (no CUDA device)"


def test_packages_that_break_on_import(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "broken_on_import.py").write_text("raise RuntimeError('first line\\nsecond')")
    monkeypatch.syspath_prepend(tmp_path)
    check = doctor._package("broken", "broken_on_import")
    assert check == Check(
        "broken", False, "cannot be imported: first line", "pip install broken", needed=True
    )
    assert doctor.version_of("no-such-distribution-at-all") is None


def test_little_room_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "LOW_DISK", 2**80)
    monkeypatch.setattr(doctor, "LOW_MEMORY", 2**80)
    for check in (doctor._disk(), doctor._memory()):
        assert not check.ok
        assert check.remedy


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A library in the cache that says it is for sm_80 and sm_90."""
    path = tmp_path / "trtfuse" / "plugins" / "key" / plugin_library.LIBRARY
    said = {"tensorrt": "10.6", "architectures": "80 90", "differences": []}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(plugin_library, "find", lambda: path)
    monkeypatch.setattr(doctor, "_child", lambda code, *args: (json.dumps(said), ""))
    monkeypatch.setattr(doctor, "gpus", tuple)
    return path


def test_the_plugin_library_fits_the_gpu_or_not(monkeypatch: pytest.MonkeyPatch, library: Path) -> None:
    check = doctor._plugin_library()
    assert check.ok
    assert check.detail == f"{library} (headers of TensorRT 10.6; architectures 80, 90)"
    monkeypatch.setattr(doctor, "gpus", lambda: (doctor.Gpu("NVIDIA L4", "8.9", 1, ""),))
    assert doctor._plugin_library().detail.endswith("; fits NVIDIA L4")
    monkeypatch.setattr(doctor, "gpus", lambda: (doctor.Gpu("RTX PRO", "12.0", 1, ""),))
    check = doctor._plugin_library()
    assert not check.ok
    assert check.detail.endswith("has no code for RTX PRO (compute capability 12.0)")
    assert check.remedy is not None
    assert check.remedy.startswith("trtfuse plugins build --architectures 120 --include-dir")
    assert "TRTFUSE_PLUGIN_LIBRARY" not in check.remedy
    monkeypatch.setattr(plugin_library, "find", lambda: Path("/opt/mine.so"))
    remedy = doctor._plugin_library().remedy
    assert remedy is not None
    assert "set TRTFUSE_PLUGIN_LIBRARY" in remedy


def test_a_plugin_library_that_is_missing_or_cannot_be_used(
    monkeypatch: pytest.MonkeyPatch, library: Path
) -> None:
    monkeypatch.setattr(doctor, "_child", lambda code, *args: ("", "InputError: no plugin library"))
    assert doctor._plugin_library().detail == f"{library} cannot be used: InputError: no plugin library"
    said = json.dumps({"tensorrt": "10.6", "architectures": "80", "differences": ["TrtfuseSoftmax: gone"]})
    monkeypatch.setattr(doctor, "_child", lambda code, *args: (said, ""))
    assert "does not fit this trtfuse: TrtfuseSoftmax: gone" in doctor._plugin_library().detail
    monkeypatch.setattr(plugin_library, "find", lambda: None)
    check = doctor._plugin_library()
    assert not check.ok
    assert check.remedy == plugin_library.GET_LIBRARY

    def absent() -> None:
        raise EnvironmentMissing("TRTFUSE_PLUGIN_LIBRARY names x.so, which is no file: unset it")

    monkeypatch.setattr(plugin_library, "find", absent)
    check = doctor._plugin_library()
    assert (check.ok, check.remedy) == (False, "unset it")


def test_the_child_that_loads_a_plugin_library(tmp_path: Path) -> None:
    """The probe on a small library with the one function that is called."""
    source, library = tmp_path / "small.c", tmp_path / "small.so"
    said = '{\\"tensorrt\\": \\"10.6\\", \\"architectures\\": \\"90\\", \\"plugins\\": []}'
    source.write_text(f'const char* trtfuse_describe(void) {{ return "{said}"; }}')
    try:
        subprocess.run(["g++", "-x", "c", "-shared", "-fPIC", "-o", library, source], check=True)
    except OSError:
        pytest.skip("no compiler here")
    found = doctor._last_json(doctor._child(doctor.LIBRARY_PROBE, str(library))[0])
    assert found["architectures"] == "90"
    assert len(found["differences"]) == len(plugin_library.PLUGINS)
    text, why = doctor._child(doctor.LIBRARY_PROBE, str(source))
    assert text == ""
    assert "no plugin library of trtfuse" in why


def test_nvcc_is_the_one_that_builds_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> None:
        raise EnvironmentMissing("nvcc with CUDA's headers is missing: pip install it")

    tools = types.SimpleNamespace(nvcc="/opt/cuda/bin/nvcc", version="13.0")
    monkeypatch.setattr(plugin_library, "toolchain", lambda: tools)
    assert doctor._nvcc() == Check("nvcc", True, "/opt/cuda/bin/nvcc (release 13.0)")
    monkeypatch.setattr(plugin_library, "toolchain", absent)
    assert doctor._nvcc() == Check("nvcc", False, "nvcc with CUDA's headers is missing", "pip install it")


def test_packages_that_run_engines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    absent = doctor._runtime("cuda-bindings", "no_such_module_at_all")
    assert absent.detail.startswith("not installed")
    assert absent.remedy == "pip install 'trtfuse[tensorrt]'"
    assert doctor._runtime("pytest", "pytest") == Check("pytest", True, pytest.__version__)
    (tmp_path / "broken_runtime.py").write_text("raise RuntimeError('no driver')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    broken = doctor._runtime("cuda-bindings", "broken_runtime")
    assert broken.detail == "cannot be imported: RuntimeError: no driver"


def test_two_onnxruntimes_are_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"onnxruntime-gpu": "1.23.2"}
    monkeypatch.setattr(doctor, "version_of", installed.get)
    assert doctor._two_onnxruntimes() == []
    installed["onnxruntime"] = "1.22.0"
    (check,) = doctor._two_onnxruntimes()
    assert (check.ok, check.needed) == (False, False)
    assert check.detail.startswith("onnxruntime 1.22.0 and onnxruntime-gpu 1.23.2 are both installed")
    assert check.remedy is not None
    assert check.remedy.endswith("pip install onnxruntime-gpu")
