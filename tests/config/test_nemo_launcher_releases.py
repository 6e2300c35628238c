"""NVIDIA's own trees, and AWS's template, adopted: each size has the values, the script and the image it had.

``SLIPWAY_NEMO_LAUNCHER=DIR[:DIR...]`` names checkouts, of which each holds `launcher_scripts/`, or is a
`conf.template` of AWS's; nothing of them is in this repository. ``SLIPWAY_NEMO_TABLE=FILE`` keeps the table.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from launcher.cli.app import main
from launcher.config.hydra_setup import register_resolvers

ROOTS = [Path(path) for path in os.environ.get("SLIPWAY_NEMO_LAUNCHER", "").split(":") if path]
FAMILIES = ("bert", "gpt3", "llama", "mt5", "t5", "nemotron", "falcon", "chatglm", "starcoder2")
FAMILIES = (*FAMILIES, "baichuan2", "mistral", "mixtral", "grok", "qwen2")
# What only Slipway says of a training; NeMo is not handed these, but for `name`, which the size has too.
OWN = re.compile(r"(run\.(model_type|preprocessed_dir|blending_alpha)|resume\..*|name|restore_from_path)$")

pytestmark = pytest.mark.skipif(not ROOTS, reason="SLIPWAY_NEMO_LAUNCHER names no checkout")


def conf_of(root: Path) -> Path:
    return root / "launcher_scripts/conf" if (root / "launcher_scripts").is_dir() else root


def sizes() -> list[Any]:
    """Return every size of the language models of each tree."""
    found = []
    for root in ROOTS:
        folder = conf_of(root) / "training"
        for path in sorted(folder.rglob("*.yaml")):
            name = str(path.relative_to(folder).with_suffix(""))
            if name.partition("/")[0] in FAMILIES:
                found.append(pytest.param(root, name, id=f"{root.name}:{name}"))
    return found


@pytest.fixture(scope="module")
def adopted(tmp_path_factory: pytest.TempPathFactory) -> Mapping[Path, Path]:
    """Return the adopted tree of each checkout."""
    parent = tmp_path_factory.mktemp("adopted")
    trees = {root: parent / f"{number}" for number, root in enumerate(ROOTS)}
    for root, tree in trees.items():
        assert main(["adopt", str(root), "--output", str(tree), "--json"]) == 0
    return trees


def flat(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(node, dict) and node:
        for key, value in node.items():
            yield from flat(value, f"{path}.{key}" if path else str(key))
    else:
        yield path, node


def theirs(root: Path, size: str) -> dict[str, Any] | str:
    """Return a training as that launcher writes it for NeMo, by Hydra itself; or why it cannot."""
    register_resolvers()
    try:
        with initialize_config_dir(str(conf_of(root).absolute()), version_base="1.3"):
            overrides = [f"training={size}", "launcher_scripts_path=/nl", "base_results_dir=/nl/results"]
            tree = compose("config", overrides)
            OmegaConf.resolve(tree.training)
    except yaml.YAMLError as error:
        return str(error)
    values: dict[str, Any] = OmegaConf.to_container(tree.training)  # type: ignore[assignment]
    return values


def script_of(root: Path, family: str) -> str:
    """Return the script that their code runs for a family."""
    code = (root / "launcher_scripts/nemo_launcher/core/stages.py").read_text()
    code = code[code.index("class Training(") : code.index("class FineTuning(")]
    match = re.search(rf'"{family}":[^"]*"examples/([^"]+)"', code)
    assert match is not None
    return match[1]


@pytest.mark.parametrize(("root", "size"), sizes())
def test_a_size_is_what_it_was(
    root: Path, size: str, adopted: Mapping[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--config-dir", str(adopted[root]), f"training={size}", "base_results_dir=/nl/results"]
    words.append("launcher_scripts_path=/nl")
    written = theirs(root, size)
    if isinstance(written, str):
        assert main(["show", *words, "training"]) == 2, written
        return
    code = main(["show", *words, "training"])
    shown = capsys.readouterr()
    outcome = "same"
    if code != 0:  # a key of its own, which our trainings have not
        assert re.match(r"slipway: training\.\w+: there is no such key\n", shown.err), shown.err
        outcome = shown.err.splitlines()[0]
    else:
        ours = dict(flat(yaml.safe_load(shown.out)["training"]))
        expected = {key: value for key, value in flat(written) if not key.startswith("hydra")}
        assert {key: value for key, value in ours.items() if key in expected} == expected
        assert not [key for key in ours if key not in expected and not OWN.match(key)]
        code = main(["launch", "stages=[training]", *words, "--dry-run"])
        text = capsys.readouterr()
        if code == 0:
            script = script_of(root, size.partition("/")[0])
            assert f"/opt/NeMo/examples/{script} \\\n" in text.out
            outcome += f", {Path(script).name}"
            image = OmegaConf.load(conf_of(root) / "config.yaml").container
            assert f"--container-image={image}".replace("nvcr.io/", "nvcr.io#") in text.out.replace("'", "")
        else:
            refusals = re.findall(r"^slipway: (?!warning)(.*)", text.err, re.MULTILINE)
            assert code == 2 and refusals
            outcome += f"; refused: {refusals[0]}"
    if table := os.environ.get("SLIPWAY_NEMO_TABLE"):
        with Path(table).open("a") as stream:
            stream.write(f"{root.name}\t{size}\t{outcome}\n")


@pytest.mark.parametrize("root", ROOTS, ids=lambda root: root.name)
def test_the_tree_launches_as_it_stood(
    root: Path,
    adopted: Mapping[Path, Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The root's own choice, with what envsubst would have put in."""
    monkeypatch.setenv("TARGET_PATH", "/fsx/target")
    monkeypatch.setenv("ENROOT_IMAGE", "/apps/nemo.sqsh")
    assert main(["launch", "--config-dir", str(adopted[root]), "--dry-run"]) == 0
    script = capsys.readouterr().out
    assert "megatron_gpt_pretraining.py" in script and "--job-name=nemo-megatron-gpt3_5b" in script
