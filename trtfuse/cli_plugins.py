"""`trtfuse plugins`: what plugin libraries there are, building one, and the path of the one that is used."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trtfuse import plugin_library
from trtfuse.errors import EnvironmentMissing

if TYPE_CHECKING:
    from trtfuse.plugin_library import Built

SCHEMA = "trtfuse/plugins/1"
PLACES = {
    "environment": "named by TRTFUSE_PLUGIN_LIBRARY",
    "package": "came with trtfuse",
    "cache": "built on this machine",
}

app = typer.Typer(
    name="plugins",
    help="The plugin library: what is built, building it, its path.",
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


@app.callback(invoke_without_command=True)
def _top(context: typer.Context) -> None:
    """The library of TensorRT plugins that fused ops run in: what is built, building it, its path."""
    if context.invoked_subcommand is None:
        sys.stdout.write(context.get_help() + "\n")


@app.command("list")
def list_(
    json: Annotated[bool, typer.Option("--json", help="Print JSON to stdout, and nothing else.")] = False,
) -> None:
    """Show the libraries and the plugins.

    Which libraries there are, which one is used, and the plugins in that one.
    A stale one was built from other sources than this trtfuse's, and is not used.
    """
    found = inventory()
    if json:
        import json as encoder

        sys.stdout.write(encoder.dumps(found, indent=2) + "\n")
    else:
        sys.stdout.write("".join(f"{line}\n" for line in _lines(found)))


@app.command()
def build(
    include_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            show_default=False,
            help="TensorRT's headers. Default: TRTFUSE_TENSORRT_INCLUDE, or the system's.",
        ),
    ] = None,
    architectures: Annotated[
        str, typer.Option(metavar="LIST", help="GPU architectures; ptx: for the GPUs that come after them.")
    ] = ",".join(plugin_library.ARCHITECTURES),
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", show_default=False, help="Where to put a copy."),
    ] = None,
    kernels_only: Annotated[
        bool, typer.Option("--kernels-only", help="The kernels alone; needs no TensorRT headers.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Build even if the cache has it.")] = False,
) -> None:
    """Build the library into the cache and print its path.

    Needs g++, nvcc (a CUDA toolkit's or pip's) and TensorRT's headers; takes minutes the first time.
    """
    names = plugin_library.split_names(architectures)
    path = plugin_library.build(include_dir, names, output=output, kernels_only=kernels_only, force=force)
    sys.stdout.write(f"{path}\n")


@app.command()
def path() -> None:
    """Print the path of the library that is used. Exits with 4 where there is none."""
    sys.stdout.write(f"{plugin_library.locate()}\n")


def inventory() -> dict[str, Any]:
    """The JSON of `trtfuse plugins list --json`.

    used: the path of the library that is used, None if there is none. plugins, differences: what is in that
    library, and where it differs from what this trtfuse declares.
    """
    used = plugin_library.find()
    try:
        sources = plugin_library.sources_hash()
    except EnvironmentMissing:
        sources = ""
    return {
        "schema": SCHEMA,
        "used": None if used is None else str(used),
        "libraries": [_entry(built, used, sources) for built in plugin_library.listing()],
        "plugins": [] if used is None else [_plain(p) for p in plugin_library.describe(used)["plugins"]],
        "differences": [] if used is None else plugin_library.disagreements(used),
    }


def _entry(built: Built, used: Path | None, sources: str) -> dict[str, Any]:
    return {
        "path": str(built.path),
        "place": built.place,
        "architectures": list(built.architectures),
        "tensorrt": built.tensorrt,
        "bytes": built.bytes,
        "used": built.path == used,
        "stale": bool(sources and built.sources) and built.sources != sources,
    }


def _plain(plugin: dict[str, Any]) -> dict[str, Any]:
    """A plugin as JSON can say it: infinite defaults as text, float ones without the noise of fp32."""

    def default(field: dict[str, Any]) -> Any:
        value = field["default"]
        if field["kind"] != "float":
            return value
        return float(f"{value:g}") if math.isfinite(value) else str(value)

    return {**plugin, "fields": [{**field, "default": default(field)} for field in plugin["fields"]]}


def _lines(found: dict[str, Any]) -> list[str]:
    lines = []
    for entry in found["libraries"]:
        state = [word for word in ("used", "stale") if entry[word]]
        what = f"TensorRT {entry['tensorrt']} headers" if entry["tensorrt"] else "kernels alone"
        lines += [
            f"{entry['path']}{' (' + ', '.join(state) + ')' if state else ''}",
            f"  {PLACES[entry['place']]}; {what}; architectures {', '.join(entry['architectures'])}; "
            f"{entry['bytes'] / 2**20:.1f} MiB",
        ]
    if found["used"] is None:
        return [*lines, f"no plugin library to use: {plugin_library.GET_LIBRARY}"]
    lines += ["", "plugins in the one that is used:"]
    for plugin in found["plugins"]:
        fields = ", ".join(
            f"{f['name']} ({f['kind']}{'' if f['default'] == '' else ', ' + str(f['default'])})"
            for f in plugin["fields"]
        )
        lines.append(f"  {plugin['name']} {plugin['version']}: {fields}")
    return lines + [f"  differs from this trtfuse: {line}" for line in found["differences"]]
