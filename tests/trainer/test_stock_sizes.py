"""The two sides agree: our trainer accepts and builds the launcher's configuration of each stock size."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from launcher.config.compose import BatchComposer, list_options
from launcher.stages.planning import plan_launch
from slipway.arithmetic.parameters import count_parameters, padded_vocabulary, vocabulary_size
from slipway.common.errors import UserError
from slipway.trainer.config.check import check_keys
from slipway.trainer.config.layout import make_layout
from slipway.trainer.config.load import flatten
from slipway.trainer.config.settings import read_settings
from slipway.trainer.data.vocabulary import read_vocabulary
from tests.trainer.conftest import free_port
from tests.trainer.probing import run_probe
from tests.warm import WarmPool

FAMILIES = ("gpt2", "gpt3", "llama", "t5")
EXPERTS = [size for size in list_options("training") if size.split("/")[0] in ("deepseek", "mixtral")]
SIZES = [size for size in list_options("training") if size.split("/")[0] in FAMILIES]


@pytest.fixture(scope="module")
def sweep() -> BatchComposer:
    return BatchComposer(["engine=megatron"])


def launch_config(sweep: BatchComposer, size: str, *overrides: str) -> dict[str, Any]:
    """Return the configuration of a launch, as the trainer reads it."""
    plan = plan_launch(sweep.compose([f"training={size}", *overrides]).config, number=1, tag="x")
    assert plan.job.config is not None
    return dict(plan.job.config)


def test_each_family_has_sizes() -> None:
    assert {size.split("/")[0] for size in SIZES} == set(FAMILIES)


@pytest.mark.parametrize("size", sorted({*SIZES} - {"t5/41b"}))
def test_stock_size_is_accepted_unchanged(sweep: BatchComposer, size: str) -> None:
    config = launch_config(sweep, size)
    flat = flatten(config)
    check_keys(flat)
    settings = read_settings(flat)
    world = config["trainer"]["num_nodes"] * config["trainer"]["devices"]
    layout = make_layout(settings, world)
    assert layout.tensor * layout.pipeline * layout.context * layout.data == layout.world == world
    per_pass = settings.micro_batch * layout.data
    assert layout.micro_batches * per_pass == settings.global_batch


def test_refused_size_is_reported_with_the_valid_value(sweep: BatchComposer) -> None:
    message = r"model\.pipeline_model_parallel_size=2: .*valid here: 1 or null"
    with pytest.raises(UserError, match=message):
        check_keys(flatten(launch_config(sweep, "t5/41b")))


@pytest.mark.parametrize("size", EXPERTS)
def test_experts_are_refused_by_name(sweep: BatchComposer, size: str) -> None:
    message = (
        r"model\.expert_model_parallel_size=\d+: mixtures of experts .*engine=nemo and engine=megatron_lm"
    )
    with pytest.raises(UserError, match=message):
        check_keys(flatten(launch_config(sweep, size)))


@pytest.mark.parametrize("size", SIZES)
def test_both_sides_pad_the_same_vocabulary(sweep: BatchComposer, size: str) -> None:
    config = launch_config(sweep, size)
    settings = read_settings(flatten(config))
    # Without its files: the data dir of this machine is not the test's.
    tokenizer = replace(settings.data.tokenizer, model=None, vocab_file=None, merge_file=None)
    vocabulary = read_vocabulary(tokenizer, mock=True)
    if settings.denoising is not None:
        vocabulary = vocabulary.add_sentinels(settings.denoising.sentinels)
    padded = padded_vocabulary(vocabulary.size, settings.architecture.vocab_divisor, settings.parallel.tensor)
    assert padded == vocabulary_size(config["model"])


def test_given_vocabulary_size_is_kept(sweep: BatchComposer) -> None:
    config = launch_config(sweep, "llama/llama2_13b", "+training.model.override_vocab_size=1001")
    settings = read_settings(flatten(config))
    assert padded_vocabulary(1001, settings.architecture.vocab_divisor, settings.parallel.tensor) == 1001
    assert vocabulary_size(config["model"]) == 1001


class SizeCounts(NamedTuple):
    """The parameters of all sizes, built in one process; `expected` is the launcher's formula."""

    expected: dict[str, int]
    parameters: dict[str, int]
    vocabularies: dict[str, int]
    megabytes: float


@pytest.fixture(scope="module")
def size_counts(sweep: BatchComposer, pool: WarmPool, tmp_path_factory: pytest.TempPathFactory) -> SizeCounts:
    requests, expected, vocabularies = {}, {}, {}
    for size in SIZES:
        config = launch_config(sweep, size)
        vocabulary = vocabulary_size(config["model"])
        assert vocabulary is not None
        vocabularies[size] = vocabulary
        expected[size] = count_parameters(config["model"], vocabulary, config["run"]["model_type"])
        requests[size] = {"flat": flatten(config), "vocabulary": vocabulary}
    directory = tmp_path_factory.mktemp("sizes")
    (directory / "asked").write_text(json.dumps(requests, default=str))
    arguments = [str(free_port()), str(directory / "asked")]
    counts = run_probe(pool, "tests.trainer.probe_sizes", arguments, directory)
    return SizeCounts(expected, counts["parameters"], vocabularies, counts["megabytes"])


@pytest.mark.trainer
@pytest.mark.parametrize("size", SIZES)
def test_a_size_has_as_many_parameters_as_the_formula_says(size_counts: SizeCounts, size: str) -> None:
    assert size_counts.parameters[size] == size_counts.expected[size]


@pytest.mark.trainer
def test_the_largest_model_takes_no_memory_to_build(size_counts: SizeCounts) -> None:
    assert max(size_counts.parameters.values()) > 400e9
    assert size_counts.megabytes < 2048


class Published(NamedTuple):
    """A published number of parameters, and one unit of its last digit."""

    number: float
    unit: float


# The unit is 1 where a source has the exact number of the published weights.
PUBLISHED = {
    # github.com/openai/gpt-2, README and model_card.md; huggingface.co/distilbert/distilgpt2.
    "gpt2/124m": Published(124e6, 1e6),
    "gpt2/355m": Published(355e6, 1e6),
    "gpt2/774m": Published(774e6, 1e6),
    "gpt2/1558m": Published(1558e6, 1e6),
    "gpt2/distil": Published(82e6, 1e6),
    # Brown et al. 2020 (arXiv 2005.14165), table 2.1, and its title for the largest.
    "gpt3/126m": Published(125e6, 1e6),
    "gpt3/175b": Published(175e9, 1e9),
    # Narayanan et al. 2021 (arXiv 2104.04473), table 1: 48 layers of hidden size 8,192.
    "gpt3/40b": Published(39.1e9, 0.1e9),
    # Touvron et al. 2023 (arXiv 2302.13971), table 2.
    "llama/llama1_7b": Published(6.7e9, 0.1e9),
    "llama/llama1_13b": Published(13.0e9, 0.1e9),
    "llama/llama1_30b": Published(32.5e9, 0.1e9),
    "llama/llama1_65b": Published(65.2e9, 0.1e9),
    # The weights at huggingface.co/meta-llama: Llama-2-*-hf, Meta-Llama-3*.
    "llama/llama2_7b": Published(6_738_415_616, 1),
    "llama/llama2_13b": Published(13_015_864_320, 1),
    "llama/llama2_70b": Published(68_976_648_192, 1),
    "llama/llama3_8b": Published(8_030_261_248, 1),
    "llama/llama3_70b": Published(70_553_706_496, 1),
    "llama/llama3_1_8b": Published(8_030_261_248, 1),
    "llama/llama3_1_70b": Published(70_553_706_496, 1),
    "llama/llama3_1_405b": Published(405_853_388_800, 1),
    # Raffel et al. 2019 (arXiv 1910.10683), sections 3.1.1 and 3.7. NeMo's have version 1.1's shapes, BERT's
    # tokenizer and learned positions.
    "t5/220m": Published(220e6, 10e6),
    "t5/3b": Published(3e9, 1e9),
    "t5/11b": Published(11e9, 1e9),
}
# The sizes of vocabularies before Megatron pads them.
UNPADDED = {"gpt2": 50257, "gpt3": 50257, "llama1": 32000, "llama2": 32000, "llama3": 128256, "t5": 29096}


@pytest.mark.trainer
@pytest.mark.parametrize("size", PUBLISHED)
def test_a_size_has_as_many_parameters_as_its_paper_says(
    sweep: BatchComposer, size_counts: SizeCounts, size: str
) -> None:
    model = launch_config(sweep, size)["model"]
    family, name = size.split("/")
    unpadded = UNPADDED[name[: len("llama1")] if family == "llama" else family]
    tied = model.get("share_embeddings_and_output_weights", True)
    width = (model.get("encoder") or model)["hidden_size"]
    # A row of the vocabulary is one of the embedding, and of the output where this has its own.
    padding = (size_counts.vocabularies[size] - unpadded) * (width + (0 if tied else width))
    if family == "t5":
        padding += size_counts.vocabularies[size] - unpadded
    published = PUBLISHED[size]
    assert abs(size_counts.parameters[size] - padding - published.number) < published.unit
