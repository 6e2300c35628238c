"""Findings, and the checks that yield them."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, ParamSpec

from launcher.checks.facts import Facts
from launcher.errors import escape, literal
from launcher.estimates.values import Values, full
from launcher.plan import Plan

P = ParamSpec("P")


class Severity(enum.StrEnum):
    """An error stops a launch, a warning is printed; a check without its facts is `skipped`.

    `slipway doctor` also prints things that are in order, missing, or unknown for want of an answer.
    """

    ERROR = "error"
    WARNING = "warning"
    SKIPPED = "skipped"
    MISSING = "missing"
    UNKNOWN = "unknown"
    OK = "ok"


@dataclass(frozen=True, slots=True)
class Finding:
    """A mistake, or a possible one.

    `key` is the key of the configuration to change first, such as ``training.model.global_batch_size``; `fix`
    names valid values, one remedy a line. `why` is the reason of a skipped check, which the message has too.
    The check sets `id`, its own; a report adds `source`, the origin of the values.

    For a thing of machines, such as ``enroot.runtime``, `where` names the machines, and it is `needed` if the
    launch requires it. `free` are free bytes; they differ on every machine, so the message omits them.
    """

    severity: Severity
    key: str | None
    message: str
    fix: str | None = None
    also: tuple[str, ...] = ()
    why: str | None = None
    id: str = ""
    source: str | None = None
    where: tuple[str, ...] = ()
    needed: bool = False
    free: int | None = None


def error(key: str, value: Any, text: str, fix: str | None = None, also: Sequence[str] = ()) -> Finding:
    """Return an error whose message reads ``KEY=VALUE: text``."""
    message = escape(f"{full(key)}={literal(value)}: {text}")
    return Finding(Severity.ERROR, full(key), message, fix, tuple(map(full, also)))


def warning(key: str, value: Any, text: str, fix: str | None = None, also: Sequence[str] = ()) -> Finding:
    return replace(error(key, value, text, fix, also), severity=Severity.WARNING)


def name_likewise(others: Iterable[str]) -> str:
    """Name the first two others with the same mistake."""
    names = list(dict.fromkeys(others))
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    return f"; likewise {', '.join(names[:2])}{more}" if names else ""


def skip_check(what: str, why: str | None) -> Finding:
    text = f"not checked: {what}" + (f" ({why})" if why else "")
    return Finding(Severity.SKIPPED, None, text, why=why or None)


class Check(Generic[P]):
    """A check: its rule is a pure function of a plan and of facts about files and the cluster.

    The rule's parameters select its input: `plan`, `facts` or a field of them, NeMo's nodes as `values`,
    without which it does not apply, and the `engine` that reads these. A check may be called as its rule.

    `id` is stable: users write it in ``--no-check=ID``. `topic` is its line in the documentation. `needs` are
    the fields of `Facts` that it requires, else it is skipped; ``cluster.nodes`` is a part of one: the check
    is skipped if `missing` of ``cluster`` has the reason, and not applicable if the part was not asked for.
    """

    def __init__(self, check_id: str, topic: str, rule: Callable[P, Iterator[Finding]], *needs: str) -> None:
        self.id, self.topic, self.needs = check_id, topic, needs
        self._rule: Callable[..., Iterator[Finding]] = rule
        self._reads = _parameters(rule)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Iterator[Finding]:
        return self._rule(*args, **kwargs)

    def find(self, plan: Plan, facts: Facts) -> Iterator[Finding]:
        """Yield the rule's findings; its facts must be known."""
        config = plan.job.config
        if config is None and "values" in self._reads:
            return
        known = {"plan": plan, "facts": facts, "values": Values(config or {}), "engine": plan.job.engine}
        arguments = [known[name] if name in known else getattr(facts, name) for name in self._reads]
        for finding in self._rule(*arguments):
            yield replace(finding, id=self.id)

    def apply(self, plan: Plan, facts: Facts) -> Iterator[Finding]:
        """Yield the check's findings, or the reason why it is skipped."""
        reasons = self._reasons(facts)
        if not reasons:
            yield from self.find(plan, facts)
        elif None not in reasons:
            yield replace(skip_check(self.topic, reasons[0]), id=self.id)

    def has_facts(self, facts: Facts) -> bool:
        """Return True if each needed fact is known."""
        return not self._reasons(facts)

    def is_applicable(self, facts: Facts) -> bool:
        """Return True if the check can run, or is reported as skipped."""
        return None not in self._reasons(facts)

    def _reasons(self, facts: Facts) -> list[str | None]:
        """Return the reasons for missing facts; None for one that was not asked for."""
        reasons: list[str | None] = []
        for name in self.needs:
            whole, _, part = name.partition(".")
            value = getattr(facts, whole)
            if value is None:
                reasons.append(None if part else "")
            elif part and getattr(value, part) is None:
                reasons.append(value.missing.get(part))
        return reasons


def _parameters(rule: Any) -> tuple[str, ...]:
    code = getattr(rule, "func", rule).__code__  # a partial has its function's
    names: tuple[str, ...] = code.co_varnames[: code.co_argcount]
    return tuple(name for name in names if name not in getattr(rule, "keywords", ()))


def check(check_id: str, topic: str, *needs: str) -> Callable[[Callable[P, Iterator[Finding]]], Check[P]]:
    """Make a rule a check; the tuple at the end of its module lists it."""
    return lambda rule: Check(check_id, topic, rule, *needs)
