"""Requests of a launch to its container, and those that are refused before anything is submitted."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from launcher.config.compose import compose
from launcher.errors import UserError
from launcher.images.resolve import read_recorded_digest
from launcher.plan import Mount, Plan
from launcher.rendering.render import TEMPLATE_DIR, render_template
from launcher.rendering.supervision import supervisor_settings
from launcher.stages.planning import plan_launch
from slipway.supervisor.images import container_name
from tests.launch_files import script_of

_PLACES = ["base_results_dir=/shared/results", "data_dir=/shared/data", "container=/apps/nemo.sqsh"]
_LAUNCH = ["training=gpt3/126m", "training.trainer.num_nodes=1", *_PLACES]


def plan_of(*overrides: str) -> Plan:
    return plan_launch(compose([*_LAUNCH, *overrides]).config, number=1, tag="test")


def mounts(*texts: str) -> list[Mount]:
    """Return the user's own mounts of a launch."""
    container = plan_of(f"container_mounts={json.dumps(texts)}").job.container
    assert container is not None
    return list(container.mounts[2:])


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("container_options.name='a b'", ["container_options.name='a b'", "letters, digits"]),
        ("container_options.name=a/b", ["container_options.name='a/b'", "letters, digits"]),
        ("container_options.name='nemo:exec'", ["without Pyxis' ':exec'", "container_options.name=nemo:"]),
        ("container_options.name=", ["container_options.name=''"]),
        (f"container_options.name={'n' * 101}", ["101 characters", "up to 100"]),
        ("container_options.env=['A=B']", ["container_options.env", "'A=...'", "env_vars.A=B"]),
        ("container_options.env=['HF_TOKEN=abc']", ["container_options.env", "env_files={HF_TOKEN:"]),
        ("container_options.env=['a b']", ["container_options.env", "'a b'"]),
        ("cluster.srun_args=['--container-name=x']", ["cluster.srun_args", "container_options.name=x"]),
        ("container_mounts=['/a/$b:/c']", ["'$'", "${oc.env:NAME}"]),
        ("container_mounts=['/a/`b`']", ["'`'"]),
        ("container_mounts=['/a:/b:readonly']", ["'readonly'", "Enroot knows no flag"]),
        ("container_mounts=['/a:/b:ro,rw']", ["is not a mount"]),
        ("container_mounts=['/a:/b:size=1g']", ["'size=1g'"]),
        ("container_mounts=['/a:b']", ["the target in the container is a whole path"]),
        ("container_mounts=['s3://bucket/pile:/mnt/pile']", ["is not a mount", "data_preparation.inputs"]),
        ("container_mounts=['https://host/pile']", ["is not a mount", "data_preparation.inputs"]),
        ("container_mounts=[tmpfs]", ["tmpfs:/its/target"]),
        ("container_mounts=['~other/x']", ["another user's home"]),
        ("container_mounts=['/x:/shared/results:ro']", ["read-only over /shared/results", "without :ro"]),
        ("container_mounts=['/x:/shared:ro']", ["read-only over /shared/results"]),
        ("data_dir=/shared/$data", ["data_dir", "'$'"]),
    ],
)
def test_options_that_fail_on_the_nodes_are_refused_before_the_launch(
    override: str, words: list[str]
) -> None:
    override = override.replace("$", r"\$") if "oc.env" in override else override
    with pytest.raises(UserError) as caught:
        plan_of(override)
    for word in words:
        assert word in str(caught.value)
    assert "abc" not in str(caught.value)


@pytest.mark.parametrize(
    "key", ["container_options.workdir", "container_options.stage_to", "workspace.shell"]
)
def test_no_path_of_this_machine_is_suggested_for_one_in_the_container(key: str) -> None:
    with pytest.raises(UserError, match="a whole path is needed") as caught:
        plan_of(f"{key}=./here", "stages=[workspace]")
    assert (caught.value.key, caught.value.hint) == (key, None)


def test_shell_without_container_is_suggested_by_its_whole_path() -> None:
    with pytest.raises(UserError) as caught:
        plan_of("workspace.shell=./here", "stages=[workspace]", "container=null")
    assert caught.value.hint == f"workspace.shell={Path('here').absolute()}"


def test_one_node_may_save_its_container_and_several_may_not() -> None:
    save = "container_options.save=/shared/saved.sqsh"
    assert "--container-save=/shared/saved.sqsh" in script_of(plan_of(save))
    for more in ("training.trainer.num_nodes=2", "resilience.nodes={min: 1, max: 2}"):
        with pytest.raises(UserError, match="each of the job's 2 nodes would write this file"):
            plan_of(save, more)


def test_mounts_take_no_path_or_one_relative_to_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    assert mounts("tmpfs:/scratch", "tmpfs:/big:size=10g+nosuid", "umount:/dev/shm") == [
        Mount("tmpfs", "/scratch"),
        Mount("tmpfs", "/big", "size=10g+nosuid"),
        Mount("umount", "/dev/shm"),
    ]
    assert mounts("corpus", "./tmpfs:/data:ro+rprivate", "../up:/up") == [
        Mount(f"{tmp_path}/corpus", f"{tmp_path}/corpus"),
        Mount(f"{tmp_path}/tmpfs", "/data", "ro+rprivate"),
        Mount(f"{tmp_path}/../up", "/up"),
    ]
    assert mounts("~/a:/a", "$HOME/b:~/c", "$HOME:/home") == [
        Mount("/home/me/a", "/a"),
        Mount("/home/me/b", "/home/me/c"),
        Mount("/home/me", "/home"),
    ]


def test_apptainer_has_no_mounts_without_a_path() -> None:
    with pytest.raises(UserError, match="Apptainer has no such mount"):
        plan_of("container_mounts=[tmpfs:/scratch]", "container_options.runtime=apptainer")


def test_variables_of_the_job_win_in_the_container() -> None:
    job = plan_of(
        "env_vars.NCCL_DEBUG=INFO",
        "cluster.env_vars.NCCL_NVLS_ENABLE=0",
        "env_files.HF_TOKEN=/home/me/token",
        "container_options.env=[PATH]",
        "training.model.tensor_model_parallel_size=2",  # from which CUDA_DEVICE_MAX_CONNECTIONS follows
        "env_vars.UCX_TLS=null",
    ).job
    names = {"PATH", "MASTER_ADDR", "MASTER_PORT", "NCCL_DEBUG", "NCCL_NVLS_ENABLE", "HF_TOKEN"}
    assert {*names, "CUDA_DEVICE_MAX_CONNECTIONS"} <= set(job.container_variables)
    assert "UCX_TLS" not in job.container_variables


def recorded_name(image: Path) -> str:
    """Return the name that a job gives the container of an image, as the script of a session does."""
    plan = plan_of(f"container={image}", "container_options.name=kept")
    container = supervisor_settings(plan).container
    assert container is not None
    naming = render_template("container_name.sh.j2", {"job": plan.job})
    functions = (TEMPLATE_DIR / "image_record.sh").read_text()
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", f'{functions}\n{naming}\necho "$SLIPWAY_CONTAINER"'],
        check=True,
        capture_output=True,
        text=True,
    )
    assert not done.stderr and done.stdout.strip() == container_name(container)
    return container_name(container)


def write_record(image: Path, *, digest: str | None, sha256: str) -> None:
    state = image.stat()
    fields = {"version": 1, "source": "x", "digest": digest, "sha256": sha256, "size": state.st_size}
    fields |= {"config": {"labels": {"sha256": "9" * 64}}, "recipe": None, "modified": int(state.st_mtime)}
    image.with_name(f"{image.name}.json").write_text(json.dumps(fields, indent=2))


def test_a_name_has_the_digits_of_the_image_as_it_is(tmp_path: Path) -> None:
    image = tmp_path / "an image.sqsh"
    image.write_bytes(b"hsqs1")
    write_record(image, digest="sha256:" + "a" * 64, sha256="b" * 64)
    assert recorded_name(image) == "kept-aaaaaaaaaaaa"
    write_record(image, digest=None, sha256="b" * 64)
    assert recorded_name(image) == "kept-bbbbbbbbbbbb"
    os.utime(image, (1, 1))  # another file of the same size: the record is not of it
    unknown = recorded_name(image)
    assert unknown != "kept-bbbbbbbbbbbb"
    os.utime(image, (2, 2))
    assert recorded_name(image) != unknown
    image.with_name(f"{image.name}.json").unlink()
    within_a_second = {(os.utime(image, ns=(0, ns)), recorded_name(image))[1] for ns in (5, 6)}
    assert len(within_a_second) == 2
    image.unlink()
    assert recorded_name(image).startswith("kept-")


def test_a_pinned_image_of_a_registry_has_its_digest_in_the_name() -> None:
    for sign in ":@":  # as Pyxis takes it, and as most write it
        image = f"nvcr.io#nvidia/nemo{sign}sha256:{'c' * 64}"
        pinned = plan_of(f"container='{image}'", "container_options.name=kept")
        assert "--container-name=kept-cccccccccccc" in script_of(pinned)
    first, second = (
        script_of(plan_of(f"container=nvcr.io#nvidia/nemo:{tag}", "container_options.name=kept"))
        for tag in ("24.05", "24.07")
    )
    names = [
        next(line for line in text.splitlines() if "--container-name" in line) for text in (first, second)
    ]
    assert names[0] != names[1]


def test_a_record_of_another_file_has_no_digest(tmp_path: Path) -> None:
    from launcher.images.store import ImageConfig, Sidecar

    image = tmp_path / "x.sqsh"
    image.write_bytes(b"hsqs1")
    digest = "sha256:" + "a" * 64
    state = image.stat()
    record = Sidecar("x", digest, "b" * 64, state.st_size, "lz4", (), 1, "now", "us", ImageConfig())
    record.write(image)
    assert read_recorded_digest(str(image)) == digest, "records of earlier versions tell no time"
    Sidecar(
        *("x", digest, "b" * 64, state.st_size, "lz4", (), 1, "now", "us", ImageConfig(), None),
        modified=int(state.st_mtime),
    ).write(image)
    assert read_recorded_digest(str(image)) == digest
    os.utime(image, (1, 1))
    assert read_recorded_digest(str(image)) is None
