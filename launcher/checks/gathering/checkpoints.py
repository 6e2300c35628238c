"""Find the checkpoint from which a training resumes, without loading it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

from launcher.checks.facts import MissingPath, RewrittenPast, SavedShards
from launcher.checks.gathering.path_resolver import Fault, PathResolver, is_there
from launcher.errors import did_you_mean, nearest, nearest_files
from launcher.estimates.values import Values, full
from launcher.file_systems import mount_of
from launcher.runs.trained import (
    MarkedCheckpoint,
    find_marked_checkpoints,
    node,
    read_marked_checkpoint,
    read_model_sizes,
)
from slipway.arithmetic.interventions import DEFAULTS, find_rewritten, was_made
from slipway.common.files import read_bytes, read_int, read_json, read_text
from slipway.common.node.checkpoints import MARKER, TRACKER
from slipway.common.owners import why_untrusted

_NAMED = "resume.checkpoint"
_INITIAL = "restore_from_path"
_TEACHER, _VOCABULARY = "model.teacher", "model.tokenizer.vocab_file"
_LARGEST_VOCABULARY = 64 << 20
# By these keys a marker describes the model too (slipway/trainer/config/architecture.py).
_SIZES = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups"),
    "kv_channels",
)
_DIRECTORY = "exp_manager.checkpoint_callback_params.dirpath"
# NeMo's keys for one checkpoint each; its T5 files have the last two at the root.
_OF_NEMO = (
    "model.resume_from_checkpoint",
    "model.restore_from_path",
    "exp_manager.resume_from_checkpoint",
    "restore_from_path",
)
# A checkpoint of NeMo's older format has a directory for each rank, which the key does not name.
_RANKS = ("mp_rank_00", "tp_rank_00_pp_rank_000")
# The format that slipway/trainer/checkpoint/compatible.py refuses under other sizes, and those sizes.
_SHARDED = "dp_reshardable"
_SHARDS = ("tensor", "pipeline", "virtual_pipeline")


def checkpoint_directory(resolver: PathResolver) -> Path | None:
    """Return a training's checkpoint directory on this machine; None if the container's image has it."""
    value = resolver.plan.job.chain.checkpoints
    return resolver.host(value) if value is not None else resolver.plan.paths.checkpoints


def read_complete_checkpoints(directory: Path | None) -> list[MarkedCheckpoint]:
    """Return the complete checkpoints of our trainer in a directory, the newest last."""
    try:
        marked = find_marked_checkpoints(directory) if directory is not None else []
    except OSError:
        return []
    return [checkpoint for checkpoint in marked if checkpoint.damage is None]


def choose_checkpoint(resolver: PathResolver) -> MarkedCheckpoint | None:
    """Return the checkpoint to resume from: the named one until a newer follows it, else the newest."""
    values, directory = resolver.values, checkpoint_directory(resolver)
    newest, value = next(reversed(read_complete_checkpoints(directory)), None), values.raw(_NAMED)
    if not isinstance(value, str) or (newest is not None and _was_made(values, newest)):
        return newest
    path = resolver.host(value) if "/" in value else directory / value if directory is not None else None
    return read_marked_checkpoint(path) if path is not None else None


def read_saved_shards(resolver: PathResolver) -> SavedShards | None:
    """Return the shards of the optimizer states that our trainer would load; None if all sizes can."""
    chosen = choose_checkpoint(resolver) if resolver.plan.job.engine == "megatron" else None
    values = resolver.values
    if chosen is None or chosen.content.get("optimizer") != _SHARDED:
        return None
    if not values.flag("resume.load_optimizer", default=True) and not _was_made(values, chosen):
        return None
    sizes = [read_int(chosen.content.get(f"{name}_model_parallel_size"), 1) for name in _SHARDS]
    known = [size for size in sizes if size is not None]
    return SavedShards(str(chosen.path), *known) if known == sizes else None


def find_missing_checkpoint(resolver: PathResolver) -> tuple[MissingPath, ...] | None:
    """Return faults of the checkpoint to resume from; None if the job is no training."""
    job = resolver.plan.job
    if job.config is None or job.stage != "training":
        return None
    values = Values(job.config)
    lacks = _check_newest(resolver, values)
    if job.engine == "megatron":
        own = _check_named, _check_initial, _check_teacher
        lacks = [*(lack for check in own for lack in check(resolver, values)), *lacks]
        lacks = lacks or [*_check_owner(resolver, values), *_find_foreign_teacher(resolver, values)]
    elif job.engine == "nemo":
        lacks = [*_check_nemo(resolver, values), *lacks]
    return tuple(lacks)


def _check_named(resolver: PathResolver, values: Values) -> list[MissingPath]:
    """Look for our trainer's `resume.checkpoint`: a name in the run's directory of checkpoints, or a path."""
    value, directory = values.raw(_NAMED), checkpoint_directory(resolver)
    if not isinstance(value, str):
        return []
    known = read_complete_checkpoints(directory)[::-1]

    def fault(path: Path) -> Fault | None:
        if known and _was_made(values, known[0]):
            return None  # the newest checkpoint comes after it: the named one may be gone by now
        why, names = _why_lost(path), [checkpoint.path.name for checkpoint in known]
        return (why, _suggest_near(path, names, directory)) if why is not None else None

    path: Path | MissingPath | None = directory / value if directory is not None else None
    if "/" in value:
        path = resolver.input(_NAMED, value, f"training.{_NAMED}=")
    return resolver.look(_NAMED, value, path, fault)


def _check_initial(resolver: PathResolver, values: Values) -> list[MissingPath]:
    """Look for the weights that a run of our trainer starts from, unless it has its own checkpoint."""
    value = values.raw(_INITIAL)
    if not isinstance(value, str) or read_complete_checkpoints(checkpoint_directory(resolver)):
        return []

    def fault(path: Path) -> Fault | None:
        why = _why_lost(path)
        saved = _read_newest(path)
        if why is None or (saved and saved[0].path != path):
            other = _compare_models(saved[0].content if saved else {}, values)
            return (other, "a run starts from the weights of the same model") if other is not None else None
        if is_there(path / "config.json"):
            return why, f"slipway convert {path} --to slipway makes a checkpoint of a Hugging Face model"
        return why, nearest_files(path)

    return resolver.look(_INITIAL, value, resolver.input(_INITIAL, value, f"training.{_INITIAL}="), fault)


def _check_teacher(resolver: PathResolver, values: Values) -> list[MissingPath]:
    """Look for the model that a run of our trainer learns from, and count its tokens."""
    value = values.raw(_TEACHER)
    if not isinstance(value, str):
        return []

    def fault(path: Path) -> Fault | None:
        if not is_there(path):
            return "there is no such directory", nearest_files(path)
        is_theirs = is_there(path / "config.json")
        if is_theirs and not any(path.glob("*.safetensors")):
            return "there is a config.json in it, and no .safetensors file", "one with weights of that format"
        if not is_theirs and (why := _why_lost(path)) is not None:
            newest = read_complete_checkpoints(path)[-1:]
            near = f"training.{_TEACHER}={newest[0].path}" if newest else nearest_files(path / MARKER)
            return f"{why}, and no config.json of Hugging Face's", near
        return _compare_vocabularies(resolver, values, read_model_sizes(path))

    return resolver.look(_TEACHER, value, resolver.input(_TEACHER, value, f"training.{_TEACHER}="), fault)


def _compare_vocabularies(resolver: PathResolver, values: Values, sizes: Mapping[str, Any]) -> Fault | None:
    """Compare the tokens of a teacher with those of the run's ``vocab.json``, if that can be read."""
    value, known = values.raw(_VOCABULARY), sizes.get("vocabulary")
    path = resolver.input(_VOCABULARY, value) if isinstance(value, str) else None
    with suppress(OSError, ValueError):
        if known is not None and isinstance(path, Path) and path.suffix == ".json":
            own = len(read_json(path, _LARGEST_VOCABULARY))
            if own != known:
                return (
                    f"it has {known:,} tokens, and training.{_VOCABULARY} {own:,}",
                    "a student has the tokenizer of its teacher",
                )
    return None


def _compare_models(marker: Mapping[str, Any], values: Values) -> str | None:
    """Return the first key in which a run's model differs from a checkpoint's."""
    model = marker.get("model")
    stacks = ("encoder", "decoder") if values.node("model.encoder") else ("decoder",)
    for stack, name in product(stacks, _SIZES):
        saved = model.get(stack) if isinstance(model, dict) else None
        key = f"model.{stack}.{name}" if len(stacks) > 1 else f"model.{name}"
        size, saved_size = values.raw(key), saved.get(name) if isinstance(saved, dict) else None
        if isinstance(size, int) and isinstance(saved_size, int) and size != saved_size:
            return f"it has {key}={saved_size}, and this run {size}"
    return None


def _check_owner(resolver: PathResolver, values: Values) -> list[MissingPath]:
    """Look at the owner of the checkpoint that our trainer would start from."""
    chosen = choose_checkpoint(resolver) if values.flag("exp_manager.resume_if_exists") else None
    key = _NAMED if isinstance(values.raw(_NAMED), str) else _DIRECTORY
    if chosen is not None or not isinstance(value := values.raw(_INITIAL), str):
        return _find_foreign(key, values, [chosen] if chosen is not None else [])
    path = resolver.host(value)
    return _find_foreign(_INITIAL, values, _read_newest(path)) if path is not None else []


def _find_foreign_teacher(resolver: PathResolver, values: Values) -> list[MissingPath]:
    value = values.raw(_TEACHER)
    path = resolver.host(value) if isinstance(value, str) else None
    saved = read_marked_checkpoint(path) if path is not None else None
    return _find_foreign(_TEACHER, values, [saved] if saved is not None else [])


def _read_newest(path: Path) -> list[MarkedCheckpoint]:
    """Return the newest complete checkpoint of a directory, or that of a path itself, if there is one."""
    saved = read_marked_checkpoint(path)
    return read_complete_checkpoints(path)[-1:] or ([] if saved is None else [saved])


def _find_foreign(key: str, values: Values, chosen: Sequence[MarkedCheckpoint]) -> list[MissingPath]:
    """Return the checkpoints that our trainer refuses, because they are another user's.

    An NFS export may show the user's files as another's; the trainer detects that by writing a file next to
    the checkpoint.
    """
    trusted, own = values.raw("resume.trust_owner"), {os.geteuid(), 0}
    answers = [(saved.path, why_untrusted(saved.path, own, trusted and str(trusted))) for saved in chosen]
    mounts = [mount_of(path) for path, _ in answers]
    is_mapped = key in (_NAMED, _DIRECTORY) and any(mount and mount.kind[:3] == "nfs" for mount in mounts)
    return [
        MissingPath(key, str(path), answer[0], not is_mapped, answer[1]) for path, answer in answers if answer
    ]


def _was_made(values: Values, checkpoint: MarkedCheckpoint) -> bool:
    """Return True if a checkpoint comes after this way to resume."""
    recorded = checkpoint.content.get("resume")
    return isinstance(recorded, dict) and was_made(_changes(values), recorded)


def _changes(values: Values) -> dict[str, Any]:
    return {name: value for name, value in (values.node("resume") or {}).items() if name in DEFAULTS}


def find_rewritten_past(values: Values, checkpoint: MarkedCheckpoint) -> RewrittenPast | None:
    """Return the first key that contradicts what the checkpoint to resume from was trained on."""
    recorded, consumed = node(checkpoint.content, "resume"), checkpoint.content.get("consumed_samples")
    if not isinstance(consumed, int):
        return None
    try:
        key = find_rewritten(_changes(values), recorded, consumed)
    except (TypeError, ValueError):
        return None  # a value that `engine.megatron` refuses
    if key is None:
        return None
    return RewrittenPast(f"resume.{key}", recorded.get(key, []), consumed, checkpoint.path.name)


def _suggest_near(path: Path, names: list[str], directory: Path | None) -> str:
    if not names:
        return f"there is no complete checkpoint in {directory}; null goes on from the newest, or starts"
    listed = f"complete ones in {directory}, the newest first: {', '.join(names[:5])}"
    if len(names) > 5:
        listed += f" and {len(names) - 5} more"
    return f"{did_you_mean(path.name, names)}\n{listed}" if nearest(path.name, names) else listed


def _why_lost(path: Path) -> str | None:
    """Return why there is no complete checkpoint of our trainer at a path."""
    if not is_there(path):
        return "there is no such checkpoint"
    saved = read_marked_checkpoint(path)
    if saved is None:
        return f"not a complete checkpoint: no {MARKER} in it that can be read"
    return f"not a complete checkpoint: {saved.damage}" if saved.damage is not None else None


def _check_nemo(resolver: PathResolver, values: Values) -> Iterator[MissingPath]:
    for key in _OF_NEMO:
        value = values.raw(key)
        if isinstance(value, str) and value.strip() and "://" not in value:
            yield from resolver.look(key, value, resolver.input(key, value), _find_nemo_fault)


def _find_nemo_fault(path: Path) -> Fault | None:
    if is_there(path / MARKER):
        return "a checkpoint of Slipway, which NeMo cannot read", "engine=megatron"
    by_rank = [path.parent / rank / path.name for rank in _RANKS]
    if any(map(is_there, (path, *by_rank))):
        return None
    return "there is no such checkpoint", nearest_files(path)


def _check_newest(resolver: PathResolver, values: Values) -> list[MissingPath]:
    """Look for a required checkpoint, and for the one that Megatron-LM's record names."""
    engine, key = resolver.plan.job.engine, "exp_manager.resume_ignore_no_checkpoint"
    if not values.flag("exp_manager.resume_if_exists"):
        return []

    def fault(directory: Path) -> Fault | None:
        if engine == "megatron_lm" and (why := _why_not_newest(directory)) is not None:
            return why, nearest_files(directory / "iter_", "")
        if values.raw(key) is not False or _holds_any(directory, engine):
            return None
        why = f"there is no complete checkpoint in it, and {full(key)}=False asks for one"
        return why, f"{full(key)}=True starts from step 0"

    return resolver.look(_DIRECTORY, str(values.raw(_DIRECTORY)), checkpoint_directory(resolver), fault)


def _why_not_newest(directory: Path) -> str | None:
    """Return why Megatron-LM would not find the iteration of its record; no record is a fresh start."""
    try:
        text = read_text(directory / TRACKER, errors="replace").strip()
    except OSError:
        return None
    name = f"iter_{int(text):07d}" if text.isdecimal() and len(text) < 12 else text
    if name == "release" or (text.isdecimal() and is_there(directory / name)):
        return None
    return f"its {TRACKER} says {text[:40]!r}, and there is no {name[:40]}"


def _holds_any(directory: Path, engine: str) -> bool:
    if engine == "megatron":
        return bool(read_complete_checkpoints(directory))
    if engine == "megatron_lm":
        return is_there(directory / TRACKER)
    return has_entries(directory)


def has_entries(directory: Path) -> bool:
    """Return True if a directory has visible entries, or cannot be read."""
    try:
        return any(not entry.name.startswith(".") for entry in directory.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True


def find_missing_source(resolver: PathResolver) -> tuple[MissingPath, ...] | None:
    """Return faults of the source of a conversion or evaluation; None for other jobs."""
    job = resolver.plan.job
    if job.stage not in ("conversion", "evaluation") or job.stage_config is None:
        return None
    node, key = job.stage_config[job.stage], f"{job.stage}.source"
    source, path = node["source"], resolver.host(node["source"])
    tasks = tuple(_find_unknown_tasks(resolver, node["lm_eval"])) if job.stage == "evaluation" else ()
    if path is None or resolver.is_created_later(path):
        return tasks
    if not is_there(path):
        why, fix = "there is no such file or directory", nearest_files(path)
        return (resolver.missing(key, source, why, fix, at=path),)
    marked = sorted(read_complete_checkpoints(path), key=lambda checkpoint: checkpoint.serial)
    steps = {checkpoint.step for checkpoint in marked}
    requested = node["step"] if isinstance(node["step"], list) else [node["step"]]
    lost = sorted({step for step in requested if step is not None} - steps) if steps else []
    if lost:
        why, known = f"no complete checkpoint of this step in {path}", ", ".join(map(str, sorted(steps)))
        return tuple(
            resolver.missing(f"{job.stage}.step", str(step), why, f"steps: {known}") for step in lost
        )
    if path.is_dir() and not any(not entry.name.startswith(".") for entry in path.iterdir()):
        return (resolver.missing(key, source, "no checkpoint in it"),)
    if job.stage == "evaluation":
        read = [saved for saved in marked if saved.step in requested] or _read_newest(path)
        return (*tasks, *_find_foreign(key, Values(job.stage_config), read))
    if job.engine == "nemo":  # its job finds NeMo's own checkpoints
        return ()
    if node["source_format"] == "auto" and not any(map(_WEIGHTS.search, _names(path))):
        fix = "a checkpoint of Slipway, Hugging Face, Megatron-LM, PyTorch DCP or DeepSpeed"
        return (resolver.missing(key, source, "no weights of a known format in it", fix),)
    chosen = [checkpoint for checkpoint in marked if node["step"] in (None, checkpoint.step)]
    return tuple(_find_taken_output(resolver, node, chosen[-1] if chosen else None))


_TASKS_SHOWN = 20
_LIST_TASKS = "from lm_eval.tasks import TaskManager; print(*TaskManager().all_tasks, sep='\\n')"


def _find_unknown_tasks(resolver: PathResolver, harness: Mapping[str, Any]) -> Iterator[MissingPath]:
    """Yield tasks unknown to lm-eval; the job checks them itself with another lm-eval or a user's tasks."""
    is_ours = resolver.plan.job.payload.argv[0] == sys.executable and harness["include_path"] is None
    package = find_spec("lm_eval") if is_ours and harness["tasks"] else None
    names = {name for name in harness["tasks"] if not name.endswith((".yaml", ".yml"))}
    for directory in (package and package.submodule_search_locations) or ():
        # Most tasks have a file of their name; to know all names lm-eval reads 14,000 files.
        if names.issubset(path.stem for path in Path(directory, "tasks").rglob("*.yaml")):
            return
        with suppress(OSError, subprocess.SubprocessError):
            command = [sys.executable, "-c", _LIST_TASKS]
            known = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.split("\n")
            for name in sorted(names.difference(known)) if len(known) > 1 else ():
                fix = did_you_mean(name, known, _TASKS_SHOWN)
                yield resolver.missing("evaluation.lm_eval.tasks", name, "lm-eval has no such task", fix)


# Files by which slipway/trainer/conversion/sources.py knows the formats of weights.
_WEIGHTS = re.compile(r"complete\.json|config\.json|common\.pt|\.metadata|.*_model_states\.pt|latest\w*")
# The file that slipway/trainer/conversion/outputs.py adds to a result.
_RECORD = "conversion.json"


def _names(directory: Path) -> Iterator[str]:
    """Yield the names of the files of a directory, and of its directories."""
    for path in (directory, *directory.iterdir()) if directory.is_dir() else ():
        with suppress(OSError):  # a file, or a directory that cannot be listed
            yield from [entry.name for entry in path.iterdir()]


def _find_taken_output(
    resolver: PathResolver, node: Mapping[str, Any], checkpoint: MarkedCheckpoint | None
) -> Iterator[MissingPath]:
    """Yield an output that exists and that another conversion made: it is not overwritten."""
    value, asked = str(node["output"]), {key: node[key] for key in ("to", "dtype")}
    if checkpoint is not None:
        value, asked["step"] = value.replace("{step}", str(checkpoint.step)), checkpoint.step
    output = resolver.host(value) if not node["every"] and "{step}" not in value else None
    try:
        if output is None or (output.is_dir() and not any(output.iterdir())) or not os.path.lexists(output):
            return
        if checkpoint is not None:
            asked["checkpoint"] = f"{zlib.crc32(read_bytes(checkpoint.path / MARKER)):08x}"
        made_of = dict(read_json(output / _RECORD)["made_of"])
        # Records of earlier versions omit some keys.
        differences = [f"{key}={made_of[key]}" for key in asked if made_of.get(key, asked[key]) != asked[key]]
    except (OSError, ValueError, KeyError, TypeError):
        differences = [f"it has no {_RECORD}"]
    if differences:
        why = f"something else is there ({', '.join(differences)}), which is not overwritten"
        yield resolver.missing("conversion.output", str(output), why, "another conversion.output")
