"""Files are whole or not there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trtfuse.errors import InputError
from trtfuse.files import atomic_path, atomic_write


def test_a_file_appears_when_it_is_whole(tmp_path: Path) -> None:
    with atomic_write(tmp_path / "f") as f:
        f.write(b"new")
        assert not (tmp_path / "f").exists()
    assert (tmp_path / "f").read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["f"]


def test_what_was_there_survives_a_failure(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"old")
    with pytest.raises(UnicodeEncodeError), atomic_write(tmp_path / "f", "w") as f:
        f.write("half" + "\ud800" * 100_000)
    assert (tmp_path / "f").read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["f"]


def test_a_new_file_has_the_usual_rights(tmp_path: Path) -> None:
    (tmp_path / "usual").write_bytes(b"")
    with atomic_path(tmp_path / "f") as path:
        path.write_bytes(b"")
    assert (tmp_path / "f").stat().st_mode == (tmp_path / "usual").stat().st_mode


@pytest.mark.parametrize("place", ["no/such/folder/f", "."])
def test_a_place_that_cannot_be_written_is_said_in_one_line(place: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot write") as caught, atomic_write(tmp_path / place):
        pass
    assert "\n" not in str(caught.value)


def test_what_is_no_regular_file_is_never_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="no regular file"), atomic_write(tmp_path / "pipe"):
        pass
    assert not (tmp_path / "pipe").is_file()


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"old")
    (tmp_path / "link").symlink_to(tmp_path / "f")
    with atomic_write(tmp_path / "link") as f:
        f.write(b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "f").read_bytes() == b"new"
