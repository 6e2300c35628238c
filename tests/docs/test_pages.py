"""The documentation: each page can be reached, names files that exist, and shows what the commands print."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest
import yaml

from launcher.checks.registry import CHECKS
from launcher.config.compose import compose, list_options
from launcher.stages.planning import plan_launch
from scripts.doc_outputs import Block, blocks

OUTPUTS = blocks()


def test_index_links_every_page(repository: Path) -> None:
    index = (repository / "docs" / "index.md").read_text()
    pages = {path.name for path in (repository / "docs").glob("*.md")} - {"index.md"}
    assert pages - set(re.findall(r"\]\((\w[\w-]*\.md)", index)) == set()


def test_navigation_has_every_page_once(repository: Path) -> None:
    sections = yaml.safe_load((repository / "mkdocs.yml").read_text())["nav"]
    pages = [
        page
        for section in sections
        for entries in section.values()
        for entry in entries
        for page in entry.values()
    ]
    assert sorted(pages) == sorted(path.name for path in (repository / "docs").glob("*.md"))


@pytest.mark.parametrize("page", ["docs/architecture.md", "docs/glossary.md", "CONTRIBUTING.md"])
def test_files_that_a_page_names_exist(page: str, repository: Path) -> None:
    text = (repository / page).read_text()
    paths = re.findall(
        r"`((?:launcher|supervisor|trainer|arithmetic|corpus|sandbox|conf|scripts|tests|templates)/[^`\s]*)`",
        text,
    )
    missing = [name for name in paths if "NAME" not in name and "FAMILY" not in name]
    missing = [name for name in missing if not (repository / name).exists()]
    assert len(paths) >= (page != "docs/glossary.md")
    assert missing == []


def test_architecture_quotes_the_row_of_the_flag(repository: Path) -> None:
    page = (repository / "docs" / "architecture.md").read_text()
    (row,) = re.findall(r"`(yield \"gpus-per-node\".*?)`", page)
    assert row in (repository / "launcher" / "rendering" / "slurm_flags.py").read_text()


def test_the_size_of_architecture_is_complete(repository: Path, tmp_path: Path) -> None:
    page = (repository / "docs" / "architecture.md").read_text()
    (size,) = re.findall(r"( +defaults:\n +- /training/.*?)\n +```", page, re.DOTALL)
    path = tmp_path / "training/gpt3/mine.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(textwrap.dedent(size))
    config = compose(["training=gpt3/mine", "cluster=bcm"], (tmp_path,)).config
    plan = plan_launch(config, number=1, tag="x")
    assert plan.paths.run_name == "gpt3_126m"


@pytest.mark.parametrize("block", OUTPUTS, ids=[f"{block.page.stem}:{block.line}" for block in OUTPUTS])
def test_outputs_are_those_of_the_commands(block: Block) -> None:
    assert block.commands
    assert block.actual() == block.text, "write it anew: .venv/bin/python -m scripts.doc_outputs --write"


@pytest.mark.parametrize("page", ["README.md", "CHANGELOG.md"])
def test_the_counts_of_checks_and_sizes_are_current(page: str, repository: Path) -> None:
    text = (repository / page).read_text()
    (tens,) = re.findall(r"[Oo]ver (\d+)0 checks(?:\]| before)", text)
    assert int(tens) == (len(CHECKS) - 1) // 10, f"there are {len(CHECKS)} checks"
    assert re.findall(r"(\d+) model sizes\b", text) == [str(len(list_options("training")))]
