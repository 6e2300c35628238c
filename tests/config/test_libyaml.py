"""Files of the tree read with libyaml: same values and messages as with OmegaConf's own loader."""

from __future__ import annotations

import io

import pytest
import yaml
from omegaconf import _utils

from launcher.config.compose import CONF_DIR
from launcher.config.hydra_setup import use_libyaml

_VALUES = """\
numbers: [1e3, 1_000, 0x1f, .5, 1., 1:30, 007]
others: [2024-01-01, yes, ~, "\\u00e9", 'it''s', "${a.b}"]
"""


def loaders() -> tuple[type, type]:
    use_libyaml()
    libyaml = _utils.get_yaml_loader()
    (plain,) = [base for base in libyaml.__mro__ if base.__name__ == "OmegaConfLoader"]
    return plain, libyaml


@pytest.mark.skipif(not yaml.__with_libyaml__, reason="PyYAML was built without libyaml")
def test_every_shipped_file_has_the_same_values() -> None:
    plain, libyaml = loaders()
    texts = [path.read_text(encoding="utf-8") for path in CONF_DIR.rglob("*.yaml")]
    assert len(texts) > 50
    for text in [_VALUES, "", "---\na: 1\n", *texts]:
        assert repr(yaml.load(text, Loader=libyaml)) == repr(yaml.load(text, Loader=plain))


@pytest.mark.skipif(not yaml.__with_libyaml__, reason="PyYAML was built without libyaml")
@pytest.mark.parametrize(
    "text",
    ["a: 1\na: 2\n", "a: [1\nb: 2\n", "a:\n\tb: 1\n", "a: b: c\n", "*x\n", "a: \x01\n", "a: 1\n---\nb: 2\n"],
)
def test_a_broken_file_has_the_message_with_its_name_and_column(text: str) -> None:
    messages = []
    for loader in loaders():
        stream = io.StringIO(text)
        stream.name = "mine.yaml"
        with pytest.raises(yaml.YAMLError) as raised:
            yaml.load(stream, Loader=loader)
        messages.append(str(raised.value))
    assert messages[0] == messages[1]
    assert "mine.yaml" in messages[1]
