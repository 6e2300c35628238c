"""Find and identify a training's data and the files of its tokenizer."""

from __future__ import annotations

import json
import math
import stat
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from launcher.checks.facts import MissingPath
from launcher.checks.gathering.checkpoints import choose_checkpoint
from launcher.checks.gathering.host import ask_module
from launcher.checks.gathering.path_resolver import Fault, PathResolver, opened, why_unreadable
from launcher.checks.rules.training import weight_of
from launcher.drafting import Draft
from launcher.errors import file_mode, nearest_files
from launcher.estimates.parallelism import is_encoder_decoder
from launcher.estimates.values import Values, count
from launcher.stages.data_preparation import data_sets_of
from slipway.arithmetic import indexed
from slipway.arithmetic.vocabulary import WAYS_TO_A_VOCABULARY

_PREFIX = "model.data.data_prefix"
_SPLITS, _SPLIT_WEIGHTS = "model.data.splits_string", "900,50,50"
_SUFFIXES, _CACHE = (".bin", ".idx"), "model.data.index_mapping_dir"
_MAKE = "`slipway data tokenize` makes one from text files; data_impl=mock generates data"

_PATIENCE_SECONDS = 120


def data_sets(values: Values) -> list[tuple[str, str]]:
    """Return keys and prefixes of the data sets, each once; `data.prefix` reports malformed lists."""
    if values.raw("model.data.data_impl") != "mmap":
        return []
    prefixes = values.raw(_PREFIX)
    named = {_PREFIX: prefixes}
    if isinstance(prefixes, Mapping):
        named = {f"{_PREFIX}.{split}": value for split, value in prefixes.items()}
    return list(dict.fromkeys((key, prefix) for key, value in named.items() for prefix in _prefixes(value)))


def _prefixes(value: Any) -> Iterator[str]:
    for item in [value] if isinstance(value, str) else value if isinstance(value, list) else ():
        if isinstance(item, str) and item.strip() and weight_of(item) is None:
            yield item


def find_missing_data(resolver: PathResolver) -> tuple[MissingPath, ...] | None:
    """Return faults of the data sets; None if the job reads no data set."""
    named, cache = data_sets(resolver.values), resolver.values.raw(_CACHE)
    if named and "://" in str(cache):
        named.append((_CACHE, str(cache)))
    lacks = [_find_missing_set(resolver, key, prefix) for key, prefix in named]
    if prepared := _find_unread(resolver, [prefix for key, prefix in named if key != _CACHE]):
        return (prepared._replace(certain=any(lacks)),)
    return tuple(lack for lack in lacks if lack is not None) if named else None


def _find_unread(resolver: PathResolver, prefixes: Sequence[str]) -> MissingPath | None:
    """Return the mistake of a training that ignores the data which its launch prepares."""
    paths = [resolver.host(prefix.strip()) for prefix in prefixes]
    nodes = [config.data_preparation for config in resolver.draft.composition.before]
    written = [prefix for node in nodes if node is not None for prefix in data_sets_of(node)]
    if not written or not paths or set(paths) & {*written, None}:
        return None
    why = f"the data preparation before it writes {written[0]}, which the training does not read"
    return MissingPath(_PREFIX, prefixes[0], why, True, f"training.{_PREFIX}=[{written[0]}]")


def _find_missing_set(resolver: PathResolver, key: str, value: str) -> MissingPath | None:
    prefix = resolver.input(key, value)
    if not isinstance(prefix, Path):
        return prefix
    files = {suffix: prefix.with_name(f"{prefix.name}{suffix}") for suffix in _SUFFIXES}
    certain = all(resolver.is_visible(path) for path in files.values())
    sizes: dict[str, int] = {}
    wrong: dict[str, str] = {}
    for suffix, path in files.items():
        try:
            with opened(path) as stream:
                sizes[suffix] = stream.seek(0, 2)
        except OSError as error:
            wrong[suffix] = why_unreadable(error)
    if wrong:
        reasons = {reason: [name for name in wrong if wrong[name] == reason] for reason in wrong.values()}
        why = "; ".join(f"its {' and '.join(names)}: {reason}" for reason, names in reasons.items())
        remedies = (nearest_files(files[".idx"], ".idx"), _suggest_directory(resolver, value), _MAKE)
        fix = "\n".join(filter(None, remedies))
        if prefix.suffix in _SUFFIXES:
            fix = "without the suffix: a prefix names both files"
        return resolver.missing(key, value, why, fix, certain=certain)
    try:
        fault = why_no_data_set(files[".idx"], sizes[".bin"])
    except OSError as error:
        fault = f"its .idx: {why_unreadable(error)}"
    if fault is not None:
        return resolver.missing(key, value, fault, _MAKE, certain=certain)
    short = _find_short(resolver, key, files[".idx"]) if resolver.plan.job.engine == "megatron" else None
    return resolver.missing(key, value, *short, certain=certain) if short is not None else None


def _find_short(resolver: PathResolver, key: str, idx: Path) -> Fault | None:
    """Return the first split that our trainer reads and that has no window (slipway/trainer/data/source.py).

    The trainer may refuse more T5 splits: a T5's window is longer than its input.
    """
    values = resolver.values
    length = values.whole("model.seq_length" if is_encoder_decoder(values) else "model.encoder_seq_length")
    splits, named = ["train", "validation"], key.removeprefix(_PREFIX).lstrip(".")
    if values.raw("trainer.limit_val_batches") == 0:
        splits.remove("validation")
    # A data set that is named for a split is whole.
    text = "1" if named else str(values.raw(_SPLITS) or _SPLIT_WEIGHTS)
    weights = [weight_of(part) or 0.0 for part in text.split(",")]
    is_known = len(weights) <= 3 and min(weights) >= 0 and 0 < sum(weights) < math.inf
    if length is None or not is_known or named not in ("", *splits):
        return None
    chosen = choose_checkpoint(resolver) if values.flag("exp_manager.resume_if_exists") else None
    saved = {"split_rule": indexed.SPLIT_RULE} if chosen is None else chosen.content
    rule = saved.get("split_rule", indexed.FIRST_SPLIT_RULE)
    with opened(idx) as stream:
        header = indexed.parse_header(stream.read(indexed.HEADER.size), stream.seek(0, 2))
        parts = indexed.split_documents([*weights, 0.0, 0.0][:3], header.boundaries - 1, rule)
        for split, (first, last) in zip([named] if named else splits, parts, strict=False):
            start, end = (indexed.read_start(stream, header, document) for document in (first, last))
            tokens = (end - start) // header.token_bytes
            if tokens <= length:
                why = f"its {split} split has {tokens:,} tokens in {count(last - first, 'document')}"
                fix = "use more documents" if named else f"use more documents, or change training.{_SPLITS}"
                if split != "train":
                    fix += "\ntraining.trainer.limit_val_batches=0 trains without validation"
                return f"{why}, and a window needs {length + 1:,}", fix
    return None


def _suggest_directory(resolver: PathResolver, value: str) -> str | None:
    """Suggest another directory for a missing file of `data_dir`, such as the user's own."""
    data_dir, here = Path(resolver.draft.composition.config.data_dir), Path("data").absolute()
    if not Path(value).is_relative_to(data_dir):
        return None
    another = here if here.is_dir() and here != data_dir else "..."
    return f"it is looked for in data_dir={data_dir}; to look elsewhere: data_dir={another}"


def why_no_data_set(idx: Path, bin_size: int) -> str | None:
    """Return the mismatch of an ``.idx`` and the size of its ``.bin``; None if they match.

    Raise OSError if the ``.idx`` cannot be read.
    """
    with opened(idx) as stream:
        head = stream.read(indexed.HEADER.size)
        try:
            header = indexed.parse_header(head, stream.seek(0, 2))
        except ValueError as error:
            return str(error)
        if not header.sequences or header.boundaries < 2:
            return "there are no documents in it"
        size = indexed.read_start(stream, header, header.boundaries - 1)
    if size != bin_size:
        return f"its .idx tells of {size:,} bytes of tokens, its .bin has {bin_size:,}"
    return None


class DataAnswer(NamedTuple):
    """The answer of the trainer's program about the data.

    `changed` are the data that differ from an earlier identity, each as old → new; `accept` is the value of
    `training.resume.accept_data` that accepts them.
    """

    identity: list[dict[str, Any]]
    changed: tuple[str, ...]
    accept: str | None


def data_identity(draft: Draft) -> list[dict[str, Any]]:
    """Return the identity of a training's data for the record; empty if unknown."""
    if draft.plan.job.stage != "training":
        return []
    answer = ask_identity(draft, [])
    return answer.identity if answer is not None else []


def ask_identity(draft: Draft, earlier: Sequence[object]) -> DataAnswer | None:
    """Compare a training's data with an earlier identity; ``None`` if the program does not answer."""
    files = list(_list_files(PathResolver(draft)))
    if not files:
        return DataAnswer([], (), None)
    state = tuple(_state(item["path"]) for item in files)
    return _ask(json.dumps({"wanted": files, "earlier": list(earlier)}), state)


def _ask(question: str, state: tuple[object, ...]) -> DataAnswer | None:
    answer = ask_trainer("slipway.trainer.data.identity", question, state)
    return DataAnswer(answer["identity"], tuple(answer["changed"]), answer["accept"]) if answer else None


# A launch asks twice, for the checks and for the record; the points of a sweep read the same files.
@lru_cache(maxsize=16)
def ask_trainer(module: str, question: str, state: tuple[object, ...] = ()) -> Any:
    """Ask a program of the trainer; return None without an answer.

    `state` is the state of the files that the question names, a key of the cache.
    """
    try:
        return json.loads(ask_module(module, question, _PATIENCE_SECONDS))
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def _list_files(resolver: PathResolver) -> Iterator[dict[str, str]]:
    """Yield the files as the program expects them, without those that an earlier stage will write.

    `name` is the path in the job, `path` that on this machine.
    """
    for key, value in data_sets(resolver.values):
        prefix, path = Path(value.strip()), resolver.input(key, value.strip())
        for suffix in _SUFFIXES if isinstance(path, Path) else ():
            yield {"kind": "data", "key": _PREFIX, "name": f"{prefix}{suffix}", "path": f"{path}{suffix}"}
    for key, value in tokenizer_files(resolver.values, resolver.plan.job.engine):
        path = resolver.input(key, value)
        if isinstance(path, Path):
            yield {"kind": "tokenizer", "key": key, "name": str(Path(value)), "path": str(path)}
    key, value = "model.teacher", resolver.values.raw("model.teacher")
    if isinstance(value, str) and isinstance(path := resolver.input(key, value), Path):
        yield {"kind": "teacher", "key": key, "name": str(Path(value)), "path": str(path)}


def _state(path: str) -> tuple[int, ...] | None:
    """Return a file's identity, size and times, which show later writes."""
    try:
        status = Path(path).stat()
    except (OSError, ValueError):
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


# --- the tokenizer that made the data

_ENDS = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
_HELD_OUT = "evaluation.perplexity.data_prefix"


def data_of_other_tokenizers(resolver: PathResolver) -> tuple[MissingPath, ...] | str | None:
    """Return the data sets that another tokenizer than the training's made, by their manifests.

    None if there are no data, or no tokenizer, to compare; the reason if no data set has a manifest.
    """
    job = resolver.plan.job
    evaluation = (job.stage_config or {}).get("evaluation")
    values = Values((job.config if evaluation is None else job.stage_config) or {})
    named = data_sets(values)
    if evaluation is not None:
        own = [(_HELD_OUT, prefix) for prefix in _prefixes(evaluation["perplexity"]["data_prefix"])]
        named = (own or named) if evaluation["perplexity"]["enabled"] else []
    keys = {prefix.strip(): key for key, prefix in named}
    paths = {prefix: resolver.input(key, prefix) for prefix, key in keys.items()}
    data = {prefix: str(path) for prefix, path in paths.items() if isinstance(path, Path)}
    data = {prefix: path for prefix, path in data.items() if Path(f"{path}.bin").is_file()}
    tokenizer = _tokenizer(resolver, values)
    if not data or tokenizer is None:
        return None
    training = resolver.draft.composition.config.training if evaluation is None else None
    accepted = training.resume.accept_data if training is not None else values.raw("resume.accept_data")
    ends_matter = any(values.flag(f"model.data.{name}") for name in _ENDS)
    question = json.dumps({"data": data, "tokenizer": tokenizer, "ends_matter": ends_matter})
    state = [_state(f"{path}.bin") for path in data.values()]
    answer = ask_trainer(
        "slipway.trainer.data.tokenized", question, (*state, *map(_state, tokenizer.values()))
    )
    if answer is None:
        return None
    accept, fix = answer["accept"], "data that the training's tokenizer made"
    if training is not None:
        fix += ", or the tokenizer of the data: training.model.tokenizer.*\nif they fit all the same: "
        fix += f"training.resume.accept_data={'+'.join(filter(None, (accepted, accept)))}"
    is_accepted = accept in (accepted or "").split("+")
    others = []
    for name, why, is_certain in answer["others"]:
        is_error = is_certain and not is_accepted
        others.append(MissingPath(keys[name], name, why, is_error, fix if is_error else None))
    if answer["unknown"] and not others:
        return f"no manifest of {answer['unknown'][0]} says which one did"
    return tuple(others)


def _tokenizer(resolver: PathResolver, values: Values) -> dict[str, str] | None:
    """Return the trainer's tokenizer, with paths of this machine; None if they do not exist here."""
    library, kind = (values.raw(f"{_NODE}.{name}") for name in ("library", "type"))
    fields = {"library": library, "name": kind if isinstance(kind, str) else ""}
    for key, value in tokenizer_files(values, resolver.plan.job.engine):
        path = resolver.input(key, value)
        if not isinstance(path, Path):
            return None
        fields["name" if key.endswith(".type") else key.rpartition(".")[2]] = str(path)
    return fields if library in ("megatron", "sentencepiece", "huggingface") else None


# --- the files of a tokenizer

_NODE = "model.tokenizer"
_WORDPIECES = ("BertWordPieceCase", "BertWordPieceLowerCase")
_MERGES = "it is made together with vocab.json: with merges of another tokenizer the ids are others"
_PIECES = (
    "a SentencePiece model, such as the tokenizer.model of published weights; the text is tokenized with it "
    "by data_preparation.tokenizer.file=PATH"
)
# The first line of the pointer that replaces a large file of a repository until it is fetched.
_LFS = b"version https://git-lfs"


def find_missing_tokenizer(resolver: PathResolver) -> tuple[MissingPath, ...] | None:
    """Return missing files of the tokenizer; None if the payload needs no files."""
    job, values = resolver.plan.job, resolver.values
    # For mock data our trainer takes known sizes instead of files.
    if job.config is None or (job.engine == "megatron" and values.raw("model.data.data_impl") == "mock"):
        return None
    files = tokenizer_files(values, job.engine)
    lacks = [lack for key, value in files for lack in _find_missing_file(resolver, key, value)]
    if job.engine != "nemo":  # NeMo downloads files without a name
        lacks += [_report_unset(key, values) for key in _select_keys(values) if values.raw(key) is None]
    return tuple(lacks)


def tokenizer_files(values: Values, engine: str | None) -> Iterator[tuple[str, str]]:
    """Yield keys and paths of the tokenizer's files, or of its directory."""
    for key in _select_keys(values):
        value = values.raw(key)
        if isinstance(value, str) and value and (engine != "nemo" or "://" not in value):  # NeMo downloads
            yield key, value


def _select_keys(values: Values) -> tuple[str, ...]:
    """Return the keys whose files the tokenizer of this library and type reads."""
    library, kind = values.raw(f"{_NODE}.library"), values.raw(f"{_NODE}.type")
    if library == "sentencepiece":
        return (f"{_NODE}.model",)
    if library == "huggingface":
        # The value may be a name on the hub.
        return (f"{_NODE}.type",) if (isinstance(kind, str) and Path(kind).is_absolute()) else ()
    if library != "megatron":
        names = ("model", "vocab_file", "merge_file")
        return tuple(f"{_NODE}.{name}" for name in names if values.raw(f"{_NODE}.{name}") is not None)
    if kind in _WORDPIECES:
        return (f"{_NODE}.vocab_file",)
    return (f"{_NODE}.vocab_file", f"{_NODE}.merge_file")


def _report_unset(key: str, values: Values) -> MissingPath:
    ways_out = {"model": _PIECES, "merge_file": _MERGES}
    way_out = ways_out.get(key.rpartition(".")[2], WAYS_TO_A_VOCABULARY)
    if values.raw(f"{_NODE}.type") in _WORDPIECES:
        way_out = "BERT's vocab.txt has a token in each line"
    return MissingPath(key, "null", "it is not set", True, way_out)


def _find_missing_file(resolver: PathResolver, key: str, value: str) -> list[MissingPath]:
    def fault(path: Path) -> Fault | None:
        why = _why_no_tokenizer(path, key)
        if why is None:
            return None
        ways_out = {"vocab.json": WAYS_TO_A_VOCABULARY, "merges.txt": _MERGES, "tokenizer.model": _PIECES}
        near, elsewhere = nearest_files(path, path.suffix), _suggest_directory(resolver, value)
        return why, "\n".join(filter(None, (near, elsewhere, ways_out.get(path.name))))

    return resolver.look(key, value, resolver.input(key, value, f"training.{key}="), fault)


def _why_no_tokenizer(path: Path, key: str) -> str | None:
    try:
        if key.endswith(".type"):
            return None if stat.S_ISDIR(file_mode(path)) else "there is no such directory"
        with opened(path) as stream:
            head = stream.read(64)
    except OSError as error:
        return why_unreadable(error)
    if not head:
        return "an empty file"
    if head.startswith(_LFS):
        return "not the file, but a pointer of Git LFS's to it: git lfs pull"
    if path.suffix == ".json" and not head.lstrip().startswith(b"{"):
        return "not a vocabulary: it does not begin with {"
    return None
