"""The section `watch`: its defaults, its way to the supervisor, and mistakes in it."""

from __future__ import annotations

import json
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from launcher.config.compose import compose
from launcher.drafting import Request, draft
from launcher.errors import UserError
from slipway.common.node.settings import from_json
from slipway.watch import parameters
from slipway.watch.parameters import Deadline, Parameters


def read_settings(*overrides: str) -> dict[str, Any]:
    """Return what `supervisor.json` of a launch holds."""
    launch = draft(Request(["training=gpt3/126m", "cluster=local", *overrides], []))
    settings: dict[str, Any] = json.loads(launch.texts[launch.plan.paths.supervisor_settings])
    return settings


def test_defaults_of_the_tree_are_those_of_launches_without_them() -> None:
    settings = read_settings()
    assert parameters.from_json(from_json(settings).watch) == Parameters()
    del settings["watch"]
    assert parameters.from_json(from_json(settings).watch) == Parameters()


def test_values_reach_the_supervisor() -> None:
    time = "2027-01-31T18:00+02:00"
    overrides = ["watch.loss_spike.sigmas=4", "watch.disk.reaction=off", f"watch.deadline.at={time}"]
    overrides += ["watch.no_step.reaction=restart"]
    watch = parameters.from_json(from_json(read_settings(*overrides)).watch)
    moment = datetime(2027, 1, 31, 18, tzinfo=timezone(timedelta(hours=2))).timestamp()
    assert (watch.loss_spike.sigmas, watch.disk.reaction, watch.deadline) == (4.0, "off", Deadline(at=moment))
    assert watch.no_step.reaction == parameters.RESTART
    assert watch._replace(loss_spike=Parameters().loss_spike) != watch


@pytest.mark.parametrize("time", ["2027-01-31T18:00", "'2027-01-31 18:00'", "2027-01-31"])
def test_deadline_without_a_zone_is_one_of_this_machine(time: str) -> None:
    written = read_settings(f"watch.deadline.at={time}")["watch"]["deadline"]["at"]
    assert written == datetime.fromisoformat(time.strip("'")).timestamp()


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("watch.disk.reaction=notfy", "did you mean 'notify'?"),
        ("watch.disk.reaction=restart", "'notify', 'hold', 'save', 'stop' or 'off'"),
        ("watch.no_step.reaction=restrat", "did you mean 'restart'?"),
        ("watch.disk.part=2", "expected a part of the whole"),
        ("watch.disk.hours=0", "expected a number above 0"),
        ("watch.throughput.steps=0", "expected 1 or more"),
        ("watch.loss_spike.sigma=3", "did you mean 'sigmas'?"),
        ("watch.deadline.at=tomorrow", "expected a date and a time"),
        ("watch.disk=3", "expected keys below it"),
    ],
)
def test_mistake_names_what_is_valid(override: str, words: str) -> None:
    with pytest.raises(UserError) as raised:
        compose(["training=gpt3/126m", override])
    assert override.split("=")[0] in str(raised.value)
    assert words in f"{raised.value} {raised.value.hint}"


@pytest.mark.parametrize("content", [{"x": {}}, {"disk": {"x": 1}}, {"disk": 3}])
def test_unknown_parameters_are_refused(content: Any) -> None:
    with pytest.raises(ValueError, match="not of this version"):
        parameters.from_json(content)
