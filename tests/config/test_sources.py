"""The source of a value, as a mistake names it."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.config.compose import CONF_DIR
from launcher.config.sources import Sources

BASE = [line.partition("#")[0].strip() for line in (CONF_DIR / "cluster/_base.yaml").read_text().splitlines()]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A tree of the user's own, in front of ours."""
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster/ours.yaml").write_text(
        "defaults:\n  - bcm\n  - _self_\n\n# a comment\npartition: p5\nsrun_args:\n  - --a\n  - --b\n"
    )
    (tmp_path / "cluster/heir.yaml").write_text("defaults: [ours, _self_]\naccount: llm\n")
    (tmp_path / "training").mkdir()
    (tmp_path / "training/none.yaml").write_text("defaults: [gpt3/_base@_here_, _self_]\nrun: null\n")
    return tmp_path


@pytest.mark.parametrize(
    ("key", "overrides", "source"),
    [
        ("cluster.gres", [], "from @/cluster/bcm.yaml:12"),
        ("cluster.gres", ["cluster.gres=gpu:4"], "from the command line: cluster.gres=gpu:4"),
        ("cluster.gres", ["cluster.gres=a", "++cluster.gres=b"], "from the command line: ++cluster.gres=b"),
        ("cluster.gres", ["cluster=local"], f"from @/cluster/_base.yaml:{BASE.index('gres: null') + 1}"),
        ("cluster", ["cluster=local"], "from the command line: cluster=local"),
        ("cluster.partition", ["cluster=ours"], "from cluster/ours.yaml:6"),
        ("cluster.partition", ["cluster=heir"], "from cluster/ours.yaml:6"),
        ("cluster.account", ["cluster=heir"], "from cluster/heir.yaml:2"),
        ("cluster.srun_args.1", ["cluster=ours"], "from cluster/ours.yaml:9"),
        ("cluster.mem", ["cluster=ours"], "from @/cluster/bcm.yaml:13"),
        ("engine", [], "from @/cluster/bcm.yaml:6"),  # where it refers to
        ("container", ["cluster.container=x"], "from the command line: cluster.container=x"),
        ("training.model.num_layers", [], "from @/training/gpt3/126m.yaml:14"),
        ("training.model.optim.name", [], "from @/training/gpt3/_shared.yaml:104"),
        ("training.run.name", ["training=none"], "from training/none.yaml:2"),
        ("training.model.data.x", ["training.model.data={y: 1}"], None),
        ("training.model.data.x", ["+training.model.data={x: 1}"], "from the command line: +training.mo"),
        ("training.model.data.x", ["training.model.data=null"], "from the command line: training.model."),
        ("no.such.key", [], None),
        # a tree with mistakes
        ("cluster.mem", ["cluster=no_such"], None),
        ("cluster.mem", ["=", "a b"], "from @/cluster/bcm.yaml:13"),
    ],
)
def test_source_is_the_line_or_the_override_that_set_the_value(
    key: str, overrides: list[str], source: str | None, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tree)
    location = Sources(overrides, [tree, CONF_DIR]).locate(key)
    expected = source.replace("@", str(CONF_DIR)) if source else None
    assert (location or "").startswith(expected or "\0" if expected else "")
    assert (location is None) == (source is None)
