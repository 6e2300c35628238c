"""Unusual images and machines: file systems without locks, files of other users, users without a home."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from launcher.cli.app import main
from launcher.errors import UserError
from launcher.file_systems import MountedFileSystem
from launcher.images import backends, building, importing, rootfs
from launcher.images.building import Builder
from launcher.images.importing import ImportOptions, import_image
from launcher.images.progress import ImageProgress
from launcher.images.recipes import read_recipe
from launcher.images.references import Kind, Reference
from launcher.images.registry import Access, RemoteImage, enroot_login, hint_names
from launcher.images.scratch import lock_image
from launcher.images.store import ImageConfig
from launcher.images.tools import BUILDERS, ToolError, explain_failure


def test_a_volume_is_one_line_of_the_image_only(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    bad = ("/a b", "/x\n/etc /y none bind", "/../../home", "/$HOME", "relative")
    notes = rootfs.configure(tmp_path / "root", ImageConfig(volumes=("/data", *bad)), "x")
    lines = (tmp_path / "root/etc/fstab").read_text().splitlines()
    assert [line.split()[1] for line in lines] == ["/data"]
    assert len(notes) == len(bad)


def test_a_read_only_device_directory_is_emptied(tmp_path: Path) -> None:
    (tmp_path / "root/dev").mkdir(parents=True)
    (tmp_path / "root/dev/null").touch()
    (tmp_path / "root/dev").chmod(0o555)
    rootfs.make_readable(tmp_path / "root")
    assert not list((tmp_path / "root/dev").iterdir())
    assert (tmp_path / "root/dev").stat().st_mode & 0o700 == 0o700


def test_a_file_system_without_locks_is_uncertain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(handle: int, operation: int) -> None:
        raise OSError(errno.EBADF, "Bad file descriptor")

    monkeypatch.setattr("fcntl.flock", refuse)
    with lock_image(tmp_path / "x.sqsh", lambda who: None) as lock:
        assert not lock.certain


def test_a_lock_file_that_its_holder_removes_on_nfs_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, attempts = fcntl.flock, []

    def stale(handle: int, operation: int) -> None:
        attempts.append(operation)
        if len(attempts) == 1:
            raise OSError(errno.ESTALE, "Stale file handle")
        real(handle, operation)

    monkeypatch.setattr("fcntl.flock", stale)
    with lock_image(tmp_path / "x.sqsh", lambda who: pytest.fail(f"waited for {who}")) as lock:
        assert lock.certain


def test_a_directory_without_permission_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refuse(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_CREAT:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path, flags, mode)

    monkeypatch.setattr("os.open", refuse)
    with pytest.raises(UserError, match="permission denied"), lock_image(tmp_path / "x.sqsh", print):
        pass


def test_a_replaced_image_of_a_colleague_is_kept_on_nfs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(old: Path, new: Path) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted", str(new))

    monkeypatch.setattr("os.link", refuse)
    monkeypatch.setattr(
        importing, "mount_of", lambda path: MountedFileSystem("nfs4", tmp_path, "server:/images")
    )
    (tmp_path / "x.sqsh").write_text("theirs")
    importing._keep_for_jobs(tmp_path / "x.sqsh")
    [backup] = tmp_path.glob(".x.sqsh.old-*")
    assert backup.read_text() == "theirs"


def test_login_is_skipped_without_home_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr("pwd.getpwuid", refuse)
    monkeypatch.delenv("HOME")
    assert enroot_login("nvcr.io", environment={}) is None


@pytest.mark.parametrize(
    ("registry", "host"),
    [("nvcr.io", "nvcr.io"), ("a.b:5000", "a.b"), ("[::1]", "[::1]"), ("docker.io", "auth.docker.io")],
)
def test_hints_name_the_host_of_a_login(registry: str, host: str) -> None:
    assert hint_names(Reference(Kind.REGISTRY, "a/b", registry, "1"))["HOSTNAME"] == host


def test_hints_for_an_image_of_no_registry_name_no_registry() -> None:
    message = ["open index.json: no such file or directory: image not known"]
    assert explain_failure("look", "skopeo", 1, message, {}).hint == "check its name and its tag"


def test_a_directory_as_target_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.sqsh").mkdir()
    with pytest.raises(UserError, match="a directory, and no image's file"):
        import_image(Reference.parse("oci:/nowhere:1"), tmp_path / "x.sqsh")


def test_a_home_in_an_option_is_expanded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["oci:/nowhere:1", "--output=~/x.sqsh", "--on-cluster", "--dry-run", "cluster=bcm"]
    assert main(["image", "import", *words]) == 0
    assert f"--output={Path.home()}/x.sqsh" in capsys.readouterr().out


def test_a_login_refused_to_both_programs_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise explain_failure("look", "skopeo", 1, ["unauthorized"], {"REGISTRY": "a.b"})

    def fail(*_: object) -> None:
        raise explain_failure("look", "enroot", 1, ["[INFO] Authenticating with user: <anonymous>"])

    monkeypatch.setattr("launcher.images.registry.look_up", refuse)
    monkeypatch.setattr("launcher.images.backends._run_enroot", fail)
    monkeypatch.setattr("launcher.images.tools.find_program", Path)
    with pytest.raises(UserError, match="the registry refuses access") as raised:
        backends.look_up(backends.ENROOT, Reference.parse("a.b/c:1"), Access())
    assert "skopeo login a.b" in str(raised.value)


def install_refusing_skopeo(
    directory: Path, monkeypatch: pytest.MonkeyPatch, message: str, tags: str = "", user: str = ""
) -> None:
    """Put a skopeo first in PATH whose look-ups fail; it may have a login, and list tags."""
    script = f"""#!/bin/sh
case "$*" in
*list-tags*) [ '{tags}' ] && echo '{{"Tags": [{tags}]}}' ;;
*--get-login*) [ '{user}' ] && echo '{user}' ;;
*) echo '{message}' >&2 && exit 1 ;;
esac
"""
    (directory / "skopeo").write_text(script)
    (directory / "skopeo").chmod(0o755)
    monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")


def refusal(image: str = "nvcr.io#nvidia/nemo:24.99", access: Access | None = None) -> str:
    with pytest.raises(ToolError) as raised:
        backends.look_up(backends.SKOPEO, Reference.parse(image), access or Access())
    return str(raised.value)


UNKNOWN = "reading manifest 24.99 in nvcr.io/nvidia/nemo: manifest unknown"
DENIED = "reading manifest 24.99 in nvcr.io/nvidia/nemo: denied: requested access to the resource is denied"


def test_the_nearest_tags_are_suggested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_refusing_skopeo(tmp_path, monkeypatch, UNKNOWN, '"23.11", "24.07", "24.09", "latest"')
    message = refusal()
    assert "nvidia/nemo has no tag 24.99 (of 4 tags)" in message
    assert "nearest: 24.09, 24.07" in message and "skopeo list-tags docker://nvcr.io/nvidia/nemo" in message
    assert "private" not in message


def test_a_missing_repository_may_be_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_refusing_skopeo(tmp_path, monkeypatch, UNKNOWN)
    message = refusal()
    assert "there is no such image" in message and "or it is private" in message
    assert "the registry was asked without a login" in message
    assert "`skopeo login nvcr.io`" in message


def test_a_refusal_names_the_login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_refusing_skopeo(tmp_path, monkeypatch, DENIED, user="bob")
    message = refusal()
    assert "the registry was asked as bob, of the logins of skopeo and docker" in message
    assert "check the name" in message
    access = Access(authfile=tmp_path / "auth.json")
    assert f"asked as bob, of {tmp_path}/auth.json" in refusal(access=access)


def test_a_refusal_names_the_login_of_enroot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_refusing_skopeo(tmp_path, monkeypatch, DENIED)
    monkeypatch.setenv("ENROOT_CONFIG_PATH", str(tmp_path))
    (tmp_path / ".credentials").write_text("machine nvcr.io login alice password hunter22\n")
    with pytest.raises(ToolError) as raised:
        import_image(
            Reference.parse("nvcr.io#nvidia/nemo:24.99"), tmp_path / "x.sqsh", ImportOptions(via="skopeo")
        )
    assert f"asked as alice, of {tmp_path}/.credentials" in str(raised.value)
    assert "hunter22" not in str(raised.value)


@pytest.mark.parametrize("name", ["x.sqsh", "x.sqsh.json"])
def test_a_colleagues_file_in_a_sticky_directory_is_refused_before_the_import(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = tmp_path / "images"
    images.mkdir()
    images.chmod(0o1777)
    (images / name).write_text("theirs")
    # Both the directory and the file are another user's.
    monkeypatch.setattr(importing.os, "geteuid", lambda: os.getuid() + 4242)
    monkeypatch.setattr(backends, "choose_backend", lambda *_: backends.SKOPEO)
    remote = RemoteImage("sha256:0", 1, 1, ImageConfig())
    monkeypatch.setattr(backends, "look_up", lambda *_: remote)
    monkeypatch.setattr(backends, "make_squashfs", lambda *_: pytest.fail("it was imported"))
    with pytest.raises(UserError, match="sticky bit, where only its owner can replace it") as raised:
        import_image(Reference.parse("a.b#c:1"), images / "x.sqsh")
    assert str(images / name) in str(raised.value) and "images_dir=DIR" in str(raised.value)
    assert [path.name for path in images.iterdir()] == [name]


def test_a_read_only_directory_is_refused_before_the_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A colleague may have left a lock there all the same."""
    (tmp_path / ".x.sqsh.lock").touch()
    monkeypatch.setattr(importing.os, "access", lambda *_: False)
    with pytest.raises(UserError, match="permission denied"):
        importing.check_replaceable(tmp_path / "x.sqsh")


@pytest.mark.parametrize("name", BUILDERS)
def test_a_full_disk_names_the_command_that_removes_layers(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise explain_failure("build x", name, 1, ["write: no space left on device"])

    monkeypatch.setattr("launcher.images.tools.run", fail)
    with pytest.raises(ToolError, match="no space is left") as raised:
        building.build_recipe(read_recipe("nemo"), Builder(name), {}, ImageProgress(), Access())
    assert f"{name} keeps layers of earlier builds: `{Builder(name).cleanup}`" in (raised.value.hint or "")
