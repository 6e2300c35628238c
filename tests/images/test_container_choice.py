"""The values of `container`: what they become in the script, and what is reported if they are missing."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from launcher.checks.facts import MissingPath
from launcher.checks.gathering.images import find_fetched_at_once, find_missing_image
from launcher.checks.gathering.path_resolver import PathResolver
from launcher.cli.app import main
from launcher.drafting import Draft, Request, draft, resolve_choice
from launcher.errors import UserError
from launcher.images.importing import ImportOptions
from launcher.images.progress import ImageProgress
from launcher.images.resolve import read_recorded_digest, resolve_container
from launcher.images.store import Sidecar
from launcher.launching.building import ImageRequirement, make_here, required_image
from launcher.sweeps.points import SweepRequest, draft_sweep
from tests.checks.shelves import image

Capsys = pytest.CaptureFixture[str]

NEMO = "nvcr.io#nvidia/nemo:24.07"
PINNED = "sha256:" + "a1" * 32


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def draft_with(container: str, *more: str) -> Draft:
    overrides = [f"container={container}", "images_dir=images", "cluster=bcm", "training=gpt3/126m"]
    return draft(Request([*overrides, *more], ["slipway", "launch"]))


def write_image(file: Path) -> None:
    """Write a file that looks like a squashfs."""
    file.parent.mkdir(exist_ok=True)
    image(file)


def image_of(launch: Draft) -> str:
    assert launch.plan.job.container is not None
    return launch.plan.job.container.image


@pytest.mark.parametrize(
    ("container", "name"),
    [
        (NEMO, NEMO),
        ("nvcr.io/nvidia/nemo:24.07", NEMO),
        ("docker://nvcr.io/nvidia/nemo:24.07", NEMO),
        ("docker://nvcr.io#nvidia/nemo:24.07", NEMO),
        ("localhost:5000#team/x:1", "localhost:5000#team/x:1"),
        ("ubuntu:22.04", "ubuntu:22.04"),  # Docker Hub's: Pyxis writes no registry
        (f"nvcr.io/nvidia/nemo@{PINNED}", f"nvcr.io#nvidia/nemo:{PINNED}"),
        ("/apps/nemo.sqsh", "/apps/nemo.sqsh"),
        ("dockerd://me/nemo:1", "HERE/images/me+nemo+1.sqsh"),
        ("oci:layouts/tiny:1", "HERE/images/tiny+1.sqsh"),
    ],
)
def test_container_becomes_the_name_that_pyxis_takes(container: str, name: str, directory: Path) -> None:
    assert resolve_container(container, f"{directory}/images").image == name.replace("HERE", str(directory))


@pytest.mark.parametrize(
    ("container", "name"),
    [("docker://nvcr.io/nvidia/nemo:24.07", NEMO), ("oci:layouts/tiny:1", "HERE/images/tiny+1.sqsh")],
)
def test_the_script_has_the_name_that_pyxis_takes(container: str, name: str, directory: Path) -> None:
    launch = draft_with(container)
    expected = name.replace("HERE", str(directory))
    assert image_of(launch) == expected
    assert f"--container-image={expected}" in shlex.split(launch.script, comments=True)


def test_a_recipe_resolves_to_its_file(directory: Path) -> None:
    run, dev = image_of(draft_with("nemo")), image_of(draft_with("nemo:dev"))
    assert re.fullmatch(rf"{re.escape(str(directory))}/images/nemo-run-[0-9a-f]{{12}}\.sqsh", run)
    assert Path(dev).name.startswith("nemo-dev-")
    conf = directory / "conf/image"
    conf.mkdir(parents=True)
    (conf / "ours.yaml").write_text("defaults: [nemo, _self_]\ntag: '2'\n")
    words = ["container=ours", "images_dir=images", "cluster=bcm"]
    launch = draft(Request(words, [], config_dirs=(directory / "conf",)))
    assert Path(image_of(launch)).name.startswith("ours-run-")


def test_each_point_of_a_sweep_has_its_own_image(directory: Path) -> None:
    words = ["cluster=bcm", "images_dir=images", "container=choice(nemo,docker://nvcr.io/nvidia/nemo:24.07)"]
    sweep = draft_sweep(SweepRequest(words, ["slipway", "sweep"]))
    images = [Path(image_of(point.draft)).name for point in sweep.points]
    assert images[0].startswith("nemo-run-")
    assert images[1] == "nemo:24.07"


@pytest.mark.parametrize(
    ("container", "words"),
    [
        ("nemu", ["container=nemu: there is no such recipe", "nemo-aws", "docker.io/library/nemu"]),
        ("nemo:devel", ["container=nemo:devel: a recipe has no such flavor", "valid: run, dev"]),
        ("nvcr.io/NVIDIA/nemo:24.07", ["container=", "lower case"]),
        ("dokcer://x/y:1", ["container=", "docker://"]),
        ("here.sqsh", ["an image file is given by its whole path"]),
    ],
)
def test_a_wrong_container_is_named_with_its_source(container: str, words: list[str]) -> None:
    with pytest.raises(UserError) as raised:
        draft_with(container)
    message = str(raised.value)
    assert all(word in message for word in [*words, "from the command line: container="]), message


# --- what the checks say


def missing_path(launch: Draft) -> MissingPath:
    paths = find_missing_image(PathResolver(launch))
    assert paths is not None
    (path,) = paths
    return path


@pytest.mark.parametrize("container", ["nemo:dev", "oci:layouts/tiny:1"])
def test_a_missing_image_is_named_with_the_command_that_makes_it(container: str, directory: Path) -> None:
    path = missing_path(draft_with(container))
    assert (path.key, path.certain) == ("container", True)
    verb = (
        f"build nemo:dev --images-dir={directory}/images"  # wherever it is pasted
        if container == "nemo:dev"
        else f"import oci:{directory}/layouts/tiny:1 --output={directory}/images/tiny+1.sqsh"
    )
    assert path.fix == f"slipway image {verb}; or the same launch with --build"
    assert "there is no such file" in path.why
    write_image(Path(image_of(draft_with(container))))
    assert find_missing_image(PathResolver(draft_with(container))) == ()


def test_a_torn_image_is_found_by_the_checks(directory: Path) -> None:
    image(directory / "torn.sqsh", size=200)
    path = missing_path(draft_with(f"{directory}/torn.sqsh"))
    assert path.why.startswith("cut short")
    assert path.fix == "import it again, to another file: slipway image import IMAGE --output FILE"


def test_images_of_apptainer_are_images_where_it_starts_them(directory: Path) -> None:
    sif, sandbox = directory / "x.sif", directory / "sandbox"
    sif.write_bytes(b"#!/usr/bin/env run-singularity\n".ljust(32, b"\0") + b"SIF_MAGIC\0" + bytes(500))
    sandbox.mkdir()
    image(directory / "whole.sqsh")
    for runtime in ("apptainer", "singularity"):
        option = f"container_options.runtime={runtime}"
        for path in (sif, sandbox, directory / "whole.sqsh"):
            assert find_missing_image(PathResolver(draft_with(str(path), option))) == ()
        # A directory is not copied to the nodes.
        staged = missing_path(draft_with(str(sandbox), option, "container_options.stage_to=/scratch"))
        assert staged.why == "a directory, not a file"
        (directory / "no.sif").write_text("#!/bin/sh\n")
        fix = missing_path(draft_with(f"{directory}/no.sif", option)).fix or ""
        assert "--force" not in fix and "no.sif" not in fix
    wrong = missing_path(draft_with(str(sif)))
    assert wrong.why == "an image of Apptainer's (SIF), which Pyxis does not start"
    assert wrong.fix == "container_options.runtime=apptainer, or singularity"
    assert missing_path(draft_with(str(sandbox))).why == "a directory, not a file"


def test_a_registry_image_on_many_nodes_is_a_warning(directory: Path) -> None:
    (path,) = find_fetched_at_once(PathResolver(draft_with(NEMO))) or ()
    assert not path.certain
    assert path.why == "each of the job's 8 nodes fetches and unpacks it by itself, all at once"
    assert path.fix is not None
    assert f"slipway image import '{NEMO}'" in path.fix
    write_image(directory / "images/nvidia+nemo+24.07.sqsh")
    (path,) = find_fetched_at_once(PathResolver(draft_with(NEMO))) or ()
    assert path.fix == f"it is a file already: container={directory}/images/nvidia+nemo+24.07.sqsh"
    for more in ("training.trainer.num_nodes=1", "container_options.name=nemo"):
        assert find_fetched_at_once(PathResolver(draft_with(NEMO, more))) == ()
    assert find_fetched_at_once(PathResolver(draft_with("/apps/nemo.sqsh"))) is None


def test_the_digest_is_read_from_the_record(directory: Path) -> None:
    file = directory / "nemo.sqsh"
    image(file)
    assert read_recorded_digest(str(file)) is None
    values = {"compression": "lz4", "squash_options": (), "block_size": 131072, "created": "", "made_by": ""}
    size = file.stat().st_size
    Sidecar(source=NEMO, digest=PINNED, sha256="0" * 64, size=size, **values).write(file)  # type: ignore[arg-type]
    assert read_recorded_digest(str(file)) == PINNED
    Sidecar(source=NEMO, digest=None, sha256="0" * 64, size=size, **values).write(file)  # type: ignore[arg-type]
    assert read_recorded_digest(str(file)) == f"sha256:{'0' * 64}"
    assert read_recorded_digest(NEMO) is None and read_recorded_digest(None) is None


# --- launch --build, without making anything


def dry(capsys: Capsys, *words: str) -> tuple[str, str]:
    assert main(["launch", "--dry-run", "cluster=bcm", "images_dir=images", *words]) == 0
    printed = capsys.readouterr()
    return printed.out, printed.err


@pytest.mark.parametrize("flag", ["--build", "--build=host"])
def test_build_makes_a_file_of_a_registry_image(flag: str, directory: Path, capsys: Capsys) -> None:
    out, message = dry(capsys, flag, f"container={NEMO}")  # an override after a bare --build is not its value
    file = directory / "images/nvidia+nemo+24.07.sqsh"
    assert f"    --container-image={file} \\\n" in out
    assert f"slipway: first: slipway image import '{NEMO}' --output={file}\n" in message
    write_image(file)
    script, message = dry(capsys, flag, f"container={NEMO}")
    assert f"--container-image={file} " in script and "first:" not in message


def test_build_as_a_job_comes_first(directory: Path, capsys: Capsys) -> None:
    out, _ = dry(capsys, "--build=job", "container=nemo", "stage_cluster.image.partition=cpu")
    stages = re.findall("^# --- (image|training): .*", out, re.MULTILINE)
    assert stages == ["image", "training"]
    first = out.partition("\n# --- training: ")[0]
    assert "#SBATCH --partition=cpu\n#SBATCH --nodes=1\n" in first
    assert "#SBATCH --cpus-per-task=8\n#SBATCH --mem=32G\n#SBATCH --time=4:00:00\n" in first
    assert "gpu" not in first.partition("\n# Made by")[0]
    file = Path(image_of(draft_with("nemo"))).name
    words = ["image", "build", "nemo", f"--images-dir={directory}/images", f"--expect={file}"]
    assert "".join(f"    {word} \\\n" for word in words).removesuffix(" \\\n") in first
    assert not (directory / "images").exists() and not (directory / "results").exists()


def test_trees_of_the_job_are_absolute_paths(directory: Path) -> None:
    (directory / "conf/image").mkdir(parents=True)
    request = Request(["container=nemo", "cluster=bcm", "images_dir=images"], [], config_dirs=(Path("conf"),))
    requirement = required_image(draft(request).composition, request)
    assert requirement is not None
    assert requirement.command[-1] == f"--config-dir={directory}/conf"


@pytest.mark.parametrize("option", ["stage_to=/scratch", "runtime=apptainer"])
@pytest.mark.parametrize("flag", ["--build", "--build=job"])
def test_options_that_need_a_file_get_the_built_one(
    flag: str, option: str, directory: Path, capsys: Capsys
) -> None:
    out, _ = dry(capsys, flag, f"container_options.{option}", f"container={NEMO}")
    training = out.rpartition("# --- training: ")[2]
    file = f"{directory}/images/nvidia+nemo+24.07.sqsh"
    # Only the job knows the path of the copy on each node; supervisor.json has the path of the file.
    assert ("=%SLIPWAY_IMAGE% " if option.startswith("stage_to") else file) in training
    assert NEMO not in training


def test_build_replaces_a_torn_file(directory: Path, capsys: Capsys) -> None:
    (directory / "images").mkdir()
    image(directory / "images/nvidia+nemo+24.07.sqsh", size=200)
    _, message = dry(capsys, "--build", f"container={NEMO}")
    assert "slipway: first: slipway image import" in message


@pytest.mark.parametrize("name", ["$(x) y", "long" * 60])
def test_run_names_of_image_jobs_are_short_and_distinct(name: str, capsys: Capsys) -> None:
    runs = []
    for suffix in ("", "z"):
        out, _ = dry(capsys, "--build=job", f"container='oci:/layouts/{name}{suffix}:1'")
        runs += re.findall(r"^#SBATCH --job-name=nemo-megatron-(image_\S+)$", out, re.MULTILINE)
    assert len(set(runs)) == 2
    assert all(len(run) < 120 for run in runs)


def test_a_recipe_changed_while_the_job_waited_is_refused(directory: Path, capsys: Capsys) -> None:
    (directory / "conf/image").mkdir(parents=True)
    recipe = directory / "conf/image/ours.yaml"
    recipe.write_text("defaults: [nemo, _self_]\ntag: '2'\n")
    request = Request(
        ["container=ours", "cluster=bcm", "images_dir=images"], [], config_dirs=(directory / "conf",)
    )
    requirement = required_image(draft(request).composition, request)
    assert requirement is not None
    recipe.write_text("defaults: [nemo, _self_]\nworkdir: /elsewhere\n")
    assert main([*requirement.work.arguments]) == 2
    errors = capsys.readouterr().err
    assert f"--expect={requirement.file.name}: the recipe ours becomes ours-run-" in errors
    assert not (directory / "images").exists()
    # Another launch has built the image before the recipe changed.
    write_image(requirement.file)
    assert main([*requirement.work.arguments]) == 0
    assert f"there already: {requirement.file}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "errors"),
    [
        (["--build", "container=null"], "--build: container=null: there is no image to build"),
        (["--build", "container=nemu"], "from the command line: container=nemu"),
        (["--build", "cluster=local"], "--build: cluster.scheduler=local runs without containers"),
        (
            ["--build=job", "cluster=interactive", "cluster.scheduler=allocation", "container=nemo"],
            "--build=job",
        ),
        (["--build=job", "--smoke", "container=nemo"], "--smoke: it would not wait"),
        (
            ["--build=job", "--launch-number=2", "container=nemo"],
            "--launch-number and --tag are those of one",
        ),
    ],
)
def test_build_without_an_image_to_build_is_refused(words: list[str], errors: str, capsys: Capsys) -> None:
    assert main(["launch", "--dry-run", "cluster=bcm", *words]) == 2
    assert errors in capsys.readouterr().err


def test_a_file_needs_no_build(directory: Path) -> None:
    request = Request([f"container={directory}/x.sqsh", "cluster=bcm"], [])
    composition = draft(request).composition
    assert required_image(composition, request) is None
    choice = resolve_choice(composition)
    assert choice is not None and (choice.stored, choice.command) == (None, ())
    command = resolve_container("nemo", str(directory), template_dir=directory).command
    assert command == ("image", "build", "nemo", f"--images-dir={directory}", f"--template-dir={directory}")


def test_hints_of_a_launch_name_options_of_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[ImportOptions] = []

    def refuse(source: object, target: object, options: ImportOptions, progress: object) -> None:
        calls.append(options)
        raise UserError("no TLS", hint="if you trust the network on the way to it: --plain-http")

    monkeypatch.setattr("launcher.images.importing.import_image", refuse)
    requirement = ImageRequirement(
        resolve_container("127.0.0.1:5000/x:1", "images"), Path("images/x.sqsh"), Request([], [])
    )
    with pytest.raises(UserError) as raised:
        make_here(requirement, ImageProgress())
    assert "ENROOT_ALLOW_HTTP=yes slipway launch ... --build" in (raised.value.hint or "")
    assert "--plain-http" not in (raised.value.hint or "")
    monkeypatch.setenv("ENROOT_ALLOW_HTTP", "yes")
    with pytest.raises(UserError):
        make_here(requirement, ImageProgress())
    assert [options.plain_http for options in calls] == [False, True]
    assert "--plain-http" in requirement.command, "a job makes it in the same way"
