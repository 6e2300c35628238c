"""The checks together: their order, skipped checks, unknown facts, and odd trees."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from pkgutil import iter_modules
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import pytest

from launcher.checks import rules
from launcher.checks.facts import Facts
from launcher.checks.findings import Check, Severity
from launcher.checks.gate import GATHERERS, looking_gatherers
from launcher.checks.gathering.host import supervisor_python_problem, trainer_verdicts
from launcher.checks.registry import CHECKS, require_known, run_checks
from launcher.errors import UserError
from launcher.estimates.values import divisors
from tests.checks.plans import GPT, KNOWN, T5, changed, plan_of

GLOBAL = "model.global_batch_size"


@pytest.mark.parametrize("config", [GPT, T5, None], ids=["gpt", "t5", "data preparation"])
def test_good_plan_has_no_findings(config: dict[str, Any] | None) -> None:
    assert run_checks(plan_of(config), KNOWN) == []


def test_a_check_may_be_left_out() -> None:
    plan = plan_of(changed(GPT, {"model.tensor_model_parallel_size": 3}))
    assert [finding.id for finding in run_checks(plan, KNOWN)] == ["layout.world", "layout.tensor"]
    assert run_checks(plan, KNOWN, ["layout.world", "layout.tensor"]) == []


def test_unknown_facts_skip_a_check() -> None:
    findings = run_checks(plan_of(GPT), Facts())
    assert {finding.severity for finding in findings} == {Severity.SKIPPED}
    skipped = [
        "keys.unknown",
        "keys.variables",
        "engine.megatron",
        "job.python",
        "run.singleton",
        "secret.permissions",
    ]
    assert [finding.id for finding in findings] == skipped


def test_explicit_expert_tensor_size_stays_beside_suggested_sizes() -> None:
    experts = {"model.num_moe_experts": 4, "model.moe_grouped_gemm": True, "trainer.num_nodes": 1}
    sizes = {"model.tensor_model_parallel_size": 16, "model.expert_tensor_parallel_size": 16}
    config = changed(GPT, {**experts, **sizes})
    (free,) = _fixes(changed(config, {"model.expert_tensor_parallel_size": None}))
    assert "valid tensor sizes: 1, 2, 4, 8" in free
    # With any of these sizes, the experts of 16 would not divide the 8 GPUs.
    (own,) = _fixes(config)
    assert "valid tensor sizes" not in own


def _fixes(config: dict[str, Any]) -> list[str]:
    findings = run_checks(plan_of(config, engine="megatron_lm"), KNOWN)
    return [finding.fix or "" for finding in findings if finding.id == "layout.world"]


def test_errors_come_first() -> None:
    plan = plan_of(changed(GPT, {"model.optim.sched.warmup_steps": 5000, GLOBAL: 100}))
    severities = [finding.severity for finding in run_checks(plan, Facts())]
    assert severities == sorted(severities, key=list(Severity).index)
    assert severities[:2] == [Severity.ERROR, Severity.WARNING]


@pytest.mark.parametrize(
    "ids",
    [
        ["layout.split_rank", "layout.experts", "layout.gpus", "memory.fits"],
        ["job.python", "run.singleton", "run.training", "run.shards", "run.order", "data.identity"],
        ["path.shared", "path.image", "image.fetch", "image.engine", "image.network", "space.checkpoints"],
    ],
)
def test_order_of_checks_is_that_of_their_topics(ids: list[str]) -> None:
    order = [check.id for check in CHECKS]
    start = order.index(ids[0])
    assert order[start : start + len(ids)] == ids


def test_each_check_of_a_module_is_in_its_tuple() -> None:
    modules = [import_module(f"{rules.__name__}.{module.name}") for module in iter_modules(rules.__path__)]
    made = {check for module in modules for check in vars(module).values() if isinstance(check, Check)}
    forgotten = {check.id for check in made - set(CHECKS)}
    assert forgotten == set(), "a check that the tuple at the end of its module does not name"
    assert len({check.id for check in CHECKS}) == len(CHECKS)


def test_each_fact_is_gathered_by_a_function_of_its_type() -> None:
    types = get_type_hints(Facts)
    asked_otherwise = {"trainer_verdict": trainer_verdicts, "supervisor_python": supervisor_python_problem}
    asked = [*GATHERERS.items(), *looking_gatherers().items()]
    assert types.keys() - {field for field, _ in asked} == {"array_tasks", "submission"}
    for field, ask in asked:
        find = asked_otherwise.get(field, inspect.unwrap(ask))
        answer = get_type_hints(getattr(find, "func", find))["return"]
        if field == "trainer_verdict":  # asked of all drafts at once
            (answer,) = get_args(answer)
        assert _members(answer) <= _members(types[field]), field


def _members(answer: Any) -> set[Any]:
    """Return the members of a union, mappings for dictionaries."""
    members = get_args(answer) if isinstance(answer, UnionType) else [answer]
    return {Mapping[get_args(member)] if get_origin(member) is dict else member for member in members}


def test_an_unknown_id_names_the_nearest() -> None:
    require_known(["layout.world"])
    require_known(["machine"], ["machine"])
    with pytest.raises(UserError, match=r"--no-check=layout.wrld: there is no such check") as raised:
        require_known(["layout.wrld"])
    assert raised.value.hint == "did you mean 'layout.world'?"


@pytest.mark.parametrize("key", ["trainer", "exp_manager", "model", "model.optim", "model.data"])
@pytest.mark.parametrize("value", [None, 3, "text", [1], {}])
def test_no_shape_of_the_tree_breaks_a_check(key: str, value: Any) -> None:
    """A check returns findings or none, and never raises."""
    for base in (GPT, T5):
        plan = plan_of(base)
        run_checks(replace(plan, job=replace(plan.job, config=changed(base, {key: value}))), KNOWN)


@pytest.mark.parametrize("number", [1, 2, 12, 36, 97, 1024, 5040])
def test_divisors_are_complete(number: int) -> None:
    assert list(divisors(number)) == [size for size in range(1, number + 1) if number % size == 0]


def test_large_numbers_take_no_time() -> None:
    """Trying every number would take minutes for a prime of many digits, or for ever."""
    assert list(divisors(2000000011)) == [1, 2000000011]
    assert divisors(10**40)[-1] == 10**40
    plan = plan_of(changed(GPT, {GLOBAL: 2000000011, "model.hidden_size": 999999937}))
    assert {"batch.global", "model.heads"} <= {finding.id for finding in run_checks(plan, KNOWN)}
