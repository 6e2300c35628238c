"""`slipway image push`: several registries get the same image, and each is read back."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from launcher.cli.app import main
from launcher.images.progress import LineProgress
from launcher.images.references import Reference
from launcher.images.registry import Access, look_up, push
from tests.images.tiny import PASSWORD, USER, Registry, need, run

Capsys = pytest.CaptureFixture[str]


@pytest.fixture
def login(guarded_registry: Registry, tmp_path: Path) -> Path:
    """A file of logins, as skopeo writes it."""
    file = tmp_path / "auth.json"
    words = ("--authfile", file, "--tls-verify=false", "-u", USER, "-p", PASSWORD)
    run("skopeo", "login", *words, guarded_registry.host)
    return file


def push_json(capsys: Capsys, *words: object) -> tuple[int, list[dict[str, Any]], str]:
    code = main(["image", "push", *map(str, words), "--plain-http", "--json"])
    output = capsys.readouterr()
    return code, json.loads(output.out or "[]"), output.err


def test_every_registry_gets_the_same_image(
    tiny_layout: Path, registry: Registry, guarded_registry: Registry, login: Path, capsys: Capsys
) -> None:
    places = [f"{server.host}/push/all:1" for server in (registry, guarded_registry)]
    code, results, _ = push_json(capsys, f"oci:{tiny_layout}:1", *places, "--authfile", login)
    assert code == 0
    digests = {result["digest"] for result in results}
    access = Access(plain_http=True, authfile=login)
    assert digests == {look_up(Reference.parse(place), access).digest for place in places}
    assert len(digests) == 1 and not any(result["was_there"] for result in results)
    # Copy from one registry to another, and push once more: nothing is sent.
    further = f"{registry.host}/push/copy:2"
    code, results, _ = push_json(capsys, places[1], further, places[0], "--authfile", login)
    assert (code, [result["was_there"] for result in results]) == (0, [False, True])
    assert {result["digest"] for result in results} == digests


def test_a_refusal_does_not_stop_other_registries(
    tiny_layout: Path, registry: Registry, guarded_registry: Registry, capsys: Capsys
) -> None:
    source = f"oci:{tiny_layout}:1"
    refusing = f"{guarded_registry.host}/push/refused:1"
    code, results, complaint = push_json(capsys, source, refusing, f"{registry.host}/push/one:1")
    assert (code, [result["error"] is None for result in results]) == (1, [False, True])
    assert "the registry refuses access" in complaint and "skopeo login" in complaint
    assert main(["image", "push", source, refusing, "--plain-http"]) == 2
    assert "the registry refuses access" in capsys.readouterr().err


def test_a_manifest_that_is_no_json_is_pushed_without_a_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # skopeo writes the manifest of an image as it is, whatever it is.
    (tmp_path / "skopeo").write_text(
        f"""#!/bin/sh
cd {tmp_path}
case "$*" in
    inspect*new*) [ -e copied ] || exit 1; echo '<manifest/>' ;;
    inspect*) echo '<manifest/>' ;;
    copy*) touch copied ;;
    *) exit 1 ;;
esac
"""
    )
    (tmp_path / "skopeo").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("HOME", str(tmp_path))
    source, target = (Reference.parse(f"registry.example/team/{name}:1") for name in ("old", "new"))
    [result] = push(source, [target], LineProgress(), Access())
    assert (result.error, result.was_there) == (None, False)


def test_an_archive_is_packed_once(
    tiny_layout: Path, registry: Registry, tmp_path: Path, capsys: Capsys
) -> None:
    archive, temporary = tmp_path / "tiny.tar", tmp_path / "temporary"
    temporary.mkdir()
    run("skopeo", "copy", "-q", f"oci:{tiny_layout}:1", f"docker-archive:{archive}:team/tiny:1")
    places = [f"{registry.host}/push/archive{number}:1" for number in (1, 2)]
    code, results, _ = push_json(capsys, f"docker-archive:{archive}", *places, "--temp-dir", temporary)
    assert code == 0 and len({result["digest"] for result in results}) == 1
    # A layer of a registry is compressed, whatever it was in the archive.
    raw = run("skopeo", "inspect", "--tls-verify=false", "--raw", f"docker://{places[0]}")
    assert "gzip" in json.loads(raw)["layers"][0]["mediaType"]
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("a.sqsh", "127.0.0.1:1/x:1"), "a squashfs has lost its layers"),
        (("oci:/none:1", "podman://x:1"), "not a place in a registry"),
        (("oci:/none:1", f"127.0.0.1:1/x@sha256:{'0' * 64}"), "not a place in a registry"),
        (("oci:/none:1",), "where to? no registry is named"),
        (("oci:/none:1", "127.0.0.1:1/x:1"), "cannot read oci:/none:1"),
        (("nemo",), "where to? no registry is named"),
        (("oci:/none:1", "127.0.0.1:1/x:1", "image.tag=2"), "is not a recipe, and has no such keys"),
        (("nimo", "127.0.0.1:1/x:1"), "there is no such recipe"),
        (("nemo", "podman://x:1"), "not a place in a registry"),
    ],
)
def test_pushes_that_cannot_succeed_are_refused(words: tuple[str, ...], message: str, capsys: Capsys) -> None:
    code, _, complaint = push_json(capsys, *words)
    assert (code, message in complaint) == (2, True), complaint
    assert "build it first" not in complaint


def test_pushing_an_unbuilt_recipe_is_refused(
    tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    need("buildah")
    # Where no overlay can be mounted buildah and skopeo need another storage.
    storage = f'[storage]\ndriver = "vfs"\ngraphroot = "{tmp_path}/graph"\nrunroot = "{tmp_path}/run"\n'
    (tmp_path / "storage.conf").write_text(storage)
    monkeypatch.setenv("CONTAINERS_STORAGE_CONF", str(tmp_path / "storage.conf"))
    code, _, complaint = push_json(capsys, "nemo", "127.0.0.1:1/x:1", "--builder=buildah")
    assert code == 2 and "build it first: slipway image build nemo" in complaint
