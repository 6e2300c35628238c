"""The table of rules: their names, sentences and patterns."""

from __future__ import annotations

import re

import pytest

from slipway.common.node.failure_rules import FailureRule
from slipway.common.node.judging import RULES, find_rule


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.name}-{rule.of}")
def test_a_rule_is_well_formed(rule: FailureRule) -> None:
    assert re.fullmatch(r"[a-z][a-z_]*", rule.name)
    assert re.fullmatch(r"[ -~]+", rule.means)
    assert not rule.means.endswith(".")
    assert (rule.nodes == "-") == (rule.verdict != "exclude")


def test_rules_of_one_name_say_the_same() -> None:
    for rule in RULES:
        namesake = find_rule(rule.name)
        assert namesake is not None
        assert (namesake.verdict, namesake.means, namesake.advice) == (rule.verdict, rule.means, rule.advice)
    assert find_rule("nosuch") is None
    assert find_rule(None) is None


def test_no_pattern_matches_an_empty_line() -> None:
    assert [rule.name for rule in RULES if re.search(rule.pattern, "")] == []


def test_the_last_rule_matches_whatever_ended() -> None:
    assert RULES[-1].of == "end"
    assert all(re.search(RULES[-1].pattern, f"code={code} state=-") for code in ("-", 1, 143))


def test_sentences_about_the_previous_job_match_no_rule() -> None:
    """The next link writes these sentences into its own log, with the names of nodes."""
    patterns = [rule.pattern for rule in RULES if rule.of == "log"]
    messages = [f"Job 17: excludes n1 until 2026-11-22 02:02: {rule.means}" for rule in RULES]
    assert [line for line in messages if any(re.search(pattern, line) for pattern in patterns)] == []
