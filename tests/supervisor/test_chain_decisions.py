"""The decisions of a chain, over all sequences of fates of its links."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from slipway.common.node.settings import ChainSettings
from slipway.supervisor.chain import (
    Before,
    Ending,
    Phase,
    Transition,
    decide_after_end,
    look_back,
)


@dataclass(frozen=True)
class Event:
    """The fate of a link: its end, and if it saves a checkpoint before."""

    kind: str
    saves: bool = False


ENDINGS = {
    "done": Ending("done", "done", "all is done"),
    "mistake": Ending("stop", "mistake", "it was refused"),
    "cancelled": Ending("stop", "cancelled", "somebody cancelled it"),
    "failed": Ending("continue", "failed", "its tasks failed"),
    "node_failed": Ending("exclude", "node_failed", "a node of it failed", ("n1",)),
    "preempted": Ending("continue", "preempted", "another job took its nodes"),
    "requeued": Ending("continue", "ended_by_user", "somebody cancelled or requeued it"),
    # Its node died: the next link judges it.
    "lost": Ending("exclude", "node_failed", "a node of it failed", ("n2",)),
    "lost_cancelled": Ending("continue", "lost", "it ended without a word"),
}
EVENTS = st.builds(Event, st.sampled_from(sorted(ENDINGS)), st.booleans())
COUNTED = ("failed", "node_failed", "lost")


@dataclass
class Model:
    """A chain as the world sees it: jobs in the queue, marks in a directory."""

    settings: ChainSettings
    submitted: list[int] = field(default_factory=lambda: [1])
    over: bool = False
    ran: list[int] = field(default_factory=list)
    in_vain: int = 0
    # The failures of the newest link with marks, and the number of links after it.
    failures: int = 0
    since: int = 0
    saved: bool = False
    before: Event | None = None
    is_marked: bool = True
    stopped_by: str | None = None

    def link(self, number: int, event: Event) -> None:
        """Run one job of the chain: it begins, and meets its fate."""
        assert not self.over, "a link began after the end of the chain"
        step = look_back(self.settings, number, self._before(), number + 1 in self.submitted)
        self._carry_out(number, step)
        if self.over:
            self.stopped_by = step.ending.why if step.ending else None
            return
        self.ran.append(number)
        self.in_vain = 0 if event.saves else self.in_vain + (event.kind in COUNTED)
        self.failures, self.since, self.saved = step.failures, 0, event.saves
        self.before, self.is_marked = event, not event.kind.startswith("lost")
        if not self.is_marked:
            return
        next_step = decide_after_end(
            self.settings,
            number,
            ENDINGS[event.kind],
            step.failures,
            event.saves,
            number + 1 in self.submitted,
        )
        self._carry_out(number, next_step)
        assert next_step.ending is not None
        self.stopped_by = next_step.ending.why

    def _before(self) -> Before | None:
        if self.before is None:
            return None
        state = "CANCELLED" if self.before.kind == "lost_cancelled" else ""
        return Before(
            "17", ENDINGS[self.before.kind], not self.is_marked, state, self.failures, 1, self.saved
        )

    def _carry_out(self, number: int, step: Transition) -> None:
        self.over = step.phase is Phase.OVER
        if step.submits:
            assert not self.over, "a link was submitted after the end of the chain"
            assert number + 1 not in self.submitted, "a link was submitted twice"
            assert number + 1 <= self.settings.links
            self.submitted.append(number + 1)


SETTINGS = st.builds(
    ChainSettings,
    links=st.integers(1, 8),
    from_job=st.booleans(),
    max_failures=st.integers(1, 4),
    restarts=st.just(0),
)


@given(SETTINGS, st.lists(EVENTS, min_size=1, max_size=10))
def test_every_sequence_of_events_keeps_the_rules(settings: ChainSettings, events: list[Event]) -> None:
    """No link runs twice or after the end; only final events end a chain, and they always do."""
    chain = Model(settings)
    if not settings.from_job:
        chain.submitted = list(range(1, settings.links + 1))
    for number, event in enumerate(events, start=1):
        if number > settings.links or chain.over:
            break
        assert number in chain.submitted, f"link {number} was never submitted"
        was_in_vain = chain.in_vain
        chain.link(number, event)
        began = chain.ran[-1:] == [number]
        final = event.kind in ("done", "mistake", "cancelled")
        if began and chain.over:
            in_vain = settings.links > 1 and chain.in_vain >= settings.max_failures
            assert final or (in_vain and not event.saves and event.kind in COUNTED), chain
        if not began:  # it looked back at a lost one
            assert chain.before is not None
            assert chain.before.kind == "lost_cancelled" or was_in_vain >= settings.max_failures
        if began and final:
            assert chain.over
    assert sorted(set(chain.submitted)) == sorted(chain.submitted)


@given(
    SETTINGS,
    st.integers(0, 3),
    st.integers(0, 9),
    st.sampled_from(sorted(ENDINGS)),
    st.booleans(),
)
def test_a_new_checkpoint_forgives_and_a_crash_loop_stops(
    settings: ChainSettings, restarts: int, failures: int, kind: str, has_progressed: bool
) -> None:
    settings = settings._replace(restarts=restarts)
    ending = ENDINGS[kind]
    step = decide_after_end(settings, 1, ending, failures, has_progressed, False)
    if ending.verdict in ("done", "stop"):
        assert step.phase is Phase.OVER and step.ending == ending
    elif has_progressed:
        assert (step.phase, step.failures) == (Phase.PASSED, 0)
    elif not ending.is_failure:
        assert (step.phase, step.failures) == (Phase.PASSED, failures)
    else:
        goes_on = settings.links > 1 or settings.restarts > 0
        stops = goes_on and failures + 1 >= settings.max_failures
        assert (step.phase is Phase.OVER) == stops and step.failures == failures + 1


def test_a_node_at_fault_is_excluded_and_the_next_link_is_submitted() -> None:
    settings, ending, lost = ChainSettings(links=3), ENDINGS["node_failed"], ENDINGS["lost"]
    assert decide_after_end(settings, 1, ending, 0, False, False) == Transition(Phase.PASSED, 1, ending, True)
    before = Before("16", lost, is_judged_now=True)
    assert look_back(settings, 2, before, False) == Transition(Phase.RUNS, 1, lost, True)


def test_work_of_the_link_before_is_not_repeated() -> None:
    step = look_back(ChainSettings(links=3), 2, Before("16", ENDINGS["node_failed"]), False)
    assert step.submits and step.ending == ENDINGS["node_failed"]._replace(nodes=())


def test_a_link_that_finds_its_chain_ended_is_over_whatever_the_mark_says() -> None:
    settings = ChainSettings(links=3)
    cancelled = look_back(settings, 2, Before("16", ENDINGS["failed"], state="CANCELLED"), False)
    assert cancelled.phase is Phase.OVER and cancelled.ending is not None
    assert (cancelled.ending.verdict, cancelled.ending.why) == ("stop", "it was cancelled")
    done = look_back(settings, 2, Before("16", ENDINGS["done"], state="CANCELLED"), False)
    assert done == Transition(Phase.OVER, 1, ENDINGS["done"])


def test_links_that_left_no_mark_count_as_failures() -> None:
    settings = ChainSettings(links=9, max_failures=3)
    lost = Ending("continue", "lost", "it ended without a word")
    step = look_back(settings, 4, Before("16", lost, True, "", failures=0, links=3), False)
    assert step.phase is Phase.OVER and step.ending is not None
    assert step.ending.why == "3 links in a row ended without a new checkpoint: it ended without a word"
    step = look_back(
        settings, 4, Before("16", lost, True, "", failures=0, links=3, has_progressed=True), False
    )
    assert (step.phase, step.failures) == (Phase.RUNS, 0)
    step = look_back(settings, 4, Before("16", lost, False, "PREEMPTED", failures=1, links=1), False)
    assert (step.phase, step.failures) == (Phase.RUNS, 1)
