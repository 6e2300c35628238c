"""Values reach the job byte for byte, through a real bash."""

from __future__ import annotations

import dataclasses
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.config.compose import compose
from launcher.errors import UserError
from launcher.plan import Payload, Plan
from launcher.rendering.quoting import RawShell, one_per_line, quote, quote_header
from launcher.rendering.render import render
from launcher.stages.planning import plan_launch

# Everything that a value may hold: no NUL, no line breaks, and nothing that UTF-8 cannot carry.
values = st.text(st.characters(blacklist_characters="\0\n\r", blacklist_categories=["Cs"]), max_size=30)


def bash(script: str) -> bytes:
    return subprocess.run(["bash", "-c", script], capture_output=True, check=True).stdout


@settings(max_examples=50, deadline=None)
@given(st.lists(values, min_size=1, max_size=8))
def test_arguments_arrive_byte_for_byte(arguments: list[str]) -> None:
    assert bash(f"printf '%s\\0' {one_per_line(arguments)}").decode() == "".join(f"{a}\0" for a in arguments)


@settings(max_examples=50, deadline=None)
@given(values)
def test_a_variable_holds_the_value(value: str) -> None:
    assert bash(f'export X={quote(value)}; printf %s "$X"').decode() == value


@pytest.mark.parametrize("text", ["a\0b", "a\nb", "a\rb"])
def test_what_no_script_can_carry_is_refused(text: str) -> None:
    for function in (quote, quote_header):
        with pytest.raises(UserError, match="line break or NUL"):
            function(text)


def test_only_raw_shell_is_expanded() -> None:
    assert bash(f"X=1; printf %s {quote('$X')}") == b"$X"
    assert bash(f"X=1; printf %s {quote(RawShell('$X'))}") == b"1"


def test_hostile_values_of_a_whole_script_do_not_run(tmp_path: Path) -> None:
    """The local script, run for real, with values that would each create a file if they were executed."""
    canary = tmp_path / "canary"
    hostile = f"$(touch {canary}) `touch {canary}`; touch {canary} # ' \" \\ %j ${{HOME}} é"
    plan = _local_plan(tmp_path, hostile)
    rendered = render(plan)
    plan.paths.directory.mkdir(parents=True)
    plan.paths.script.write_text(rendered.script)
    plan.paths.task_script.write_text(rendered.task)
    done = subprocess.run(["bash", plan.paths.script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "seen").read_text() == f"{hostile}\0{hostile}\0"
    assert not canary.exists()


def _local_plan(tmp_path: Path, hostile: str) -> Plan:
    overrides = [
        "training=gpt3/tiny",
        "cluster=local",
        "training.trainer.num_nodes=1",
        f"base_results_dir={tmp_path}",
    ]
    plan = plan_launch(compose([*overrides, "training.trainer.devices=1"]).config, number=1, tag="x")
    show = f'printf "%s\\0%s\\0" "$1" "$HOSTILE" >{quote(str(tmp_path / "seen"))}'
    payload = Payload(argv=("bash", "-c", show, "bash", hostile), working_dir=str(tmp_path))
    return dataclasses.replace(
        plan, job=dataclasses.replace(plan.job, payload=payload, environment={"HOSTILE": hostile})
    )
