"""`slipway list`: the available choices."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launcher.cli.app import main
from launcher.config.compose import compose, list_options
from launcher.runs.paths import display_path
from slipway.arithmetic.parameters import count_parameters, vocabulary_size

Capsys = pytest.CaptureFixture[str]


def list_output(capsys: Capsys, *words: str, check: int = 0) -> str:
    assert main(["list", *words]) == check
    return capsys.readouterr().out


def test_list_alone_shows_all_kinds_of_choices(capsys: Capsys) -> None:
    text = list_output(capsys)
    assert text.startswith("STAGE ")
    assert all(word in text for word in ("\nFAMILY ", "\nCLUSTER ", "training", "gpt3", "bcm", "sandbox"))
    assert "\x1b" not in text


def test_every_size_has_its_parameters(capsys: Capsys) -> None:
    sizes = {row["size"]: row for row in json.loads(list_output(capsys, "training", "--json"))}
    assert list(sizes) == list_options("training")
    assert all(row["parameters"] > 0 and row["num_nodes"] > 0 for row in sizes.values())
    # Counted by hand: 12 layers of 12 h² + 13 h, 50,304 tokens and 2,048 positions of h, the last norm's 2 h.
    h = 768
    assert sizes["gpt3/126m"]["parameters"] == 12 * (12 * h * h + 13 * h) + (50_304 + 2_048) * h + 2 * h
    assert (sizes["gpt3/126m"]["vocabulary"], sizes["gpt3/126m"]["hidden_size"]) == (50_304, 768)


def test_sizes_are_read_as_hydra_composes_them(capsys: Capsys) -> None:
    sizes = {row["size"]: row for row in json.loads(list_output(capsys, "training", "--json"))}
    for size in (
        "t5/220m",
        "bert/110m",
        "mixtral/mixtral_8x7b",
        "gpt3/40b_64k",
        "deepseek/deepseek_v3",
        "mt5/11b",
    ):
        training = compose([f"training={size}"]).config.training
        assert training is not None
        model, row = training.model, sizes[size]
        assert row["vocabulary"] == vocabulary_size(model)
        assert row["parameters"] == count_parameters(model, row["vocabulary"], row["type"])
        assert row["num_layers"] == {**model, **(model.get("encoder") or {})}["num_layers"]
        assert (row["num_nodes"], row["devices"]) == (
            training.trainer["num_nodes"],
            training.trainer["devices"],
        )


def test_the_table_of_sizes(capsys: Capsys) -> None:
    lines = list_output(capsys, "training").splitlines()
    assert lines[0].split() == [
        "SIZE",
        "PARAMETERS",
        "LAYERS",
        "HIDDEN",
        "HEADS",
        "SEQUENCE",
        "BATCH",
        "NODES×GPUS",
    ]
    (row,) = [line.split() for line in lines if line.startswith("gpt3/126m ")]
    assert row == ["gpt3/126m", "125M", "12", "768", "12", "2,048", "256", "8×8"]


def test_clusters_have_descriptions(capsys: Capsys) -> None:
    rows = json.loads(list_output(capsys, "clusters", "--json"))
    assert all(row["about"] for row in rows)
    assert next(row["about"] for row in rows if row["cluster"] == "local").startswith("This machine, without")


def test_a_tree_of_the_user_is_listed(capsys: Capsys, tmp_path: Path) -> None:
    (tmp_path / "training/ours").mkdir(parents=True)
    (tmp_path / "training/ours/small.yaml").write_text(
        "defaults:\n  - /training/gpt3/126m@_here_\n  - _self_\nmodel: {num_layers: 2}\n"
    )
    (tmp_path / "training/ours/broken.yaml").write_text(
        "defaults:\n  - /training/gpt3/126m@_here_\n  - _self_\nrun: {nam: x}\n"
    )
    assert main(["list", "training", "--config-dir", str(tmp_path), "--json"]) == 1
    output = capsys.readouterr()
    sizes = {row["size"]: row for row in json.loads(output.out)}
    assert sizes["ours/small"]["num_layers"] == 2
    assert {size: row["tree"] for size, row in sizes.items() if size in ("ours/small", "gpt3/126m")} == {
        "ours/small": str(tmp_path),
        "gpt3/126m": None,
    }
    assert "training.run.nam: there is no such key" in sizes["ours/broken"]["error"]
    assert "training.run.nam" in output.err
    assert main(["list", "training", "--config-dir", str(tmp_path)]) == 1
    assert [line.split()[1:] for line in capsys.readouterr().out.splitlines() if "broken" in line] == [
        [*["-"] * 7, display_path(tmp_path)]
    ]


def test_an_unknown_word_is_refused(capsys: Capsys) -> None:
    with pytest.raises(SystemExit):
        main(["list", "models"])
    assert "families" in capsys.readouterr().err
