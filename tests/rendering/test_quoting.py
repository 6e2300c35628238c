"""Values reach the job byte for byte, through a real bash."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from launcher.config.compose import compose
from launcher.config.overrides import hydra_value
from launcher.config.stored import config_text
from launcher.errors import UserError
from launcher.rendering.quoting import RawShell, one_per_line, quote, quote_header
from launcher.stages.planning import plan_launch
from tests.launch_files import script_of, task_of, with_argument, write_files

# All text that a value may hold: no NUL, no line breaks, and nothing that UTF-8 cannot carry.
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
def test_text_that_no_script_can_carry_is_refused(text: str) -> None:
    for function in (quote, quote_header):
        with pytest.raises(UserError, match="line break or NUL"):
            function(text)


def test_only_raw_shell_is_expanded() -> None:
    assert bash(f"X=1; printf %s {quote('$X')}") == b"$X"
    assert bash(f"X=1; printf %s {quote(RawShell('$X'))}") == b"1"


# Characters with a meaning in shells, Hydra, OmegaConf or Slurm.
nasty = st.text("ab \t'\"\\$`;#%&|<>(){}[]*?!~=,:@^é日🚀\x01\x7f", min_size=1, max_size=20)
executed = st.sampled_from(["$(touch canary)", "`touch canary`", "; touch canary #", "${x:=$(touch canary)}"])
hostile = st.builds(lambda a, b, c: a + b + c, nasty, executed | st.just("") | values, nasty)
names = hostile.map(lambda text: text.replace("/", "")).filter(lambda text: len(text.encode()) <= 200)

RECORDER = """#!/bin/sh
printf '%s\\0' "$HOSTILE" "$PWD" "$PYTHONPATH" "$@" >"$RECORD"
"""


@settings(
    max_examples=40,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # shrinking would compose for minutes
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(directory=names, value=hostile, argument=hostile, tool=names)
def test_hostile_values_arrive_through_the_whole_way(
    tmp_path: Path, directory: str, value: str, argument: str, tool: str
) -> None:
    """Values go from an override to the task's environment, arguments and directory; nothing is executed."""
    base = Path(tempfile.mkdtemp(dir=tmp_path))
    recorder, record = base / f"tool{tool}", base / "record"
    recorder.write_text(RECORDER)
    recorder.chmod(0o755)
    overrides = [
        "stages=[data_preparation]",
        "cluster=local",
        "data_preparation.inputs=[/etc/hostname]",
        f"base_results_dir={hydra_value(f'{base}/results{directory}')}",
        f"cluster.python={hydra_value(str(recorder))}",
        f"data_preparation.pattern={hydra_value(argument)}",
        f"env_vars.HOSTILE={hydra_value(value)}",
        f"env_vars.RECORD={record}",
    ]
    plan = with_argument(plan_launch(compose(overrides).config, number=1, tag="x"), argument)
    assert plan.job.stage_config is not None
    config = yaml.safe_load(config_text(plan.job.stage_config))
    assert config["data_preparation"]["pattern"] == argument
    plan.paths.code.mkdir(parents=True)
    write_files(plan)
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        ["bash", plan.paths.script], cwd=base, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    code = f"{base}/results{directory}/tokenize_text/launches/1/code"
    recorded = record.read_bytes().decode().split("\0")[:-1]
    assert recorded[:5] == [value, code, code, "-u", "-m"]
    assert recorded[-1] == argument
    assert not list(base.rglob("canary*"))


@pytest.mark.parametrize("scheduler", ["slurm", "local"])
def test_no_variable_of_the_users_can_be_one_of_the_scripts(tmp_path: Path, scheduler: str) -> None:
    """The scripts' variables begin with SLIPWAY_; all other names but those of bash and Slurm are free."""
    chosen = ["cluster=bcm" if scheduler == "slurm" else "cluster=local", "enable_vboost=True"]
    everything = ["numa_mapping.enable=True", "training.model.nsys_profile.enabled=True"]
    plan = plan_launch(
        compose([*chosen, *everything, f"base_results_dir={tmp_path}"]).config, number=1, tag="x"
    )
    assigned = set(
        re.findall(r"^(?:export )?([A-Za-z_]\w*)\+?=", script_of(plan) + task_of(plan), re.MULTILINE)
    )
    assert {"SLIPWAY_DIR", "RANK"} <= assigned
    own = assigned - set(plan.job.environment) - {"PYTHONPATH"}  # which the user's value is added to
    assert not [name for name in own if name.islower()]
    for name in [*own, "MASTER_ADDR", "RANDOM", "UID", "BASH_ENV", "OPTIND", "IFS", "SLURM_JOB_ID"]:
        with pytest.raises(UserError, match=rf"env_vars\.{name}: "):
            plan_launch(compose([f"env_vars.{name}=1"]).config, number=1, tag="x")


FREE = ("http_proxy", "PATH", "NCCL_DEBUG", "PMIX_MCA_gds", "SLURM_CPU_BIND", "run", "launch_dir")


@pytest.mark.parametrize("name", FREE)
def test_other_names_are_the_users(name: str) -> None:
    config = compose([f"env_vars.{name}=x"]).config
    assert plan_launch(config, number=1, tag="x").job.environment[name] == "x"
