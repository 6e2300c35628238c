"""Plans of `--smoke` for the stock sizes: the work of each GPU, on one node and for two steps."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from launcher.drafting import Draft, Request, draft
from launcher.errors import UserError
from launcher.estimates.parallelism import read_parallel_config
from launcher.estimates.values import Values
from launcher.smoke import Smoke, drop_smoke, plan_smoke
from slipway.arithmetic.layout import ParallelConfig
from tests.checks.shelves import stock

IMAGE = "container=nvcr.io#nvidia/nemo:24.07"


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that plans a smoke, in a directory with a GPT's data."""
    stock(tmp_path / "data")
    monkeypatch.chdir(tmp_path)

    def call(*overrides: str) -> tuple[Draft, Smoke]:
        words = ["cluster=bcm", IMAGE, f"base_results_dir={tmp_path}", *overrides]
        request = Request(overrides=words, command=["slipway", "launch", *words, "--smoke"])
        full_draft = draft(request)
        return full_draft, plan_smoke(full_draft, request)

    return call


def parallel_config_of(launch_draft: Draft) -> ParallelConfig:
    assert launch_draft.plan.job.config is not None
    parallel_config = read_parallel_config(Values(launch_draft.plan.job.config))
    assert parallel_config
    return parallel_config


@pytest.mark.parametrize(
    ("size", "pipeline", "batch"),
    [
        ("gpt3/126m", 1, 32),  # 8 nodes, and a batch of 256 on all of them
        ("gpt3/5b", 1, 128),
        ("gpt3/20b", 1, 32),
        ("gpt3/175b", 2, 64),
        ("t5/220m", 1, 512),
        ("llama/llama2_7b", 1, 128),
    ],
)
def test_each_gpu_has_the_work_of_the_whole_training(plan: Any, size: str, pipeline: int, batch: int) -> None:
    full_draft, smoke = plan(f"training={size}")
    whole, small = parallel_config_of(full_draft), parallel_config_of(smoke.draft)
    nodes = full_draft.plan.job.resources.nodes
    assert smoke.draft.plan.job.resources.nodes == 1
    assert (small.pipeline, small.batch) == (pipeline, batch)
    assert (small.micro, small.tensor, small.devices) == (whole.micro, whole.tensor, whole.devices)
    assert small.micro_batches(1) == whole.micro_batches(nodes)
    layers = [item.plan.job.config["model"].get("num_layers") for item in (full_draft, smoke.draft)]  # type: ignore[index]
    if layers[0] is not None:
        assert layers[0] / whole.pipeline == layers[1] / small.pipeline


def test_a_smoke_is_short_and_writes_to_its_own_run(plan: Any, tmp_path: Path) -> None:
    full_draft, smoke = plan(
        "training=gpt3/5b",
        "training.exp_manager.create_wandb_logger=True",
        f"training.exp_manager.explicit_log_dir={tmp_path}/mine",
        "training.trainer.max_time='05:00:00:00'",
        "training.model.rampup_batch_size=[256,256,1000]",
        "cluster.nodelist='h[07-22,40],x3'",
    )
    job, paths = smoke.draft.plan.job, smoke.draft.plan.paths
    assert paths.run_dir == tmp_path / "gpt3_5b_smoke"
    assert (job.resources.time_limit, job.queue.nodelist) == ("00:30:00", "h07")
    config = job.config
    assert config is not None
    exp_manager = config["exp_manager"]
    assert config["trainer"]["max_steps"] == 2
    assert exp_manager["max_time_per_run"] == "00:00:25:00"
    assert exp_manager["explicit_log_dir"] == str(paths.results)
    assert not exp_manager["create_checkpoint_callback"]
    assert not exp_manager["create_wandb_logger"]
    assert config["model"]["rampup_batch_size"] is None
    # The optimizer, which shapes the first steps, is unchanged.
    assert full_draft.plan.job.config is not None
    assert config["model"]["optim"] == full_draft.plan.job.config["model"]["optim"]
    assert "the optimizer's states are shared by 8 instead of 128" in " ".join(smoke.summary)


@pytest.mark.parametrize("key", ["cluster", "stage_cluster.training"])
def test_one_job_of_an_array_is_tried(plan: Any, key: str) -> None:
    full_draft, smoke = plan("training=gpt3/126m", f"++{key}.sbatch.array=0-4%1")
    assert "#SBATCH --array=0-4%1\n" in full_draft.script
    assert "--array" not in smoke.draft.script
    assert "_%j.out" in smoke.draft.script


def test_a_smoke_has_no_spares_and_no_restarts(plan: Any) -> None:
    full_draft, smoke = plan("training=gpt3/126m", "resilience.restarts=2", "resilience.spares=2")
    assert "#SBATCH --nodes=10\n" in full_draft.script
    assert "#SBATCH --nodes=1\n" in smoke.draft.script


def test_a_shorter_time_limit_stays(plan: Any) -> None:
    _, smoke = plan("training=gpt3/126m", "training.run.time_limit=00:10:00")
    assert smoke.draft.plan.job.resources.time_limit == "00:10:00"


def test_a_pipeline_shrinks_as_far_as_needed_and_the_summary_says_so(plan: Any) -> None:
    layout = [
        f"training.model.{name}_model_parallel_size={size}"
        for name, size in (("tensor", 2), ("pipeline", 24))
    ]
    _, smoke = plan("training=gpt3/5b", *layout, "training.trainer.num_nodes=12")
    assert parallel_config_of(smoke.draft).pipeline == 4
    assert "pipeline 4 instead of 24, with 4 of the 24 layers" in smoke.summary[1]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["training=gpt3/40b_64k"],
            r"one node of 8 GPUs cannot hold tensor 8 × context 4 × pipeline 4\n"
            r"(.*\n)*.*two steps on all nodes are training\.trainer\.max_steps=2",
        ),
        (
            ["stages=[data_preparation]", "data_preparation.inputs=[/x]"],
            r"stages=\[data_preparation\] has no",
        ),
    ],
)
def test_layouts_beyond_one_node_are_refused(plan: Any, overrides: list[str], message: str) -> None:
    with pytest.raises(UserError) as error:
        plan(*overrides)
    assert re.search(message, str(error.value))


def test_the_launch_command_has_no_smoke_option() -> None:
    command = ["slipway", "launch", "training.model.x=--smoke", "--smo", "--smoke", "--", "--smoke"]
    assert drop_smoke(command) == ["slipway", "launch", "training.model.x=--smoke", "--", "--smoke"]
