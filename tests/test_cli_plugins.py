"""`trtfuse plugins`: what is printed, and how each command ends."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from test_plugin_library import put
from typer.testing import CliRunner

from trtfuse import cli_plugins, errors_cli, plugin_library
from trtfuse.errors import EnvironmentMissing

PLUGIN = {
    "name": "TrtfuseSoftmax",
    "version": "1",
    "fields": [
        {"name": "scale", "kind": "float", "default": 0.00999999978},
        {"name": "fill", "kind": "float", "default": float("-inf")},
        {"name": "inputs", "kind": "text", "default": ""},
    ],
}
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs `trtfuse plugins ...` on an empty cache: exit code, stdout, stderr."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for variable in ("TRTFUSE_PLUGIN_LIBRARY", "TRTFUSE_TENSORRT_INCLUDE"):
        monkeypatch.delenv(variable, raising=False)
    app = typer.Typer()
    app.add_typer(cli_plugins.app, name="plugins")

    def call(*arguments: str) -> tuple[int, str, str]:
        result = CliRunner().invoke(app, ["plugins", *arguments])
        code = result.exit_code
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            code = errors_cli.say(result.exception, 0)
        return code, result.stdout, result.stderr + capsys.readouterr().err

    return call


@pytest.fixture
def two(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[Path, Path]:
    """One library that fits the sources and one that does not."""
    monkeypatch.setattr(plugin_library, "describe", lambda path: {"plugins": [PLUGIN]})
    monkeypatch.setattr(plugin_library, "disagreements", lambda path: [])
    return put(tmp_path, "fits", plugin_library.sources_hash()), put(tmp_path, "old", "others")


def test_nothing_is_built(run: Run) -> None:
    code, out, err = run("list")
    assert (code, err) == (0, "")
    assert out == f"no plugin library to use: {plugin_library.GET_LIBRARY}\n"
    code, out, _ = run("list", "--json")
    assert code == 0
    nothing: dict[str, Any] = {"used": None, "libraries": [], "plugins": [], "differences": []}
    assert json.loads(out) == {"schema": "trtfuse/plugins/1", **nothing}


def test_path_without_a_library_ends_with_4_and_says_how_to_get_one(run: Run) -> None:
    code, out, err = run("path")
    assert (code, out) == (EnvironmentMissing.exit_code, "")
    assert err == f"error: the plugin library is missing: {plugin_library.GET_LIBRARY}\n"


def test_path_is_the_path_and_nothing_else(run: Run, two: tuple[Path, Path]) -> None:
    assert run("path") == (0, f"{two[0]}\n", "")


def test_list_marks_the_used_and_the_stale_and_shows_the_plugins(run: Run, two: tuple[Path, Path]) -> None:
    code, out, _ = run("list")
    assert code == 0
    lines = out.splitlines()
    assert f"{two[0]} (used)" in lines
    assert f"{two[1]} (stale)" in lines
    assert lines[1] == "  built on this machine; TensorRT 10.6 headers; architectures 90, ptx; 0.0 MiB"
    assert lines[-1] == "  TrtfuseSoftmax 1: scale (float, 0.01), fill (float, -inf), inputs (text)"


def test_json_of_the_list(run: Run, two: tuple[Path, Path]) -> None:
    code, out, _ = run("list", "--json")
    assert code == 0

    def no_constant(text: str) -> None:
        pytest.fail(f"{text} is no JSON")

    found = json.loads(out, parse_constant=no_constant)
    assert found["used"] == str(two[0])
    first = {e["path"]: e for e in found["libraries"]}[str(two[0])]
    assert first == {
        "path": str(two[0]),
        "place": "cache",
        "architectures": ["90", "ptx"],
        "tensorrt": "10.6",
        "bytes": two[0].stat().st_size,
        "used": True,
        "stale": False,
    }
    assert [f["default"] for f in found["plugins"][0]["fields"]] == [0.01, "-inf", ""]


def test_a_library_that_does_not_fit_is_said(
    run: Run, two: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugin_library, "disagreements", lambda path: ["TrtfuseSoftmax: gone"])
    assert "  differs from this trtfuse: TrtfuseSoftmax: gone\n" in run("list")[1]


def test_a_named_library_that_is_not_there_ends_with_4(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRTFUSE_PLUGIN_LIBRARY", "/nowhere/x.so")
    for command in ("list", "path"):
        code, out, err = run(command)
        assert (code, out) == (4, "")
        assert "correct or unset it" in err


def test_build_hands_over_every_option(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def build(*args: Any, **options: Any) -> Path:
        calls.append((*args, options))
        return Path("/made/it.so")

    monkeypatch.setattr(plugin_library, "build", build)
    assert run("build") == (0, "/made/it.so\n", "")
    standard = {"output": None, "kernels_only": False, "force": False}
    assert calls.pop() == (None, list(plugin_library.ARCHITECTURES), standard)
    words = "--include-dir inc --architectures 80,90,ptx -o out.so --kernels-only --force"
    assert run("build", *words.split())[0] == 0
    given = {"output": Path("out.so"), "kernels_only": True, "force": True}
    assert calls.pop() == (Path("inc"), ["80", "90", "ptx"], given)


def test_build_with_an_unknown_architecture_ends_with_2(run: Run) -> None:
    code, out, err = run("build", "--architectures", "volta")
    assert (code, out) == (2, "")
    assert err.startswith("error: 'volta' is no architecture: choose from 80")


def test_help_names_the_commands(run: Run) -> None:
    code, out, _ = run()
    assert code == 0
    assert all(command in out for command in ("list", "build", "path"))
