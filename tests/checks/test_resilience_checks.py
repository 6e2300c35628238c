"""Faults that keep a chain from going on, or a job from saving, and invalid ranges of nodes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from launcher.checks.findings import Severity
from launcher.checks.registry import run_checks
from launcher.config.compose import compose
from launcher.errors import Mistakes, UserError
from launcher.plan import Chain, Plan
from launcher.stages.planning import plan_launch
from tests.checks.plans import GPT, KNOWN, changed, plan_of


def chain_plan(
    links: int = 3, config: dict[str, Any] = GPT, limit: str | None = "1-00:00:00", **queue: Any
) -> Plan:
    plan = plan_of(config, resources={"time_limit": limit})
    job_queue = replace(plan.job.queue, **{"requeue": False, "signal": "B:USR1@300", **queue})
    return replace(plan, job=replace(plan.job, chain=Chain(links=links), queue=job_queue))


def outcomes(plan: Plan) -> list[tuple[str, Severity, str | None]]:
    return [(finding.id, finding.severity, finding.key) for finding in run_checks(plan, KNOWN)]


@pytest.mark.parametrize("links", [1, 3])
def test_a_good_chain_passes(links: int) -> None:
    assert outcomes(chain_plan(links)) == []


@pytest.mark.parametrize(
    ("queue", "key"),
    [
        ({"requeue": True}, "cluster.requeue"),
        ({"requeue": None}, "cluster.requeue"),
        ({"further": {"requeue": True}}, "cluster.sbatch.requeue"),
    ],
)
def test_requeue_is_an_error_in_a_chain(queue: dict[str, Any], key: str) -> None:
    assert outcomes(chain_plan(**queue)) == [("chain.requeue", Severity.ERROR, key)]
    assert outcomes(chain_plan(links=1, **queue)) == []


def test_alternatives_are_no_dependency_of_a_chain() -> None:
    either = {"dependency": "afterok:1?afterok:2"}
    assert outcomes(chain_plan(**either)) == [("chain.dependency", Severity.ERROR, "training.run.dependency")]
    assert outcomes(chain_plan(links=1, **either)) == []
    assert outcomes(chain_plan(dependency="afterok:1,singleton")) == []


@pytest.mark.parametrize("key", ["resume_if_exists", "create_checkpoint_callback"])
def test_tasks_that_start_again_without_resumption_are_an_error(key: str) -> None:
    plan = chain_plan(links=1, config=changed(GPT, {f"exp_manager.{key}": False}))
    plan = replace(plan, job=replace(plan.job, chain=Chain(restarts=2)))
    assert outcomes(plan) == [("chain.resume", Severity.ERROR, f"training.exp_manager.{key}")]


@pytest.mark.parametrize("key", ["resume_if_exists", "create_checkpoint_callback"])
def test_chain_without_resumption_is_an_error(key: str) -> None:
    no_resume = changed(GPT, {f"exp_manager.{key}": False})
    assert outcomes(chain_plan(config=no_resume)) == [
        ("chain.resume", Severity.ERROR, f"training.exp_manager.{key}")
    ]
    assert outcomes(chain_plan(links=1, config=no_resume)) == []


@pytest.mark.parametrize(
    ("signal", "limit", "is_bad"),
    [
        ("B:USR1@300", "00:05:00", True),
        ("B:USR1@299", "00:05:00", False),
        ("USR1@300", "5", True),
        ("RB:SIGUSR1@300", "5", True),
        ("10@300", "5", True),
        ("B:USR1", "1", False),
        ("B:USR1@300", "unlimited", False),
        ("B:USR1@300", None, False),
        (None, "1", False),
    ],
)
def test_save_signal_as_soon_as_the_job_begins_is_an_error(
    signal: str | None, limit: str | None, is_bad: bool
) -> None:
    untimed = changed(GPT, {"trainer.max_time": None})
    result = outcomes(chain_plan(links=1, config=untimed, limit=limit, signal=signal))
    assert result == [("time.save", Severity.ERROR, "resilience.save_before_end")] * is_bad


@pytest.mark.parametrize(
    ("signal", "is_bad"),
    [
        *((signal, False) for signal in ("USR1@9", "SIGUSR1@9", "usr1", "10@9", "B:USR1@9", "RB:SIGUSR1@9")),
        *((signal, False) for signal in ("TERM@9", "SIGTERM@9", "15", "R:TERM@9")),
        *((signal, True) for signal in ("USR2@9", "SIGUSR2@9", "12@9", "HUP@9", "INT@9", "R:2@9", "KILL")),
        *((signal, True) for signal in ("B:TERM@9", "BR:15@9", "B:USR2", "USR10@9", "9")),
    ],
)
@pytest.mark.parametrize("stage", ["training", "command"])
def test_a_signal_at_which_nothing_is_saved_is_an_error(signal: str, is_bad: bool, stage: str) -> None:
    """The command of another stage may know any signal."""
    plan = chain_plan(links=1, signal=signal)
    result = outcomes(replace(plan, job=replace(plan.job, stage=stage)))
    expected = [("time.save", Severity.ERROR, "cluster.signal")] * (is_bad and stage == "training")
    assert [outcome for outcome in result if outcome[0] == "time.save"] == expected


def test_a_chain_without_a_limit_is_a_warning() -> None:
    untimed = changed(GPT, {"trainer.max_time": None})
    result = outcomes(chain_plan(config=untimed, limit=None, signal=None))
    assert result == [("time.save", Severity.WARNING, "training.run.time_limit")]


@pytest.mark.parametrize(
    ("overrides", "signal"),
    [
        ([], "B:USR1@300"),
        (["training.run.time_limit='00:10:00'"], "B:USR1@150"),
        (["training.run.time_limit='1'"], "B:USR1@15"),
        (["training.run.time_limit=unlimited"], None),
        # The partition's limit ends the job, and Slurm counts from that.
        (["training.run.time_limit=null"], "B:USR1@300"),
        (["training.run.time_limit=null", "resilience.save_before_end=null"], None),
        (["training.run.time_limit=null", "resilience.save_before_end=120"], "B:USR1@120"),
        (["resilience.save_before_end=120"], "B:USR1@120"),
        (["resilience.save_before_end=null"], None),
        (["cluster.signal=B:USR2@9"], "B:USR2@9"),
        (["cluster.signal=B:USR2@9", "resilience.save_before_end=null"], "B:USR2@9"),
    ],
)
@pytest.mark.parametrize("engine", ["nemo", "megatron", "megatron_lm"])
def test_save_signal_follows_from_the_time_limit_and_the_margin(
    engine: str, overrides: list[str], signal: str | None
) -> None:
    config = compose(["training=gpt3/126m", "cluster=bcm", f"engine={engine}", *overrides]).config
    assert plan_launch(config, number=1, tag="x").job.queue.signal == signal


def test_data_preparation_has_no_save_signal() -> None:
    config = compose(["stages=[data_preparation]", "data_preparation.inputs=[/x]"]).config
    assert plan_launch(config, number=1, tag="x").job.queue.signal is None


SPARE = ["resilience.health=quick", "resilience.spares=1"]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["resilience.links=2", "cluster=local"], "resilience.links=2: cluster.scheduler=local has no queue"),
        (["resilience.links=2", "cluster.scheduler=allocation"], "cluster.scheduler=allocation has no queue"),
        (["resilience.links=2", "cluster.sbatch.array='0-3'"], "the tasks of an array"),
        (["resilience.nodes={min: 4, max: 2}"], "resilience.nodes.min=4: more than resilience.nodes.max, 2"),
        (["resilience.nodes={min: 1, max: 2}", "cluster=local"], "has no queue that chooses how many"),
        (["resilience.links=0"], "resilience.links=0"),
        (["resilience.save_before_end=0"], "resilience.save_before_end=0: expected auto, or seconds from 1"),
        (["resilience.save_before_end=65536"], "expected auto, or seconds from 1 to 65535"),
        (["resilience.save_before_end=true"], "expected auto, or seconds"),
        (["resilience.save_before_end=soon"], "resilience.save_before_end='soon'"),
        (["resilience.exclude_hours=inf"], "resilience.exclude_hours=inf"),
        (["resilience.max_failures=9999999999999999999"], "resilience.max_failures=9999999999999999999"),
        (["resilience.submit=both"], "resilience.submit='both'"),
        (["resilience.after_stage=afternotok"], "resilience.after_stage='afternotok'"),
        (["resilience.health=quik"], "resilience.health='quik': expected 'off', 'quick' or 'full'"),
        (["resilience.spares=-1"], "resilience.spares=-1"),
        (["resilience.spares=1"], "nothing finds a node that is to be replaced"),
        ([*SPARE, "resilience.nodes={min: 1, max: 2}"], "resilience.nodes is a range"),
        ([*SPARE, "cluster.scheduler=allocation"], "takes further nodes of the allocation by itself"),
        ([*SPARE, "cluster=local"], "resilience.spares=1: cluster.scheduler=local has none"),
        ([*SPARE, "cluster.sbatch.segment=8"], "cluster.sbatch.segment=8 has to divide the 9 nodes"),
    ],
)
def test_invalid_chains_ranges_and_margins_are_refused(overrides: list[str], words: str) -> None:
    with pytest.raises((UserError, Mistakes)) as raised:
        plan_launch(compose(["training=gpt3/126m", *overrides]).config, number=1, tag="x")
    assert words in str(raised.value)
