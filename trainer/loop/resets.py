"""Whether documents that share a window are kept apart."""

from __future__ import annotations

from trainer.config.settings import Settings
from trainer.data.documents import Resets
from trainer.data.vocabulary import Vocabulary
from trainer.distributed import Place
from trainer.logs import LOGGER
from trainer.model.backends import uses_transformer_engine


def resets_of(settings: Settings, place: Place, vocabulary: Vocabulary) -> Resets | None:
    """Return what starts anew with each document, None for nothing.

    Attention that takes no mask crosses documents, and the log says so. NeMo's always does: its
    ``get_attention_mask_from_fusion``, True by default, leaves the mask away.
    """
    data = settings.data
    attention, way_out = data.reset_attention, _without_masks(settings, place)
    if attention and way_out:
        attention = False
        if place.is_main:
            LOGGER.warning(
                "model.data.reset_attention_mask=True: attention crosses documents, as it does in "
                "NeMo: Transformer Engine's takes no mask. %s keeps them apart",
                way_out,
            )
    if not (attention or data.reset_positions):
        return None
    draws = settings.architecture.attention_dropout > 0
    return Resets(vocabulary.end_of_text, data.reset_positions, attention, same_kernel=draws)


def _without_masks(settings: Settings, place: Place) -> str | None:
    """Return what would have the attention take masks; None if it does."""
    if settings.parallel.context > 1:
        return "model.context_parallel_size=1"
    shape = settings.architecture
    with_engine = shape.attention_backend == "transformer_engine" or (
        shape.attention_backend == "auto" and uses_transformer_engine(shape, place.device)
    )
    return "model.attention_backend=sdpa" if with_engine else None
