"""The ways to tell people are checked before a launch, and reach the job by reference."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launcher.config.compose import compose
from launcher.errors import UserError
from launcher.rendering.supervision import supervisor_settings
from launcher.stages.planning import plan_launch
from slipway.common.node.settings import from_json, to_json
from slipway.watch import parameters, telling

OWN = ["training=gpt3/tiny", "cluster=sandbox", "cluster.slurm_conf=null"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["watch.tell.mail.server=smtp.x.org"], "watch.tell.mail.to is not set"),
        (["watch.tell.mail.server=smtp.x.org", "watch.tell.mail.to=[a@x.org]"], "watch.tell.mail.sender is"),
        (["watch.tell.mail.server=smtp.x.org:http"], "expected HOST or HOST:PORT"),
        (["watch.tell.webhook.style=slak"], "did you mean 'slack'"),
        (["watch.tell.webhook.url_file=/u", "watch.tell.webhook.style=pagerduty"], "a routing key"),
        (["watch.tell.webhook.url_file='a\tb'"], "watch.tell.webhook.url_file"),
        (["watch.tell.every=0"], "watch.tell.every"),
        (["watch.tell.command=notify"], "watch.tell.command"),
        (["watch.loss_spike.reaction=pause"], "'notify', 'hold', 'save', 'stop' or 'off'"),
    ],
)
def test_ways_that_cannot_work_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError) as refused:
        plan_launch(compose([*OWN, *overrides]).config, number=1, tag="t")
    assert message in str(refused.value)


def test_the_job_has_what_was_set(tmp_path: Path) -> None:
    ways = ["watch.tell.command=[/opt/notify,'$HOME a']", "watch.tell.mail.to=[a@x.org]"]
    overrides = [
        *OWN,
        *ways,
        "watch.tell.every=5",
        "watch.no_step.least=90",
        "watch.loss_spike.reaction=hold",
    ]
    plan = plan_launch(compose(overrides).config, number=1, tag="t")
    settings = from_json(json.loads(to_json(supervisor_settings(plan))))
    told = telling.from_json(settings.tell)
    assert told.command == ("/opt/notify", "$HOME a")
    assert (told.mail.to, told.every) == (("a@x.org",), 5)
    own = parameters.from_json(settings.watch)
    assert (own.no_step.least, own.loss_spike.reaction) == (90, "hold")


def test_a_job_of_a_version_without_a_watch_has_the_defaults() -> None:
    content = json.loads(to_json(supervisor_settings(plan_launch(compose(OWN).config, number=1, tag="t"))))
    del content["watch"], content["tell"]
    settings = from_json(content)
    assert telling.from_json(settings.tell) == telling.Tell()
    assert parameters.from_json(settings.watch) == parameters.Parameters()
