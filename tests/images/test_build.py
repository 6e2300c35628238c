"""`slipway image build`: real builders, on an image that was made of this machine's own programs."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher.cli.app import main
from launcher.errors import UserError
from launcher.images import building
from launcher.images.building import Builder, find_builder
from launcher.images.recipes import read_recipe
from launcher.images.references import Reference
from launcher.images.registry import Access, architecture, look_up
from launcher.images.resolve import read_recorded_digest
from tests.images import tiny
from tests.images.tiny import Registry, need, run

Capsys = pytest.CaptureFixture[str]

RECIPE = """\
defaults:
  - _base
  - _self_
template: small
base: localhost/tiny:1
env: {COLOUR: deep $BLUE}
workdir: /work place
"""
TEMPLATE = """\
{% extends "_base.Dockerfile.j2" %}
{% block body %}
RUN echo "made of $GREETING" > /etc/made
ENTRYPOINT ["/bin/sh", "-c", "exec \\"$@\\"", "entry"]
CMD ["cat", "/etc/made"]
{% endblock %}
"""


@pytest.fixture(scope="module")
def build_directory(tiny_layout: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory with a container storage that holds the base, and trees with a recipe `small`."""
    need("skopeo", "umoci", "mksquashfs", "unsquashfs")
    directory = tmp_path_factory.mktemp("kitchen")
    (directory / "conf/image").mkdir(parents=True)
    (directory / "templates").mkdir()
    (directory / "conf/image/small.yaml").write_text(RECIPE)
    (directory / "templates/small.Dockerfile.j2").write_text(TEMPLATE)
    # Plain copies work wherever tests run.
    storage = f'[storage]\ndriver = "vfs"\ngraphroot = "{directory}/graph"\nrunroot = "{directory}/run"\n'
    (directory / "storage.conf").write_text(storage)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CONTAINERS_STORAGE_CONF", str(directory / "storage.conf"))
        run("skopeo", "copy", "-q", f"oci:{tiny_layout}:1", "containers-storage:localhost/tiny:1")
        yield directory


@pytest.fixture
def options(build_directory: Path, tmp_path: Path) -> list[str]:
    """Return the options of every call: a store of the test's own, and the trees."""
    trees = [f"--config-dir={build_directory}/conf", f"--template-dir={build_directory}/templates"]
    return [f"--images-dir={tmp_path}/images", *trees]


def ask_json(capsys: Capsys, verb: str, *words: str) -> Any:
    assert main(["image", verb, *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("builder", ["buildah", "podman"])
def test_a_recipe_is_built_into_a_squashfs(
    options: list[str], builder: str, tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    need(builder)
    store = tmp_path / "images"
    # A truncated file is no image, whatever its name.
    torn = store / ask_json(capsys, "render", "small", *options[1:])["file_name"]
    store.mkdir()
    torn.write_bytes(b"hsqs")
    answer = ask_json(capsys, "build", "small", f"--builder={builder}", *options)
    image = Path(answer["path"])
    assert not answer["reused"] and image == torn
    assert {path.name for path in store.iterdir()} == {image.name, f"{image.name}.json"}

    (entry,) = ask_json(capsys, "list", *options[:2])
    assert (entry["path"], entry["recipe"]["name"], entry["recipe"]["flavor"]) == (
        str(image),
        "small",
        "run",
    )
    assert image.name == f"small-run-{entry['recipe']['hash'][:12]}.sqsh"

    # The image itself holds the settings of the recipe: a job finds them there, without the record.
    copy = shutil.copy(image, tmp_path / "alone.sqsh")
    for details in (ask_json(capsys, "inspect", "small", *options), ask_json(capsys, "inspect", str(copy))):
        assert details["env"] == {**dict(word.split("=", 1) for word in tiny.ENV), "COLOUR": "deep $BLUE"}
        assert (details["workdir"], details["cmd"]) == ("/work place", ["cat", "/etc/made"])
        assert details["entrypoint"] == ["/bin/sh", "-c", 'exec "$@"', "entry"]
        assert details["labels"]["slipway.recipe.hash"] == entry["recipe"]["hash"]
        assert details["labels"]["slipway.dirty"] in ("true", "false", "unknown")
    assert run("unsquashfs", "-cat", image, "etc/made").startswith("made of good morning")

    assert ask_json(capsys, "verify", "small", "--deep", *options)[0]["is_whole"]

    # The second build makes nothing, and needs no program.
    monkeypatch.setenv("PATH", str(tmp_path))
    before = image.stat()
    second = ask_json(capsys, "build", "small", *options)
    assert second["reused"] and second["digest"] == answer["digest"]
    assert image.stat() == before


def test_a_recipe_that_changed_is_another_image(options: list[str], tmp_path: Path, capsys: Capsys) -> None:
    before = tmp_path / "images" / "small-run-0123456789ab.sqsh"
    before.parent.mkdir()
    before.write_bytes(b"as it was")
    assert main(["image", "inspect", "small", *options]) == 2
    errors = capsys.readouterr().err
    assert f"of the recipe as it was before: {before.name}" in errors
    assert "slipway image build small:run" in errors


def test_a_failing_instruction_is_quoted_and_leaves_nothing(
    options: list[str], build_directory: Path, tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    need("buildah")
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    # Build in layers, as where overlays work: without layers a failed instruction leaves no container.
    monkeypatch.setattr(building, "find_builder", lambda name: replace(find_builder(name), copies=False))
    template = build_directory / "templates/failing.Dockerfile.j2"
    template.write_text(TEMPLATE.replace("> /etc/made", "; nosuchprogram --now"))
    assert main(["image", "build", "small", "image.template=failing", *options]) == 2
    errors = capsys.readouterr().err
    assert "cannot build localhost/" in errors and "nosuchprogram" in errors
    assert "subprocess exited" not in errors.partition("slipway: cannot")[2], "which says nothing"
    assert run("buildah", "containers", "-q") == ""
    assert not any((tmp_path / "temporary").iterdir())
    assert not (tmp_path / "images").exists() or not any((tmp_path / "images").iterdir())


def test_a_run_records_the_digest_of_the_registry(
    options: list[str], registry: Registry, tmp_path: Path, capsys: Capsys
) -> None:
    need("buildah")
    words = [f"images_dir={tmp_path}/images", "image.builder=buildah", *options[1:]]
    answer = ask_json(capsys, "build", "small", *words)
    place = f"{registry.host}/push/small:1"
    (result,) = ask_json(capsys, "push", "small", place, *words, "--plain-http")
    assert result["digest"] != answer["digest"], "a registry packs its layers"
    assert read_recorded_digest(answer["path"]) == result["digest"]
    remote = look_up(Reference.parse(place), Access(plain_http=True))
    assert remote.digest == result["digest"]
    assert ask_json(capsys, "build", "small", *words)["reused"], "it is the same image still"


def start_slipway(*words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "launcher.cli.app", "image", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_an_interrupted_build_leaves_nothing(
    options: list[str], build_directory: Path, tmp_path: Path
) -> None:
    need("buildah")
    seconds = f"654.{os.getpid()}"  # other tests may sleep on this machine
    template = build_directory / "templates/waiting.Dockerfile.j2"
    template.write_text(TEMPLATE.replace("> /etc/made", f"; sleep {seconds}"))
    with start_slipway("build", "small", "image.template=waiting", *options) as process:
        assert process.stderr
        for line in process.stderr:
            if "made of" in line and "RUN" not in line:  # what the instruction says before it sleeps
                break
        process.send_signal(signal.SIGINT)
        process.stderr.read()
        assert process.wait() == 130
    assert list((tmp_path / "images").iterdir()) == []
    assert run("buildah", "containers", "-q") == ""
    words = f"sleep\0{seconds}".encode()
    sleeping = [path for path in Path("/proc").glob("[0-9]*/cmdline") if words in _content(path)]
    assert sleeping == []


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_two_builds_at_once_build_once(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need("buildah")
    real = shutil.which("buildah")
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin/buildah"
    program.write_text(f'#!/bin/sh\necho "$1" >> {tmp_path}/calls\nexec {real} "$@"\n')
    program.chmod(0o755)

    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    processes = [start_slipway("build", "small", "--builder=buildah", "--json", *options) for _ in range(2)]
    outputs = [process.communicate() for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert sorted(json.loads(out)["reused"] for out, _ in outputs) == [False, True]
    assert (tmp_path / "calls").read_text().split().count("bud") == 1


def write_stand_in(directory: Path, name: str, script: str) -> None:
    directory.mkdir(exist_ok=True)
    (directory / name).write_text(f"#!/bin/sh\n{script}\n")
    (directory / name).chmod(0o755)


# Answers of the programs, each of them seen on a machine.
NO_DAEMON = "echo 'Cannot connect to the Docker daemon at unix:///var/run/docker.sock.' >&2; exit 1"
DAEMON = "echo 'Server: Docker Engine - Community'"
PODMAN_AS_DOCKER = "echo 'Client: Podman Engine'"
NO_OVERLAY = """\
if [ "$STORAGE_DRIVER" = vfs ]; then echo '"GraphDriverName": "vfs",'
else echo 'Error: kernel does not support overlay fs' >&2; exit 125; fi"""


@pytest.mark.parametrize(
    ("programs", "expected"),
    [
        ({"docker": NO_DAEMON, "buildah": 'echo \'"GraphDriverName": "overlay",\''}, ("buildah", False)),
        ({"docker": DAEMON, "buildah": "exit 0"}, ("docker", False)),
        ({"docker": PODMAN_AS_DOCKER, "podman": "echo graphDriverName: vfs"}, ("podman", True)),
        ({"podman": NO_OVERLAY}, ("podman", True)),
    ],
    ids=["a docker without a daemon", "docker", "podman in the name of docker", "no overlay"],
)
def test_the_first_working_builder_is_taken(
    programs: dict[str, str], expected: tuple[str, bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, script in programs.items():
        write_stand_in(tmp_path / "bin", name, script)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("STORAGE_DRIVER", raising=False)
    builder = find_builder()
    assert (builder.name, builder.copies) == expected
    transport = "dockerd" if builder.name == "docker" else "podman"
    assert str(builder.reference("localhost/me/a:1")) == f"{transport}://localhost/me/a:1"


def test_each_builder_says_why_it_does_not_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_stand_in(tmp_path / "bin", "docker", NO_DAEMON)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(UserError, match="no program that builds images works here") as raised:
        find_builder()
    message = str(raised.value)
    assert "docker: docker: Cannot connect to the Docker daemon" in message
    assert "buildah: not on PATH" in message and "--on-cluster" in message
    with pytest.raises(UserError, match="podman does not work here"):
        find_builder("podman")


@pytest.mark.parametrize(
    ("base", "words"),
    [
        ("nvcr.io#nvidia/nemo:24.07", {"docker": "--pull", "podman": "--pull=newer", "buildah": "--pull"}),
        (f"nvcr.io#nvidia/nemo@sha256:{'0' * 64}", {}),
        ("localhost/tiny:1", {}),
    ],
    ids=["a tag may move", "pinned", "of this machine"],
)
def test_a_base_named_by_a_tag_is_pulled_again(base: str, words: dict[str, str], tmp_path: Path) -> None:
    for name in ("docker", "podman", "buildah"):
        recipe = read_recipe("nemo", None, [f"image.base={base}", f"image.platform=linux/{architecture()}"])
        command = Builder(name).command(recipe, tmp_path, {"a b": "c=d"}, Access())
        assert [word for word in command if word.startswith("--pull")] == [
            word for builder, word in words.items() if builder == name
        ]
        assert (
            command[-1] == str(tmp_path / "context") and "a b=c=d" in command and "--platform" not in command
        )
        assert ("--layers=true" in command) == ("--force-rm" in command) == (name != "docker")


def test_builders_get_the_options_of_the_registry(tmp_path: Path) -> None:
    access = Access(plain_http=True, authfile=tmp_path / "auth.json")
    recipe = read_recipe("nemo")
    for name in ("podman", "buildah"):
        words = Builder(name).command(recipe, tmp_path, {}, access)
        assert words[words.index("--authfile") + 1] == str(tmp_path / "auth.json")
        assert "--tls-verify=false" in words
    with pytest.raises(UserError, match="does not take --authfile"):
        Builder("docker").command(recipe, tmp_path, {}, access)


def test_an_image_built_meanwhile_is_reused(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    need("buildah")
    answers: list[Any] = []

    def find_late(preferred: str | None = None) -> Builder:
        if not answers:
            answers.append(None)
            answers[0] = ask_json(capsys, "build", "small", *options)
        return find_builder("buildah")

    monkeypatch.setattr(building, "find_builder", find_late)
    assert ask_json(capsys, "build", "small", *options)["reused"]
    assert not answers[0]["reused"]


def test_a_store_that_cannot_be_made_is_named(build_directory: Path, tmp_path: Path, capsys: Capsys) -> None:
    need("buildah")
    (tmp_path / "file").touch()
    trees = [f"--config-dir={build_directory}/conf", f"--template-dir={build_directory}/templates"]
    words = ["small", "--builder=buildah", f"--images-dir={tmp_path}/file", *trees]
    assert main(["image", "build", *words]) == 2
    assert f"cannot write {tmp_path}/file: file exists" in capsys.readouterr().err
