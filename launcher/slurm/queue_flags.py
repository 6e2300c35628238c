"""The keys of `cluster` that are flags of sbatch with the same names and values: a line for each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator
from pydantic_core import PydanticCustomError

from slipway.common.section_types import one_line


def as_text(value: Any) -> Any:
    """Refuse a number in place of a text: YAML and Hydra read 0042 as 34, 1:30:00 as 5400.

    The caller knows the file and the override, and reads the value as it was written.
    """
    if isinstance(value, (int, float)):
        raise PydanticCustomError("number_for_text", "text; a number needs quotes")
    return value


def as_whole(value: Any) -> Any:
    """Refuse true and false, which Python takes for 1 and 0, and a number with a point."""
    if isinstance(value, (bool, float)):
        raise ValueError("expected a whole number")
    return value


def _join(value: Any) -> Any:
    # Hydra takes a list on the command line more easily than a text with commas.
    if isinstance(value, list):
        return ",".join(str(item) for item in value if item is not None) or None
    return as_text(value)


def _not_empty(value: str | None) -> str | None:
    if value is not None and not value.strip():
        raise ValueError("an empty value; null leaves the option out")
    return value


# Every text of ours reaches a script, where it is part of a line.
Line = Annotated[str, AfterValidator(one_line)]
Text = Annotated[Line, BeforeValidator(as_text)]
Option = Annotated[Text | None, AfterValidator(_not_empty)]
Words = Annotated[Line | None, BeforeValidator(_join), AfterValidator(_not_empty)]
Whole = Annotated[int, BeforeValidator(as_whole)]


@dataclass(frozen=True, kw_only=True)
class QueueFlags:
    """The flags that select where and when a job waits, in the order of the script's header.

    A field names the key of `cluster` and the flag of sbatch; `cluster.sbatch` refuses the flag for the key.
    ``None`` leaves a flag out, ``False`` is its opposite (``--no-requeue``).
    """

    partition: Option = None
    account: Option = None
    qos: Option = None
    reservation: Option = None
    constraint: Option = None
    nodelist: Words = None
    exclude: Words = None
    switches: Option = None
    licenses: Words = None
    begin: Option = None
    deadline: Option = None
    requeue: bool | None = None
    signal: Option = None
    mail_type: Words = None
    mail_user: Option = None
    comment: Text | None = None


# A site may refuse any job without these.
ADMITTING = ("partition", "account", "qos", "reservation")
# These select the nodes of a job.
CHOOSING_NODES = (*ADMITTING, "constraint", "nodelist", "exclude")
