"""Every mistake is one message that names the key, the value, its source and what is valid.

Exit code 2, no traceback, nothing on stdout that could be taken for a result, nothing written or submitted.
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

import pytest

from launcher.cli.app import main
from launcher.config.compose import compose
from launcher.errors import UserError

# Files in a tree of the user's, by the choice that reads each.
TREE = {
    "syntax": "defaults: [bcm, _self_]\npartition: [a\nx: 1\n",
    "tab": "account:\n\tx: 1\n",
    "twice": "defaults: [bcm, _self_]\nmem: 1\nmem: 2\n",
    "listing": "- partition\n- account\n",
    "unknown": "defaults: [bcm, _self_]\n\npartion: p5\n",
    "typed": "defaults: [bcm, _self_]\nexclusive: maybe\n",
    "broken": "defaults: [bcm, _self_]\naccount: ${nope\n",
    "dangling": "defaults: [bcm, _self_]\naccount: ${cluster.partion}\n",
    "orphan": "partition: p5\n",
    "circle": "defaults: [circle, _self_]\n",
    "heir": "defaults:\n  - bmc\n  - _self_\n",
    "scalar": "defaults: bcm\n",
}


@dataclass(frozen=True)
class Places:
    """What the mistakes refer to; in a row, `@tree` and so on stand for these."""

    tree: Path
    templates: Path
    images: Path
    bare: Path  # an interpreter without any library
    file: Path

    def fill(self, text: str) -> str:
        for name in ("tree", "templates", "images", "bare", "file"):
            text = text.replace(f"@{name}", str(getattr(self, name)))
        return text


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Places:
    root = tmp_path_factory.mktemp("places")
    for folder in ("tree/cluster", "syntax", "undefined", "images"):
        (root / folder).mkdir(parents=True)
    for name, text in TREE.items():
        (root / "tree/cluster" / f"{name}.yaml").write_text(text)
    (root / "tree/cluster/latin.yaml").write_bytes(b"account: \xff\n")
    (root / "syntax/sbatch.sh.j2").write_text("#!/bin/bash\n{% if %}\n")
    (root / "undefined/task.sh.j2").write_text("#!/bin/bash\n\n{{ jobb.stage }}\n")
    (root / "images/nemo-24.07.sqsh").touch()
    (root / "file").touch()
    venv.create(root / "bare", with_pip=False)
    return Places(root / "tree", root, root / "images", root / "bare/bin/python", root / "file")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory to stand in, on a machine without Slurm."""
    monkeypatch.setenv("PATH", str(tmp_path_factory.mktemp("no-slurm")))
    monkeypatch.chdir(tmp_path)
    return tmp_path


SHIPPED = "conf/cluster/bcm.yaml:11"
LOCAL = ["cluster=local", "training=gpt3/tiny"]
MOCK = "training.model.data.data_impl=mock"

COMPOSING: list[tuple[list[str], list[str]]] = [
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
    (["cluster.partition='a"], ["a quote is not closed", "\"cluster.partition='a'\""]),
    (["cluster.partition=a,b"], ["several values", "cluster.partition=[a,b]", "\"cluster.partition='a,b'\""]),
    (["stages=[training"], ["stages=[training", "a list is [a, b]"]),
    (["data_dir=${nope"], ["data_dir=${nope", "interpolation is not closed"]),
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
    # of a key that is there twice, the one that counts
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
    (["cluster.mem=[1]"], ["cluster.mem=[1]: expected text"]),
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
    (["stages=[data_preparation]"], ["data_preparation.inputs=???: a value is needed", "text.yaml:8"]),
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
    (["--config-dir=@tree", "cluster=orphan"], ["'cluster.gpus_per_node'", "defaults: [_base, _self_]"]),
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
        ["--config-dir=@tree", "cluster=dangling"],
        ["'cluster.partion'", "dangling.yaml:2", "did you mean '${cluster.partition}'"],
    ),
]

T = "training.model.tensor_model_parallel_size"
P = "training.model.pipeline_model_parallel_size"
V = "training.model.virtual_pipeline_model_parallel_size"
BATCH = "training.model.global_batch_size"
TWO = "training.trainer.num_nodes=2"  # 16 GPUs

CHECKING: list[tuple[list[str], list[str]]] = [
    # types of NeMo's keys
    (["training.trainer.num_nodes=-3"], ["training.trainer.num_nodes=-3: expected 1 or more"]),
    (["training.trainer.num_nodes=0"], ["training.trainer.num_nodes=0: expected 1 or more"]),
    (["training.trainer.num_nodes=2.5"], ["training.trainer.num_nodes=2.5: expected a whole number"]),
    (
        ["training.model.micro_batch_size=foo"],
        [
            "training.model.micro_batch_size='foo': expected a whole number of at least 1 [type.whole]",
            "from the command line: training.model.micro_batch_size=foo",
        ],
    ),
    (["training.model.num_layers=1.5"], ["training.model.num_layers=1.5: expected a whole number"]),
    (["training.model.optim.lr=fast"], ["training.model.optim.lr='fast': expected a number above 0"]),
    (
        ["training.model.hidden_dropout=1.5"],
        ["hidden_dropout=1.5: expected a number of at least 0 and below 1"],
    ),
    (["training.model.sequence_parallel=maybe"], ["sequence_parallel='maybe': expected True or False"]),
    (
        ["training.model.micro_batch_size=foo", "training.model.hidden_size=0"],
        ["micro_batch_size='foo'", "hidden_size=0"],
    ),
    # layouts
    (
        [f"{T}=3", TWO],
        [
            f"{T}=3: tensor 3 × pipeline 1 × context 1 = 3 does not divide 2 nodes × 8 GPUs = 16",
            "[layout.world]",
            f"from the command line: {T}=3",
            f"training.trainer.num_nodes is from the command line: {TWO}",
            "valid tensor sizes: 1, 2, 4\n",
            "node counts that would do: 3, 6, 12, 24\n",
        ],
    ),
    ([f"{T}=64", TWO], [f"{T}=64", "= 64 does not divide 2 nodes × 8 GPUs = 16"]),
    (
        [f"{T}=8", TWO],
        [f"{T}=8: does not divide 12 attention heads", "sizes: 1, 2, 3, 4", "conf/training/gpt3/126m.yaml"],
    ),
    (["training.model.num_attention_heads=7"], ["=7: does not divide hidden size 768 [model.heads]"]),
    (["training.model.num_query_groups=5"], ["=5: does not divide 12 attention heads"]),
    (["training.model.ffn_hidden_size=3071", f"{T}=2"], ["3071 hidden units of the MLP"]),
    ([f"{P}=8"], [f"{P}=8: pipeline 8 does not divide 12 layers", "1, 2, 3, 4, 6, 12"]),
    (
        [f"{P}=4", f"{V}=5"],
        [f"{V}=5: does not divide 3 layers of a pipeline stage", "valid virtual sizes: null, 3"],
    ),
    ([f"{V}=2"], [f"{V}=2: virtual stages are parts of pipeline stages, and pipeline is 1"]),
    (
        ["training.model.sequence_parallel=True", "engine=megatron", "container=null"],
        ["sequence_parallel=true: it needs tensor > 1 [layout.sequence_parallel]"],
    ),
    (["training.model.context_parallel_size=3", "training.trainer.num_nodes=3"], ["2 × context 3 = 6"]),
    (
        ["cluster.gpus_per_node=4", "training.trainer.devices=8"],
        ["cluster.gpus_per_node=4: 8 tasks to a node", "[layout.gpus]"],
    ),
    (
        ["training=t5/220m", f"{P}=2", "training.model.pipeline_model_parallel_split_rank=2"],
        ["split_rank=2: with pipeline 2 the decoder begins in one of the stages 1 to 1"],
    ),
    (
        ["training=gpt3/175b", TWO],
        ["= 32 does not divide 2 nodes × 8 GPUs = 16", "node counts that would do: 4, 8, 16, 32, 64, 128"],
    ),
    # batches
    (
        [f"{BATCH}=100", TWO],
        [
            f"{BATCH}=100: not a multiple of micro batch 4 × data parallel 16 = 64",
            "global batches near it: 64, 128, 192",
        ],
    ),
    ([f"{BATCH}=1", TWO], [f"{BATCH}=1: not a multiple of micro batch 4 × data parallel 16 = 64"]),
    (["training.model.rampup_batch_size=[64]"], ["rampup_batch_size=[64]: expected three whole numbers"]),
    (["training.trainer.accumulate_grad_batches=2"], ["accumulated already [batch.accumulation]"]),
    # the model and its data
    (
        ["training.model.data.seq_length=1024"],
        ["seq_length=1024: the model is built for sequences of 2048", "[model.sequence]"],
    ),
    (["training.model.max_position_embeddings=1024"], ["learned positions for fewer tokens"]),
    (
        ["training.model.activations_checkpoint_granularity=full"],
        ["activations_checkpoint_method=null", "block or uniform", "activations_checkpoint_num_layers=null"],
    ),
    (["training.model.optim.sched.min_lr=1"], ["not below the learning rate 0.0006 that it falls from"]),
    (
        ["training.trainer.max_time=1800"],
        [
            "training.trainer.max_time=1800: expected days:hours:minutes:seconds",
            "command line",
            "[time.max_time]",
        ],
    ),
    (
        ["--no-check=layout.gpu"],
        ["--no-check=layout.gpu: there is no such check", "did you mean 'layout.gpus'"],
    ),
    # the cluster
    (["training.run.time_limit=banana"], ["training.run.time_limit='banana'", "DAYS-HOURS"]),
    (["cluster.srun_args='--x \"y'"], ["cluster.srun_args='--x \"y': no closing quotation"]),
    (["cluster.srun_args={a: 1}"], ["cluster.srun_args: expected a list", "line: cluster.srun_args={a: 1}"]),
    (["cluster.mem=plenty"], ["cluster.mem='plenty'", "64G"]),
    (["env_vars={A: [1]}"], ["env_vars.A=[1]: expected text"]),
]

LAUNCHING: list[tuple[list[str], list[str]]] = [
    (["container=null", "engine=nemo"], ["there is no Slurm here", "slipway sandbox up", "cluster=local"]),
    (
        ["container=@images/nemo-24.7.sqsh"],
        ["there is no such file", "nemo-24.07.sqsh", "command line: container=@images"],
    ),
    ([*LOCAL, MOCK, "cluster.python=@bare"], ["does not find torch, megatron", "pip install 'PATH[train]'"]),
    (
        ["cluster=sandbox", "training=gpt3/tiny", "cluster.python=@bare"],
        ["cluster.python='@bare'", "container=..."],
    ),
    ([*LOCAL, MOCK, "cluster.python=@images/python3"], ["@images/python3': there is no such file"]),
    (
        [*LOCAL, MOCK, "cluster.python=/bin/true", "base_results_dir=@file/x"],
        ["@file/x", "a directory", "base_results_dir=..."],
    ),
]

OTHER_VERBS: list[tuple[list[str], list[str]]] = [
    (["status", "no_such_run"], ["no_such_run"]),
    (["logs", "no_such_run"], ["there is no run 'no_such_run'"]),
    (["plot", "no_such_run"], ["there is no run 'no_such_run'"]),
    (["follow", "no_such_run"], ["there is no run 'no_such_run'"]),
    (["data", "tokenize", "no_such_file"], ["no_such_file: no such file or directory"]),
    (["data", "tokenize", "@file", "cluster=bmc"], ["cluster=bmc", "did you mean 'bcm'"]),
    (["sandbox", "up", "--nodes=0"], ["--nodes 0"]),
    (["lanch"], ["lanch: there is no such verb", "did you mean 'launch'"]),
    (["training=gpt3/5b"], ["slipway launch training=gpt3/5b"]),
    (["launch", "--cluster=bcm"], ["--cluster=bcm", "no dashes in front: cluster=bcm"]),
    (["launch", "-training=gpt3/5b"], ["no dashes in front: training=gpt3/5b"]),
    (["launch", "--nodes"], ["unrecognized arguments: --nodes"]),
]

ROWS = [
    *((["launch", "--dry-run", *row], words) for row, words in [*COMPOSING, *CHECKING]),
    *((["launch", *row], words) for row, words in LAUNCHING),
    *OTHER_VERBS,
]


def run(arguments: list[str]) -> int:
    try:
        return main(arguments)
    except SystemExit as end:  # argparse
        assert isinstance(end.code, int)
        return end.code


@pytest.mark.parametrize(("arguments", "words"), ROWS, ids=lambda value: ascii(" ".join(value))[:60])
def test_a_mistake_is_told_and_nothing_is_done(
    arguments: list[str],
    words: list[str],
    places: Places,
    here: Path,
    repository: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = run([places.fill(argument) for argument in arguments])
    told = capsys.readouterr()
    for word in words:
        assert places.fill(word).replace("@@", f"{repository}/") in told.err
    assert (code, told.out) == (2, "")
    assert "Traceback" not in told.err
    assert "slipway: " in told.err
    assert not any(ord(char) < 32 for char in told.err.replace("\n", ""))
    assert list(here.iterdir()) == []


def test_several_mistakes_are_told_together(capsys: pytest.CaptureFixture[str]) -> None:
    mistakes = ["cluster.exclusive=maybe", "cluster.cpus_per_task=0", "+cluster.partion=x"]
    assert run(["launch", "--dry-run", *mistakes]) == 2
    assert capsys.readouterr().err == (
        "slipway: cluster.exclusive='maybe': expected true or false, or user or mcs\n"
        "  from the command line: cluster.exclusive=maybe\n"
        "slipway: cluster.cpus_per_task=0: expected 1 or more\n"
        "  from the command line: cluster.cpus_per_task=0\n"
        "slipway: cluster.partion: there is no such key\n"
        "  from the command line: +cluster.partion=x\n"
        "  did you mean 'partition'?\n"
    )


def told_of(*overrides: str) -> list[str]:
    with pytest.raises(UserError) as caught:
        compose(overrides)
    return [mistake.message for mistake in caught.value.mistakes]


def test_mistakes_of_every_kind_are_told_together() -> None:
    """In the order of the command line, though Hydra stops at the first that it meets."""
    assert told_of(
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


def test_what_is_missing_is_told_with_the_others() -> None:
    assert told_of("stages=[data_preparation]", "cluster.exclusive=maybe", "cluster.mem=plenty")[-1] == (
        "data_preparation.inputs=???: a value is needed"
    )


def test_a_wrong_choice_accuses_no_key_of_the_right_one() -> None:
    """Keys that only T5 has, and a size of T5 that there is not."""
    overrides = ["training=t5/3c", "training.model.pipeline_model_parallel_split_rank=2", "cluster.mem=x"]
    assert [message.partition(":")[0] for message in told_of(*overrides)] == [
        "training=t5/3c",
        "cluster.mem='x'",
    ]


def test_a_value_that_another_one_refers_to_is_told_once() -> None:
    assert told_of("base_results_dir=${oc.env:SLIPWAY_NO_SUCH}/x") == [
        "base_results_dir: the environment variable SLIPWAY_NO_SUCH is not set"
    ]


# What the reference launcher got wrong, and works: an override, and a line of the script.
WORKING = [
    (["cluster.mem=64GB"], "#SBATCH --mem=64G\n"),
    (["cluster.exclusive=False"], None),
    (["cluster.exclusive=True"], "#SBATCH --exclusive\n"),
    (["training.run.time_limit=30"], "#SBATCH --time=30\n"),
    (["training.run.time_limit='2-12'"], "#SBATCH --time=2-12\n"),
    (["training.run.time_limit=UNLIMITED"], "#SBATCH --time=UNLIMITED\n"),
    (["+cluster.gres=gpu:8"], "#SBATCH --gpus-per-node=8\n"),
    (["+cluster.gres=gpu:8", "cluster.gpus_per_node=null"], "#SBATCH --gres=gpu:8\n"),
    (["+cluster.partition=gpu"], "#SBATCH --partition=gpu\n"),
    (["++cluster.partition=gpu"], "#SBATCH --partition=gpu\n"),
    (["+training=gpt3/5b"], "#SBATCH --job-name=nemo-megatron-gpt3_5b\n"),
    (["+cluster=p5", "++training=gpt3/5b"], "#SBATCH --job-name=nemo-megatron-gpt3_5b\n"),
    (["+training.trainer.num_nodes=2"], "#SBATCH --nodes=2\n"),
    (["training=../x", "training=gpt3/5b"], "#SBATCH --job-name=nemo-megatron-gpt3_5b\n"),
    (["cluster.srun_args=--no-container-mount-home"], "    --no-container-mount-home \\\n"),
    (["cluster.srun_args=--mpi=pmix --label"], "    --mpi=pmix \\\n    --label \\\n"),
    (["cluster.srun_args='--comment=\"a b\" --label'"], "    '--comment=a b' \\\n    --label \\\n"),
    (["cluster.srun_args=[--container-unshare=net]"], "    --container-unshare=net \\\n"),
    (["+cluster.srun_args=[--a=1, --b]"], "    --a=1 \\\n    --b \\\n"),
    (["cluster.srun_args=[]"], None),
    (["base_results_dir=here"], "{here}/here/gpt3_126m/launches/1/"),
    (["+training.model.gc_interval=100"], "#SBATCH --nodes=8\n"),
    ([f"{T}=3", "--no-check=layout.world"], "#SBATCH --nodes=8\n"),
    ([f"{T}=8", TWO, "--no-check", "layout.tensor"], "#SBATCH --nodes=2\n"),
]


@pytest.mark.parametrize(("arguments", "line"), WORKING, ids=lambda value: ascii(value)[:50])
def test_what_is_no_mistake(
    arguments: list[str], line: str | None, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["launch", "--dry-run", *arguments]) == 0
    told = capsys.readouterr()
    assert told.out.startswith("#!/bin/bash\n")
    if line is None:
        assert "--exclusive" not in told.out or "--no-container-mount-home" not in told.out
    else:
        assert line.format(here=here) in told.out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["+training.model.micro_batchsize=4"],
            "slipway: warning: training.model.micro_batchsize=4: no shipped configuration has this key"
            " [keys.unknown]\n"
            "  from the command line: +training.model.micro_batchsize=4\n"
            "  did you mean training.model.micro_batch_size?\n",
        ),
        (
            ["training.trainer.max_steps=100"],
            "slipway: warning: training.trainer.val_check_interval=2000: longer than the training,",
        ),
        (
            [TWO, "training.trainer.devices=4"],
            "cluster.gpus_per_node=8: 4 GPUs of each node would be idle: training.trainer.devices=4",
        ),
        (["training.trainer.max_time='09:00:00:00'"], "not before the job's time limit, 1-00:00:00"),
    ],
)
def test_a_warning_stops_nothing(
    arguments: list[str], words: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["launch", "--dry-run", *arguments]) == 0
    told = capsys.readouterr()
    assert words in told.err
    assert told.out.startswith("#!/bin/bash\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["training=gpt3/5B"], "training=gpt3/5B: there is no such choice"),
        (["cluster.exclusive=maybe"], "from the command line: cluster.exclusive=maybe"),
        (["env_vars.X=\udcff"], r"env_vars.X=\udcff: this override is not valid UTF-8"),
    ],
)
def test_the_same_in_a_process_of_its_own(
    arguments: list[str], words: str, here: Path, repository: Path
) -> None:
    command = [sys.executable, str(repository / "launcher/main.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert list(here.iterdir()) == []


def test_where_one_stands_may_be_gone(here: Path, repository: Path) -> None:
    program = (
        "import os, sys; os.mkdir('x'); os.chdir('x'); os.rmdir('../x'); os.execv(sys.argv[1], sys.argv[1:])"
    )
    command = [sys.executable, str(repository / "launcher/main.py"), "--dry-run"]
    done = subprocess.run([sys.executable, "-c", program, *command], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "slipway: the current directory was deleted\n  cd to one that exists\n"


def test_a_full_disk_is_told(
    tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    disk = tmp_path_factory.mktemp("disk")
    environment = {**os.environ, "PATH": "/usr/bin:/bin:/usr/sbin:/sbin"}
    mount = ["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(disk)]
    try:
        mounted = subprocess.run(mount, capture_output=True, env=environment).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        pytest.skip("a small disk cannot be mounted here")
    try:
        launch = ["launch", *LOCAL, MOCK, "--no-check=space.checkpoints", "cluster.python=/bin/true"]
        assert run([*launch, f"base_results_dir={disk}/results"]) == 2
    finally:
        subprocess.run(["umount", str(disk)], check=True, env=environment)
    told = capsys.readouterr()
    assert "no space left" in told.err.lower()
    assert f"{disk}/results" in told.err
    assert "Traceback" not in told.err


def test_a_bug_keeps_its_traceback(here: Path, repository: Path) -> None:
    program = """
import sys
from launcher import drafting
from launcher.cli.app import main
from launcher.config.compose import compose
from launcher.errors import UserError
def bug(*arguments, **named):
    raise ValueError("a bug of ours")
drafting.plan_launch = bug
sys.exit(main(["launch", "--dry-run"]))
"""
    environment = {**os.environ, "PYTHONPATH": str(repository)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout) == (1, "")
    assert "Traceback" in done.stderr
    assert "ValueError: a bug of ours" in done.stderr
    assert list(here.iterdir()) == []
