"""The shell of a site in a job: lines before the tasks, words before each, variables that tasks expand."""

from __future__ import annotations

import dataclasses
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from launcher.config.compose import compose
from launcher.plan import Payload, Plan
from launcher.rendering.quoting import expand
from launcher.sandbox.lifecycle import Sandbox
from launcher.stages.planning import plan_launch
from tests.launch_files import script_of, write_files

# A module system as Lmod and conda are: it reads variables that are not set, and commands in it fail.
_MODULES = """\
echo "$SITE_QUIET"
module() {
    false
    if [ -n "$SITE_QUIET" ]; then :; fi
    [ "$2" != nosuch ] || return 3
    export LOADED="$LOADED:$2"
}
"""


def _plan(tmp_path: Path, command: str, **changes: Any) -> Plan:
    (tmp_path / "modules.sh").write_text(_MODULES)
    overrides = ["training=gpt3/tiny", "cluster=local", "training.trainer.devices=1"]
    places = ["training.trainer.num_nodes=1", f"base_results_dir={tmp_path}/results"]
    plan = plan_launch(compose([*overrides, *places]).config, number=1, tag="x")
    payload = Payload(("bash", "-c", command), str(tmp_path), save_signal="TERM")
    return dataclasses.replace(plan, job=dataclasses.replace(plan.job, payload=payload, **changes))


def _run(plan: Plan, template_dir: Path | None = None, **variables: str) -> tuple[int, str]:
    write_files(plan, template_dir)
    done = subprocess.run(
        ["bash", plan.paths.script],
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout


def test_module_system_survives_before_the_tasks(tmp_path: Path) -> None:
    lines = (f"source {tmp_path}/modules.sh", "module load cuda # the newest", "module load 'n  ccl'")
    code, output = _run(_plan(tmp_path, 'echo "loaded $LOADED"', setup=lines))
    assert (code, "loaded :cuda:n  ccl\n" in output) == (0, True), output


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("module load nosuch", ": eval 'module load nosuch' on "),
        ("no_such_program x", ": eval 'no_such_program x' on "),
        ("if true; then", ": eval 'if true; then' on "),
        ("echo 'half", ": eval 'echo '"),
        ("false # } ; touch broken", ": eval 'false # } ; touch broken' on "),
    ],
)
def test_line_that_fails_before_the_tasks_ends_the_job_by_name(tmp_path: Path, line: str, named: str) -> None:
    plan = _plan(tmp_path, "echo began", setup=(f"source {tmp_path}/modules.sh", line))
    code, output = _run(plan)
    assert code == 1 and named in output and "began" not in output, output


def test_script_is_strict_again_after_the_lines(tmp_path: Path) -> None:
    script = script_of(_plan(tmp_path, "true", setup=("true",)))
    lines = script.splitlines()
    assert lines.index("set +eu # module systems and conda do not survive them") < lines.index("eval true")
    assert lines.index("eval true") < lines.index("trap - ERR") < lines.index("set -eu")
    assert "set +eu" not in script_of(_plan(tmp_path, "true"))


def test_template_of_a_site_may_load_modules(tmp_path: Path) -> None:
    plan = _plan(tmp_path, 'echo "loaded $LOADED"')
    for name in ("local.sh.j2", "task.sh.j2"):
        (tmp_path / name).write_text(
            f'{{% extends "slipway/{name}" %}}\n{{% block environment %}}\n{{{{ super() }}}}'
            f"source {tmp_path}/modules.sh\nmodule load {name}\n{{% endblock %}}\n"
        )
    code, output = _run(plan, tmp_path)
    assert (code, "loaded :local.sh.j2:task.sh.j2\n" in output) == (0, True), output
    for name in ("local.sh.j2", "task.sh.j2"):
        other = tmp_path / f"of-{name}"
        other.mkdir()
        text = (tmp_path / name).read_text().replace(f"module load {name}", "module load nosuch")
        (other / name).write_text(text)
        code, output = _run(_plan(tmp_path, "echo began"), other)
        assert (
            code != 0
            and "exit code 3 of line " in output
            and ": module load nosuch" in output
            and "began" not in output
        ), output


def test_words_before_each_task_start_it(tmp_path: Path) -> None:
    plan = _plan(tmp_path, 'echo "prefix $A"', task_prefix=("env", "A=b  $c"))
    code, output = _run(plan)
    assert (code, "prefix b  $c\n" in output) == (0, True), output


@pytest.mark.parametrize(
    ("value", "variables", "expected"),
    [
        ("/opt/efa/lib:$LIB", {"LIB": "/sys:/x y"}, "/opt/efa/lib:/sys:/x y"),
        ("/opt/efa/lib:$LIB", {}, "/opt/efa/lib"),  # and no empty part, which were the current directory
        ("$LIB:/opt/efa/lib", {"LIB": "/sys"}, "/sys:/opt/efa/lib"),
        ("$LIB:/opt/efa/lib", {}, "/opt/efa/lib"),
        ("/a:$LIB:/b", {}, "/a:/b"),
        ("$A:$LIB", {"A": "1"}, "1"),
        ("$A/lib64:$LIB", {"A": "/cuda", "LIB": "/sys"}, "/cuda/lib64:/sys"),
        ("$A", {"A": "$(touch stolen) `x` \"'"}, "$(touch stolen) `x` \"'"),
        ("${A}i", {"A": "n1"}, "n1i"),
        ("tcp://$A:$B", {"A": "n1", "B": "29500"}, "tcp://n1:29500"),
        ("x; touch stolen; `touch stolen` \"'\\ ${A}", {"A": ""}, "x; touch stolen; `touch stolen` \"'\\ "),
        ("", {}, ""),
        ("$A", {}, None),
        ("/x/$A/y", {}, None),
    ],
)
def test_references_are_expanded_and_nothing_else(
    tmp_path: Path, value: str, variables: dict[str, str], expected: str | None
) -> None:
    script = f'set -eu; export NAME={expand(value, "NAME")}; printf %s "$NAME"'
    done = subprocess.run(["bash", "-c", script], env=variables, capture_output=True, text=True, cwd=tmp_path)
    assert list(tmp_path.iterdir()) == []
    if expected is None:
        assert done.returncode != 0
        assert "A: env_expand.NAME: not set in the task" in done.stderr
    else:
        assert (done.stdout, done.returncode) == (expected, 0), done.stderr


def test_tasks_expand_their_own_variables(tmp_path: Path) -> None:
    expansions = {"PATH": "/opt/x:$PATH", "MASTER_ADDR": "${MASTER_ADDR}i", "MINE": "$RANK of $WORLD_SIZE"}
    plan = _plan(tmp_path, 'echo "$PATH; $MASTER_ADDR; $MINE"', expansions=expansions)
    code, output = _run(plan, PATH="/usr/bin:/bin:/usr/sbin")
    assert (code, "/opt/x:/usr/bin:/bin:/usr/sbin; 127.0.0.1i; 0 of 1\n" in output) == (0, True), output
    assert '"${PATH:+:$PATH}"' in plan.paths.task_script.read_text()


def test_shell_of_a_workspace_has_lines_and_variables(tmp_path: Path) -> None:
    (tmp_path / "modules.sh").write_text(_MODULES)
    overrides = ["stages=[workspace]", "training=gpt3/tiny", "cluster=local", "workspace.shell=/usr/bin/env"]
    keys = [f'cluster.setup=["source {tmp_path}/modules.sh","module load x"]', "env_expand.B=$LOADED:it's"]
    config = compose([*overrides, f"base_results_dir={tmp_path}", *keys]).config
    script = script_of(plan_launch(config, number=1, tag="x"))
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert "\nB=:x:it's\n" in done.stdout, done.stderr + script


@pytest.mark.slurm
def test_job_of_a_site_on_slurm(tmp_path: Path, sandbox: Sandbox) -> None:
    """Lines, words, variables, and a value with commas, as srun and bash read them."""
    (tmp_path / "modules.sh").write_text(_MODULES)
    overrides = [
        *("training=gpt3/tiny", "cluster=sandbox", f"base_results_dir={tmp_path}"),
        *("training.trainer.num_nodes=1", "training.trainer.devices=2", "cluster.cpus_per_task=1"),
        'cluster.srun_args=["--cpu-bind=mask_cpu:0x1,0x1","--label"]',
        f'cluster.setup=["source {tmp_path}/modules.sh","module load cuda"]',
        "cluster.task_prefix=[env,PREFIX=p]",
        "env_expand={THREADS: $SLURM_CPUS_PER_TASK, LOADED: '/mine$LOADED', PORT: ':$SLURM_PROCID'}",
    ]
    plan = plan_launch(compose(overrides).config, number=1, tag="x")
    payload = Payload(("bash", "-c", 'echo "$PREFIX $THREADS $LOADED $PORT"'), working_dir="/")
    write_files(dataclasses.replace(plan, job=dataclasses.replace(plan.job, payload=payload)))
    done = subprocess.run(
        ["sbatch", "--wait", "--parsable", plan.paths.script],
        env=dict(sandbox.environment()),
        capture_output=True,
        text=True,
        timeout=120,
    )
    log = plan.paths.log(done.stdout.strip()).read_text()
    assert done.returncode == 0, log + done.stderr
    for rank in range(2):
        assert f"{rank}: p 1 /mine:cuda :{rank}\n" in log
