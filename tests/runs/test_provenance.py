"""The provenance of a launch: the commit, uncommitted changes, versions, the image."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.drafting import Request, draft
from launcher.launching.writing import write_draft
from launcher.runs import provenance as checkouts
from launcher.runs.provenance import checkout_of, gather, package_versions
from launcher.runs.write import reserve_number
from slipway.common.files import write_atomic

GIT = ["git", "-c", "user.name=x", "-c", "user.email=x@example.org"]


def git(directory: Path, *arguments: str) -> str:
    return subprocess.run(
        [*GIT, "-C", str(directory), *arguments], check=True, capture_output=True, text=True
    ).stdout


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with one commit, nothing changed."""
    directory = tmp_path / "my checkout"
    (directory / "conf").mkdir(parents=True)
    (directory / "conf" / "a.yaml").write_text("x: 1\n")
    (directory / "code.py").write_bytes(b"# caf\xe9\r\ntoken = 1\n")
    (directory / "weights.bin").write_bytes(bytes(range(256)))
    git(directory, "init", "-q")
    git(directory, "add", ".")
    git(directory, "commit", "-q", "-m", "first")
    return directory


def test_clean_checkout_has_no_diff(checkout: Path) -> None:
    state = checkout_of(checkout / "conf")
    assert state is not None
    assert (state.top, state.dirty, state.diff) == (checkout, False, None)
    assert state.commit == git(checkout, "rev-parse", "HEAD").strip()


def test_recorded_changes_can_be_applied(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The diff applies byte for byte, whatever the encoding and the user's git configuration."""
    (checkout / "code.py").write_bytes(b"# caf\xe9 au lait\r\ntoken = 2\n")
    (checkout / "weights.bin").write_bytes(bytes(range(255, -1, -1)))
    (checkout / "conf" / "a.yaml").unlink()
    (checkout / "staged.txt").write_text("new\n")
    git(checkout, "add", "staged.txt")
    odd = os.fsdecode(b"n\xe9w\n.txt")
    (checkout / odd).touch()
    config = tmp_path / "gitconfig"
    config.write_text(
        "[color]\n ui = always\n[diff]\n noprefix = true\n external = /bin/false\n mnemonicPrefix = true\n"
        "[core]\n pager = false\n[status]\n showUntrackedFiles = no\n relativePaths = true\n"
    )
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(config))
    state = checkout_of(checkout / "conf")
    assert state is not None and state.dirty is True and state.diff is not None
    assert "n\\udce9w\\n.txt" in state.diff
    patch, clone = tmp_path / "git.diff", tmp_path / "again"
    write_atomic(patch, state.diff)
    git(tmp_path, "clone", "-q", str(checkout), str(clone))
    git(clone, "apply", str(patch))
    for name in ("code.py", "weights.bin", "staged.txt"):
        assert (clone / name).read_bytes() == (checkout / name).read_bytes()
    assert not (clone / "conf" / "a.yaml").exists()


def test_untracked_files_alone_do_not_make_a_checkout_dirty(checkout: Path) -> None:
    (checkout / "notes").touch()
    state = checkout_of(checkout)
    assert state is not None
    assert state.dirty is False
    assert state.diff is not None and "#   notes" in state.diff.splitlines()


def test_too_large_diff_is_replaced_by_a_message(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkouts, "_LARGEST_DIFF", 1 << 20)
    (checkout / "code.py").write_text("".join(f"line {number}\n" for number in range(200_000)))
    state = checkout_of(checkout)
    assert state is not None and state.dirty is True and state.diff is not None
    assert "the changes are missing" in state.diff
    assert len(state.diff) < 1000


def test_the_values_of_secrets_are_masked(checkout: Path) -> None:
    (checkout / "conf" / "a.yaml").write_text("x: 1\nenv_vars:\n  HF_TOKEN: hf_0123456789\n")
    (checkout / "code.py").write_bytes(b"# caf\xe9\r\ntoken = read_token()\n")
    state = checkout_of(checkout)
    assert state is not None and state.diff is not None
    assert "hf_0123456789" not in state.diff
    assert "+  HF_TOKEN: ***" in state.diff
    assert "+token = read_token()" in state.diff, "a program is kept as it is"
    assert "the values of secrets are masked" in state.diff


def test_checkout_is_none_without_repository_commit_or_git(
    tmp_path: Path, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert checkout_of(tmp_path) is None
    empty = tmp_path / "empty"
    empty.mkdir()
    git(empty, "init", "-q")
    (empty / "file").touch()
    git(empty, "add", ".")
    assert checkout_of(empty) is None, "there is no commit yet"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert checkout_of(checkout) is None


def test_second_checkout_is_recorded_by_itself(tmp_path: Path, checkout: Path) -> None:
    theirs = tmp_path / "theirs"
    shutil.copytree(checkout, theirs)
    (theirs / "conf" / "a.yaml").write_text("x: 2\n")
    origin = gather(checkout, (checkout, theirs / "conf"), None)
    assert list(origin.files) == ["config_git.diff"]
    commit = git(theirs, "rev-parse", "HEAD").strip()
    assert origin.fields["config_git"] == {
        "directory": str(theirs),
        "commit": commit,
        "dirty": True,
        "diff": "config_git.diff",
    }
    assert origin.fields["git_dirty"] is False
    same_origin = gather(checkout, (checkout / "conf",), None)
    assert "config_git" not in same_origin.fields, "one checkout is told once"


def test_image_digest_is_read_from_the_reference() -> None:
    digest = "sha256:" + "0f" * 32
    images = {f"nvcr.io#nvidia/nemo@{digest}": digest, "nvcr.io#nvidia/nemo:24.01": None, None: None}
    assert {image: gather(Path("/"), (), image).fields["image_digest"] for image in images} == images


def test_package_versions_are_gathered() -> None:
    versions = package_versions()
    assert set(versions) == {"python", "slipway", "hydra-core", "omegaconf", "jinja2", "pydantic", "submitit"}
    assert versions["python"] == ".".join(map(str, sys.version_info[:3]))


def test_launch_records_its_provenance(tmp_path: Path, checkout: Path) -> None:
    (checkout / "conf" / "a.yaml").write_text("x: 2\n")
    overrides = ["training=gpt3/tiny", "cluster=local", f"base_results_dir={tmp_path}"]
    request = Request(overrides, ["slipway"], config_dirs=(checkout / "conf",))
    launch_draft = draft(request)
    reserve_number(launch_draft.plan.paths.run_dir, launch_draft.results_key)
    manifest = write_draft(launch_draft, request)
    directory = launch_draft.plan.paths.directory
    assert manifest.config_git is not None
    assert "+x: 2" in (directory / manifest.config_git["diff"]).read_text()
    assert json.loads((directory / "launcher.json").read_text())["packages"]["slipway"]
    assert (manifest.git_diff is not None) == (directory / "git.diff").exists()


# A job that only records the digest of its image: RUN_DIRECTORY IMAGE.
RECORD = """
import os, sys
from slipway.supervisor.images import record_digest
from slipway.supervisor.job import Job
from slipway.common.node.settings import ContainerSettings, Settings
from slipway.supervisor.tasks import Signals
settings = Settings("run", 1, "tag", "/r", "/r/s.sh", "/r/log_", "slurm", "nemo")
job = Job("7", "7.0", "7", 1, False, sys.argv[1], settings, 0, {})
record_digest(job, ContainerSettings(sys.argv[2], True), Signals())
try:
    os.wait()
except ChildProcessError:
    pass
"""


def record_digest_of(directory: Path, image: Path) -> str:
    """Let a job record the digest of its image; return the digest in its mark."""
    (directory / "marks").mkdir(exist_ok=True)
    done = subprocess.run([sys.executable, "-c", RECORD, directory, image], capture_output=True)
    assert (done.stdout, done.stderr) == (b"", b"")
    assert [path.name for path in (directory / "marks").iterdir()] == ["image.sha256"]
    return (directory / "marks" / "image.sha256").read_text().split()[0]


def test_job_records_the_digest_of_its_image(tmp_path: Path) -> None:
    image = tmp_path / "an $image.sqsh"
    image.write_bytes(b"squashfs" * 1000)
    expected = hashlib.sha256(image.read_bytes()).hexdigest()
    assert record_digest_of(tmp_path, image) == expected
    image.write_bytes(b"another")
    assert record_digest_of(tmp_path, image) == expected, "that of the first attempt stays"


def test_an_image_is_hashed_once(tmp_path: Path) -> None:
    """A job takes the checksum recorded beside the image, if the record is of the file's current state."""
    image = tmp_path / "an $image.sqsh"
    image.write_bytes(b"squashfs" * 1000)
    state = image.stat()
    content = {"version": 1, "sha256": "d" * 64, "size": state.st_size, "modified": int(state.st_mtime)}
    image.with_name(f"{image.name}.json").write_text(json.dumps(content, indent=2))
    assert record_digest_of(tmp_path, image) == "d" * 64
    os.utime(image, (1, 1))
    shutil.rmtree(tmp_path / "marks")
    assert record_digest_of(tmp_path, image) == hashlib.sha256(image.read_bytes()).hexdigest()


def test_unused_image_is_not_recorded(tmp_path: Path) -> None:
    image = tmp_path / "an image.sqsh"
    image.write_bytes(b"squashfs")
    overrides = [
        "training=gpt3/tiny",
        "cluster=local",
        f"container='{image}'",
        f"base_results_dir={tmp_path}",
    ]
    request = Request(overrides, ["slipway"])
    launch_draft = draft(request)
    reserve_number(launch_draft.plan.paths.run_dir, launch_draft.results_key)
    manifest = write_draft(launch_draft, request)
    assert (manifest.image, manifest.image_digest) == (None, None)
    assert json.loads(launch_draft.texts[launch_draft.plan.paths.supervisor_settings])["container"] is None


def test_an_image_of_a_registry_has_no_file(tmp_path: Path) -> None:
    overrides = ["training=gpt3/126m", "cluster=bcm", "container=nvcr.io/nvidia/nemo:24.01"]
    launch_draft = draft(Request([*overrides, f"base_results_dir={tmp_path}"], ["slipway"]))
    assert (
        json.loads(launch_draft.texts[launch_draft.plan.paths.supervisor_settings])["container"]["is_file"]
        is False
    )
