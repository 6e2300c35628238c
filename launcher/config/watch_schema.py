"""The section `watch`: its keys are made of the parameters of the detectors, `slipway.watch.parameters`."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field, create_model

from launcher.config.stage_schema import StrictModel
from launcher.config.values import Positive, Share, Text, Whole
from slipway.watch.parameters import REACTIONS, Parameters


def _check_time(text: str) -> str:
    try:
        datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(
            "expected a date and a time of day: 2027-01-31T18:00, or 2027-01-31T18:00+01:00"
        ) from None
    return text


# By the name of a parameter, else by the type of its default.
_NAMED: dict[str, Any] = {
    "reaction": Literal[REACTIONS],
    "part": Share,
    "at": Annotated[Text, AfterValidator(_check_time)] | None,
}
_TYPED: dict[type, Any] = {int: Annotated[Whole, Field(ge=1)], float: Positive}


def _make_section(name: str, defaults: Any) -> type[BaseModel]:
    fields: dict[str, Any] = {
        key: (_NAMED.get(key) or _TYPED[type(value)], value) for key, value in defaults._asdict().items()
    }
    return create_model(f"watch.{name}", __base__=StrictModel, **fields)


def _make_watch() -> type[BaseModel]:
    sections: dict[str, Any] = {}
    for name, defaults in Parameters()._asdict().items():
        section = _make_section(name, defaults)
        # Launches that were stored before there was a detector have its defaults.
        sections[name] = (section, Field(default_factory=section))
    return create_model("watch", __base__=StrictModel, **sections)


if TYPE_CHECKING:
    Watch = BaseModel
else:
    Watch = _make_watch()


def watch_settings(watch: Watch) -> dict[str, Any]:
    """Return the parameters for `supervisor.json`: times in Unix seconds."""
    content: dict[str, Any] = watch.model_dump()
    deadline = content["deadline"]
    if deadline["at"] is not None:
        deadline["at"] = datetime.fromisoformat(deadline["at"]).timestamp()
    return content
