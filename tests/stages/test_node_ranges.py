"""A range of nodes becomes what each engine needs to train on as many as there are."""

from __future__ import annotations

import pytest

from launcher.config.compose import compose
from launcher.plan import Plan
from launcher.rendering.render import render
from launcher.stages.planning import plan_launch


def planned(*overrides: str) -> Plan:
    # Not what is asked for where there is a range.
    fixed = ["training=gpt3/126m", "training.trainer.num_nodes=16", "cluster.python=/venv/bin/python"]
    return plan_launch(compose([*fixed, *overrides]).config, number=1, tag="tag")


@pytest.mark.parametrize(
    ("engine", "written"),
    # Our trainer counts them; NeMo wants a number there, and is told another one in the job.
    [("nemo", 2), ("megatron", None), ("megatron_lm", 2)],
)
def test_a_range(engine: str, written: int | None) -> None:
    plan = planned(f"engine={engine}", "resilience.nodes={min: 2, max: 4}")
    assert list(plan.job.resources.node_counts) == [2, 3, 4]
    assert plan.job.config is not None
    assert plan.job.config["trainer"]["num_nodes"] == written
    made = render(plan)
    assert "#SBATCH --nodes=2-4\n" in made.script
    of_srun = (
        '--nodes="$SLURM_JOB_NUM_NODES"',
        "--ntasks=$((SLURM_JOB_NUM_NODES * 8))",
        "--ntasks-per-node=8",
    )
    assert "".join(f"    {argument} \\\n" for argument in of_srun) in made.script
    assert ('"trainer.num_nodes=$SLURM_JOB_NUM_NODES"' in made.script) is (engine == "nemo")
    assert 'export WORLD_SIZE="$SLURM_NTASKS"\n' in made.task


@pytest.mark.parametrize("engine", ["nemo", "megatron", "megatron_lm"])
def test_a_range_of_one_number_is_that_number(engine: str) -> None:
    plan = planned(f"engine={engine}", "resilience.nodes={min: 2, max: 2}")
    same = planned(f"engine={engine}", "training.trainer.num_nodes=2")
    assert plan == same
    assert render(plan) == render(same)


def test_flags_of_a_range_for_sbatch() -> None:
    """Told of tasks, it would give no more nodes than the least number of nodes has tasks."""
    script = render(
        planned("engine=megatron", "resilience.nodes={min: 2, max: 4}", "cluster.cpus_per_task=3")
    ).script
    header = [line for line in script.splitlines() if line.startswith("#SBATCH")]
    assert "#SBATCH --cpus-per-task=24" in header
    assert not [line for line in header if "ntasks" in line]
    assert "    --cpus-per-task=3 \\\n" in script
    assert "unset SLURM_CPUS_PER_TASK" in script
