"""Values stay as they were written, although YAML and Hydra read numbers where text is meant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launcher.config.compose import compose, list_options
from launcher.config.sources import Sources
from launcher.errors import UserError

OURS = """\
defaults: [bcm, _self_]
account: 0042
mem: 64_0
partition: 1e3
env_vars: {UMASK: 0022, WAIT: 12:30:00, FLAG: yes, VERSION: 1.10, HEX: 0x10}
"""


def test_numbers_in_files_arrive_as_they_were_written(tmp_path: Path) -> None:
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster" / "ours.yaml").write_text(OURS.replace("64_0", "64000"))
    cluster = compose(["cluster=ours"], (tmp_path,)).config.cluster
    assert (cluster.account, cluster.mem, cluster.partition) == ("0042", "64000", "1e3")
    expected = {"UMASK": "0022", "WAIT": "12:30:00", "FLAG": "yes", "VERSION": "1.10", "HEX": "0x10"}
    assert {name: cluster.env_vars[name] for name in expected} == expected
    (tmp_path / "cluster" / "ours.yaml").write_text(OURS)
    with pytest.raises(UserError, match=r"cluster\.mem='64_0'") as raised:
        compose(["cluster=ours"], (tmp_path,))
    assert "ours.yaml:3" in str(raised.value)


def test_a_time_limit_in_a_file_is_no_number_of_minutes(tmp_path: Path) -> None:
    (tmp_path / "training").mkdir()
    text = "defaults: [gpt3/126m@_here_, _self_]\nrun:\n  time_limit: 1:30:00\n  name: 1_000\n"
    (tmp_path / "training" / "mine.yaml").write_text(text)
    training = compose(["training=mine"], (tmp_path,)).config.training
    assert training is not None
    assert (training.run.time_limit, training.run.name) == ("1:30:00", "1_000")
    assert training.run.results_dir.endswith("/results/1_000"), "also where another key refers to it"
    assert training.trainer["max_time"] < "00:01:30:00"


def test_numbers_on_the_command_line_arrive_as_they_were_typed(tmp_path: Path) -> None:
    config = compose(
        [
            "training.run.time_limit=30",
            "cluster.partition=007",
            "training.run.name=1_000",
            "base_results_dir=1e3",
        ]
    ).config
    assert config.training is not None
    assert (config.training.run.time_limit, config.cluster.partition) == ("30", "007")
    assert config.base_results_dir == str(Path.cwd() / "1e3")
    assert config.training.run.results_dir == str(Path.cwd() / "1e3" / "1_000")


def test_our_own_files_write_text_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking up how a number was written takes a second reading of the tree."""

    def fail_on_lookup(self: Sources, key: str) -> str:
        raise AssertionError(f"{key} needs quotes")

    monkeypatch.setattr(Sources, "written", fail_on_lookup)
    for group in ("cluster", "training"):
        for choice in list_options(group):
            compose([f"{group}={choice}"])


@pytest.mark.parametrize(
    ("overrides", "key", "expected"),
    [
        (["base_results_dir=$HOME/r"], "base_results_dir", "{}/r"),
        (["base_results_dir=~/r"], "base_results_dir", "{}/r"),
        (["container=~/x.sqsh"], "container", "{}/x.sqsh"),
        (["env_files.A_TOKEN=$HOME/token"], "env_files.A_TOKEN", "{}/token"),
        (["wandb_api_key_file=~/key"], "wandb_api_key_file", "{}/key"),
        (["cluster.python=~/bin/python"], "cluster.python", "{}/bin/python"),
        (["training.run.results_dir=~/r"], "training.run.results_dir", "{}/r"),
        (["training.model.tokenizer.vocab_file=~/v"], "training.model.tokenizer.vocab_file", "{}/v"),
        (["training.model.data.data_prefix=[1.0,'~/x']"], "training.model.data.data_prefix.1", "{}/x"),
        (["base_results_dir=/a~/b"], "base_results_dir", "/a~/b"),
        (["env_vars.A=~/x", "env_vars.B=$HOME"], "env_vars.A", "~/x"),
        (["env_expand.A=$HOME/x"], "env_expand.A", "$HOME/x"),
        (["cluster.task_prefix=[env,$HOME/x]"], "cluster.task_prefix.1", "$HOME/x"),
        (["cluster.comment=$HOMER/x"], "cluster.comment", "$HOMER/x"),
    ],
)
def test_home_is_that_of_the_user_where_a_value_begins_with_it(
    overrides: list[str], key: str, expected: str
) -> None:
    value: Any = compose(overrides).config.model_dump()
    for part in key.split("."):
        value = value[int(part) if part.isdecimal() else part]
    assert value == expected.format(Path.home())
