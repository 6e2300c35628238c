"""Mistakes that the checks find in a composed configuration, warnings, and overrides that are no mistakes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.mistakes.places import Places, Rows, assert_mistake, run

T = "training.model.tensor_model_parallel_size"
P = "training.model.pipeline_model_parallel_size"
V = "training.model.virtual_pipeline_model_parallel_size"
BATCH = "training.model.global_batch_size"
TWO = "training.trainer.num_nodes=2"  # 16 GPUs

CHECKING: Rows = [
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
        ["cluster.gpus_per_node=4: 8 tasks per node", "[layout.gpus]"],
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


@pytest.mark.parametrize(("arguments", "words"), CHECKING, ids=lambda value: ascii(" ".join(value))[:60])
def test_mistake_of_the_configuration_is_reported_and_nothing_is_written(
    arguments: list[str],
    words: list[str],
    places: Places,
    cwd: Path,
    repository: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert_mistake(["launch", "--dry-run", *arguments], words, places, cwd, repository, capsys)


# Overrides that the reference launcher got wrong, each with a line of the script that it leads to.
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
def test_valid_overrides_are_accepted(
    arguments: list[str], line: str | None, cwd: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["launch", "--dry-run", *arguments]) == 0
    output = capsys.readouterr()
    assert output.out.startswith("#!/bin/bash\n")
    if line is None:
        assert "--exclusive" not in output.out or "--no-container-mount-home" not in output.out
    else:
        assert line.format(here=cwd) in output.out


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
def test_warning_does_not_stop_the_launch(
    arguments: list[str], words: str, cwd: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["launch", "--dry-run", *arguments]) == 0
    output = capsys.readouterr()
    assert words in output.err
    assert output.out.startswith("#!/bin/bash\n")
