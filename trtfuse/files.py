"""Files that are either whole or not there: written beside under a temporary name, then renamed."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from trtfuse.errors import InputError


def explain_os_error(path: Path, error: OSError) -> InputError:
    """The one line for a file that cannot be written."""
    reason = error.strerror or str(error)
    return InputError(f"cannot write {path}: {reason}; choose another place or make room there")


@contextlib.contextmanager
def beside(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yields an empty file in the folder of `path`, to be filled and put somewhere by `put`; else it goes.

    Raises InputError when the folder is missing or cannot be written.
    """
    path = Path(path)
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
        os.close(handle)
    except OSError as e:
        raise explain_os_error(path, e) from e
    temporary = Path(name)
    try:
        # mkstemp makes files that only their owner reads; a product has the usual rights.
        mask = os.umask(0)
        os.umask(mask)
        temporary.chmod(0o666 & ~mask)
        yield temporary
    except OSError as e:
        raise explain_os_error(path, e) from e
    finally:
        temporary.unlink(missing_ok=True)


def put(temporary: Path, path: Path) -> None:
    """Gives a file another's name, when it is on disk for good."""
    with open(temporary, "rb") as f:
        os.fsync(f.fileno())
    os.replace(temporary, path)


@contextlib.contextmanager
def atomic_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yields a temporary path in the folder of `path`; renamed to `path` on success, removed on failure.

    Raises InputError when the folder is missing or cannot be written.
    """
    path = Path(path)
    if path.is_dir():
        raise InputError(f"cannot write {path}: it is a folder; name a file in it")
    path = path.resolve() if path.is_symlink() else path
    if path.exists() and not path.is_file():
        raise InputError(f"cannot write {path}: it is no regular file; name another")
    with beside(path) as temporary:
        yield temporary
        put(temporary, path)


@contextlib.contextmanager
def atomic_write(path: str | os.PathLike[str], mode: str = "wb") -> Iterator[IO[Any]]:
    """Yields an open temporary file (`mode` "wb" or "w") that becomes `path` on success."""
    with (
        atomic_path(path) as temporary,
        open(temporary, mode, encoding=None if "b" in mode else "utf-8") as f,
    ):
        yield f


@contextlib.contextmanager
def lock(path: str | os.PathLike[str]) -> Iterator[None]:
    """Holds the lock of `path` (the file `<path>.lock`) against other processes; nothing where it cannot be
    made, or on a system without such locks."""
    with _held(f"{os.fspath(path)}.lock", os.O_CREAT | os.O_RDWR):
        yield


@contextlib.contextmanager
def lock_folder(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Likewise a folder, with no file left there."""
    with _held(os.fspath(folder), os.O_RDONLY):
        yield


@contextlib.contextmanager
def _held(place: str, flags: int) -> Iterator[None]:
    try:
        import fcntl

        handle = os.open(place, flags, 0o666)
    except (ImportError, OSError):
        yield
        return
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
