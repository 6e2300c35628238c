"""A rendered script on a real Slurm with Pyxis: where its tasks are, and what they see there."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from launcher.sandbox.lifecycle import Sandbox
from tests.integration.conftest import SLIPWAY, run_command

pytestmark = [pytest.mark.slurm, pytest.mark.pyxis]

# Two tasks on each of two nodes; each runs the image's `python3`.
_TWO_BY_TWO = [
    "cluster=sandbox",
    "training=gpt3/tiny",
    "training.model.data.data_impl=mock",
    "training.trainer.num_nodes=2",
    "training.trainer.devices=2",
    "numa_mapping.enable=False",
]

Reports = dict[int, dict[str, str]]


def launch_arguments(directory: Path, image: Path, *overrides: str, stay: Path | None = None) -> list[str]:
    """Return the arguments of a launch whose tasks report into `directory/results/told`."""
    report_dir = directory / "results" / "told"
    report_dir.mkdir(parents=True, exist_ok=True)
    (directory / "data").mkdir(exist_ok=True)
    words = ["launch", *_TWO_BY_TWO, f"container={image}", f"env_vars.REPORT_TO={report_dir}"]
    words += [f"env_vars.STAY_WHILE={stay}"] if stay else []
    return [*words, *overrides]


def reports(directory: Path) -> Reports:
    """Return the report of each task."""
    by_rank: Reports = {}
    for file in (directory / "results" / "told").glob("[0-9]"):  # other files are not complete yet
        lines = (line.partition(" ") for line in file.read_text().splitlines())
        by_rank[int(file.name)] = {key: value for key, _, value in lines}
    return by_rank


def run_to_completion(directory: Path, *words: str) -> Reports:
    done = run_command(SLIPWAY, *words, "--follow", cwd=directory)
    assert "COMPLETED" in done.stdout, done.stdout + done.stderr
    return reports(directory)


def test_tasks_of_two_nodes_start_in_the_image_with_its_mounts_and_environment(
    on_pyxis: Sandbox, shell_image: Path, tmp_path: Path
) -> None:
    for name in ("data", "scratch", "corpus"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "of-the-host").touch()
    directories = [tmp_path / "results", tmp_path / "data", "/scratch", "/corpus", tmp_path / "launcher"]
    task_reports = run_to_completion(
        tmp_path,
        *launch_arguments(tmp_path, shell_image),
        f"container_mounts=['{tmp_path}/scratch:/scratch','{tmp_path}/corpus:/corpus:ro']",
        f"env_vars.LOOK_AT='{' '.join(map(str, directories))}'",
        "env_vars.OF_THE_JOB='two words, $HOME and \"quotes\"'",
        "env_vars.IN_BOTH=job",
    )
    assert {rank: report["node"] for rank, report in task_reports.items()} == {
        0: "n1",
        1: "n1",
        2: "n2",
        3: "n2",
    }
    code = tmp_path / "results/gpt3_tiny/launches/1/code"
    for rank, report in task_reports.items():
        assert report["image"] == "shell"
        assert report["directory"] == str(code)
        assert report["arguments"].startswith("-u -m slipway.trainer.pretrain --config-path=")
        assert (report["RANK"], report["WORLD_SIZE"], report["MASTER_ADDR"]) == (str(rank), "4", "n1")
        assert report["OF_THE_IMAGE"] == "made at build"
        assert report["OF_THE_JOB"] == 'two words, $HOME and "quotes"'
        assert report["IN_BOTH"] == "job", "what the configuration says wins over the image"
        assert report["/scratch"].startswith("writable: of-")
        assert "of-the-host" in report["/scratch"]
        assert report["/corpus"] == "read-only: of-the-host "
        assert report[str(tmp_path / "data")] == "read-only: of-the-host "
        assert report[str(tmp_path / "results")].startswith("writable: ")
        assert report[str(tmp_path / "launcher")].startswith("absent")
    assert sorted(path.name for path in (tmp_path / "scratch").iterdir()) == [
        *(f"of-{rank}" for rank in range(4)),
        "of-the-host",
    ]
    assert [path.name for path in (tmp_path / "corpus").iterdir()] == ["of-the-host"]
    manifest = json.loads((tmp_path / "results/gpt3_tiny/launcher.json").read_text())
    assert manifest["image"] == str(shell_image)


def test_options_of_the_container_reach_pyxis(
    on_pyxis: Sandbox, shell_image: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    look_at = f"env_vars.LOOK_AT='{home} /etc'"
    words = launch_arguments(tmp_path, shell_image, look_at, "env_vars.IN_BOTH=job")
    plain = run_to_completion(tmp_path, *words)
    assert {report[str(home)] for report in plain.values()} <= {"absent: ", "read-only: "}
    assert {report["/etc"].partition(":")[0] for report in plain.values()} == {"read-only"}
    assert {report["CAME_THROUGH"] for report in plain.values()} == {"unset"}

    options = ["mount_home=True", "writable=True", "entrypoint=True", "env=[STARTED_IN]", "name=kept"]
    task_reports = run_to_completion(tmp_path, *words, *(f"container_options.{option}" for option in options))
    assert {report[str(home)].partition(":")[0] for report in task_reports.values()} == {"writable"}
    assert {report["/etc"].partition(":")[0] for report in task_reports.values()} == {"writable"}
    assert {report["IN_BOTH"] for report in task_reports.values()} == {"job"}
    assert {report["CAME_THROUGH"] for report in task_reports.values()} == {"entrypoint"}
    name = name_of_container(tmp_path, launch=2)
    assert re.fullmatch("kept-[0-9a-f]{12}", name)
    command = ["srun", "--nodes=2", "--label", f"--container-name={name}", "sh", "-c", "echo /etc/of-*"]
    lines = run_command(*command, cwd=tmp_path).stdout.splitlines()
    assert sorted(lines) == ["0: /etc/of-0 /etc/of-1", "1: /etc/of-2 /etc/of-3"], "as the tasks left them"


def name_of_container(directory: Path, launch: int) -> str:
    """Return the container's name from the log of a launch."""
    (log,) = (directory / f"results/gpt3_tiny/launches/{launch}").glob("log-*.out")
    match = re.search(r"the container is called (\S+)", log.read_text())
    assert match
    return match[1]


def test_a_container_with_a_name_is_of_the_image_that_the_launch_names(
    on_pyxis: Sandbox, shell_image: Path, other_shell_image: Path, tmp_path: Path
) -> None:
    image = tmp_path / "image.sqsh"
    words = launch_arguments(
        tmp_path, image, "container_options.name=kept", "container_options.writable=True"
    )
    for source, expected in ((shell_image, "shell"), (other_shell_image, "other"), (shell_image, "shell")):
        shutil.copy2(source, image)
        task_reports = run_to_completion(tmp_path, *words)
        assert {report["image"] for report in task_reports.values()} == {expected}
    names = [name_of_container(tmp_path, number) for number in (1, 2, 3)]
    assert names[0] != names[1]
    assert names[2] == names[0], "the container of the first image is there still"

    prune = ["image", "prune", "--named", "kept", "cluster=sandbox", "--json"]
    containers = json.loads(run_command(SLIPWAY, *prune, "--dry-run", cwd=tmp_path).stdout)
    assert {(entry["node"], entry["name"]) for entry in containers} >= {
        (node, name) for node in ("n1", "n2") for name in names
    }
    assert {entry["state"] for entry in containers} == {"idle"}
    with subprocess.Popen(
        ["srun", "--nodelist=n1", f"--container-name={names[0]}", "sh", "-c", "echo up; exec sleep 60"],
        stdout=subprocess.PIPE,
        cwd=tmp_path,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        removed = json.loads(run_command(SLIPWAY, *prune, "--yes", cwd=tmp_path).stdout)
        process.terminate()
    states = {(entry["node"], entry["name"]): entry["state"] for entry in removed}
    assert states.pop(("n1", names[0])) == "runs"
    del states["n2", names[0]]  # the nodes of a sandbox see each other's processes
    assert set(states.values()) == {"removed"}
    run_command(SLIPWAY, *prune, "--yes", cwd=tmp_path)
    assert json.loads(run_command(SLIPWAY, *prune, cwd=tmp_path).stdout) == []


def test_mounts_without_a_source_reach_pyxis(on_pyxis: Sandbox, shell_image: Path, tmp_path: Path) -> None:
    task_reports = run_to_completion(
        tmp_path,
        *launch_arguments(tmp_path, shell_image, "env_vars.LOOK_AT=/scratch"),
        "container_mounts=['tmpfs:/scratch:size=1m+nosuid','umount:/dev/shm']",
    )
    assert {report["/scratch"].partition(":")[0] for report in task_reports.values()} == {"writable"}


def test_a_missing_mount_ends_the_job_with_pyxis_own_words(
    on_pyxis: Sandbox, shell_image: Path, tmp_path: Path
) -> None:
    words = launch_arguments(tmp_path, shell_image, f"container_mounts=['{tmp_path}/absent:/absent']")
    refusal = run_command(SLIPWAY, *words, cwd=tmp_path, check=2)
    assert f"{tmp_path}/absent" in refusal.stderr
    outcome = run_command(SLIPWAY, *words, "--no-check=path.mounts", "--follow", cwd=tmp_path, check=1)
    assert "exit code 1: the container could not be started" in outcome.stdout
    (log,) = (tmp_path / "results/gpt3_tiny/launches/1").glob("log-*.out")
    assert f"source path does not exist: {tmp_path}/absent" in log.read_text()


def test_a_shell_is_where_a_rank_runs_in_a_container_without_a_name(
    on_pyxis: Sandbox, shell_image: Path, tmp_path: Path
) -> None:
    stay = tmp_path / "results" / "stay"
    stay.parent.mkdir()
    stay.touch()
    run_command(
        SLIPWAY, *launch_arguments(tmp_path, shell_image, "env_vars.OF_THE_JOB=job", stay=stay), cwd=tmp_path
    )
    try:
        deadline = time.monotonic() + 120
        while len(reports(tmp_path)) < 4:
            assert time.monotonic() < deadline, "no tasks"
            time.sleep(0.1)
        script = 'echo "$(hostname) $RANK $OF_THE_JOB $(cat /etc/image-name) $PWD"'
        outcome = run_command(
            SLIPWAY, "attach", "gpt3_tiny", "--rank", "2", "--", "sh", "-c", script, cwd=tmp_path
        )
        code = tmp_path / "results/gpt3_tiny/launches/1/code"
        assert outcome.stdout == f"n2 2 job shell {code}\n"
        outside = ["attach", "gpt3_tiny", "--outside", "--", "ls", "/etc/image-name"]
        assert run_command(SLIPWAY, *outside, cwd=tmp_path, check=None).returncode != 0
    finally:
        stay.unlink()
    assert "COMPLETED" in run_command(SLIPWAY, "follow", "gpt3_tiny", cwd=tmp_path).stdout


@pytest.mark.trainer
def test_our_trainer_trains_in_an_image_on_two_nodes(
    on_pyxis: Sandbox, trainer_image: Path, tmp_path: Path
) -> None:
    small = ["training.trainer.max_steps=4", "training.trainer.val_check_interval=2"]
    small += ["training.trainer.limit_val_batches=1", "training.model.encoder_seq_length=32"]
    (tmp_path / "data").mkdir()
    small += ["training.trainer.devices=1", f"container={trainer_image}", "engine=megatron"]
    words = ["launch", *_TWO_BY_TWO, *small]
    done = run_command(SLIPWAY, *words, "--follow", cwd=tmp_path)
    assert "COMPLETED" in done.stdout, done.stdout + done.stderr
    run = tmp_path / "results" / "gpt3_tiny"
    lines = [json.loads(line) for line in (run / "results/metrics.jsonl").read_text().splitlines()]
    assert (lines[0]["world_size"], lines[-1]["step"]) == (2, 4)
    verdict = json.loads(run_command(SLIPWAY, "verify", "gpt3_tiny", "--json", cwd=tmp_path).stdout)
    assert verdict["verdict"] == "verified"
    second = run_command(SLIPWAY, *words, "training.trainer.max_steps=6", "--follow", cwd=tmp_path)
    assert "COMPLETED" in second.stdout
    assert json.loads((run / "results/metrics.jsonl").read_text().splitlines()[-1])["step"] == 6
