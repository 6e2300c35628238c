"""Files of the tree read with libyaml: the values of OmegaConf's loader, and a mistake's file and line."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from launcher.config.compose import CONF_DIR, compose
from launcher.config.hydra_setup import TreeLoader
from launcher.errors import UserError

_VALUES = """\
numbers: [1e3, 1_000, 0x1f, .5, 1., 1:30, 007]
others: [2024-01-01, yes, ~, "\\u00e9", 'it''s', "${a.b}"]
"""


def test_every_shipped_file_has_the_same_values() -> None:
    texts = [path.read_text(encoding="utf-8") for path in CONF_DIR.rglob("*.yaml")]
    assert len(texts) > 50
    for text in [_VALUES, "---\na: 1\n", *texts]:
        plain = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
        assert repr(yaml.load(text, Loader=TreeLoader)) == repr(plain)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("a: 1\na: 2\n", ":2: not valid YAML: found duplicate key a"),
        ("a: [1\nb: 2\n", ":2: not valid YAML: did not find expected ',' or ']'"),
        ("a:\n\tb: 1\n", ":2: not valid YAML: found character that cannot start any token"),
        ("a: @b\n", ":1: not valid YAML: found character that cannot start any token"),
        ("a: b: c\n", ":1: not valid YAML: mapping values are not allowed in this context"),
        ("*x\n", ":1: not valid YAML: "),
        ("a: \x01\n", ": not valid YAML: "),
        ("a: 1\n---\nb: 2\n", ":2: not valid YAML: but found another document"),
    ],
)
@pytest.mark.skipif(not yaml.__with_libyaml__, reason="PyYAML was built without libyaml")
def test_a_broken_file_is_named_with_its_line(text: str, place: str, tmp_path: Path) -> None:
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster/mine.yaml").write_text(text)
    with pytest.raises(UserError) as raised:
        compose(["cluster=mine"], (tmp_path,))
    assert f"cluster/mine.yaml{place}" in str(raised.value)
    assert ("not with tabs" in str(raised.value)) == ("\t" in text)
