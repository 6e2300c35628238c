"""The section `watch`: how people are told, and keys made of the parameters of the detectors.

The detectors' parameters are in `slipway.watch.parameters`, and the job's form of the rest in
`slipway.watch.telling`.
"""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field, create_model

from launcher.config.stage_schema import StrictModel
from launcher.config.values import Line, LineList, Positive, Share, Text, Whole, matching
from slipway.watch.parameters import REACTIONS, RESTART, Parameters
from slipway.watch.telling import WEBHOOK_STYLES


def _check_time(text: str) -> str:
    try:
        datetime.fromisoformat(text)
    except ValueError:
        raise ValueError("expected a date and a time: 2027-01-31T18:00, or 2027-01-31T18:00+01:00") from None
    return text


class WebhookConfig(StrictModel):
    """A service that takes a POST."""

    url_file: Line | None = None
    style: Literal[WEBHOOK_STYLES] = "generic"  # type: ignore[valid-type]
    key_file: Line | None = None


class MailConfig(StrictModel):
    """A mail server, and the addresses."""

    server: Annotated[Line, matching(r"[\w.-]+(:[0-9]{1,5})?", "expected HOST or HOST:PORT")] | None = None
    to: LineList = Field(default_factory=list)
    sender: Line | None = None
    user: Line | None = None
    password_file: Line | None = None


class AliveConfig(StrictModel):
    """A dead man's switch."""

    file: Line | None = None
    url_file: Line | None = None


class TellConfig(StrictModel):
    """The ways to tell people of alerts."""

    command: LineList = Field(default_factory=list)
    webhook: WebhookConfig = WebhookConfig()
    mail: MailConfig = MailConfig()
    apprise_file: Line | None = None
    alive: AliveConfig = AliveConfig()
    timeout: Positive = 10.0
    every: Positive = 15.0

    def files(self) -> dict[str, str]:
        """Return the paths of the files with secrets, by their keys."""
        paths = {
            "webhook.url_file": self.webhook.url_file,
            "webhook.key_file": self.webhook.key_file,
            "mail.password_file": self.mail.password_file,
            "apprise_file": self.apprise_file,
            "alive.url_file": self.alive.url_file,
        }
        return {f"watch.tell.{name}": path for name, path in paths.items() if path is not None}


# By the name of a parameter, of one detector's before, else by the type of its default.
_NAMED: dict[str, Any] = {
    "no_step.reaction": Literal[(*REACTIONS[:-1], RESTART, REACTIONS[-1])],
    "reaction": Literal[REACTIONS],
    "part": Share,
    "at": Annotated[Text, AfterValidator(_check_time)] | None,
}
_TYPED: dict[type, Any] = {int: Annotated[Whole, Field(ge=1)], float: Positive}


def _make_watch() -> type[BaseModel]:
    nodes: dict[str, Any] = {"tell": (TellConfig, Field(default_factory=TellConfig))}
    for name, defaults in Parameters()._asdict().items():
        keys = defaults._asdict().items()
        fields: dict[str, Any] = {
            key: (_NAMED.get(f"{name}.{key}") or _NAMED.get(key) or _TYPED[type(value)], value)
            for key, value in keys
        }
        node = create_model(f"watch.{name}", __base__=StrictModel, **fields)
        nodes[name] = (node, Field(default_factory=node))
    return create_model("watch", __base__=StrictModel, **nodes)


if TYPE_CHECKING:

    class Watch(BaseModel):
        """The section: the detectors' keys are made at run time."""

        tell: TellConfig = TellConfig()
else:
    Watch = _make_watch()


def watch_settings(watch: Watch) -> dict[str, Any]:
    """Return the parameters for `supervisor.json`: times in Unix seconds."""
    content: dict[str, Any] = watch.model_dump(exclude={"tell"})
    deadline = content["deadline"]
    if deadline["at"] is not None:
        deadline["at"] = datetime.fromisoformat(deadline["at"]).timestamp()
    return content
