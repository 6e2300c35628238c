"""The scripts' behaviour, and users' own templates."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from launcher.config.compose import compose
from launcher.errors import UserError
from launcher.plan import Payload, Plan
from launcher.rendering.render import render
from launcher.stages.planning import plan_launch
from tests.job_marks import end_marks
from tests.launch_files import script_of, write_files


def local_plan(tmp_path: Path, command: str, tasks: int = 2, number: int = 1) -> Plan:
    overrides = ["training=gpt3/tiny", "cluster=local", f"training.trainer.devices={tasks}"]
    places = ["training.trainer.num_nodes=1", f"base_results_dir={tmp_path}"]
    plan = plan_launch(compose([*overrides, *places]).config, number=number, tag="x")
    payload = Payload(argv=("bash", "-c", command), working_dir=str(tmp_path))
    return dataclasses.replace(plan, job=dataclasses.replace(plan.job, payload=payload))


def start(plan: Plan, *, session: bool = False) -> subprocess.Popen[str]:
    write_files(plan)
    return subprocess.Popen(
        ["bash", plan.paths.script],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=session,
    )


def exit_mark(plan: Plan) -> dict[str, object]:
    return end_marks(plan.paths.directory)[-1]


def wait_for(path: Path) -> None:
    for _ in range(200):
        if path.exists():
            return
        time.sleep(0.05)
    raise AssertionError(f"{path} did not appear")


def test_each_task_knows_its_rank(tmp_path: Path) -> None:
    plan = local_plan(
        tmp_path, 'echo "rank $RANK of $WORLD_SIZE, local $LOCAL_RANK of $LOCAL_WORLD_SIZE"', tasks=3
    )
    output = start(plan).communicate(timeout=30)[0]
    for rank in range(3):
        assert f"rank {rank} of 3, local {rank} of 3" in output
    assert exit_mark(plan)["exit_code"] == 0


@pytest.mark.parametrize(
    "command", ["exit 7", "[[ $RANK == 1 ]] && exit 7; sleep 60", "[[ $RANK == 0 ]] && exit 7; sleep 60"]
)
def test_the_first_task_that_fails_ends_the_others_and_gives_the_code(tmp_path: Path, command: str) -> None:
    plan = local_plan(tmp_path, command)
    process = start(plan)
    process.communicate(timeout=20)
    assert process.returncode == 7
    assert exit_mark(plan)["exit_code"] == 7


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_signals_reach_the_payload_at_once(tmp_path: Path, number: signal.Signals) -> None:
    short = number.name.removeprefix("SIG")
    # The pause lets the other task catch the signal too, before the failure of this one ends it.
    handler = f'trap "touch caught-$RANK; sleep 0.5; exit 5" {short}; touch ready-$RANK; '
    handler += "while :; do sleep 0.1; done"
    plan = local_plan(tmp_path, handler)
    process = start(plan)
    for rank in range(2):
        wait_for(tmp_path / f"ready-{rank}")
    os.kill(process.pid, number)
    process.communicate(timeout=20)
    assert [(tmp_path / f"caught-{rank}").exists() for rank in range(2)] == [True, True]
    assert process.returncode == 5
    assert exit_mark(plan)["exit_code"] == 5


def test_a_second_job_of_a_run_waits_for_the_first(tmp_path: Path) -> None:
    first = start(local_plan(tmp_path, "touch began; sleep 1; touch ended", tasks=1))
    wait_for(tmp_path / "began")
    second = start(local_plan(tmp_path, "[[ -e ended ]]", tasks=1, number=2))
    assert [process.communicate(timeout=30) and process.returncode for process in (first, second)] == [0, 0]


def test_a_template_of_the_users_overrides_one_block(tmp_path: Path) -> None:
    plan = local_plan(tmp_path, "true")
    plan = dataclasses.replace(plan, scheduler="slurm")
    (tmp_path / "sbatch.sh.j2").write_text(
        '{% extends "slipway/sbatch.sh.j2" %}\n'
        "{% block environment %}\n{{ super() }}module load cuda\n{% endblock %}\n"
    )
    script = script_of(plan, tmp_path)
    assert "\nmodule load cuda\n" in script
    assert "export TRANSFORMERS_OFFLINE=0\n" in script
    assert "srun" in script


@pytest.mark.parametrize(
    ("name", "text", "hint"),
    [
        ("sbatch.sh.j2", "{% block rendezvous %}{% endblock %}", "valid: environment, header, tasks"),
        ("sbatch.sh.j2", "{% block enviroment %}{% endblock %}", "did you mean 'environment'"),
        ("local.sh.j2", "{% block turn %}{% endblock %}", "valid: environment, header, tasks"),
        ("local.sh.j2", "{% block tasks %}bash x{% block mine %}{% endblock %}{% endblock %}", None),
    ],
)
def test_a_block_that_is_not_there_is_an_error(
    tmp_path: Path, name: str, text: str, hint: str | None
) -> None:
    """Rendering would leave the block out without notice."""
    (tmp_path / name).write_text(f'{{% extends "slipway/{name}" %}}\n{text}\n')
    plan = local_plan(tmp_path, "true")
    if hint is None:
        assert script_of(plan, tmp_path)
        return
    with pytest.raises(UserError, match=f"{name}:2: the script has no block") as error:
        render(plan, tmp_path)
    assert hint in str(error.value.hint)


def test_a_script_without_its_supervisor_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "local.sh.j2").write_text("#!/bin/bash\nsource resilience.sh\n")
    with pytest.raises(UserError, match=r"does not start supervisor\.pyz"):
        render(local_plan(tmp_path, "true"), tmp_path)


def test_variables_of_the_users_reach_the_payload_whatever_they_are_called(tmp_path: Path) -> None:
    """The scripts' own variables begin with SLIPWAY_."""
    names = ("run", "launch_dir", "code", "payload", "name", "value", "capability", "tasks", "hosts")
    overrides = ["training=gpt3/tiny", "cluster=local", "training.trainer.devices=1"]
    places = ["training.trainer.num_nodes=1", f"base_results_dir={tmp_path}"]
    variables = [f"env_vars.{name}=mine-{name}" for name in names]
    plan = plan_launch(compose([*overrides, *places, *variables]).config, number=1, tag="x")
    payload = Payload(argv=("env",), working_dir=str(tmp_path), save_signal="TERM")
    plan = dataclasses.replace(plan, job=dataclasses.replace(plan.job, payload=payload))
    output = start(plan).communicate(timeout=30)[0]
    assert [name for name in names if f"\n{name}=mine-{name}\n" not in output] == [], output


def test_a_template_with_an_unknown_name_is_the_users_mistake(tmp_path: Path) -> None:
    (tmp_path / "local.sh.j2").write_text("{{ no_such_thing }}")
    with pytest.raises(UserError, match="no_such_thing"):
        render(local_plan(tmp_path, "true"), tmp_path)


def test_a_job_that_is_killed_has_never_succeeded(tmp_path: Path) -> None:
    """Like `slipway cancel`, the test signals all processes at once; bash may lose an exit code then."""
    for number in range(1, 9):
        plan = local_plan(tmp_path, "echo begins; while :; do sleep 0.2 & wait $!; done", number=number)
        process = start(plan, session=True)
        assert process.stdout is not None
        while "begins" not in process.stdout.readline():
            pass
        os.killpg(process.pid, signal.SIGTERM)
        process.communicate(timeout=30)
        assert exit_mark(plan)["exit_code"] == 143
