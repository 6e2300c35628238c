"""The provenance of a launch: the commit and what was not committed, versions, the image."""

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
from supervisor.files import write_atomic

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


def test_nothing_changed(checkout: Path) -> None:
    found = checkout_of(checkout / "conf")
    assert found is not None
    assert (found.top, found.dirty, found.diff) == (checkout, False, None)
    assert found.commit == git(checkout, "rev-parse", "HEAD").strip()


def test_recorded_changes_can_be_applied(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Byte for byte, whatever the encoding, and however the user has set up git."""
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
    found = checkout_of(checkout / "conf")
    assert found is not None and found.dirty is True and found.diff is not None
    assert "n\\udce9w\\n.txt" in found.diff
    patch, again = tmp_path / "git.diff", tmp_path / "again"
    write_atomic(patch, found.diff)
    git(tmp_path, "clone", "-q", str(checkout), str(again))
    git(again, "apply", str(patch))
    for name in ("code.py", "weights.bin", "staged.txt"):
        assert (again / name).read_bytes() == (checkout / name).read_bytes()
    assert not (again / "conf" / "a.yaml").exists()


def test_untracked_files_alone_do_not_make_it_dirty(checkout: Path) -> None:
    (checkout / "notes").touch()
    found = checkout_of(checkout)
    assert found is not None
    assert found.dirty is False
    assert found.diff is not None and "#   notes" in found.diff.splitlines()


def test_a_difference_that_is_too_large_is_told(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkouts, "_LARGEST_DIFF", 1 << 20)
    (checkout / "code.py").write_text("".join(f"line {number}\n" for number in range(200_000)))
    found = checkout_of(checkout)
    assert found is not None and found.dirty is True and found.diff is not None
    assert "the changes are not here" in found.diff
    assert len(found.diff) < 1000


def test_the_values_of_secrets_are_masked(checkout: Path) -> None:
    (checkout / "conf" / "a.yaml").write_text("x: 1\nenv_vars:\n  HF_TOKEN: hf_0123456789\n")
    (checkout / "code.py").write_bytes(b"# caf\xe9\r\ntoken = read_token()\n")
    found = checkout_of(checkout)
    assert found is not None and found.diff is not None
    assert "hf_0123456789" not in found.diff
    assert "+  HF_TOKEN: ***" in found.diff
    assert "+token = read_token()" in found.diff, "a program is kept as it is"
    assert "the values of secrets are masked" in found.diff


def test_no_checkout_and_no_git(tmp_path: Path, checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert checkout_of(tmp_path) is None
    empty = tmp_path / "empty"
    empty.mkdir()
    git(empty, "init", "-q")
    (empty / "file").touch()
    git(empty, "add", ".")
    assert checkout_of(empty) is None, "there is no commit yet"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert checkout_of(checkout) is None


def test_two_checkouts(tmp_path: Path, checkout: Path) -> None:
    theirs = tmp_path / "theirs"
    shutil.copytree(checkout, theirs)
    (theirs / "conf" / "a.yaml").write_text("x: 2\n")
    found = gather(checkout, theirs / "conf", None)
    assert list(found.files) == ["config_git.diff"]
    commit = git(theirs, "rev-parse", "HEAD").strip()
    assert found.fields["config_git"] == {
        "directory": str(theirs),
        "commit": commit,
        "dirty": True,
        "diff": "config_git.diff",
    }
    assert found.fields["git_dirty"] is False
    same = gather(checkout, checkout / "conf", None)
    assert "config_git" not in same.fields, "one checkout is told once"


def test_images() -> None:
    digest = "sha256:" + "0f" * 32
    images = {f"nvcr.io#nvidia/nemo@{digest}": digest, "nvcr.io#nvidia/nemo:24.01": None, None: None}
    assert {image: gather(Path("/"), None, image).fields["image_digest"] for image in images} == images


def test_versions() -> None:
    found = package_versions()
    assert set(found) == {"python", "slipway", "hydra-core", "omegaconf", "jinja2", "pydantic", "submitit"}
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))


def test_a_launch_keeps_it(tmp_path: Path, checkout: Path) -> None:
    (checkout / "conf" / "a.yaml").write_text("x: 2\n")
    overrides = ["training=gpt3/tiny", "cluster=local", f"base_results_dir={tmp_path}"]
    request = Request(overrides, ["slipway"], config_dir=checkout / "conf")
    made = draft(request)
    reserve_number(made.plan.paths.run_dir, made.results_key)
    manifest = write_draft(made, request)
    directory = made.plan.paths.directory
    assert manifest.config_git is not None
    assert "+x: 2" in (directory / manifest.config_git["diff"]).read_text()
    assert json.loads((directory / "launcher.json").read_text())["packages"]["slipway"]
    assert (manifest.git_diff is not None) == (directory / "git.diff").exists()


# A job that only records the digest of its image: RUN_DIRECTORY IMAGE.
RECORD = """
import os, sys
from supervisor.images import record_digest
from supervisor.job import Job
from supervisor.settings import ContainerSettings, Settings
from supervisor.tasks import Signals
settings = Settings("run", 1, "tag", "/r", "/r/s.sh", "/r/log_", "slurm", "nemo")
job = Job("7", "7.0", "7", 1, False, sys.argv[1], settings, 0, {})
record_digest(job, ContainerSettings(sys.argv[2], True), Signals())
try:
    os.wait()
except ChildProcessError:
    pass
"""


def record(directory: Path, image: Path) -> str:
    """Let a job record the digest of its image, and return what stands in its mark."""
    (directory / "marks").mkdir(exist_ok=True)
    done = subprocess.run([sys.executable, "-c", RECORD, directory, image], capture_output=True)
    assert (done.stdout, done.stderr) == (b"", b"")
    assert [path.name for path in (directory / "marks").iterdir()] == ["image.sha256"]
    return (directory / "marks" / "image.sha256").read_text().split()[0]


def test_the_job_finds_out_the_digest_of_its_image(tmp_path: Path) -> None:
    image = tmp_path / "an $image.sqsh"
    image.write_bytes(b"squashfs" * 1000)
    expected = hashlib.sha256(image.read_bytes()).hexdigest()
    assert record(tmp_path, image) == expected
    image.write_bytes(b"another")
    assert record(tmp_path, image) == expected, "that of the first attempt stays"


def test_an_image_is_hashed_once(tmp_path: Path) -> None:
    """A job takes the checksum of the record beside the image, if that is of the file as it is."""
    image = tmp_path / "an $image.sqsh"
    image.write_bytes(b"squashfs" * 1000)
    state = image.stat()
    content = {"version": 1, "sha256": "d" * 64, "size": state.st_size, "modified": int(state.st_mtime)}
    image.with_name(f"{image.name}.json").write_text(json.dumps(content, indent=2))
    assert record(tmp_path, image) == "d" * 64
    os.utime(image, (1, 1))
    shutil.rmtree(tmp_path / "marks")
    assert record(tmp_path, image) == hashlib.sha256(image.read_bytes()).hexdigest()


def test_an_image_that_is_not_used_is_not_told_of(tmp_path: Path) -> None:
    image = tmp_path / "an image.sqsh"
    image.write_bytes(b"squashfs")
    overrides = [
        "training=gpt3/tiny",
        "cluster=local",
        f"container='{image}'",
        f"base_results_dir={tmp_path}",
    ]
    request = Request(overrides, ["slipway"])
    made = draft(request)
    reserve_number(made.plan.paths.run_dir, made.results_key)
    manifest = write_draft(made, request)
    assert (manifest.image, manifest.image_digest) == (None, None)
    assert json.loads(made.rendered.settings)["container"] is None


def test_an_image_of_a_registry_has_no_file(tmp_path: Path) -> None:
    overrides = ["training=gpt3/126m", "cluster=bcm", "container=nvcr.io/nvidia/nemo:24.01"]
    rendered = draft(Request([*overrides, f"base_results_dir={tmp_path}"], ["slipway"])).rendered
    assert json.loads(rendered.settings)["container"]["is_file"] is False
