"""Downloads from a server that fails in each way in which servers do."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest

from slipway.common.errors import UserError
from slipway.corpus.errors import OutsideError
from slipway.corpus.fetching import Download, Fetched, Policy, fetch_all, file_name
from slipway.corpus.progress import Progress
from slipway.corpus.remotes import public_name, remote, retry_after
from tests.corpus.servers import FaultyServer, faulty_server

QUICK = Policy(attempts=3, first_wait=0.01, longest_wait=0.02, timeout=5.0, sync_bytes=1 << 18)
CONTENT = random.Random(22).randbytes(1_500_000)
SHA256 = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def server() -> Iterator[FaultyServer]:
    with faulty_server() as server:
        yield server


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "downloads"


def fetch_file(directory: Path, url: str, sha256: str | None = None, policy: Policy = QUICK) -> Fetched:
    [result] = fetch_all(
        [Download(remote(url), sha256)], directory, Progress("fetching", 0, 1, "files"), policy
    )
    return result


def suffixes(directory: Path) -> list[str]:
    """Return the suffixes of the files in a directory."""
    return sorted(path.suffix for path in directory.iterdir())


def test_a_file_arrives_whole_and_is_used_again(server: FaultyServer, directory: Path) -> None:
    url = server.put("a.jsonl", CONTENT)
    first = fetch_file(directory, url)
    assert (first.path.read_bytes(), first.size, first.sha256) == (CONTENT, len(CONTENT), SHA256)
    assert first.path.name.endswith("-a.jsonl")
    assert suffixes(directory) == [".jsonl", ".state"]
    assert fetch_file(directory, url) == first
    assert server.sent["/a.jsonl"] == len(CONTENT)
    assert server.requests["/a.jsonl"] == 2


def test_a_file_of_known_sha256_is_not_asked_for_again(server: FaultyServer, directory: Path) -> None:
    url = server.put("a.jsonl", CONTENT)
    first = fetch_file(directory, url, SHA256)
    server.files.clear()
    assert fetch_file(directory, url, SHA256) == first
    assert server.requests["/a.jsonl"] == 1


def test_a_server_without_etags_that_has_the_same_size_is_not_fetched_from_again(
    server: FaultyServer, directory: Path
) -> None:
    url = server.put("a", CONTENT, validators=False)
    assert fetch_file(directory, url) == fetch_file(directory, url)
    assert server.requests["/a"] == 2


@pytest.mark.parametrize(
    ("faults", "sent"),
    [
        # Each connection goes on where the last one ended.
        ({"drop_after": [500_000, 1, 999_000]}, len(CONTENT)),
        # Only those in a row without a new byte count as failed attempts.
        ({"drop_after": [100_000] * 12}, len(CONTENT)),
        ({"statuses": [(429, "0"), (503, None), (500, None)], "drop_after": [400_000]}, len(CONTENT)),
        # Without ranges, or an ETag to name the version by, each begins again.
        ({"ranges": False, "drop_after": [300_000, 400_000]}, 700_000 + len(CONTENT)),
        ({"validators": False, "drop_after": [300_000]}, 300_000 + len(CONTENT)),
    ],
)
def test_faults_that_pass_cost_attempts_and_nothing_else(
    server: FaultyServer, directory: Path, capsys: Any, faults: dict[str, Any], sent: int
) -> None:
    policy = Policy(attempts=5, first_wait=0.01, longest_wait=0.02)
    url = server.put("a", CONTENT, **faults)
    assert fetch_file(directory, url, policy=policy).path.read_bytes() == CONTENT
    assert server.sent["/a"] == sent
    output = capsys.readouterr().out
    assert "attempt 2 of 5" in output
    assert ("the server sends no ranges: begun again" in output) == ("ranges" in faults)


def test_a_weak_etag_is_no_ground_to_resume(server: FaultyServer, directory: Path) -> None:
    """If-Range takes strong validators alone (RFC 9110, section 13.1.5)."""
    url = server.put("a", CONTENT, weak=True, drop_after=[300_000])
    assert fetch_file(directory, url).path.read_bytes() == CONTENT
    assert server.sent["/a"] == 300_000 + len(CONTENT)


def test_retry_after_is_obeyed(server: FaultyServer, directory: Path, capsys: Any) -> None:
    url = server.put("a", b"text", statuses=[(429, "1")])
    fetch_file(directory, url)
    assert "HTTP 429 Too Many Requests; 0 bytes so far; attempt 2 of 3 in 1 s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("7", 7), (" 7 ", 7), (formatdate(1030, usegmt=True), 30), (formatdate(900), 0), ("99999", 600)],
)
def test_retry_after_is_a_number_or_a_date(
    value: str, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.time", lambda: 1000.0)
    assert retry_after(value) == seconds


@pytest.mark.parametrize("value", [None, "", "soon", "-1 day"])
def test_invalid_retry_after_is_none(value: str | None) -> None:
    assert retry_after(value) is None


PERMANENT: dict[str, tuple[dict[str, Any], str | None, type[Exception], str]] = {
    "a server that always ends early": (
        {"drop_after": [700_000] * 9, "ranges": False},
        None,
        OutsideError,
        "ended before byte 1,500,000; gave up after 3 attempts without a new byte. 700,000 bytes are kept in",
    ),
    "a length that is never sent": (
        {"announced": 5},
        None,
        OutsideError,
        "gave up after 3 attempts without a new byte",
    ),
    "a server that is always busy": (
        {"statuses": [(503, None)] * 9},
        None,
        OutsideError,
        "HTTP 503 Service Unavailable; gave up after 3 attempts",
    ),
    "too many requests": ({"statuses": [(429, "0")] * 9}, None, OutsideError, "HTTP 429 Too Many Requests"),
    "another sha256": ({}, "ab" * 32, UserError, f"its sha256 is {SHA256}, expected {'ab' * 32}"),
    "another sha256, in two parts": (
        {"drop_after": [5000]},
        "ab" * 32,
        UserError,
        f"its sha256 is {SHA256}, expected {'ab' * 32}",
    ),
    "no such file": ({"statuses": [(404, None)]}, None, UserError, "HTTP 404 Not Found; there is no such"),
    "no permission": ({"statuses": [(403, None)]}, None, UserError, "HTTP 403 Forbidden; access is denied"),
    "no account": ({"user": "nobody"}, None, UserError, "name a user and password for the host in ~/.netrc"),
    "a redirect to a file": (
        {"redirect": "file:///etc/passwd"},
        None,
        UserError,
        "redirected to file:///etc/passwd, which is not followed",
    ),
    "a redirect to ftp": (
        {"redirect": "ftp://127.0.0.1/a"},
        None,
        UserError,
        "redirected to ftp://127.0.0.1/a",
    ),
    "a redirect with a password": (
        {"redirect": "http://user:hidden@127.0.0.1/a"},
        None,
        UserError,
        "redirected to http://127.0.0.1/a",
    ),
}


@pytest.mark.parametrize("fault", PERMANENT)
def test_faults_that_stay_are_named_and_leave_nothing_under_the_name(
    server: FaultyServer, directory: Path, fault: str
) -> None:
    faults, sha256, kind, message = PERMANENT[fault]
    url = server.put("a.txt", CONTENT, **faults)
    with pytest.raises(kind) as raised:
        fetch_file(directory, url, sha256)
    assert message in str(raised.value)
    assert str(raised.value).startswith(f"{url}: ")
    assert not list(directory.glob("*.txt"))


def test_received_bytes_are_kept_after_giving_up(server: FaultyServer, directory: Path) -> None:
    url = server.put("a", CONTENT, drop_after=[600_000, 0, 0, 0])
    with pytest.raises(OutsideError, match="600,000 bytes are kept"):
        fetch_file(directory, url)
    assert fetch_file(directory, url).path.read_bytes() == CONTENT
    assert server.sent["/a"] == len(CONTENT)
    last = server.headers["/a"][-1]
    assert (last["Range"], last["If-Range"]) == ("bytes=600000-", server.files["/a"].etag)


def test_bytes_that_were_not_synced_are_not_trusted(server: FaultyServer, directory: Path) -> None:
    """After a crash of the machine a file may be as long as it was, with zeros at its end."""
    url = server.put("a", CONTENT, drop_after=[600_000, 0, 0, 0])
    with pytest.raises(OutsideError):
        fetch_file(directory, url)
    [part], [state] = directory.glob("*.part"), directory.glob("*.state")
    state.write_text(json.dumps({**json.loads(state.read_text()), "synced": 500_000}))
    part.write_bytes(CONTENT[:500_000] + bytes(100_000))
    assert fetch_file(directory, url).path.read_bytes() == CONTENT


def test_no_server_at_all_is_named(directory: Path) -> None:
    with faulty_server() as server:
        url = server.put("a", CONTENT)
    with pytest.raises(OutsideError, match=r"127\.0\.0\.1:\d+/a: .*refused.*gave up after 3 attempts"):
        fetch_file(directory, url)


def test_silent_server_is_given_up(server: FaultyServer, directory: Path) -> None:
    url = server.put("a", CONTENT, chunk=500_000, pause=2.0)
    with pytest.raises(OutsideError, match="no answer in time"):
        fetch_file(directory, url, policy=Policy(attempts=1, timeout=0.2))


def test_a_source_that_changes_between_two_runs_is_fetched_anew(
    server: FaultyServer, directory: Path, capsys: Any
) -> None:
    url = server.put("a", CONTENT)
    fetch_file(directory, url)
    other = CONTENT[::-1]
    server.put("a", other)
    assert fetch_file(directory, url).path.read_bytes() == other
    assert "changed on the server since it was fetched (ETag" in capsys.readouterr().out


def test_a_new_version_that_fails_to_arrive_is_not_mixed_with_the_old_one(
    server: FaultyServer, directory: Path
) -> None:
    url = server.put("a", CONTENT)
    old = fetch_file(directory, url)
    other = CONTENT[::-1]
    server.put("a", other, drop_after=[600_000, 0, 0, 0, 0])
    with pytest.raises(OutsideError):
        fetch_file(directory, url)
    assert old.path.read_bytes() == CONTENT
    assert fetch_file(directory, url).path.read_bytes() == other
    assert server.sent["/a"] == 2 * len(CONTENT)


@pytest.mark.parametrize("ranges", [True, False])
def test_a_source_that_changes_during_a_download_is_never_mixed(
    server: FaultyServer, directory: Path, capsys: Any, ranges: bool
) -> None:
    url = server.put("a", CONTENT, drop_after=[600_000, 0, 0, 0])
    with pytest.raises(OutsideError):
        fetch_file(directory, url)
    other = CONTENT[::-1] + b"longer"
    server.put("a", other, ranges=ranges)
    assert fetch_file(directory, url).path.read_bytes() == other
    output = capsys.readouterr().out
    assert "changed on the server (size 1500000 became 1500006)" in output
    assert "the 600,000 bytes of the former version are dropped" in output


def test_a_range_of_another_version_is_never_mixed(server: FaultyServer, directory: Path) -> None:
    """Some servers know ranges and ignore If-Range."""
    url = server.put("a", CONTENT, drop_after=[600_000, 0, 0, 0])
    with pytest.raises(OutsideError):
        fetch_file(directory, url)
    server.put("a", CONTENT[::-1], ignores_conditions=True)
    assert fetch_file(directory, url).path.read_bytes() == CONTENT[::-1]


def test_a_smaller_file_on_the_server_is_fetched_from_its_beginning(
    server: FaultyServer, directory: Path
) -> None:
    url = server.put("a", CONTENT, drop_after=[600_000, 0, 0, 0])
    with pytest.raises(OutsideError):
        fetch_file(directory, url)
    server.put("a", CONTENT[:1000], ignores_conditions=True)
    assert fetch_file(directory, url).path.read_bytes() == CONTENT[:1000]


@pytest.mark.parametrize("damage", [b"", CONTENT[:-1], CONTENT[:-1] + b"?"])
def test_a_complete_file_that_was_damaged_is_fetched_again(
    server: FaultyServer, directory: Path, capsys: Any, damage: bytes
) -> None:
    url = server.put("a", CONTENT)
    path = fetch_file(directory, url).path
    path.write_bytes(damage)
    assert fetch_file(directory, url).path.read_bytes() == CONTENT
    assert "changed since it was fetched: fetched again" in capsys.readouterr().out


@pytest.mark.parametrize("state", ["", "{}", '{"version": 3}', "[]"])
def test_a_damaged_state_begins_again(server: FaultyServer, directory: Path, state: str) -> None:
    url = server.put("a", CONTENT)
    path = fetch_file(directory, url).path
    path.with_name(f"{path.name}.state").write_text(state)
    path.rename(path.with_name(f"{path.name}.part"))
    assert fetch_file(directory, url).path.read_bytes() == CONTENT


def test_a_copy_is_used_when_the_server_is_gone(server: FaultyServer, directory: Path, capsys: Any) -> None:
    url = server.put("a", CONTENT)
    first = fetch_file(directory, url)
    server.files.clear()
    assert fetch_file(directory, url) == first
    assert "the copy of an earlier run is used, and may be older" in capsys.readouterr().out


def test_another_sha256_than_that_of_the_copy_asks_the_server(server: FaultyServer, directory: Path) -> None:
    url = server.put("a", CONTENT)
    fetch_file(directory, url)
    with pytest.raises(UserError, match=f"its sha256 is {SHA256}, expected {'0' * 64}"):
        fetch_file(directory, url, "0" * 64)
    server.put("a", CONTENT[::-1])
    expected = hashlib.sha256(CONTENT[::-1]).hexdigest()
    assert fetch_file(directory, url, expected).sha256 == expected


def test_an_expected_sha256_allows_to_resume_without_an_etag(server: FaultyServer, directory: Path) -> None:
    url = server.put("a", CONTENT, validators=False, drop_after=[600_000])
    assert fetch_file(directory, url, SHA256).path.read_bytes() == CONTENT
    assert server.sent["/a"] == len(CONTENT)


def test_a_file_of_unknown_length_says_that_only_a_sha256_proves_it(
    server: FaultyServer, directory: Path, capsys: Any
) -> None:
    url = server.put("a", CONTENT, announced=None)
    assert fetch_file(directory, url).path.read_bytes() == CONTENT
    assert "the server names no length; only a sha256" in capsys.readouterr().out


def test_all_failures_are_reported_together_and_the_others_arrive(
    server: FaultyServer, directory: Path
) -> None:
    urls = [server.put("a", CONTENT), f"{server.address}/lost", f"{server.address}/gone"]
    with pytest.raises(UserError) as raised:
        fetch_all(
            [Download(remote(url)) for url in urls], directory, Progress("fetching", 0, 3, "files"), QUICK
        )
    assert [line.split(": ")[0] for line in raised.value.message.splitlines()] == urls[1:]
    assert [path.read_bytes() for path in directory.iterdir() if path.suffix == ""] == [CONTENT]


def test_a_dead_server_is_not_asked_for_every_file(server: FaultyServer, directory: Path) -> None:
    urls = [server.put(str(number), b"", statuses=[(503, None)] * 9) for number in range(40)]
    policy = dataclasses.replace(QUICK, parallel=1)
    with pytest.raises(OutsideError, match=r"/0: HTTP 503.*\n39 further files were not begun"):
        fetch_all(
            [Download(remote(url)) for url in urls], directory, Progress("fetching", 0, 40, "files"), policy
        )
    assert server.requests.total() == QUICK.attempts


def test_many_mistakes_are_named_in_part(server: FaultyServer, directory: Path) -> None:
    downloads = [Download(remote(f"{server.address}/lost{number}")) for number in range(30)]
    with pytest.raises(UserError) as raised:
        fetch_all(downloads, directory, Progress("fetching", 0, 30, "files"), QUICK)
    assert len(str(raised.value).splitlines()) == 21
    assert str(raised.value).endswith("... and 10 more files")


def test_two_processes_do_not_write_one_file(server: FaultyServer, directory: Path) -> None:
    import fcntl

    url = server.put("a", CONTENT)
    directory.mkdir()
    with (directory / f"{file_name(remote(url))}.part").open("ab") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="another process is fetching it"):
            fetch_file(directory, url)
    assert fetch_file(directory, url).sha256 == SHA256


@pytest.mark.parametrize(
    "name", ["..%2F..%2Fescape", "%2e%2e", ".hidden", "a%00b", "", "x" * 400, "%2Fetc%2Fpasswd", "a b;rm"]
)
def test_names_from_addresses_stay_in_the_directory(name: str, tmp_path: Path) -> None:
    path = tmp_path / file_name(remote(f"https://host.example/{name}"))
    assert path.parent == tmp_path
    assert not path.name.startswith(".")
    path.write_text("it can be made")


def test_user_and_password_are_used_and_never_shown(
    server: FaultyServer, directory: Path, capsys: Any
) -> None:
    basic = "Basic " + base64.b64encode(b"reader:p@ss word").decode()
    server.put("a", CONTENT, user=basic, drop_after=[400_000])
    url = f"{server.address}/a?token=verysecret&part=1".replace("http://", "http://reader:p%40ss%20word@")
    assert fetch_file(directory, url).sha256 == SHA256
    states = "".join(path.read_text() for path in directory.glob("*.state"))
    output = capsys.readouterr().out + states + "".join(path.name for path in directory.iterdir())
    for secret in ("p@ss", "p%40ss", "verysecret", "reader:"):
        assert secret not in output
    assert "token=***&part=1" in output


def test_netrc_names_user_and_password(
    server: FaultyServer, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    netrc = tmp_path / ".netrc"
    netrc.write_text("machine 127.0.0.1 login me password mine\n")
    netrc.chmod(0o600)
    monkeypatch.setenv("HOME", str(tmp_path))
    url = server.put("a", CONTENT, user="Basic " + base64.b64encode(b"me:mine").decode())
    assert fetch_file(directory, url).sha256 == SHA256


def test_a_redirect_within_http_is_followed_without_the_password(
    server: FaultyServer, directory: Path
) -> None:
    with faulty_server() as other:
        target = other.put("b", CONTENT)
        url = server.put("a", b"", redirect=target).replace("http://", "http://me:mine@")
        assert fetch_file(directory, url).sha256 == SHA256
        assert "Authorization" in server.headers["/a"][0]
        assert "Authorization" not in other.headers["/b"][0]


def test_public_names_hide_signatures() -> None:
    url = "https://u:p@host.example/a?X-Amz-Signature=abc&X-Amz-Credential=k&v=2&sig=1#part"
    assert public_name(url) == "https://host.example/a?X-Amz-Signature=***&X-Amz-Credential=***&v=2&sig=***"


_FETCH = """
import sys
from pathlib import Path
from slipway.common.errors import UserError
from slipway.corpus.errors import OutsideError
from slipway.corpus.fetching import Download, Policy, fetch_all
from slipway.corpus.progress import Progress
from slipway.corpus.remotes import remote
policy = Policy(attempts=3, first_wait=0.01, longest_wait=0.02, sync_bytes=65536)
try:
    downloads = [Download(remote(url)) for url in sys.argv[2:]]
    for result in fetch_all(downloads, Path(sys.argv[1]), Progress("fetching", 0, 1, "files"), policy):
        print(result.sha256)
except (OutsideError, UserError) as error:
    sys.exit(str(error))
"""


def test_killed_downloads_go_on_where_they_were(server: FaultyServer, directory: Path) -> None:
    """Each kill costs what was not yet synced: 64 kB, and what was under way."""
    url = server.put("a", CONTENT, chunk=8192, pause=0.004)
    path = directory / file_name(remote(url))
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    command = [sys.executable, "-c", _FETCH, str(directory), url]
    chance, kills = random.Random(7), 0
    while True:
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        enough = server.sent["/a"] + chance.randint(100_000, 300_000)
        while process.poll() is None and server.sent["/a"] < enough:
            time.sleep(0.001)
        if kills < 5:
            process.send_signal(signal.SIGKILL)
        output = process.communicate()[0]
        if process.returncode != -signal.SIGKILL:
            break
        kills += 1
        assert not path.exists()
    assert kills >= 3
    assert output.splitlines()[-1] == SHA256
    assert path.read_bytes() == CONTENT
    assert sorted(directory.iterdir()) == [path, path.with_name(f"{path.name}.state")]
    starts = server.starts("a")
    assert starts == sorted(starts)
    assert starts[-1] > len(CONTENT) // 5


_SMALL_DISK = """
mount -t tmpfs -o size=2m tmpfs "$1" && cd "$1" || exit 99
shift
dd if=/dev/zero of=filler bs=1k count="$1" status=none
shift
"$@"
echo "exit $?"
find . -name '*-?' -o -name '*.part' -size +0 | sed 's/.*\\./kept ./' | sort
rm filler
"$@"
"""


@pytest.mark.parametrize(
    ("filler", "files", "message"),
    [
        # It cannot fit, and is not begun.
        (1000, 1, "1,500,000 bytes are still to come, "),
        # Each would fit, the two together do not: the disk is full while both are received.
        (0, 2, r"is full: (.* are still to come, )?[\d,]+ bytes are free\. Received bytes are kept: make"),
    ],
)
def test_a_full_disk_is_named_and_nothing_is_lost(
    server: FaultyServer, tmp_path: Path, filler: int, files: int, message: str
) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount a small file system")
    barrier = threading.Barrier(files)
    urls = [server.put(name, CONTENT, chunk=1 << 14, barrier=barrier) for name in "ab"[:files]]
    program = [sys.executable, "-c", _FETCH, "downloads"]
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", _SMALL_DISK, "sh", str(tmp_path), str(filler), *program, *urls],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])},
        capture_output=True,
        text=True,
    )
    if done.returncode == 99:
        pytest.skip(f"no small file system can be mounted here: {done.stderr.strip()}")
    assert re.search(message, done.stderr)
    assert "Traceback" not in done.stderr
    lines = done.stdout.splitlines()
    assert "exit 1" in lines
    # One of two may be whole, or nearly so, before the other one is looked at.
    kept = sum(line.startswith("kept ") for line in lines)
    assert kept in ((1, 2) if files == 2 else (0,))
    if files == 1:
        assert server.requests["/a"] == 2
        assert lines[-1] == SHA256


def test_the_state_names_the_version(server: FaultyServer, directory: Path) -> None:
    url = server.put("a", CONTENT)
    path = fetch_file(directory, url).path
    state = json.loads(path.with_name(f"{path.name}.state").read_text())
    assert state["sha256"] == SHA256
    assert state["version"] == {"size": len(CONTENT), "etag": server.files["/a"].etag, "modified": None}
