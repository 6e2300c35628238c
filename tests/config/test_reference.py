"""Every value of every size is the reference's, or a correction with its source."""

from __future__ import annotations

import ast
import csv
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from omegaconf import DictConfig, OmegaConf
from omegaconf._utils import get_yaml_loader
from yaml import load as load_yaml

from launcher.config.compose import CONF_DIR, list_options
from launcher.config.hydra_setup import register_resolvers
from launcher.slurm.notations import format_days, parse_time_limit

REFERENCE = Path(__file__).parent / "reference"
FAMILIES = ("gpt3", "llama", "t5", "mt5", "bert")
ABSENT = "absent"

_LLAMA3 = "Llama team 2024, arXiv 2407.21783, table 3"

# By size and key: the reference's value, ours, and the source of ours.
CORRECTIONS: dict[tuple[str, str], tuple[Any, Any, str]] = {
    ("llama/llama3_1_405b", "model.num_query_groups"): (16, 8, _LLAMA3),
    **{
        (f"llama/{size}", "model.rotary_base"): (ABSENT, 500000, _LLAMA3)
        for size in ("llama3_8b", "llama3_70b", "llama3_1_8b", "llama3_1_70b", "llama3_1_405b")
    },
}

# Keys of ours, or that say what the reference's default is anyway.
OURS = {
    "run.model_type",
    "exp_manager.checkpoint_callback_params.every_n_train_steps",
    "model.data.data_prefix",  # left out of the tables
    "restore_from_path",  # in the reference at the root of the families that are not GPT's
    *(
        f"resume.{key}"
        for key in (
            *("checkpoint", "load_optimizer", "lr_scale", "lr_freeze_steps", "data_generation"),
            *("skip_samples", "data_weights", "trust_owner"),
        )
    ),
}


def read_family(family: str) -> dict[str, dict[str, Any]]:
    """Return the reference's values of each size, with interpolations as written."""
    with (REFERENCE / f"{family}_common.csv").open() as file:
        common = {row["key"]: _literal(row["value"]) for row in csv.DictReader(file)}
    with (REFERENCE / f"{family}_sizes.csv").open() as file:
        rows = list(csv.DictReader(file))
    sizes = [name for name in rows[0] if name != "key"]
    return {
        size: {**common, **{row["key"]: _yaml(row[size]) for row in rows if row[size] != ""}}
        for size in sizes
    }


def _literal(text: str) -> Any:
    value = ast.literal_eval(text)
    return _yaml(value) if isinstance(value, str) else value


def _yaml(text: str) -> Any:
    is_time = text[:1].isdigit() and ":" in text  # which YAML would read as a number to the base of 60
    return text if is_time or text.startswith("${") else load_yaml(text, get_yaml_loader())


def sizes() -> Iterator[tuple[str, dict[str, Any]]]:
    for family in FAMILIES:
        yield from read_family(family).items()


SIZES = dict(sizes())


@pytest.fixture(scope="module", autouse=True)
def _composing() -> Iterator[None]:
    register_resolvers()
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        yield


def compose_tree(size: str) -> DictConfig:
    tree = hydra_compose("config", ["~data_preparation", f"training={size}"])
    OmegaConf.set_struct(tree, False)
    return tree


def flat(node: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    leaves: dict[str, Any] = {}
    for name, value in node.items():
        if isinstance(value, Mapping):
            leaves.update(flat(value, f"{prefix}{name}."))
        else:
            leaves[f"{prefix}{name}"] = value
    return leaves


def resolved_reference(size: str, tree: DictConfig) -> dict[str, Any]:
    """Return the reference's values, with its interpolations resolved in these values."""
    other = OmegaConf.create(OmegaConf.to_container(tree))
    assert isinstance(other, DictConfig)
    other.training = {}
    for key, value in SIZES[size].items():
        OmegaConf.update(other, f"training.{key}", value, force_add=True)
    OmegaConf.resolve(other.training)
    return flat(OmegaConf.to_container(other.training))  # type: ignore[arg-type]


@pytest.mark.parametrize("size", SIZES)
def test_each_value_is_that_of_the_reference(size: str) -> None:
    tree = compose_tree(size)
    ours = flat(OmegaConf.to_container(tree.training, resolve=True, throw_on_missing=True))  # type: ignore[arg-type]
    expected = resolved_reference(size, tree)
    for (corrected, key), (theirs, right, _source) in CORRECTIONS.items():
        if corrected == size:
            assert expected.get(key, ABSENT) == theirs, key
            expected[key] = right
    expected["trainer.max_time"] = right_max_time(expected["run.time_limit"])
    differing = {
        key: (expected.get(key, ABSENT), ours.get(key, ABSENT))
        for key in sorted({*expected, *ours} - OURS)
        if not is_same(expected.get(key, ABSENT), ours.get(key, ABSENT))
    }
    assert differing == {}


def is_same(theirs: Any, ours: Any) -> bool:
    """Return True if two values are equal, and not merely true and 1, or a number and its text."""
    number = isinstance(theirs, (int, float)) and not isinstance(theirs, bool)
    return theirs == ours and (number or type(theirs) is type(ours))


def right_max_time(time_limit: str) -> str:
    """Return the limit less half an hour, as most sizes of the reference; less a sixth if it is short."""
    seconds = parse_time_limit(time_limit)
    assert seconds is not None
    return format_days(seconds - min(1800, seconds // 6))


def test_most_of_the_reference_has_the_derived_max_time_anyway() -> None:
    """The other values of the reference are beyond the limit or an hour below it."""
    differing = []
    for size, values in SIZES.items():
        max_time, derived = values["trainer.max_time"].zfill(11), right_max_time(values["run.time_limit"])
        if max_time != derived:
            limit, seconds = (
                parse_time_limit(text) for text in (values["run.time_limit"], max_time.replace(":", "-", 1))
            )
            assert limit is not None and seconds is not None
            assert seconds >= limit or seconds == limit - 3600, size
            differing.append(size)
    wrong = {size for size in SIZES if size.startswith("llama/") or size.endswith(("_improved", "k"))}
    assert set(differing) == wrong | {"gpt3/175b", "gpt3/40b"}


def test_every_size_of_the_tree_is_of_the_reference_or_sourced_elsewhere() -> None:
    own = {"gpt3/tiny", "t5/tiny", *(f"gpt2/{name}" for name in ("124m", "355m", "774m", "1558m", "distil"))}
    own |= {*(f"mixtral/mixtral_8x{size}" for size in ("7b", "22b"))}
    own |= {*(f"deepseek/deepseek_{name}" for name in ("v2_lite", "v3"))}
    assert set(list_options("training")) == set(SIZES) | own


# Layers, width, heads: Radford et al. 2019, table 2, with the heads of the published configurations.
GPT2 = {
    "124m": (12, 768, 12),
    "355m": (24, 1024, 16),
    "774m": (36, 1280, 20),
    "1558m": (48, 1600, 25),
    "distil": (6, 768, 12),
}


@pytest.mark.parametrize("name", GPT2)
def test_gpt2_has_the_published_shapes(name: str) -> None:
    model = compose_tree(f"gpt2/{name}").training.model
    assert (model.num_layers, model.hidden_size, model.num_attention_heads) == GPT2[name]
    assert (model.encoder_seq_length, model.max_position_embeddings, model.data.seq_length) == (1024,) * 3
    assert model.ffn_hidden_size == 4 * model.hidden_size
    assert (model.hidden_dropout, model.attention_dropout, model.init_method_std) == (0.1, 0.1, 0.02)
    assert model.position_embedding_type == "learned_absolute"
    assert model.share_embeddings_and_output_weights
