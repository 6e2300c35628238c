"""Imports without Enroot: the squashfs and its record, and the cases in which nothing is imported again."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import urllib.request
from pathlib import Path

import pytest

from launcher.errors import UserError
from launcher.images.importing import Imported, ImportOptions, import_image
from launcher.images.references import Reference
from launcher.images.registry import Access, architecture, enroot_login, look_up
from launcher.images.squashfs import SQUASH_OPTIONS, read_superblock
from launcher.images.store import RecipeOrigin, list_images, sidecar_path
from tests.images.importer import stand_ins
from tests.images.tiny import ENTRYPOINT, ENV, LABELS, PASSWORD, USER, WORKDIR, Registry, need, run

SKOPEO = ImportOptions(via="skopeo", plain_http=True)


@pytest.fixture(scope="module", autouse=True)
def programs() -> None:
    need("skopeo", "umoci", "mksquashfs", "unsquashfs")


@pytest.fixture(scope="module")
def imported(tiny_layout: Path, tmp_path_factory: pytest.TempPathFactory) -> Imported:
    """The image, imported without a registry; not to be changed."""
    target = tmp_path_factory.mktemp("images") / "tiny.sqsh"
    recipe = RecipeOrigin("tiny", "run", "0123456789ab")
    return import_image(layout_reference(tiny_layout), target, ImportOptions(via="skopeo", recipe=recipe))


def layout_reference(layout: Path) -> Reference:
    return Reference.parse(f"oci:{layout}:1")


def copy_image(imported: Imported, directory: Path) -> Path:
    """Copy an image and its record, for tests that change them."""
    for path in (imported.path, sidecar_path(imported.path)):
        shutil.copy2(path, directory)
    return directory / imported.path.name


def test_the_record_describes_the_image(imported: Imported, tiny_layout: Path) -> None:
    sidecar = imported.sidecar
    assert sidecar
    assert not imported.reused
    raw = run("skopeo", "inspect", "--raw", f"oci:{tiny_layout}:1").encode()
    assert sidecar.digest == imported.digest == f"sha256:{hashlib.sha256(raw).hexdigest()}"
    assert sidecar.source == f"oci:{tiny_layout}:1"
    assert sidecar.sha256 == hashlib.sha256(imported.path.read_bytes()).hexdigest()
    assert sidecar.size == imported.path.stat().st_size
    assert sidecar.compression == read_superblock(imported.path).compression
    assert (sidecar.config.env, sidecar.config.workdir) == (ENV, WORKDIR)
    assert (sidecar.config.entrypoint, sidecar.config.labels) == (ENTRYPOINT, LABELS)
    assert sidecar.recipe == RecipeOrigin("tiny", "run", "0123456789ab")
    assert "mksquashfs 4" in sidecar.made_by
    [entry] = list_images(imported.path.parent)
    assert entry.sidecar == sidecar
    # Nothing else is left there, hidden or not.
    names = {path.name for path in imported.path.parent.iterdir()}
    assert names == {"tiny.sqsh", "tiny.sqsh.json"}


def test_a_container_starts_as_its_image_says(imported: Imported, tmp_path: Path) -> None:
    run("unsquashfs", "-d", tmp_path / "root", imported.path)
    enter = ["chroot"] if os.geteuid() == 0 else ["unshare", "--map-root-user", "chroot"]
    start = [
        "env",
        "-i",
        "GREETING=hello",
        "PATH=/usr/sbin:/usr/bin:/sbin:/bin",
        *enter,
        tmp_path / "root",
        "/bin/sh",
        "/etc/rc",
    ]
    assert "it's hello" in run(*start).splitlines()
    # A given command replaces the image's, after the entry point and in the working directory.
    assert run(*start, "/bin/sh", "-c", "pwd").splitlines() == ["it's hello", WORKDIR]
    assert (tmp_path / "root/etc/environment").read_text().splitlines() == list(ENV)
    rc = (tmp_path / "root/etc/rc").read_text()
    assert all(f"# {name} {value}" in rc.splitlines() for name, value in LABELS.items())


def test_all_files_are_owned_by_root(imported: Imported) -> None:
    lines = run("unsquashfs", "-lln", imported.path).splitlines()
    assert lines
    assert {line.split()[1] for line in lines if "squashfs-root" in line} == {"0/0"}


def test_the_same_digest_is_not_imported_again(imported: Imported, tiny_layout: Path, tmp_path: Path) -> None:
    target = copy_image(imported, tmp_path)
    before = (target.stat().st_ino, target.stat().st_mtime_ns)
    second = import_image(layout_reference(tiny_layout), target, ImportOptions(via="skopeo"))
    assert second.reused
    assert second.digest == imported.digest
    assert (target.stat().st_ino, target.stat().st_mtime_ns) == before


@pytest.mark.parametrize("compression", [name for name in SQUASH_OPTIONS if name != "lz4"])
def test_another_compression_is_packed_again(
    imported: Imported, tiny_layout: Path, tmp_path: Path, compression: str
) -> None:
    target = copy_image(imported, tmp_path)
    assert imported.sidecar
    assert imported.sidecar.compression == "lz4"
    options = ImportOptions(via="skopeo", compression=compression)
    result = import_image(layout_reference(tiny_layout), target, options)
    assert not result.reused
    assert f"{target.name} is packed with lz4: packed again" in result.notes
    assert read_superblock(target).compression == compression
    # An import without a requested compression reuses the file.
    assert import_image(layout_reference(tiny_layout), target, ImportOptions(via="skopeo")).reused


def test_force_imports_again(imported: Imported, tiny_layout: Path, tmp_path: Path) -> None:
    target = copy_image(imported, tmp_path)
    inode = target.stat().st_ino
    mounted = target.open("rb")  # as a running job has it
    with mounted:
        result = import_image(layout_reference(tiny_layout), target, ImportOptions(via="skopeo", force=True))
        assert mounted.read() == imported.path.read_bytes()
    assert not result.reused
    assert target.stat().st_ino != inode


def test_a_tag_that_has_moved_is_imported_again(
    registry: Registry, tiny_layout: Path, tmp_path: Path
) -> None:
    name = registry.push(tiny_layout, "team/moving")
    first = import_image(Reference.parse(name), tmp_path / "moving.sqsh", SKOPEO)
    shutil.copytree(tiny_layout, tmp_path / "changed")
    run("umoci", "config", "--image", f"{tmp_path}/changed:1", "--config.label", "version=2")
    registry.push(tmp_path / "changed", "team/moving")
    second = import_image(Reference.parse(name), tmp_path / "moving.sqsh", SKOPEO)
    assert not second.reused
    assert second.sidecar
    assert second.sidecar.config.labels["version"] == "2"
    assert second.notes == (f"the image has changed: it was {first.digest}, and is {second.digest}",)


def test_the_digest_is_that_of_the_registry(registry: Registry, tiny_image: str, tmp_path: Path) -> None:
    reference = Reference.parse(tiny_image)
    remote = look_up(reference, Access(plain_http=True))
    output = run(
        "skopeo", "inspect", "--tls-verify=false", "--format", "{{.Digest}}", f"docker://{tiny_image}"
    )
    assert remote.digest == output.strip()
    # A reference with a digest needs no answer of the registry, which may be gone.
    pinned = Reference.parse(f"{tiny_image}@{remote.digest}")
    first = import_image(pinned, tmp_path / "pinned.sqsh", SKOPEO)
    second = import_image(
        pinned, tmp_path / "pinned.sqsh", ImportOptions(via="skopeo")
    )  # it would ask by TLS
    assert (first.reused, second.reused) == (False, True)
    assert first.digest == second.digest == remote.digest


def test_the_image_of_this_architecture_is_taken(
    registry: Registry, tiny_layout: Path, tmp_path: Path
) -> None:
    kind = "application/vnd.docker.distribution.manifest"
    digests = []
    for tag in ("mine", "other"):
        shutil.copytree(tiny_layout, tmp_path / tag)
        run("umoci", "config", "--image", f"{tmp_path / tag}:1", "--config.label", f"is={tag}")
        name = registry.push(tmp_path / tag, "team/several", tag)
        digests.append(look_up(Reference.parse(name), Access(plain_http=True)).digest)
    url = f"http://{registry.host}/v2/team/several/manifests"
    entries = []
    for digest, machine in zip(reversed(digests), ("s390x", architecture()), strict=True):
        request = urllib.request.Request(f"{url}/{digest}", headers={"Accept": f"{kind}.v2+json"})
        with urllib.request.urlopen(request) as answer:
            size = len(answer.read())
        platform = {"architecture": machine, "os": "linux"}
        entries.append({"mediaType": f"{kind}.v2+json", "size": size, "digest": digest, "platform": platform})

    def put(tag: str, manifests: list[dict[str, object]]) -> Reference:
        body = {"schemaVersion": 2, "mediaType": f"{kind}.list.v2+json", "manifests": manifests}
        headers = {"Content-Type": f"{kind}.list.v2+json"}
        request = urllib.request.Request(f"{url}/{tag}", json.dumps(body).encode(), headers, method="PUT")
        urllib.request.urlopen(request).close()
        return Reference.parse(f"{registry.host}/team/several:{tag}")

    remote = look_up(put("both", entries), Access(plain_http=True))
    assert (remote.digest, remote.config.labels["is"]) == (digests[0], "mine")
    with pytest.raises(UserError, match=f"made for s390x, and this machine is {architecture()}"):
        look_up(put("foreign", entries[:1]), Access(plain_http=True))


def test_an_image_without_a_record_is_reused_by_its_name(
    imported: Imported, tiny_layout: Path, tmp_path: Path
) -> None:
    target = copy_image(imported, tmp_path)
    sidecar_path(target).unlink()
    result = import_image(layout_reference(tiny_layout), target, ImportOptions(via="skopeo"))
    assert result.reused
    assert result.sidecar is None
    assert "no record" in result.notes[0]


def test_a_torn_image_is_imported_again(imported: Imported, tiny_layout: Path, tmp_path: Path) -> None:
    target = copy_image(imported, tmp_path)
    os.truncate(target, target.stat().st_size // 2)
    result = import_image(layout_reference(tiny_layout), target, ImportOptions(via="skopeo"))
    assert not result.reused
    assert "cut short" in result.notes[0]
    assert result.sidecar
    assert target.stat().st_size == result.sidecar.size >= read_superblock(target).used_bytes


def test_the_stored_image_serves_while_the_registry_does_not_answer(
    imported: Imported, tiny_layout: Path, tmp_path: Path
) -> None:
    layout = tmp_path / "tiny"
    shutil.copytree(tiny_layout, layout)
    target = tmp_path / "images/tiny.sqsh"
    import_image(layout_reference(layout), target, ImportOptions(via="skopeo"))
    shutil.rmtree(layout)
    second = import_image(layout_reference(layout), target, ImportOptions(via="skopeo"))
    assert second.reused
    assert "is used as it was imported" in second.notes[0]
    with pytest.raises(UserError):
        import_image(layout_reference(layout), target, ImportOptions(via="skopeo", force=True))
    assert target.exists()


def test_logins_are_read_from_authfile(guarded_registry: Registry, tiny_layout: Path, tmp_path: Path) -> None:
    name = guarded_registry.push(tiny_layout, "team/tiny", credentials=f"{USER}:{PASSWORD}")
    target = tmp_path / "images/tiny.sqsh"
    with pytest.raises(UserError) as raised:
        import_image(Reference.parse(name), target, SKOPEO)
    assert "the registry refuses access" in raised.value.message
    assert "skopeo login" in str(raised.value)
    assert not target.parent.exists()
    login = ["skopeo", "login", "--tls-verify=false", "--authfile", tmp_path / "auth", "-u", USER]
    run(*login, "-p", PASSWORD, guarded_registry.host)
    options = ImportOptions(via="skopeo", plain_http=True, authfile=tmp_path / "auth")
    assert not import_image(Reference.parse(name), target, options).reused


def test_enroot_logins_serve_skopeo_and_are_written_nowhere(
    guarded_registry: Registry, tiny_layout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = guarded_registry.push(tiny_layout, "team/tiny", credentials=f"{USER}:{PASSWORD}")
    file = Path(os.environ["HOME"], ".config/enroot/.credentials")
    file.parent.mkdir(parents=True)
    file.write_text(f"machine 127.0.0.1 login {USER} password wrong\n")
    target = tmp_path / "images/tiny.sqsh"
    with pytest.raises(UserError, match="the registry refuses access"):
        import_image(Reference.parse(name), target, SKOPEO)
    monkeypatch.setenv("TEAM_KEY", PASSWORD)
    file.write_text(
        f"machine nvcr.io login $oauthtoken password no\nmachine 127.0.0.1 login {USER} password $TEAM_KEY\n"
    )
    result = import_image(Reference.parse(name), target, SKOPEO)
    assert not result.reused
    # No file has the password.
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(PASSWORD.encode() in path.read_bytes() for path in files)


@pytest.mark.parametrize(
    ("line", "registry", "user", "login"),
    [
        ("machine nvcr.io login $oauthtoken password abc", "nvcr.io", None, ("$oauthtoken", "abc")),
        ("machine auth.docker.io login me password a b", "docker.io", None, ("me", "a b")),
        ("machine x.example login me password ${KEY}", "x.example:5000", "me", ("me", "of-key")),
        ("machine x.example login me password $NONE", "x.example", None, None),
        ("machine x.example login me password $(cat key)", "x.example", None, None),
        ("machine x.example login me password abc", "x.example", "other", None),
        ("machine x.example:5000 login me password abc", "x.example:5000", None, None),
        ("nonsense", "x.example", None, None),
    ],
)
def test_the_login_file_is_read_as_enroot_reads_it(
    tmp_path: Path, line: str, registry: str, user: str | None, login: tuple[str, str] | None
) -> None:
    (tmp_path / ".credentials").write_text(f"# mine\n\n{line}\n")
    environment = {"ENROOT_CONFIG_PATH": str(tmp_path), "KEY": "of-key"}
    assert enroot_login(registry, user, environment) == login


def test_archives_are_imported(imported: Imported, tiny_layout: Path, tmp_path: Path) -> None:
    run("skopeo", "copy", "-q", f"oci:{tiny_layout}:1", f"oci-archive:{tmp_path}/tiny.tar:1")
    run("skopeo", "copy", "-q", f"oci:{tiny_layout}:1", f"docker-archive:{tmp_path}/docker.tar:tiny:1")
    result = import_image(Reference.parse(f"oci-archive:{tmp_path}/tiny.tar:1"), tmp_path / "a.sqsh", SKOPEO)
    assert result.digest == imported.digest
    result = import_image(
        Reference.parse(f"docker-archive:{tmp_path}/docker.tar"), tmp_path / "b.sqsh", SKOPEO
    )
    assert result.sidecar
    assert (result.sidecar.config.env, result.sidecar.config.workdir) == (ENV, WORKDIR)


def test_images_of_podman_and_buildah_are_imported(
    imported: Imported, tiny_layout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "storage.conf"
    places = f'graphroot = "{tmp_path}/graph"\nrunroot = "{tmp_path}/run"\n'
    config.write_text(f'[storage]\ndriver = "vfs"\n{places}')
    monkeypatch.setenv("CONTAINERS_STORAGE_CONF", str(config))
    run("skopeo", "copy", "-q", f"oci:{tiny_layout}:1", "containers-storage:localhost/tiny:1")
    # Enroot is not used for these even where it is installed: it leaves a container behind.
    result = import_image(Reference.parse("podman://localhost/tiny:1"), tmp_path / "tiny.sqsh")
    assert result.sidecar
    assert "skopeo" in result.sidecar.made_by
    assert result.digest == imported.digest


@pytest.mark.parametrize(
    ("source", "name", "options", "message"),
    [
        ("/images/x.sqsh", "x.sqsh", ImportOptions(), "is a squashfs already"),
        ("oci:/x", "x.img", ImportOptions(), "an image's file ends in .sqsh"),
        ("oci:/x", ".x.sqsh", ImportOptions(), "is not hidden"),
        ("oci:/x", "x.sqsh", ImportOptions(via="enroot"), "Enroot does not import oci:/x"),
        ("oci:/x", "x.sqsh", ImportOptions(via="skopeo"), "there is no such image"),
    ],
)
def test_imports_that_cannot_succeed_are_refused(
    tmp_path: Path, source: str, name: str, options: ImportOptions, message: str
) -> None:
    with pytest.raises(UserError) as raised:
        import_image(Reference.parse(source), tmp_path / "images" / name, options)
    assert message in raised.value.message
    assert raised.value.hint
    assert not (tmp_path / "images").exists()


def test_a_missing_program_is_named_with_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", stand_ins(tmp_path / "bin", "skopeo"))
    with pytest.raises(UserError) as raised:
        import_image(Reference.parse("oci:/x"), tmp_path / "images/x.sqsh")
    assert raised.value.message.startswith("umoci and mksquashfs are needed")
    assert "apt-get install umoci squashfs-tools" in str(raised.value)
