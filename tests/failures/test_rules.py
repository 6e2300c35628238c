"""The table itself: patterns that mean the same to grep and to Python, and sentences that fit into JSON."""

from __future__ import annotations

import re
import subprocess

import pytest

from launcher.failures.rule import Rule
from launcher.failures.rules import RULES, rule_named, rules_file

# What only one of them has, or means otherwise: \d, \w, \b, (?...), *?, +?, ??, {,3} and [[:classes:]].
_NOT_IN_BOTH = re.compile(r"\\[A-Za-z0-9<>`']|\(\?|[*+?}]\?|[*+?}]\+|\{,|\[\[:|\\$")


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.name}-{rule.of}")
def test_a_rule_is_fit_for_its_file(rule: Rule) -> None:
    re.compile(rule.pattern)
    assert not _NOT_IN_BOTH.search(rule.pattern)
    assert re.fullmatch(r"[a-z][a-z_]*", rule.name)
    # It stands in marks, which are JSON that bash writes.
    assert re.fullmatch(r"[ -~]+", rule.means)
    assert not set(rule.means) & set('"\\`$')
    assert not rule.means.endswith(".")
    assert (rule.nodes == "-") == (rule.verdict != "exclude")


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.name}-{rule.of}")
def test_grep_takes_each_pattern(rule: Rule) -> None:
    done = subprocess.run(
        ["grep", "-a", "-E", "-e", rule.pattern], input="", capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (1, "")


def test_rules_of_one_name_say_the_same() -> None:
    for rule in RULES:
        same = rule_named(rule.name)
        assert same is not None
        assert (same.verdict, same.means, same.advice) == (rule.verdict, rule.means, rule.advice)
    assert rule_named("nosuch") is None
    assert rule_named(None) is None


def test_no_pattern_matches_an_empty_line() -> None:
    assert [rule.name for rule in RULES if re.search(rule.pattern, "")] == []


def test_the_file_has_a_line_of_six_columns_for_each_rule() -> None:
    rows = [line.split("\t") for line in rules_file().splitlines()]
    assert [row[0] for row in rows] == [rule.name for rule in RULES]
    assert {len(row) for row in rows} == {6}
    assert all(all(row) for row in rows)


def test_the_last_rule_matches_whatever_ended() -> None:
    assert RULES[-1].of == "end"
    assert all(re.search(RULES[-1].pattern, f"code={code} state=-") for code in ("-", 1, 143))


def test_what_a_job_says_of_the_one_before_is_no_sign_of_its_own_end() -> None:
    """The next link writes these sentences into its own log, with the names of nodes."""
    patterns = [rule.pattern for rule in RULES if rule.of == "log"]
    said = [f"Job 17: excludes n1 until 2026-11-22 02:02: {rule.means}" for rule in RULES]
    assert [line for line in said if any(re.search(pattern, line) for pattern in patterns)] == []
