"""Mistakes in choices, overrides and trees: each message names the key, the value and its source.

Exit code 2, no traceback, nothing on stdout that could be taken for a result, nothing written or submitted.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.config.compose import compose
from launcher.errors import UserError
from tests.cli.mistakes.places import SHIPPED, Places, Rows, assert_mistake, run

COMPOSING: Rows = [
    # choices
    (
        ["training=gpt3/5B"],
        ["training=gpt3/5B", "'gpt3/5b'", "valid: gpt3/126m, gpt3/175b", "command line"],
    ),
    (["training=gpt/5b"], ["no such choice", "did you mean 'gpt3/5b'"]),
    (["training=gpt3"], ["training=gpt3: there is no such choice", "valid: gpt3/126m, gpt3/175b"]),
    (["training=gpt3/5b/"], ["training=gpt3/5b/", "did you mean 'gpt3/5b'"]),
    (["training=gpt3/_base"], ["there is no such choice", "valid: gpt3/126m"]),
    (["training=../cluster/bcm"], ["training=../cluster/bcm: there is no such choice"]),
    (["training="], ["training=: there is no such choice", "gpt3/126m, gpt3/175b"]),
    (["training=null"], ["training=null: there is no such choice"]),
    (["training=5"], ["training=5: there is no such choice", "gpt3/126m, gpt3/175b"]),
    (["training=0"], ["training=0: there is no such choice"]),
    (["training=false"], ["training=false: there is no such choice"]),
    (["++command=null"], ["command=null: there is no such choice"]),
    (["~command=[default]"], ["command=[default]: there is no such choice"]),
    (["cluster=[bcm,1.5]"], ["cluster=[bcm,1.5]: there is no such choice", "valid: bcm, interactive"]),
    (["cluster=[[bcm]]"], ["cluster=[[bcm]]: there is no such choice"]),
    (["training=gpt3/400m"], ["training=gpt3/400m: there is no such choice", "mean 'gpt3/400m_improved'?"]),
    (["training=gpt3/1b3"], ["did you mean 'gpt3/1b_improved'? valid: gpt3/126m"]),
    (["+training=gpt3/5B"], ["+training=gpt3/5B", "did you mean 'gpt3/5b'"]),
    (["cluster=BCM"], ["cluster=BCM", "did you mean 'bcm'"]),
    (["cluster=_base"], ["cluster=_base: there is no such choice", "bcm, ", "local, "]),
    (["cluster=bcm,local"], ["cluster=bcm,local: there is no such choice"]),
    (["traning=gpt3/5b"], ["traning=gpt3/5b: there is no such key", "did you mean 'training'"]),
    (["stages=[trainin]"], ["stages=trainin", "did you mean 'training'", "command line: stages=[trainin]"]),
    (["stages=[]"], ["stages=[]: no stage", "valid: data_preparation, training"]),
    # the form of an override
    ([""], ["an empty override", "KEY=VALUE"]),
    (["=x"], ["=x: a key is missing"]),
    (["+"], ["+: a key is missing"]),
    (["training"], ["training: a value is missing", "training=CHOICE"]),
    (["gpt3/5b"], ["gpt3/5b: a value is missing", "training=gpt3/5b"]),
    (["1a=2"], ["1a=2: not a key"]),
    (["cluster.partition='a"], ["a quote or an interpolation is not closed", "\"cluster.partition='a'\""]),
    # hints are tried before they are printed
    (
        ["cluster.partition=a,b"],
        ["several values for one key\n  from the", "\n  if it is text, quote it twice:"],
    ),
    (["container_mounts=a,b"], ["several values", "\n  a list: 'container_mounts=[a,b]'\n"]),
    (["training.trainer.max_steps=1,2"], ["max_steps=1,2\n  one launch for each value: slipway sweep\n"]),
    (["cluster.sbatch.array=1,2"], ["array=1,2\n  one launch for each value: slipway sweep\n"]),
    (["cluster.partion=a,b"], ["cluster.partion=a,b: there is no such key", "did you mean 'partition'?"]),
    (["time=1:00:00"], ["did you mean 'training.trainer.max_time' or 'training.run.time_limit'"]),
    (["stages=[training"], ["stages=[training", "a list is [a, b]"]),
    (["data_dir=${nope"], ["data_dir=${nope", "an interpolation is not closed"]),
    (["training.trainer.num_nodes=choice(1,2)"], ["sweeps are not supported"]),
    # keys
    (["cluster.partion=x"], ["cluster.partion=x: there is no such key", "did you mean 'partition'"]),
    (["+cluster.partion=x"], ["cluster.partion", "command line: +cluster.partion=x", "'partition'"]),
    (["partition=gpu"], ["partition=gpu", "did you mean 'cluster.partition'"]),
    (["num_nodes=2"], ["did you mean 'training.trainer.num_nodes'"]),
    (["nodes=2"], ["did you mean 'resilience.nodes' or 'training.trainer.num_nodes'"]),
    (
        ["training.model.micro_batchsize=3"],
        ["did you mean 'micro_batch_size'", "+training.model.micro_batchsize=..."],
    ),
    (["training.model.num_layers.x=1"], ["training.model.num_layers is not there, or holds no keys"]),
    # if a key is given twice, the last one counts
    (
        ["cluster.partion=a", "cluster.partion=b"],
        ["cluster.partion=b: there is no such key", "line: cluster.partion=b"],
    ),
    (["training=gpt3/5b", "training=gpt3/5"], ["training=gpt3/5: there", "command line: training=gpt3/5\n"]),
    (["training.run.name=a/b", "training.run.name=c/d"], ["name='c/d': not a safe", "training.run.name=c/d"]),
    (
        ["cluster.account=x", "cluster.account=<x"],
        ["cluster.account=<x: a character", "line: cluster.account=<x"],
    ),
    # keys of a mapping
    (
        ["training.trainer={num_node: 3, y: {z: 1}}"],
        [
            "training.trainer.num_node: there is no such key",
            "did you mean 'num_nodes'?",
            "training.trainer.y:",
        ],
    ),
    (
        ["image.flavor=dev"],
        ["image.flavor=dev: there is no such key", "`slipway image build NAME image.flavor=dev`"],
    ),
    (["training.model.data.data_prefix.train=[a]"], ["train=[a]: there is no such key", "holds no keys"]),
    (["+training.model.data.data_prefix.train=a"], ["train=a: there is no such key", "holds no keys"]),
    (["~training.model.optin"], ["~training.model.optin: there is no such key", "'training.model.optim'"]),
    # mappings that a site fills
    (
        ["estimates.attained={gpus: {h100: {half: 0.6}}, links: 0.7}"],
        ["added with +", "'+estimates.attained={gpus: {h100: {half: 0.6}}, links: 0.7}'"],
    ),
    (["cluster.gpu_types.l4-24gb.nic_gbit_s=9"], ["to add it: +cluster.gpu_types.l4-24gb.nic_gbit_s=9"]),
    (
        ["+estimates.attained={links: 7}"],
        ["estimates.attained.links=7: expected", "command line: +estimates.attained={links: 7}"],
    ),
    (["~cluster.mem"], ["cluster.mem: this key is needed", "command line: ~cluster.mem"]),
    # values
    (
        ["cluster.exclusive=maybe"],
        ["cluster.exclusive='maybe': expected true or false", "from the command line"],
    ),
    (["cluster.exclusive=null"], ["cluster.exclusive=null: expected true or false"]),
    (["cluster.mem=[1]"], ["cluster.mem=[1]: expected text\n"]),
    (["cluster.mem={a: 1}"], ["cluster.mem={a: 1}: expected text"]),
    (["training.run.time_limit=1.5"], ["training.run.time_limit='1.5': not a time limit"]),
    (["container_mounts=/a"], ["container_mounts='/a': expected a list, such as [a, b]"]),
    (["cluster.gpus_per_node=-1"], ["cluster.gpus_per_node=-1: expected 0 or more"]),
    (["engine=nemoo"], ["engine='nemoo': expected 'nemo'", "did you mean 'nemo'"]),
    (["training.trainer.num_nodes=two"], ["training.trainer.num_nodes='two': expected a whole number"]),
    (
        ["training.trainer={num_nodes: 0}"],
        ["num_nodes=0: expected 1 or more", "training.trainer={num_nodes: 0}"],
    ),
    (["training.trainer=null"], ["training.trainer=null: expected keys below it"]),
    (["training.run=null"], ["training.run: expected keys below it", "command line: training.run=null"]),
    (["cluster.exclusive=3", "cluster.mem=[1]"], ["cluster.exclusive=3", "cluster.mem=[1]"]),
    # what is missing, and what refers to it
    (["stages=[data_preparation]"], ["data_preparation.inputs=???: a value is needed", "_base.yaml:8"]),
    (["training.run.name=???"], ["training.run.name=???: a value is needed", "give one"]),
    (["base_results_dir=null"], ["base_results_dir=null: a directory is needed"]),
    (["~data_dir"], ["data_dir: a directory is needed", "command line: ~data_dir"]),
    (["data_dir='~nobody-of-that-name/x'"], ["data_dir='~nobody-of-that-name/x'", "no such user's home"]),
    (["data_dir=${base_result_dir}/x"], ["'base_result_dir'", "did you mean '${base_results_dir}'"]),
    (["data_dir=${oc.env:SLIPWAY_NO_SUCH}"], ["environment variable SLIPWAY_NO_SUCH is not set"]),
    (["cluster.mem=${multiplied:1,2}"], ["no resolver 'multiplied'", "did you mean 'multiply'"]),
    (["data_dir=${data_dir}"], ["data_dir: it refers to itself"]),
    # values that no script can carry
    (["training.run.name='$(touch x)'"], ["training.run.name='$(touch x)': not a safe file name"]),
    (["training.run.name=../up"], ["training.run.name='../up': not a safe file name"]),
    ([f"training.run.name={'x' * 300}"], ["300 characters are too many"]),
    ([f"base_results_dir=/{'x' * 300}"], ["file name too long", "base_results_dir=..."]),
    (["cluster.partition='a\nb'"], [r"cluster.partition='a\nb'", "a line break cannot be part of a value"]),
    (["env_vars.X=a\nb"], [r"env_vars.X='a\nb'", "a line break"]),
    (["env_vars.X=a\0b"], [r"env_vars.X='a\x00b'", "a NUL character"]),
    (["cluster.account=\udcff"], [r"cluster.account=\udcff", "not valid UTF-8"]),
    (["env_vars.A-B=1"], ["env_vars.A-B: not a name that a shell variable can have"]),
    # the plan
    (["cluster.gres=gpu:4"], ["cluster.gres='gpu:4'", "contradict", f"gpus_per_node is from @@{SHIPPED}"]),
    (["container_mounts=['/a,/b']"], ["'/a,/b' is not a mount", "source:target", "from the command line"]),
    (["base_results_dir=/x:y"], ["base_results_dir: '/x:y'", "Pyxis separates with , and :"]),
    (["training.run.results_dir=/x:y"], ["training.run.results_dir: '/x:y'", "Pyxis"]),
    (["data_dir='/a,b'"], ["data_dir: '/a,b'", "Pyxis", "command line: data_dir='/a,b'"]),
    (["container=nemo.sqsh"], ["container='nemo.sqsh'", "whole path", "/nemo.sqsh"]),
    (["cluster=local", "cluster.python=bin/python"], ["cluster.python='bin/python'", "/bin/python"]),
    (["training.model.data=null"], ["training.model.data=null: keys are needed"]),
    (["~training"], ["stages=[training]", "training is from the command line: ~training"]),
    (["stages=[training,training]"], ["stages=[training,training]: a stage is named twice"]),
    (
        ["stages=[data_preparation,training]", "data_preparation.inputs=[/x]", "cluster=local"],
        [
            "stages=[data_preparation,training]",
            "no queue",
            "stages=[data_preparation], then stages=[training]",
        ],
    ),
    (["cluster=local", "resilience.links=2"], ["resilience.links=2: cluster.scheduler=local has no queue"]),
    # trees and templates of the user's own
    (["--config-dir=/no/such"], ["--config-dir /no/such: no such directory"]),
    (["--template-dir=/no/such"], ["--template-dir /no/such: no such directory"]),
    (["--template-dir=@templates/syntax"], ["syntax/sbatch.sh.j2:2: this template is not valid"]),
    (["--template-dir=@templates/undefined"], ["undefined/task.sh.j2:3:", "'jobb' is undefined"]),
    (["--config-dir=@tree", "cluster=syntax"], ["@tree/cluster/syntax.yaml:3: not valid YAML"]),
    (["--config-dir=@tree", "cluster=tab"], ["tab.yaml:2: not valid YAML", "indent with spaces"]),
    (["--config-dir=@tree", "cluster=twice"], ["twice.yaml:3: not valid YAML", "duplicate key mem"]),
    (["--config-dir=@tree", "cluster=listing"], ["listing.yaml: not a mapping", "KEY: VALUE"]),
    (["--config-dir=@tree", "cluster=latin"], ["latin.yaml: not valid UTF-8"]),
    (["--config-dir=@tree", "cluster=broken"], ["broken.yaml: account: not an interpolation"]),
    (["--config-dir=@tree", "cluster=scalar"], ["scalar.yaml: defaults='bcm': expected a list"]),
    (["--config-dir=@tree", "cluster=circle"], ["cluster=circle", "in circles"]),
    (
        ["--config-dir=@tree", "cluster=heir"],
        ["cluster/bmc: there is no such file", "@tree/cluster/heir.yaml:2"],
    ),
    (["--config-dir=@tree", "cluster=orphan"], ["'cluster.gpus_per_node'", "defaults: [bcm, _self_]"]),
    (
        ["--config-dir=@tree", "cluster=unknown"],
        [
            "cluster.partion: there is no such key",
            "from @tree/cluster/unknown.yaml:3",
            "did you mean 'partition'",
        ],
    ),
    (
        ["--config-dir=@tree", "cluster=typed"],
        ["cluster.exclusive='maybe'", "from @tree/cluster/typed.yaml:2"],
    ),
    (
        ["--config-dir=@tree", "training=bare"],
        ["the file in training/ that is built on is named with @_here_"],
    ),
    (
        ["--config-dir=@tree", "cluster=dangling"],
        ["'cluster.partion'", "dangling.yaml:2", "did you mean '${cluster.partition}'"],
    ),
]


@pytest.mark.parametrize(("arguments", "words"), COMPOSING, ids=lambda value: ascii(" ".join(value))[:60])
def test_composition_mistake_is_reported_and_nothing_is_written(
    arguments: list[str],
    words: list[str],
    places: Places,
    cwd: Path,
    repository: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert_mistake(["launch", "--dry-run", *arguments], words, places, cwd, repository, capsys)


def test_several_mistakes_are_reported_together(capsys: pytest.CaptureFixture[str]) -> None:
    mistakes = ["cluster.exclusive=maybe", "cluster.cpus_per_task=0", "+cluster.partion=x"]
    assert run(["launch", "--dry-run", *mistakes]) == 2
    assert capsys.readouterr().err == (
        "slipway: cluster.exclusive='maybe': expected true or false, or user, mcs or topo\n"
        "  from the command line: cluster.exclusive=maybe\n"
        "slipway: cluster.cpus_per_task=0: expected 1 or more\n"
        "  from the command line: cluster.cpus_per_task=0\n"
        "slipway: cluster.partion: there is no such key\n"
        "  from the command line: +cluster.partion=x\n"
        "  did you mean 'partition'?\n"
    )


def messages_of(*overrides: str) -> list[str]:
    with pytest.raises(UserError) as raised:
        compose(overrides)
    return [mistake.message for mistake in raised.value.mistakes]


def test_mistakes_of_every_kind_are_reported_together() -> None:
    """The order is that of the command line, though Hydra stops at the first mistake."""
    assert messages_of(
        "cluster.partion=x",
        "training.trainer.num_node=3",
        "cluster.mem=plenty",
        "cluster.comment=<x",
        "trainnig=3",
        "env_vars.X='<Your value>'",
        "training=gpt3/400m",
        "cluster.account=${oc.env:SLIPWAY_NO_SUCH}",
        "training.run.time_limit=",
        "~cluster.nothing",
    ) == [
        "cluster.partion=x: there is no such key",
        "training.trainer.num_node=3: there is no such key",
        "cluster.mem='plenty': not an amount of memory; valid: 64G, 64GB, 65536 (megabytes) or 0 (all)",
        "cluster.comment=<x: a character in this value means something else to Hydra",
        "trainnig=3: there is no such key",
        "env_vars.X='<Your value>': a placeholder, not a value",
        "training=gpt3/400m: there is no such choice",
        "cluster.account: the environment variable SLIPWAY_NO_SUCH is not set",
        "training.run.time_limit='': not a time limit; valid: MINUTES[:SECONDS], HOURS:MINUTES:SECONDS or "
        "DAYS-HOURS[:MINUTES[:SECONDS]]",
        "~cluster.nothing: there is no such key",
    ]


def test_missing_value_is_reported_with_the_others() -> None:
    assert messages_of("stages=[data_preparation]", "cluster.exclusive=maybe", "cluster.mem=plenty")[-1] == (
        "data_preparation.inputs=???: a value is needed"
    )


def test_wrong_choice_blames_no_key_of_the_right_one() -> None:
    """The keys are T5's own, and the size of T5 does not exist."""
    overrides = ["training=t5/3c", "training.model.pipeline_model_parallel_split_rank=2", "cluster.mem=x"]
    assert [message.partition(":")[0] for message in messages_of(*overrides)] == [
        "training=t5/3c",
        "cluster.mem='x'",
    ]


def test_referenced_value_is_reported_once() -> None:
    assert messages_of("base_results_dir=${oc.env:SLIPWAY_NO_SUCH}/x") == [
        "base_results_dir: the environment variable SLIPWAY_NO_SUCH is not set"
    ]
