"""Jobs whose paths are checked: on a file system that machines share, with all that a GPT needs."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher import file_systems as systems
from launcher.checks.facts import Facts, PathFacts
from launcher.checks.findings import Finding
from launcher.checks.gathering.paths import path_facts
from launcher.checks.registry import run_checks
from launcher.config.compose import BatchComposer
from launcher.drafting import Draft
from launcher.stages.planning import plan_launch, prepare_launch

SLURM = ("training=gpt3/126m", "cluster=bcm")
BARE = (*SLURM, "container=null")
LOCAL = ("training=gpt3/tiny", "cluster=local")
MOCK = "training.model.data.data_impl=mock"
PREFIX = "training.model.data.data_prefix"
TOKENIZER = "training.model.tokenizer"


def set_mounts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str) -> None:
    (tmp_path / "mountinfo").write_text(text)
    monkeypatch.setattr(systems, "MOUNTS", tmp_path / "mountinfo")


# It parses the tree once, and composes each configuration from that.
TREE = BatchComposer(())


def draft_with(*overrides: str) -> Draft:
    composition = TREE.compose((f"launcher_scripts_path={Path.cwd()}", *overrides))
    plan = plan_launch(composition.config, number=1, tag="tag")
    return Draft(composition, plan, composition.config, prepare_launch(composition.config).results_key)


def facts_with(*overrides: str) -> PathFacts:
    return path_facts(draft_with(*overrides))


def path_findings(*overrides: str) -> list[Finding]:
    """Return the findings of the checks of paths."""
    return path_findings_in(draft_with(*overrides))


def path_findings_in(draft: Draft) -> list[Finding]:
    findings = run_checks(draft.plan, Facts(paths=path_facts(draft)))
    return [finding for finding in findings if finding.id.startswith("path.")]


def path_problems(*overrides: str) -> list[tuple[str, str, str]]:
    return [(finding.id, finding.severity.value, finding.message) for finding in path_findings(*overrides)]
