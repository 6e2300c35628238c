"""The data of a training, from its configuration."""

from __future__ import annotations

from pathlib import Path

from slipway.common.errors import UserError
from slipway.trainer.config.data import Blend, Data
from slipway.trainer.config.resume import Resume
from slipway.trainer.config.settings import Settings
from slipway.trainer.data.index import SampleIndex, Weights, build_index, check_files
from slipway.trainer.data.index_cache import IndexCache
from slipway.trainer.data.interleave import Mixture
from slipway.trainer.data.order import BlendedOrder, Order, SampleOrder
from slipway.trainer.data.source import SPLITS, BlendedSource, IndexedSource, Source
from slipway.trainer.data.spans import Lengths, sample_lengths

# Of a data set that is a split by itself.
_WHOLE: Weights = (1.0, 0.0, 0.0)

Indices = dict[Path, SampleIndex]


def window_length(settings: Settings) -> int:
    """Return the stride of the data's windows, in tokens; each has one more.

    Raises
    ------
    UserError
        If a T5's sample does not fit its encoder and decoder.
    """
    lengths = denoised_lengths(settings)
    return lengths.raw if lengths else settings.seq_length


def denoised_lengths(settings: Settings) -> Lengths | None:
    """Return the lengths of a T5's samples; None for a GPT.

    Raises
    ------
    UserError
        If a sample does not fit the encoder and decoder.
    """
    if settings.denoising is None:
        return None
    return sample_lengths(settings.denoising, settings.seq_length, settings.architecture.seq_length)


def find_indices(data: Data, heldout: bool) -> Indices:
    """Return the sample index of each data set that is read; one process does this for all.

    Parameters
    ----------
    heldout
        Whether held-out data are wanted.

    Raises
    ------
    UserError
        If a file is missing or not of the format.
    """
    blends = [data.training, data.heldout if heldout else None]
    prefixes = {prefix: None for blend in blends if blend is not None for prefix in blend.prefixes}
    cache = IndexCache(data.index_dir) if data.index_dir else None
    return {prefix: _find(data, prefix, cache) for prefix in prefixes}


def open_training(data: Data, indices: Indices, length: int) -> IndexedSource | BlendedSource:
    """Open the training data, as windows of `length` + 1 tokens.

    Raises
    ------
    UserError
        If the files here are not those of the indices, or a data set has not even one window.
    """
    assert data.training is not None
    return _open(data.training, indices, 0, length)


def open_heldout(data: Data, indices: Indices, length: int, split: str = "validation") -> Source:
    """Open what validation evaluates, as windows of `length` + 1 tokens.

    Parameters
    ----------
    data, indices, length
        The configuration of the data, their sample indices, and the stride of a window.
    split
        Which documents are taken of data sets that are not named for each split: one of
        :data:`slipway.trainer.data.source.SPLITS`.

    Raises
    ------
    UserError
        As :func:`open_training`, or if the configuration names data for training alone.
    """
    if data.heldout is None:
        raise UserError(
            "model.data.data_prefix.validation is missing: expected the held-out data, "
            "or trainer.limit_val_batches=0 for no validation"
        )
    return _open(data.heldout, indices, 0 if data.splits is None else SPLITS.index(split), length)


def make_order(source: Source, seed: int, resume: Resume) -> SampleOrder:
    """Return the order of a run's samples, by its seed and the data generation and weights of `resume`."""
    if isinstance(source, BlendedSource):
        mixture = Mixture(source.interleaving, resume.exact_weights())
        return BlendedOrder(mixture, source.sizes, seed, resume.data_generation)
    return Order(source.windows, seed, resume.data_generation)


def _find(data: Data, prefix: Path, cache: IndexCache | None) -> SampleIndex:
    weights = _WHOLE if data.splits is None else data.splits
    check_files(prefix)
    try:
        if cache is None:
            return build_index(prefix, weights, data.split_rule)
        return cache.get(
            prefix, weights, lambda: build_index(prefix, weights, data.split_rule), data.split_rule
        )
    except OSError as error:
        raise UserError(f"model.data.data_prefix={prefix}: it cannot be read: {error}") from None


def _open(blend: Blend, indices: Indices, split: int, length: int) -> IndexedSource | BlendedSource:
    sources = [IndexedSource(prefix, indices[prefix], split, length) for prefix in blend.prefixes]
    return sources[0] if len(sources) == 1 else BlendedSource(sources, blend.weights)
