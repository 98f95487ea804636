"""Whole files: an old file or a new one, never a part; devices, pipes and streams as they stand."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import BinaryIO

import pytest

from strata_nb.whole_files import is_stream, whole_file


def test_a_write_that_fails_leaves_the_old_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(OSError, match="no space"), whole_file(path) as file:
        fail_to_write(file)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def fail_to_write(file: BinaryIO) -> None:
    file.write(b"new")
    raise OSError("no space")


def test_the_old_file_is_there_until_the_new_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with whole_file(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_is_followed_and_a_file_of_the_temporary_name_of_others_is_left_alone(
    tmp_path: Path,
) -> None:
    path, link, other = (tmp_path / name for name in ("file", "link", "link.tmp"))
    path.write_bytes(b"old")
    link.symlink_to(path)
    other.write_bytes(b"precious")
    with whole_file(link) as file:
        file.write(b"new")
    assert path.read_bytes() == b"new"
    assert link.is_symlink()
    assert other.read_bytes() == b"precious"


def test_a_pipe_is_written_to_and_stays_one(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(path.read_bytes()))
    reader.start()
    assert is_stream(path)
    with whole_file(path) as file:
        file.write(b"new")
    reader.join()
    assert read == [b"new"]
    assert stat.S_ISFIFO(path.stat().st_mode)


def test_a_device_stays_one_and_its_errors_show() -> None:
    with pytest.raises(OSError, match="No space left"), whole_file("/dev/full") as file:
        file.write(b"new")
    assert stat.S_ISCHR(os.stat("/dev/full").st_mode)


@pytest.mark.parametrize("piped", [False, True])
def test_what_was_written_to_stdout_before_stays(tmp_path: Path, piped: bool) -> None:
    code = (
        "from strata_nb.whole_files import whole_file\n"
        "print('first', flush=True)\n"
        "with whole_file('/dev/stdout') as file:\n"
        "    file.write(b'second')\n"
    )
    command = [sys.executable, "-c", code]
    if piped:
        out = subprocess.run(command, check=True, capture_output=True).stdout
    else:
        with open(tmp_path / "out", "wb") as file:
            subprocess.run(command, check=True, stdout=file)
        out = (tmp_path / "out").read_bytes()
    assert out == b"first\nsecond"


@pytest.mark.parametrize("name", ["/dev/full", "full"])
def test_an_error_of_writing_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def no_space(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", no_space)
    path = tmp_path / name  # an absolute name stays what it is
    with pytest.raises(OSError, match="No space left") as got, whole_file(path) as stream:
        stream.write(b"x")
    assert got.value.filename == str(path)
    assert list(tmp_path.iterdir()) == []
