"""`python -m slipway.corpus fetch` when sources fail: message, exit code, and the command again."""

from __future__ import annotations

import errno
import functools
import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from slipway.corpus import spec
from slipway.corpus.__main__ import main
from slipway.corpus.fetching import Policy
from slipway.corpus.sources import read_sources
from tests.corpus.servers import FaultyServer, ServedFile, faulty_server

pytestmark = pytest.mark.trainer

QUICK = functools.partial(Policy, attempts=3, first_wait=0.01, longest_wait=0.02, timeout=5.0)
# Several reads and a state between them.
CONTENT = "".join(f'{{"text": "document {number} of a few words"}}\n' for number in range(20_000)).encode()
SHA256 = hashlib.sha256(CONTENT).hexdigest()


@dataclass
class Fault:
    """A fault of the source, the exit code and message of the command, and how the fault passes.

    Attributes
    ----------
    kept_bytes
        Bytes that the next command does not request again.
    """

    code: int
    message: str
    faults: dict[str, Any] = field(default_factory=dict)
    content: bytes = CONTENT
    sha256: str | None = None
    kept_bytes: int = 0


FAULTS = {
    "truncated, and begun again each time": Fault(
        1,
        f"ended before byte {len(CONTENT):,}; gave up after 3 attempts",
        {"ranges": False, "drop_after": [300_000] * 9},
        kept_bytes=300_000,
    ),
    "dropped connections": Fault(
        1,
        "400,000 bytes are kept in",
        {"drop_after": [300_000, 100_000, *[0] * 9]},
        kept_bytes=400_000,
    ),
    "a wrong sha256": Fault(2, f"its sha256 is {SHA256}, expected {'ab' * 32}", sha256="ab" * 32),
    "another file than the sha256 says": Fault(
        2, f"expected {SHA256}: the server has another file", content=CONTENT[:-1], sha256=SHA256
    ),
    "HTTP 429": Fault(1, "HTTP 429 Too Many Requests; gave up", {"statuses": [(429, "0")] * 9}),
    "HTTP 503": Fault(1, "HTTP 503 Service Unavailable; gave up", {"statuses": [(503, None)] * 9}),
    "a length that does not come": Fault(1, "gave up after 3 attempts", {"announced": 100}),
    "an empty source": Fault(2, "empty file; on_error=skip leaves it out and counts it", content=b""),
    "no such file": Fault(2, "HTTP 404 Not Found", {"statuses": [(404, None)]}),
    "a page in the place of the file": Fault(
        2, "unknown format", {"path": "other"}, content=b"<html>sign in</html>"
    ),
}


@pytest.fixture
def server() -> Iterator[FaultyServer]:
    with faulty_server() as server:
        yield server


@pytest.fixture
def command(tmp_path: Path) -> Callable[..., list[str]]:
    """Return a function that writes a configuration for inputs and returns the words of a command."""
    (tmp_path / "bpe").mkdir()
    (tmp_path / "bpe/vocab.json").write_text('{"a": 0, "<|endoftext|>": 1}')
    (tmp_path / "bpe/merges.txt").write_text("#version: 0.2\n")

    def write(*inputs: Any, **options: Any) -> list[str]:
        node = {"inputs": list(inputs), "output_prefix": str(tmp_path / "out/text"), **options}
        node["tokenizer_dir"] = str(tmp_path / "bpe")
        (tmp_path / "p.yaml").write_text(yaml.safe_dump({"data_preparation": node}))
        return ["fetch", "--config-path", str(tmp_path), "--config-name", "p.yaml"]

    return write


@pytest.mark.parametrize("case", FAULTS)
def test_a_fault_is_named_and_the_command_goes_on_when_it_has_passed(
    server: FaultyServer,
    command: Callable[..., list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
    case: str,
) -> None:
    monkeypatch.setattr("slipway.corpus.fetching.Policy", QUICK)
    fault = FAULTS[case]
    faults = dict(fault.faults)
    name = faults.pop("path", "text.jsonl")
    url = server.put(name, fault.content, **faults)
    words = command({"url": url, "sha256": fault.sha256} if fault.sha256 else url)
    assert main(words) == fault.code
    errors = capsys.readouterr().err
    assert errors.startswith("error: ")
    assert url in errors
    assert fault.message in errors
    assert "Traceback" not in errors
    work = tmp_path / "out/text.work"
    assert not (work / "sources.json").exists()
    server.files[f"/{name}"] = ServedFile(CONTENT)
    before = server.sent[f"/{name}"]
    assert main(command(url, format="jsonl")) == 0
    [file] = read_sources(spec.load(tmp_path, "p.yaml"))
    assert (file.sha256, file.path.read_bytes()) == (SHA256, CONTENT)
    assert server.sent[f"/{name}"] - before == len(CONTENT) - fault.kept_bytes
    assert sorted(path.suffix for path in file.path.parent.iterdir()) == sorted([file.path.suffix, ".state"])


def test_source_that_changed_between_two_runs_is_reported_and_fetched(
    server: FaultyServer, command: Callable[..., list[str]], tmp_path: Path, capsys: Any
) -> None:
    words = command(server.put("text.jsonl", CONTENT))
    assert main(words) == 0
    server.put("text.jsonl", CONTENT[::-1])
    assert main(words) == 0
    output = capsys.readouterr().out
    assert "changed on the server since it was fetched (ETag" in output
    assert "changed since the last run, of the same size: it is tokenized again" in output
    [file] = read_sources(spec.load(tmp_path, "p.yaml"))
    assert file.path.read_bytes() == CONTENT[::-1]


def test_a_disk_that_fills_while_the_list_is_written_leaves_the_former_one(
    server: FaultyServer,
    command: Callable[..., list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
) -> None:
    """Full disks during downloads are real ones, in test_fetching."""
    text = tmp_path / "a.jsonl"
    text.write_bytes(CONTENT)
    words = command(str(text))
    assert main(words) == 0
    before = (tmp_path / "out/text.work/sources.json").read_bytes()
    text.write_bytes(CONTENT[::-1])

    def fail_full_disk(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", fail_full_disk)
    assert main(words) == 1
    errors = capsys.readouterr().err
    assert errors.startswith("error: No space left on device")
    assert [path.name for path in (tmp_path / "out/text.work").iterdir()] == ["sources.json"]
    assert (tmp_path / "out/text.work/sources.json").read_bytes() == before


def test_ctrl_c_keeps_what_was_received(
    server: FaultyServer, command: Callable[..., list[str]], tmp_path: Path
) -> None:
    url = server.put("text.jsonl", CONTENT, chunk=16_384, pause=0.02)
    words = command(url)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    process = subprocess.Popen(
        [sys.executable, "-m", "slipway.corpus", *words], env=environment, stderr=subprocess.PIPE, text=True
    )
    while process.poll() is None and server.sent["/text.jsonl"] < 300_000:
        time.sleep(0.002)
    process.send_signal(signal.SIGINT)
    errors = process.communicate()[1]
    assert process.returncode == 130
    assert errors == "interrupted; the same command continues from here\n"
    server.files["/text.jsonl"].pause = 0
    assert main(words) == 0
    assert server.starts("text.jsonl")[-1] > 0


def test_a_command_killed_again_and_again_ends_with_the_same_files(
    server: FaultyServer, command: Callable[..., list[str]], tmp_path: Path
) -> None:
    """Three downloads run at once, and each goes on from what is on the disk."""
    contents = [CONTENT[at:] + CONTENT[:at] for at in (0, 5, 9)]
    urls = [
        server.put(f"{number}.jsonl", content, chunk=16_384, pause=0.02)
        for number, content in enumerate(contents)
    ]
    program = (
        "import sys, functools, slipway.corpus.fetching as fetching\n"
        "fetching.Policy = functools.partial(fetching.Policy, sync_bytes=32768)\n"
        "from slipway.corpus.__main__ import main\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    arguments = [sys.executable, "-c", program, *command(*urls)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    kills = starts = 0
    while True:
        starts += 1
        sent = server.sent.total()
        process = subprocess.Popen(arguments, env=environment, stdout=subprocess.DEVNULL)
        # Different moments: after other amounts of bytes each time.
        while process.poll() is None and server.sent.total() < sent + 150_000 * starts:
            time.sleep(0.002)
        if kills < 4:
            process.send_signal(signal.SIGKILL)
        kills += process.wait() == -signal.SIGKILL
        if process.returncode == 0:
            break
    assert kills >= 3
    files = read_sources(spec.load(tmp_path, "p.yaml"))
    assert {file.name: file.path.read_bytes() for file in files} == dict(zip(urls, contents, strict=True))
    for number in range(3):
        starts = server.starts(f"{number}.jsonl")
        assert starts == sorted(starts)
        assert starts[-1] > len(CONTENT) // 5
    assert len(list(files[0].path.parent.iterdir())) == 6
