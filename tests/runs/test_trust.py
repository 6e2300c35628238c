"""A configuration of Slurm that a manifest names is used only if nobody else could have written it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from launcher.runs import trust
from launcher.runs.trust import usable_slurm_conf, why_untrusted

NOBODY = 65534
SOMEBODY = 4242

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    path = tmp_path / "cluster" / "slurm.conf"
    path.parent.mkdir(mode=0o755)
    path.touch(mode=0o644)
    return path


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    path = tmp_path / "run" / "launches" / "1" / "launcher.json"
    path.parent.mkdir(parents=True)
    path.touch(mode=0o644)
    return path


@pytest.fixture(autouse=True)
def _forget_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trust, "_logged", set())
    monkeypatch.delenv("SLURM_CONF", raising=False)


@contextmanager
def as_user(user: int) -> Iterator[None]:
    """Be another user for the system."""
    os.seteuid(user)
    try:
        yield
    finally:
        os.seteuid(0)


def test_own_files_are_trusted_also_below_tmp(conf: Path, manifest: Path) -> None:
    """The tests' directories lie below /tmp, which everybody may write and which has the sticky bit."""
    assert usable_slurm_conf(manifest, str(conf)) == str(conf)
    assert usable_slurm_conf(manifest, None) is None


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda path: os.chown(path, NOBODY, NOBODY), id="owner", marks=as_root),
        pytest.param(
            lambda path: os.chown(path.parent, NOBODY, 0), id="owner of the directory", marks=as_root
        ),
        pytest.param(lambda path: path.chmod(0o666), id="everybody"),
        pytest.param(lambda path: path.parent.chmod(0o777), id="everybody in its directory"),
        pytest.param(lambda path: path.parent.parent.chmod(0o777), id="everybody further up"),
        pytest.param(lambda path: (os.chown(path, 0, 4), path.chmod(0o664)), id="group", marks=as_root),
    ],
)
@pytest.mark.parametrize("which", ["conf", "manifest"])
def test_files_that_others_could_have_written_are_not_trusted(
    conf: Path, manifest: Path, spoil: Callable[[Path], None], which: str
) -> None:
    spoil(conf if which == "conf" else manifest)
    assert usable_slurm_conf(manifest, str(conf)) is None


def test_own_cluster_that_was_taken_down_is_trusted(tmp_path: Path, conf: Path, manifest: Path) -> None:
    conf.unlink()
    assert usable_slurm_conf(manifest, str(conf)) == str(conf)
    conf.parent.chmod(0o1777)
    assert usable_slurm_conf(manifest, str(conf)) is None, "everybody can make the file"
    conf.parent.chmod(0o755)
    manifest.unlink()
    assert usable_slurm_conf(manifest, str(conf)) is None


@as_root
def test_a_link_of_somebody_else_is_not_trusted_nor_one_in_their_directory(
    tmp_path: Path, conf: Path
) -> None:
    link = tmp_path / "link"
    link.symlink_to(conf)
    assert why_untrusted(link) is None
    os.chown(link, NOBODY, NOBODY, follow_symlinks=False)
    assert why_untrusted(link) == f"{link} belongs to nobody"
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "link").symlink_to("../cluster")
    assert why_untrusted(theirs / "link" / "slurm.conf") is None
    os.chown(theirs, NOBODY, NOBODY)
    assert why_untrusted(theirs / "link" / "slurm.conf") == f"{theirs} belongs to nobody"
    assert why_untrusted(theirs / ".." / "cluster" / "slurm.conf") is not None


def test_links_in_circles_and_odd_paths_are_not_trusted(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    for path in (tmp_path / "a", Path("slurm.conf"), Path("/a\0b"), Path("/x" * 5000), tmp_path / "nowhere"):
        assert why_untrusted(path) is not None


@as_root
def test_directory_with_the_sticky_bit_is_as_trusted_as_its_entries(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    ours, theirs = shared / "ours", shared / "theirs"
    for path in (ours, theirs):
        path.touch(mode=0o644)
    os.chown(theirs, NOBODY, NOBODY)
    assert why_untrusted(ours) is None
    assert why_untrusted(theirs) == f"{theirs} belongs to nobody"


@as_root
def test_an_unprivileged_user_trusts_root_and_themselves(tmp_path: Path, conf: Path) -> None:
    top = Path(tempfile.gettempdir())
    for path in [tmp_path, *tmp_path.parents]:
        if path.is_relative_to(top) and path != top:
            path.chmod(0o755)
    with as_user(SOMEBODY):
        assert why_untrusted(conf) is None
    os.chown(conf, SOMEBODY, SOMEBODY)
    os.chown(conf.parent, SOMEBODY, SOMEBODY)
    with as_user(SOMEBODY):
        assert why_untrusted(conf) is None
    assert why_untrusted(conf) == f"{conf.parent} belongs to user {SOMEBODY}"
    with as_user(SOMEBODY + 1):
        assert why_untrusted(conf) == f"{conf.parent} belongs to user {SOMEBODY}"


@as_root
def test_the_user_of_the_sites_slurm_is_trusted(
    tmp_path: Path, conf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site.conf"
    site.write_text(f"ClusterName=c\nSlurmUser={SOMEBODY} # its user\n")
    os.chown(conf, SOMEBODY, SOMEBODY)
    assert why_untrusted(conf) is not None
    monkeypatch.setenv("SLURM_CONF", str(site))
    assert why_untrusted(conf) is None


@as_root
def test_a_private_group_is_its_user(conf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many systems give each user a group of the same name, and let it write what the user makes."""
    conf.chmod(0o664)
    assert why_untrusted(conf) is None  # the group root
    os.chown(conf, 0, 4)
    assert why_untrusted(conf) == f"a group may write {conf}"


def test_users_own_choice_needs_no_trust(conf: Path, manifest: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    conf.chmod(0o666)
    monkeypatch.setenv("SLURM_CONF", str(conf))
    assert usable_slurm_conf(manifest, str(conf)) == str(conf)


def test_distrust_is_reported_once(conf: Path, manifest: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[str] = []
    monkeypatch.setattr(trust.logger, "warning", lambda text, *words: messages.append(text % words))
    conf.chmod(0o666)
    for _ in range(3):
        assert usable_slurm_conf(manifest, str(conf)) is None
    assert messages == [
        f"{manifest} names the cluster of SLURM_CONF={conf}, which is not trusted "
        f"(everybody may write {conf}): this machine's own is asked"
    ]
