"""Files in a run directory are opened safely."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from pathlib import Path

import pytest

from launcher.runs.manifest import read_yaml
from slipway.common.files import (
    TEXT_LIMIT,
    UnfitFile,
    is_job_id,
    open_regular,
    read_int,
    read_json,
    read_text,
    unix_time,
)


def _special(path: Path, kind: str) -> Path:
    match kind:
        case "fifo":
            os.mkfifo(path)
        case "socket":
            previous = Path.cwd()
            os.chdir(path.parent)
            try:
                with socket.socket(socket.AF_UNIX) as server:
                    server.bind(path.name)
            finally:
                os.chdir(previous)
        case "directory":
            path.mkdir()
        case "loop":
            path.symlink_to(path.name)
        case "sparse":
            with path.open("wb") as stream:
                stream.truncate(20 << 30)
        case _:
            path.symlink_to(kind)
    return path


@pytest.mark.parametrize(
    "kind",
    [
        "fifo",
        "socket",
        "directory",
        "loop",
        "sparse",
        "/dev/zero",
        "/dev/random",
        "/nonexistent",
        "/proc/kcore",
    ],
)
@pytest.mark.timeout(20)
def test_path_that_is_no_file_is_like_a_missing_one(tmp_path: Path, kind: str) -> None:
    path = _special(tmp_path / "x", kind)
    for read in (open_regular, read_text, read_json, read_yaml):
        with pytest.raises(FileNotFoundError):
            read(path)


def test_names_that_no_file_can_have_are_refused() -> None:
    for name in ("a\0b", "x" * 300, "/dev/null/x"):
        with pytest.raises(UnfitFile):
            open_regular(Path("/tmp") / name)


@pytest.mark.timeout(20)
def test_a_file_that_blocks_has_no_size() -> None:
    """/proc/kmsg is a regular file to `stat`, and blocks."""
    if os.access("/proc/kmsg", os.R_OK):
        assert read_text(Path("/proc/kmsg")) == ""


@pytest.mark.timeout(20)
def test_a_lease_does_not_keep_its_readers_waiting(tmp_path: Path) -> None:
    """The owner of a file can keep others from opening it, for 45 s by default."""
    path = tmp_path / "x"
    path.write_text("{}")
    ready, done = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        descriptor = os.open(path, os.O_RDWR)
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, 0)
        import signal

        signal.signal(signal.SIGIO, signal.SIG_IGN)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        os.write(ready[1], b"x")
        os.read(done[0], 1)
        os._exit(0)
    os.read(ready[0], 1)
    try:
        with pytest.raises(UnfitFile) as caught:
            open_regular(path)
        assert caught.value.errno == errno.EAGAIN
    finally:
        os.write(done[1], b"x")
        os.waitpid(child, 0)


def test_too_large_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b" " * (TEXT_LIMIT + 1))
    with pytest.raises(UnfitFile, match="larger than 4194304 bytes"):
        read_json(path)


@pytest.mark.parametrize(
    "text", ["", "[]", "null", "[" * 100_000, '{"a":' * 50_000, '{"a": ' + "9" * 5000 + "}", "\xff"]
)
def test_json_is_one_object(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError):
        read_json(path)


@pytest.mark.parametrize(
    "text",
    [
        "a: &a 1\nb: *a\n",
        "a: &a {b: 1}\nc: {<<: *a}\n",
        "[" * 1000,
        "- " * 5000,
        "!!python/object/apply:os.system [x]",
        "a: 2026-99-99",
        "\x00",
        "a: " + "9" * 5000,
    ],
)
def test_yaml_is_what_the_launcher_writes(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x"
    path.write_text(text)
    with pytest.raises(ValueError):
        read_yaml(path)


def test_job_ids_are_recognized() -> None:
    good = ["1", "17", "17_2", "17_0", "4294967293", "17_4000000"]
    bad = [
        "", "0", "-1", "abc", "5_[1-", "5_[1-3]", "017", "17_", "_1", "17_02", "17 ", "17\n", "9" * 20, "é",
        "٣",
        "²", "../x", "--user=root", "17_2_3", "4294967294", "17_4000001", "17,18",
    ]  # fmt: skip
    assert [text for text in [*good, *bad] if is_job_id(text)] == good


def test_numbers_are_read_within_their_range() -> None:
    assert [read_int(value) for value in (1, 2.9, -3)] == [1, 2, -3]
    invalid = (True, "1", None, [], float("nan"), float("inf"), 10**400, 2**64)
    assert [read_int(value) for value in invalid] == [None] * len(invalid)
    assert read_int(0, 1) is None and read_int(256, 0, 255) is None
    assert unix_time(1.7e9) == 1.7e9
    assert [unix_time(value) for value in (-1, 1e12, 10**400, float("nan"), "1", True)] == [None] * 6
