"""The documents of a global batch: ``python -m slipway.trainer.data.audit --config-path DIR ...``.

Which documents a step trains on is arithmetic on the configuration and the ``.idx`` files: it needs neither
torch nor a training, and writes nothing. Prints one JSON object. Exit code 2 is a mistake of the user.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipway.arithmetic.indexed import Origins, origins_path
from slipway.common.errors import EXIT_OK, EXIT_USER_ERROR, UserError
from slipway.trainer import requirements

if TYPE_CHECKING:
    from slipway.trainer.config.settings import Settings
    from slipway.trainer.data.order import SampleOrder

# These are imported late: a mistake names the missing one.
_LIBRARIES = ("numpy", "yaml")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the documents of a step; return the exit code."""
    options = _parse(arguments)
    try:
        requirements.check(_LIBRARIES)
        from slipway.trainer.config.load import flatten, load_config
        from slipway.trainer.config.settings import read_settings

        settings = read_settings(flatten(load_config(options.config_path, options.config_name)))
        recorded = json.loads(options.recorded.read_text(encoding="utf-8")) if options.recorded else None
        state = (options.after_step, options.after_samples)
        answer = audit(settings, options.step, *state, dict(options.place), recorded, options.tokens)
        json.dump(answer, sys.stdout)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return EXIT_USER_ERROR
    return EXIT_OK


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m slipway.trainer.data.audit",
        description="Print the documents of a step's global batch as JSON, by arithmetic alone.",
    )
    add = parser.add_argument
    add("--config-path", type=Path, required=True, help="directory of the configuration")
    add("--config-name", required=True, help="its file name, with or without .yaml")
    add("--step", type=_whole_number, required=True, help="the step, from 1")
    add("--after-step", type=_whole_number, default=0, help="count from a state after this step (default: 0)")
    add("--after-samples", type=_whole_number, default=0, help="the samples consumed then (default: 0)")
    add(
        "--place",
        nargs=2,
        action="append",
        default=[],
        metavar=("PREFIX", "HERE"),
        help="a data set's path on this machine, where the job has it at another place",
    )
    add("--recorded", type=Path, help="JSON file with the identity of the data to compare with")
    add("--tokens", action="store_true", help="print the ids of the tokens too")
    return parser.parse_args(arguments)


def _whole_number(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


def samples_of_step(
    settings: Settings, step: int, after_step: int = 0, after_samples: int = 0
) -> Sequence[int]:
    """Return the numbers of the samples of a step's global batch, counted from a state as in :func:`audit`.

    Raises
    ------
    UserError
        If the step is not one of the training, or does not come after the state.
    """
    if not 1 <= step <= settings.max_steps:
        raise UserError(
            f"--step {step}: expected 1 to trainer.max_steps={settings.max_steps} of this training"
        )
    if step <= after_step:
        raise UserError(f"--step {step}: expected more than --after-step {after_step}")
    steps, consumed, ramp = step - 1 - after_step, after_samples, settings.rampup
    while ramp is not None and steps and consumed <= ramp.samples:
        consumed = settings.samples_after(consumed)[-1] + 1
        steps -= 1
    if steps:
        consumed = settings.resume.pass_over(consumed, steps * settings.global_batch)
    return settings.samples_after(consumed)


def audit(
    settings: Settings,
    step: int,
    after_step: int = 0,
    after_samples: int = 0,
    places: Mapping[str, str] | None = None,
    recorded: object = None,
    with_tokens: bool = False,
) -> dict[str, Any]:
    """Return the documents of a step's global batch.

    Parameters
    ----------
    step
        The step, from 1.
    after_step, after_samples
        A state of the same training before it: the steps completed, and the samples consumed by them.
    places
        Paths on this machine of data sets that the configuration names otherwise.
    recorded
        The identity of the data at the launch, as its manifest keeps it.
    with_tokens
        Whether the ids of the tokens are wanted too.

    Returns
    -------
    dict
        ``step``, ``first_sample``, ``last_sample``, ``global_batch``, ``epoch``, ``data_generation``,
        ``changed`` (the files that are not those of the launch), ``skipped``, ``data_sets`` and ``samples``.
        ``skipped`` are the ranges of samples that were passed over up to this step. Each of the
        ``data_sets`` has had ``samples`` up to this step, of which ``skipped`` were passed over: as long as
        they are no more than its ``windows``, none was seen twice in the order of this data generation. Each
        of the ``samples`` has its ``number`` in the batch and in the run, as ``sample``, its ``data_set`` and
        ``window`` there, and the ``pieces`` of documents that it consists of: ``document`` from 0, ``first``
        and ``end`` of the tokens within it, ``source`` and ``offset`` where the data set has origins, and
        ``ids`` on request. Mock data have neither data sets nor pieces.

    Raises
    ------
    UserError
        If the training has no such step, or the data cannot be read.
    """
    samples = samples_of_step(settings, step, after_step, after_samples)
    result: dict[str, Any] = {
        "step": step,
        "first_sample": samples[0],
        "last_sample": samples[-1],
        "global_batch": len(samples),
        "data_generation": settings.resume.data_generation,
        "changed": [],
        "skipped": settings.resume.skipped_before(samples[-1]),
        "data_sets": [],
    }
    if settings.data.kind == "mock":
        mock: list[dict[str, Any]] = [
            {"number": number, "sample": sample, "data_set": None, "window": sample, "pieces": []}
            for number, sample in enumerate(samples)
        ]
        return {**result, "epoch": 0, "samples": mock}
    from slipway.trainer.checkpoint.store import split_rule
    from slipway.trainer.data.source import IndexedSource
    from slipway.trainer.data.training_data import (
        denoised_lengths,
        find_indices,
        make_order,
        open_training,
        window_length,
    )

    blend = settings.data.training
    assert blend is not None
    names = blend.prefixes
    here = tuple(Path((places or {}).get(str(name), name)) for name in names)
    # Nothing is written, so that indices are not kept either.
    settings = settings.set_split_rule(split_rule(settings.saving.directory))
    data = replace(settings.data, training=replace(blend, prefixes=here), index_dir=None)
    length = window_length(settings)
    source = open_training(data, find_indices(data, heldout=False), length)
    order = make_order(source, settings.seed, settings.resume)
    # A T5 takes spans out of the window without its last token.
    size = length if denoised_lengths(settings) else length + 1
    documents = [_Documents(prefix) for prefix in here]
    rows = []
    for number, sample in enumerate(samples):
        member, window, first = source.place(order.window(sample))
        pieces = documents[member].pieces(first, size, with_tokens)
        row = {"number": number, "sample": sample, "data_set": str(names[member]), "window": window}
        rows.append({**row, "pieces": list(pieces)})
    result["changed"] = _changes(dict(zip(map(str, names), here, strict=True)), recorded)
    sizes = [source.windows] if isinstance(source, IndexedSource) else source.sizes
    result["data_sets"] = _count(order, names, sizes, result["skipped"], samples[-1] + 1)
    return {**result, "epoch": order.epoch(samples[0]), "samples": rows}


def _count(
    order: SampleOrder,
    names: Sequence[Path],
    sizes: Sequence[int],
    skipped: Sequence[tuple[int, int]],
    samples: int,
) -> list[dict[str, Any]]:
    """Return for each data set its part of the first `samples` samples, and how many windows it has."""
    parts = list(zip(names, sizes, order.counts(samples), strict=True))
    rows: list[dict[str, Any]] = [
        {"data_set": str(name), "windows": size, "samples": count, "skipped": 0}
        for name, size, count in parts
    ]
    for first, end in skipped:
        for row, before, after in zip(rows, order.counts(first), order.counts(end), strict=True):
            row["skipped"] += after - before
    return rows


class _Documents:
    """The documents of a data set, found by the tokens before them."""

    def __init__(self, prefix: Path) -> None:
        import numpy as np

        from slipway.trainer.data.index import read_tables

        self._tables = read_tables(prefix)
        self._stream = np.memmap(f"{prefix}.bin", dtype=self._tables.dtype, mode="r")
        try:
            has_origins = origins_path(prefix).exists()
            self._origins = Origins(prefix, len(self._tables.boundaries) - 1) if has_origins else None
        except (OSError, ValueError) as error:
            raise UserError(f"model.data.data_prefix={prefix}: {error}") from None

    def pieces(self, first: int, count: int, with_tokens: bool) -> Iterator[dict[str, Any]]:
        """Yield the documents of the tokens ``[first, first + count)``, those without tokens left out."""
        document, end = self._tables.document_at(first), first + count
        while first < end:
            start, following = self._tables.start(document), self._tables.start(document + 1)
            until = min(end, following)
            if until > first:
                piece: dict[str, Any] = {"document": document, "first": first - start, "end": until - start}
                if self._origins is not None:
                    piece["source"], piece["offset"] = self._origins[document]
                if with_tokens:
                    piece["ids"] = self._stream[first:until].tolist()
                yield piece
            first, document = until, document + 1


def _changes(places: Mapping[str, Path], recorded: object) -> list[str]:
    """Return the data sets' files that are not what the launch recorded, each as old → new."""
    from slipway.trainer.data import identity

    earlier = tuple(file for file in identity.from_json(recorded) if file.kind == identity.DATA)
    if not earlier:
        return []
    files = [
        identity.InputFile(identity.DATA, identity.DATA_KEY, f"{name}{suffix}", f"{here}{suffix}")
        for name, here in places.items()
        for suffix in identity.SUFFIXES
    ]
    return [str(change) for change in identity.differences(earlier, identity.identify(files))]


if __name__ == "__main__":
    sys.exit(main())
