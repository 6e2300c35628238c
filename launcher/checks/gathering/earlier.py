"""Compare with earlier launches: the run's newest, and those of other runs with the job's name."""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from launcher.checks.facts import Change, EarlierTraining
from launcher.checks.gathering import checkpoints
from launcher.checks.gathering.data import ask_identity, ask_trainer
from launcher.checks.gathering.path_resolver import PathResolver
from launcher.checks.rules.training import weight_of
from launcher.drafting import Draft
from launcher.errors import UserError, file_mode
from launcher.estimates.values import Values, full
from launcher.runs.manifest import Manifest, find_newest_submitted, read_manifest, read_yaml
from launcher.runs.paths import LAUNCHES, LaunchPaths
from launcher.secrecy import hidden
from slipway.common.node.marks import cancelled_by, read_attempts

# Keys that the shapes of the weights depend on, in either stack of a T5.
_SHAPE = re.compile(
    r"model\.((encoder|decoder)\.)?"
    r"(num_layers|hidden_size|ffn_hidden_size|num_attention_heads|num_query_groups|kv_channels"
    r"|max_position_embeddings|position_embedding_type|activation|openai_gelu|normalization"
    r"|share_embeddings_and_output_weights|share_token_embeddings|share_decoder_tokens_head_embeddings|bias"
    r"|layernorm_1p|apply_layernorm_1p|transformer_block_type|relative_attention_\w+|qk_layernorm"
    r"|num_moe_experts|moe_ffn_hidden_size|moe_shared_expert_intermediate_size|moe_layer_freq"
    r"|multi_latent_attention|q_lora_rank|kv_lora_rank|qk_head_dim|qk_pos_emb_head_dim|v_head_dim"
    r"|override_vocab_size|arch|encoder_arch|decoder_arch)"
)
_TOKENIZER = re.compile(r"model\.tokenizer\.(library|type|model|vocab_file|merge_file|num_sentinel_tokens)")
_TOKENIZER_FILES = ("model", "vocab_file", "merge_file", "type")
# Keys that may change between two launches of one training: its layout, machines, length, logging and
# kernels.
_FREE = re.compile(
    r"run\.(?!model_type|blending_alpha).*|resume\..*|exp_manager\..*|name"
    r"|trainer\.(?!precision$|gradient_clip_val$|accumulate_grad_batches$).*"
    r"|model\.(\w+_model_parallel_\w+|expert_tensor_parallel_size|account_for_\w+|context_parallel_size"
    r"|sequence_parallel|micro_batch_size|fsdp\w*"
    r"|((encoder|decoder)\.)?activations_checkpoint\w*|((encoder|decoder)\.)?recompute_\w+|num_micro_batches\w*"
    r"|ub_tp_comm_overlap\w*|tp_comm\w*|(nsys|torch|memory)_profile\..*|gc_interval|\w*fusion"
    r"|gradient_as_bucket_view"
    r"|sync_batch_comm|use_cpu_initialization|onnx_safe|use_flash_attention|attention_backend|transformer_engine"
    r"|compile_layers"
    r"|data\.(num_workers|index_mapping_dir|exchange_indices_distributed|pin_memory)"
    r"|optim\.(overlap_\w+|bucket_cap_mb|contiguous_grad_buffer|grad_sync_dtype|dgrad\w*))"
)


def compare_earlier_training(draft: Draft) -> EarlierTraining | None:
    """Compare a planned training with the newest launch of its run; None for other jobs."""
    plan = draft.plan
    if plan.job.stage != "training" or plan.job.config is None:
        return None
    paths, manifest = _read_newest(draft) or (None, None)
    resolver, training = PathResolver(draft), draft.composition.config.training
    changes = _changes(resolver, paths, manifest) if paths is not None and manifest is not None else ()
    earlier = EarlierTraining(
        launch=manifest.launch if manifest is not None else None,
        goes_on=_goes_on(resolver, manifest),
        changes=changes,
        data=(),
        accepted=training.resume.accept_data if training is not None else None,
        abandoned=_find_nemo_checkpoints(resolver) if manifest is None else None,
    )
    if not earlier.goes_on:
        return earlier
    chosen = checkpoints.choose_checkpoint(resolver) if plan.job.engine == "megatron" else None
    saved, shards = chosen.step if chosen is not None else None, checkpoints.read_saved_shards(resolver)
    rewritten = checkpoints.find_rewritten_past(resolver.values, chosen) if chosen is not None else None
    earlier = replace(earlier, saved=saved, shards=shards, rewritten=rewritten, **_schedule(resolver, paths))
    known, since = _read_trained_data(resolver, manifest)
    answer = ask_identity(draft, known) if known else None
    if answer is not None:
        return replace(earlier, data=answer.changed, accept=answer.accept, data_since=since)
    return replace(earlier, data=None, missing={"data": "the data could not be read"}) if known else earlier


def _find_nemo_checkpoints(resolver: PathResolver) -> str | None:
    """Return the checkpoints of a run of the NeMo launcher: its `results` is not a link, unlike ours."""
    directory = resolver.plan.paths.run_dir / "results/checkpoints"
    own = checkpoints.checkpoint_directory(resolver)
    with suppress(OSError):
        if not directory.parent.is_symlink() and own != directory and any(directory.iterdir()):
            return None if own is not None and own.is_dir() and any(own.iterdir()) else str(directory)
    return None


def differences_on_record(draft: Draft) -> dict[str, Any] | None:
    """Return the changes since the previous launch, for the manifest; None if the training is the same."""
    newest = _read_newest(draft)
    if newest is None or draft.plan.job.config is None:
        return None
    paths, manifest = newest
    changes = _changes(PathResolver(draft), paths, manifest)
    if not changes:
        return None
    text = [{"key": full(change.key), "old": change.old, "new": change.new} for change in changes]
    return {"launch": paths.number, "changes": text}


def _read_newest(draft: Draft) -> tuple[LaunchPaths, Manifest] | None:
    """Return the newest launch of the run that became a job, if it was a training."""
    run_dir = draft.plan.paths.run_dir
    try:
        number = find_newest_submitted(run_dir)
        if draft.plan.job.stage != "training" or number is None:
            return None
        manifest = read_manifest(run_dir / LAUNCHES / str(number))
    except (OSError, UserError):
        return None
    paths = LaunchPaths(run_dir, manifest.run, manifest.job_name, number)
    return (paths, manifest) if manifest.stage == "training" else None


def _goes_on(resolver: PathResolver, manifest: Manifest | None) -> bool:
    """Return True if a checkpoint to resume from exists, or may when the job begins."""
    values = resolver.values
    if not values.flag("exp_manager.resume_if_exists"):
        return False
    directory = checkpoints.checkpoint_directory(resolver)
    if directory is None or checkpoints.has_entries(directory) or values.raw("resume.checkpoint") is not None:
        return True
    if manifest is None:
        return False
    # A job that failed, or was cancelled, before its first checkpoint leaves no checkpoint.
    launch_dir = resolver.plan.paths.run_dir / LAUNCHES / str(manifest.launch)
    attempts = read_attempts(launch_dir)
    if manifest.job_id is not None and cancelled_by(launch_dir, manifest.job_id) is not None:
        return any(not attempt.is_over for attempt in attempts)
    return not attempts or any(attempt.exit_code in (None, 0) for attempt in attempts)


def _read_trained_data(resolver: PathResolver, manifest: Manifest | None) -> tuple[list[Any], str]:
    """Return the identity of the data so far and its source: the checkpoint's own before the launch's."""
    if resolver.plan.job.engine == "megatron":
        chosen = checkpoints.choose_checkpoint(resolver)
        data = chosen.content.get("data") if chosen is not None else None
        if chosen is not None and isinstance(data, list) and data:
            return data, f"the checkpoint {chosen.path.name}"
    return (manifest.data, f"launch {manifest.launch} of this run") if manifest is not None else ([], "")


def _changes(resolver: PathResolver, paths: LaunchPaths, manifest: Manifest) -> tuple[Change, ...] | None:
    """Return the changes since a launch; None if its configuration cannot be read."""
    before = _read_config(paths)
    if before is None:
        return None
    old, new = dict(_flatten(before)), dict(_flatten(resolver.plan.job.config or {}))
    differing = (key for key in {**new, **old} if not _is_same(old.get(key), new.get(key)))
    keys = [key for key in differing if not _FREE.fullmatch(key)]
    if any(_is_file(key) or _is_prefix(key) for key in keys):
        same = _find_same_files(resolver, manifest, old, new)
        keys = [key for key in keys if key not in same]
    engine = resolver.plan.job.engine
    changes = [] if engine == manifest.engine else [Change("engine", manifest.engine, engine, True)]
    for key in keys:
        earlier, now = (hidden(full(key), content.get(key)) for content in (old, new))
        is_grave = key == "run.model_type" or bool(_SHAPE.fullmatch(key) or _TOKENIZER.fullmatch(key))
        # The checkpoints of our trainer are of one precision.
        is_precision = key == "trainer.precision" and engine == "megatron"
        changes.append(Change(key, earlier, now, is_grave or is_precision))
    return tuple(changes)


def _schedule(resolver: PathResolver, paths: LaunchPaths | None) -> dict[str, Any]:
    """Return how `trainer.max_steps` changed since a launch, and the learning rate with it."""
    earlier = Values((_read_config(paths) if paths else None) or {})
    before, now = (values.whole("trainer.max_steps") for values in (earlier, resolver.values))
    if before is None or now is None or before == now:
        return {}
    chosen = checkpoints.choose_checkpoint(resolver)
    step = chosen.step if chosen is not None else 0
    question = {"config": resolver.plan.job.config, "max_steps": before, "step": step}
    rate = ask_trainer("slipway.trainer.optim.schedule", json.dumps(question))
    return {"steps": (before, now), "rate": rate and tuple(rate)}


def _read_config(paths: LaunchPaths) -> dict[str, Any] | None:
    """Return the configuration of a launch; None if it cannot be read."""
    try:
        content = read_yaml(paths.config)
    except (OSError, ValueError, TypeError):
        return None
    return content if isinstance(content, dict) else None


def _find_same_files(
    resolver: PathResolver, manifest: Manifest, old: Mapping[str, Any], new: Mapping[str, Any]
) -> frozenset[str]:
    """Return keys of files that only moved, or that `data.identity` compares."""
    answer = ask_identity(resolver.draft, [])
    before = [file for file in manifest.data if isinstance(file, dict)]
    now = answer.identity if answer is not None else []
    moved = _contents(before) == _contents(now) != []
    prefixes = {key for key in {**old, **new} if _is_prefix(key)}
    same = {key for key in prefixes if moved and _weights(old.get(key)) == _weights(new.get(key))}
    # Keys of the tokenizer with files in both launches.
    seen = ({str(file.get("key")).partition("/")[0] for file in files} for files in (before, now))
    return frozenset(filter(_is_file, set.intersection(*seen))) | same


def _is_file(key: str) -> bool:
    return bool(_TOKENIZER.fullmatch(key)) and key.rpartition(".")[2] in _TOKENIZER_FILES


def _is_prefix(key: str) -> bool:
    return key == "model.data.data_prefix" or key.startswith("model.data.data_prefix.")


def _contents(files: Sequence[Mapping[str, Any]]) -> list[tuple[Any, Any]]:
    """Return the contents of the data sets, in their order and without their names."""
    return [(file.get("size"), file.get("checksum")) for file in files if file.get("kind") == "data"]


def _weights(value: Any) -> list[float | None]:
    """Return a list of data sets without their names."""
    return [weight_of(item) for item in value] if isinstance(value, list) else []


def _flatten(node: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, child in node.items():
        if isinstance(child, Mapping):
            yield from _flatten(child, f"{prefix}{name}.")
        elif child is not None:  # null equals a missing key
            yield f"{prefix}{name}", child


def _is_same(old: Any, new: Any) -> bool:
    """Return True if two values mean the same: ``1e-4`` is a text in YAML, and 0.0001 the number."""
    if old == new:
        return isinstance(old, bool) is isinstance(new, bool)
    if isinstance(old, bool) or isinstance(new, bool) or old is None or new is None:
        return False
    try:
        return float(old) == float(new)
    except (TypeError, ValueError, OverflowError):
        return str(old) == str(new)


# --- other runs


def find_same_job_name(draft: Draft) -> tuple[str, ...] | None:
    """Return other run directories with a newest launch of this job's name, by the script at their top.

    Searches this run's parent, `base_results_dir`, and sibling directories such as `results-2`.
    """
    base, paths = Path(draft.composition.config.base_results_dir), draft.plan.paths
    run_dir, script = paths.run_dir, paths.script_name
    try:
        near = {other for folder in {base, run_dir.parent} for other in _entries(folder)}
        likes = [other for other in _entries(base.parent) if _stem(other) == _stem(base)]
        near.update(other / run_dir.name for other in likes)
        runs = [other for other in near if other != run_dir and _is_directory(other / LAUNCHES)]
        return tuple(sorted(str(other) for other in runs if (other / script).is_symlink()))
    except OSError:
        return None


def _entries(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if _is_directory(folder) else []


def _stem(directory: Path) -> str:
    return directory.name.partition("-")[0]


def _is_directory(path: Path) -> bool:
    return stat.S_ISDIR(file_mode(path))
