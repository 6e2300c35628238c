"""Cleaning: datatrove's quality filters as blocks, and the account of the documents that they drop.

Only the filters' own code runs here; datatrove's executors, readers and writers do not. No filter downloads
anything: a model is a file that the configuration names.
"""

from __future__ import annotations

import hashlib
import heapq
import inspect
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipway.common.errors import UserError, suggest
from slipway.common.files import sha256_of
from slipway.corpus.errors import missing_library

if TYPE_CHECKING:
    from slipway.common.sections import Filter
    from slipway.corpus.documents import Document

EXTRA = "cleaning"
_KEY = "data_preparation.filters"
_SAMPLES = 3
_EXCERPT = 200
# Options of datatrove's blocks that have no meaning here: no document is written elsewhere, and no metadata.
_UNUSED_OPTIONS = ("exclusion_writer", "label_only", "keep_top_pairs_threshold", "save_labels_in_metadata")
_MODEL = "model"


# datatrove's class of each filter.
FILTERS = {
    "gopher_quality": "GopherQualityFilter",
    "gopher_repetition": "GopherRepetitionFilter",
    "c4_quality": "C4QualityFilter",
    "c4_paragraph": "C4ParagraphFilter",
    "fineweb_quality": "FineWebQualityFilter",
    "regex": "RegexFilter",
    "language": "LanguageFilter",
    "fasttext": "FastTextClassifierFilter",
}
# URLs of models for the filters that need one, by their option `backend`.
_MODELS: dict[str, dict[str, str]] = {
    "language": {
        "ft176": "https://dl.fbaipublicfiles.com/fasttext/supervised-models/lid.176.bin",
        "glotlid": "https://huggingface.co/cis-lmu/glotlid/resolve/main/model_v3.bin",
    },
    "fasttext": {},
}


class Cleaner:
    """Chain of filters.

    Parameters
    ----------
    filters
        Names and options, in the order of their application.

    Raises
    ------
    UserError
        If a name, an option or a value is not valid, or a library or model is missing.
    """

    def __init__(self, filters: Sequence[Filter]) -> None:
        self._blocks = [(entry.name, _build(entry)) for entry in filters]

    def clean(self, document: Document) -> Document | str:
        """Return the document, with its text as the filters leave it, or the reason to drop it.

        A reason is ``filter/datatrove's reason``.
        ``c4_quality`` removes lines; ``fasttext`` removes parts of the text if its `filter_mode` says so.
        """
        if not self._blocks:
            return document
        # Blocks divide by numbers of lines and words.
        if not document.text.strip():
            return "empty"
        from datatrove.data import Document as Block

        block = Block(text=document.text, id=document.id or "")
        for name, step in self._blocks:
            try:
                verdict = step.filter(block)
            except Exception as error:
                error.add_note(f"in filter {name}, source file {document.file}, offset {document.offset}")
                raise
            keep, reason = verdict if isinstance(verdict, tuple) else (verdict, None)
            if not keep:
                return f"{name}/{reason}" if reason else name
            if not block.text.strip():
                return f"{name}/empty"
        return document if block.text == document.text else replace(document, text=block.text)


class DropCounts:
    """Numbers of dropped documents by reason, with samples.

    The samples of a reason are the documents with the lowest hashes of places: they do not depend on how
    the documents were divided among tasks, nor on the order of `add` and `merge`.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._samples: dict[str, list[tuple[str, dict[str, Any]]]] = {}

    def add(self, reason: str, file: int, offset: int, **more: Any) -> None:
        """Count a document.

        Parameters
        ----------
        reason
            Name of the reason.
        file, offset
            Place of the document.
        more
            Further fields of a sample; a `text` is cut to 200 characters.
        """
        self.counts[reason] += 1
        rank = hashlib.blake2b(f"{reason} {file} {offset}".encode(), digest_size=8).hexdigest()
        samples = self._samples.setdefault(reason, [])
        if len(samples) < _SAMPLES or rank < samples[-1][0]:
            if "text" in more:
                more["text"] = more["text"][:_EXCERPT]
            self._keep(reason, [(rank, {"file": file, "offset": offset, **more})])

    def record(self) -> dict[str, Any]:
        """Return the counts and samples as JSON."""
        samples = {
            reason: [[rank, sample] for rank, sample in kept] for reason, kept in self._samples.items()
        }
        return {"counts": dict(sorted(self.counts.items())), "samples": dict(sorted(samples.items()))}

    def merge(self, record: Mapping[str, Any]) -> None:
        """Add what `record` returned."""
        self.counts.update(record["counts"])
        for reason, samples in record["samples"].items():
            self._keep(reason, [(rank, sample) for rank, sample in samples])

    def samples(self) -> dict[str, list[dict[str, Any]]]:
        """Return the samples of each reason."""
        return {reason: [sample for _, sample in self._samples[reason]] for reason in sorted(self._samples)}

    def _keep(self, reason: str, samples: Iterable[tuple[str, dict[str, Any]]]) -> None:
        candidates = [*self._samples.get(reason, ()), *samples]
        self._samples[reason] = heapq.nsmallest(_SAMPLES, candidates, key=lambda sample: sample[0])


def identity(filters: Sequence[Filter]) -> list[dict[str, Any]]:
    """Return what decides on the filters' results: names, options, and the SHA-256 of models.

    Raises
    ------
    UserError
        If a model cannot be read.
    """
    entries = []
    for entry in filters:
        options = dict(entry.options)
        if _MODEL in options:
            model = Path(options[_MODEL])
            try:
                options["model_sha256"] = sha256_of(model)
            except OSError as error:
                raise UserError(f"{_KEY}.{entry.name}.{_MODEL}='{model}': {error.strerror}") from None
            options[_MODEL] = model.name
        entries.append({"name": entry.name, "options": options})
    return entries


def load_datatrove(module: str) -> Any:
    """Import a module of datatrove, which then neither logs nor draws progress bars.

    Raises
    ------
    UserError
        If a library is missing.
    """
    import importlib

    # Read by tqdm when it is imported.
    os.environ.setdefault("TQDM_DISABLE", "1")
    try:
        result = importlib.import_module(f"datatrove.{module}")
        from loguru import logger
    except ImportError as error:
        raise _explain_missing(error, "cleaning or deduplicating") from None
    logger.disable("datatrove")
    return result


def _explain_missing(error: ImportError, purpose: str) -> UserError:
    """Return the error for a library; datatrove names one only in quotes within its message."""
    quoted = re.search("`(.+?)`", str(error))
    return missing_library(error.name or (quoted[1] if quoted else str(error)), purpose, EXTRA)


def _build(entry: Filter) -> Any:
    """Return datatrove's block for an entry of the configuration."""
    kind = getattr(load_datatrove("pipeline.filters"), FILTERS[entry.name])
    options = _check_options(entry, kind, has_model=entry.name in _MODELS)
    model = options.pop(_MODEL, None)
    try:
        if "language" in inspect.signature(kind).parameters:
            load_words(f"{_KEY}.{entry.name}", options.get("language", "eng"))
        return _build_model(entry, kind, options, model) if entry.name in _MODELS else kind(**options)
    except ImportError as error:
        raise _explain_missing(error, f"{_KEY}.{entry.name}") from None
    except re.error as error:
        raise UserError(f"{_KEY}.{entry.name}: not a regular expression: {error}") from None


def load_words(key: str, language: str) -> Any:
    """Return datatrove's word tokenizer of a language.

    Raises
    ------
    UserError
        If datatrove has no tokenizer for it, or its library is missing.
    """
    words = load_datatrove("utils.word_tokenizers")
    try:
        tokenizer = words.load_word_tokenizer(language)
    except ValueError:
        raise UserError(
            f"{key}.language='{language}': datatrove has no word tokenizer of that name; expected an ISO 639 "
            "code, such as eng, deu or fra"
        ) from None
    except ImportError as error:
        raise _explain_missing(error, f"{key}.language='{language}'") from None
    return tokenizer


def _check_options(entry: Filter, kind: Any, has_model: bool) -> dict[str, Any]:
    """Return the options as the block takes them."""
    key = f"{_KEY}.{entry.name}"
    parameters = {
        name: parameter
        for name, parameter in inspect.signature(kind).parameters.items()
        if name not in (*_UNUSED_OPTIONS, "model_url")
    }
    valid = sorted([*parameters, _MODEL] if has_model else parameters)
    options = {}
    for name, value in entry.options.items():
        if name not in valid:
            known = f"valid are {', '.join(valid)}" if valid else "it has no options"
            raise UserError(f"{key}.{name}: unknown option; {known}{suggest(name, valid)}")
        options[name] = str(value) if name == _MODEL else _value(f"{key}.{name}", value, parameters[name])
    for name, parameter in parameters.items():
        if parameter.default is inspect.Parameter.empty and name not in options:
            raise UserError(f"{key}.{name}: missing")
    return options


def _value(key: str, value: Any, parameter: inspect.Parameter) -> Any:
    """Return an option's value; lists become tuples, as some blocks need them."""
    default = parameter.default
    if isinstance(value, list):
        value = tuple(_value(key, item, parameter) if isinstance(item, list) else item for item in value)
    if default is inspect.Parameter.empty or isinstance(default, str):
        expected, right = "a text", isinstance(value, str)
    elif isinstance(default, bool):
        expected, right = "true or false", isinstance(value, bool)
    elif isinstance(default, int | float):
        optional = "None" in str(parameter.annotation)
        expected = "a number, or null to leave the rule out" if optional else "a number"
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        right = is_number or (optional and value is None)
    elif isinstance(default, tuple):
        expected, right = "a list", isinstance(value, tuple)
    else:
        return value
    if not right:
        raise UserError(f"{key}={value!r}: expected {expected}")
    return value


def _build_model(entry: Filter, kind: Any, options: dict[str, Any], model: str | None) -> Any:
    """Return a block of fastText with the model of a local file."""
    key = f"{_KEY}.{entry.name}.{_MODEL}"
    urls = _MODELS[entry.name]
    backend = options.get("backend", "ft176")
    if urls and backend not in urls:
        raise UserError(f"{_KEY}.{entry.name}.backend='{backend}': expected one of {', '.join(urls)}")
    way_out = f"; get it with: curl --location --output MODEL.bin {urls[backend]}" if urls else ""
    if model is None:
        raise UserError(f"{key}: missing; expected the path of a fastText model{way_out}")
    if not Path(model).is_file():
        raise UserError(f"{key}='{model}': no such file{way_out}")
    if entry.name == "fasttext":
        block = kind(model_url=model, **options)
        holder = block
    else:
        block = kind(**options)
        holder = block.model
    from fasttext.FastText import _FastText

    try:
        # Both classes keep the model here once they have downloaded it.
        holder._model = _FastText(model)
    except ValueError as error:
        raise UserError(f"{key}='{model}': not a fastText model: {error}") from None
    labels = [label.removeprefix("__label__") for label in holder._model.labels]
    for option in ("keep_labels", "remove_labels"):
        for label, _ in getattr(block, option, None) or ():
            if label not in labels:
                raise UserError(
                    f"{_KEY}.{entry.name}.{option}: no label '{label}' in {model}, which has "
                    f"{', '.join(sorted(labels))}{suggest(label, labels)}"
                )
    return block
