"""A range of nodes becomes what each engine needs to train on as many as there are."""

from __future__ import annotations

import pytest

from launcher.config.compose import compose
from launcher.plan import Plan
from launcher.rendering.render import render
from launcher.stages.planning import plan_launch
from tests.launch_files import script_of, task_of


def plan_of(*overrides: str) -> Plan:
    # A range replaces this number of nodes.
    fixed = ["training=gpt3/126m", "training.trainer.num_nodes=16", "cluster.python=/venv/bin/python"]
    return plan_launch(compose([*fixed, *overrides]).config, number=1, tag="tag")


@pytest.mark.parametrize(
    ("engine", "num_nodes"),
    # Our trainer counts the nodes; NeMo needs a number, which the job replaces.
    [("nemo", 2), ("megatron", None), ("megatron_lm", 2)],
)
def test_a_range_reaches_sbatch_srun_and_the_engine(engine: str, num_nodes: int | None) -> None:
    plan = plan_of(f"engine={engine}", "resilience.nodes={min: 2, max: 4}")
    assert list(plan.job.resources.node_counts) == [2, 3, 4]
    assert plan.job.config is not None
    assert plan.job.config["trainer"]["num_nodes"] == num_nodes
    script = script_of(plan)
    assert "#SBATCH --nodes=2-4\n" in script
    srun_options = (
        '--nodes="$SLURM_JOB_NUM_NODES"',
        "--ntasks=$((SLURM_JOB_NUM_NODES * 8))",
        "--ntasks-per-node=8",
    )
    assert "".join(f"    {argument} \\\n" for argument in srun_options) in script
    assert ('"trainer.num_nodes=$SLURM_JOB_NUM_NODES"' in script) is (engine == "nemo")
    assert 'export WORLD_SIZE="$SLURM_NTASKS"\n' in task_of(plan)


@pytest.mark.parametrize("engine", ["nemo", "megatron", "megatron_lm"])
def test_a_range_of_one_number_is_that_number(engine: str) -> None:
    plan = plan_of(f"engine={engine}", "resilience.nodes={min: 2, max: 2}")
    same = plan_of(f"engine={engine}", "training.trainer.num_nodes=2")
    assert plan == same
    assert render(plan) == render(same)


def test_sbatch_gets_no_number_of_tasks_for_a_range() -> None:
    """A number of tasks would limit sbatch to the nodes that these tasks need."""
    script = script_of(
        plan_of("engine=megatron", "resilience.nodes={min: 2, max: 4}", "cluster.cpus_per_task=3")
    )
    header = [line for line in script.splitlines() if line.startswith("#SBATCH")]
    assert "#SBATCH --cpus-per-task=24" in header
    assert not [line for line in header if "ntasks" in line]
    assert "    --cpus-per-task=3 \\\n" in script
    assert "unset SLURM_CPUS_PER_TASK" in script
