"""A stage after a chain, on a real Slurm whose links are killed, cancelled and used up."""

from __future__ import annotations

from typing import Any

import pytest

from tests.chains.chain_yard import Yard
from tests.chains.following_scenarios import AFTER

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(2400)]


def ran(yard: Yard, run: str) -> list[list[str]]:
    """Return the jobs of the stage that did something, each with the number of links that still ran."""
    path = yard.work(run) / "after"
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def told(yard: Yard, run: str) -> tuple[str, str]:
    (row,) = yard.told_by("status", AFTER.format(run))
    return row["state"], row["reason"] or ""


@pytest.mark.parametrize(
    ("run", "links"),
    [
        ("continued", ["continue", "continue", "done"]),
        ("killed_when_done", ["done"]),
        ("without_commands", ["continue", "done"]),
    ],
)
def test_stage_runs_once_after_the_link_that_is_done(chains: Any, run: str, links: list[str]) -> None:
    yard = chains.ended(run)
    assert [life.verdict for life in yard.lives(run)] == links, yard.told(run)
    ((job, running),) = ran(yard, run)
    assert running == "0"
    assert told(yard, run)[0] == "COMPLETED"
    assert yard.links(AFTER.format(run)) == [job]


def test_status_names_the_chain_that_a_stage_waits_for(chains: Any) -> None:
    yard = chains.ended("continued")
    assert "Dependency: it waits for the end of continued" in yard.said["continued"].stdout


@pytest.mark.parametrize(
    ("run", "state", "reason"),
    [
        ("given_up", "CANCELLED", "2 links in a row ended without a new checkpoint"),
        ("used_up", "CANCELLED", "its tasks failed"),
        ("called_off", "CANCELLED", "by "),
        ("called_off_waiting", "FAILED", "called_off_waiting, which it waited for, is not done"),
    ],
)
def test_stage_does_nothing_after_a_chain_that_is_not_done(
    chains: Any, run: str, state: str, reason: str
) -> None:
    yard = chains.ended(run)
    assert ran(yard, run) == []
    (found, why), history = told(yard, run), yard.slipway("history", AFTER.format(run)).stdout
    assert found == state, yard.told(run)
    assert reason in f"{why} {history}"
