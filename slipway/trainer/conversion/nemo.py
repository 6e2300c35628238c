"""Conversions of NeMo's checkpoints by NeMo's own scripts, one process for each GPU of a job.

``python -m slipway.trainer.conversion.nemo`` adds arguments to a script that only the job knows: the
checkpoint, a copy of its hyperparameters that fits the conversion, and a directory to write to. Rank 0 gives
the result its name when it is whole. Exit codes are those of ``python -m slipway.trainer.conversion``, or the
script's own.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from slipway.common.errors import EXIT_OK, EXIT_USER_ERROR, UserError
from slipway.trainer.checkpoint.files import file_checksum
from slipway.trainer.config.load import flatten, load_yaml
from slipway.trainer.conversion import outputs
from slipway.trainer.conversion.spec import Conversion, load_conversion

SCRIPT = "examples/nlp/language_modeling/megatron_ckpt_to_nemo.py"
# Of a .nemo file of a Llama's shape, on a CPU.
TO_HUGGINGFACE = "scripts/checkpoint_converters/convert_llama_nemo_to_hf.py"
HPARAMS = Path("results", "hparams.yaml")
# NeMo's name of a checkpoint has the step in it; a copy of the newest ends in `-last`.
_STEP = re.compile(r"step=(\d+)(?!.*step=\d)")
_LAST, _UNFINISHED = "-last", "-unfinished"
_PRECISIONS = {"32": "32-true", "16": "16-mixed", "bf16": "bf16-mixed"}
_WORLD = re.compile(r"SLURM_|PMI|RANK$|LOCAL_RANK$|WORLD_SIZE$|LOCAL_WORLD_SIZE$|MASTER_")
# In Hugging Face's Llama, the weights with a row for each token; NeMo pads them.
_VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")
# Files of a tokenizer, by their keys in the hyperparameters.
_TOKENIZER = ("vocab_file", "merge_file", "model", "tokenizer_model")
# Set in all of NeMo's 24.x images, for features that a conversion does not use.
_OFF: Mapping[str, Any] = {
    "virtual_pipeline_model_parallel_size": None,
    "context_parallel_size": 1,
    "activations_checkpoint_granularity": None,
    "activations_checkpoint_method": None,
    "activations_checkpoint_num_layers": None,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Convert; return the exit code."""
    options, own = _parse(arguments)
    try:
        return _convert(load_conversion(options.config_path, options.config_name), options, own)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return EXIT_USER_ERROR


def _parse(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="python -m slipway.trainer.conversion.nemo",
        description="Convert a checkpoint of NeMo's by NeMo's own script, which gets all further arguments.",
    )
    parser.add_argument("--config-path", type=Path, required=True, help="directory of the configuration")
    parser.add_argument("--config-name", required=True, help="its file name")
    parser.add_argument("--nemo-path", type=Path, required=True, help="directory with NeMo's scripts")
    parser.add_argument("--tensor_model_parallel_size", type=int, required=True)
    parser.add_argument("--pipeline_model_parallel_size", type=int, required=True)
    return parser.parse_known_args(arguments)


def _convert(conversion: Conversion, options: argparse.Namespace, own: list[str]) -> int:
    checkpoint, step = find_checkpoint(conversion.source, conversion.step)
    output, rank = conversion.output_of(step), int(os.environ.get("RANK", "0"))
    hparams_file = _run_directory(conversion) / HPARAMS
    hparams = load_yaml(hparams_file)
    record = outputs.record_of(conversion, step, checkpoint, file_checksum(checkpoint / "common.pt"))
    if outputs.is_there(output, record):
        if rank == 0:
            print(f"{output}: is there already", flush=True)
        return EXIT_OK
    script = _script(options.nemo_path, SCRIPT, "1.20")
    if conversion.to == "huggingface":
        _script(options.nemo_path, TO_HUGGINGFACE, "2.0")
        # A missing tokenizer is reported before the work, not after it.
        _describe(conversion)
    # All ranks write into it, and know it without a word to each other.
    scratch = output.parent / f".nemo-{output.name}-{os.environ.get('SLURM_JOB_ID', 'local')}"
    scratch.mkdir(parents=True, exist_ok=True)
    sizes = (options.tensor_model_parallel_size, options.pipeline_model_parallel_size)
    fitted, precision = fit_hparams(hparams, hparams_file, sizes, conversion.tokenizer_dir)
    if conversion.to == "huggingface":
        # It would wrap the model, and the script does not know the names that its weights have then.
        fitted["cfg"]["megatron_amp_O2"] = False
    copy, file = scratch / f"hparams-{rank}.yaml", scratch / f"{output.name}.nemo"
    import yaml

    copy.write_text(yaml.safe_dump(fitted, sort_keys=False), encoding="utf-8")
    command = [
        *(sys.executable, "-u", str(script)),
        *("--checkpoint_folder", str(checkpoint.parent), "--checkpoint_name", checkpoint.name),
        *("--hparams_file", str(copy), "--nemo_file_path", str(file)),
        *("--tensor_model_parallel_size", str(sizes[0]), "--pipeline_model_parallel_size", str(sizes[1])),
        *("--precision", precision, *own),
    ]
    if rank > 0:
        os.execv(command[0], command)
    code = subprocess.run(command, check=False).returncode
    if code == EXIT_OK and not file.is_file():
        raise UserError(f"{script} ended without an error, and wrote no {file}")
    weights = scratch / "pytorch_model.bin"
    if code == EXIT_OK and conversion.to == "huggingface":
        code = _run_alone(options.nemo_path / TO_HUGGINGFACE, file, weights)
    if code == EXIT_OK:
        with outputs.create_directory(output, record, size_bytes=0) as unfinished:
            if unfinished is not None and conversion.to == "huggingface":
                _write_model(unfinished, conversion, weights, record)
            elif unfinished is not None:
                file.rename(unfinished / file.name)
        print(f"{output}: written", flush=True)
    # The result is there: what jobs that were killed left of this very name is of no use any more.
    for left in _scratch_directories(output) if code == EXIT_OK else [scratch]:
        shutil.rmtree(left, ignore_errors=True)
    return code


def _scratch_directories(output: Path) -> list[Path]:
    """Return the directories that jobs wrote into for an output; another may begin with its name."""
    pattern = re.compile(re.escape(f".nemo-{output.name}-") + r"(\d+|local)")
    return [path for path in output.parent.iterdir() if pattern.fullmatch(path.name)]


def _script(root: Path, name: str, since: str) -> Path:
    if not (root / name).is_file():
        raise UserError(f"nemo_path={root}: it has no {name}, as NeMo {since} to 2.4 do")
    return root / name


def _run_alone(script: Path, file: Path, weights: Path) -> int:
    """Run the script in one process, whatever the number of the job's, and return its exit code."""
    environment = {name: value for name, value in os.environ.items() if not _WORLD.match(name)}
    command = [sys.executable, "-u", str(script), "--input_name_or_path", str(file)]
    command += ["--output_path", str(weights), "--cpu-only"]
    return subprocess.run(command, env=environment, check=False).returncode


def _write_model(directory: Path, conversion: Conversion, weights: Path, record: Mapping[str, Any]) -> None:
    """Write what Hugging Face's script leaves out: the configuration, the tokenizer and the card.

    The weights become safetensors, without the padding of the vocabulary.
    """
    # Not at the top: the ranks that only run NeMo's script need no torch before.
    import torch

    from slipway.trainer.checkpoint.tensor_files import TensorInfo
    from slipway.trainer.conversion import huggingface, safetensors_files
    from slipway.trainer.conversion.pickled_files import load

    tensors = load(weights)
    description = _describe(conversion)
    dtype = tensors[_VOCABULARY[0]].dtype if conversion.dtype is None else getattr(torch, conversion.dtype)
    entries = []
    for name, tensor in tensors.items():
        part = tensor[: description.vocabulary.size] if name in _VOCABULARY else tensor
        read = partial(torch.Tensor.detach, part)
        entries.append(safetensors_files.Entry(name, TensorInfo(tuple(part.shape), dtype), read))
    safetensors_files.write(directory, entries, conversion.shard_bytes)
    origin = {"run": conversion.training.run, "step": record["step"], "checkpoint": record["source"]}
    huggingface.write_model_files(directory, description, dtype, conversion.tokenizer_dir, origin)


def _describe(conversion: Conversion) -> Any:
    """Return the description of the training's model, with the vocabulary as it is without padding."""
    from slipway.trainer.checkpoint.description import description_of_model

    flat = flatten({"model": dict(conversion.model) if isinstance(conversion.model, Mapping) else {}})
    description = description_of_model(flat, padded=0, precision="bf16")
    return replace(description, padded_vocabulary=description.vocabulary.size)


def find_checkpoint(source: Path, step: int | None) -> tuple[Path, int]:
    """Return a checkpoint of NeMo's and its step.

    Parameters
    ----------
    source
        A checkpoint, or the directory of a run's.
    step
        Which one; None: the newest. A file of its name and ``-unfinished`` marks one that NeMo is writing, or
        was stopped at.

    Raises
    ------
    UserError
        If no checkpoint is found, or it is not in megatron-core's format.
    """
    if not source.is_dir():
        raise UserError(f"conversion.source={source}: there is no such directory")
    candidates = [source] if _step(source) is not None else sorted(source.iterdir())
    complete = [
        path
        for path in candidates
        if path.is_dir()
        and _step(path) is not None
        and not path.name.endswith(_UNFINISHED)
        and not path.with_name(path.name + _UNFINISHED).exists()
    ]
    wanted = [path for path in complete if step is None or _step(path) == step]
    if not wanted:
        steps = ", ".join(map(str, sorted({_step(path) or 0 for path in complete}))) or "none"
        what = "a complete checkpoint" if step is None else f"one of conversion.step={step}"
        raise UserError(f"conversion.source={source}: expected {what}; its steps are {steps}")
    newest = max(wanted, key=lambda path: (_step(path) or 0, not path.name.endswith(_LAST)))
    if not (newest / "common.pt").is_file():
        raise UserError(
            f"{newest}: expected megatron-core's format (common.pt), as with model.mcore_gpt=True"
        )
    return newest, _step(newest) or 0


def fit_hparams(
    content: Any, path: Path, sizes: tuple[int, int], tokenizer_dir: Path | None
) -> tuple[dict[str, Any], str]:
    """Return a training's hyperparameters for its conversion, and the precision of the weights.

    Parameters
    ----------
    content, path
        What NeMo wrote when the training began, and where.
    sizes
        Tensor and pipeline parallel size of the conversion.
    tokenizer_dir
        Where the tokenizer's files are, unless they are where the training had them.

    Raises
    ------
    UserError
        If they are not NeMo's, or a file of the tokenizer is missing in `tokenizer_dir`.
    """
    model = content.get("cfg") if isinstance(content, Mapping) else None
    if not isinstance(model, Mapping):
        raise UserError(f"{path}: expected the hyperparameters of a training of NeMo's (a key `cfg`)")
    model = {**model, **{key: value for key, value in _OFF.items() if key in model}}
    model["tensor_model_parallel_size"], model["pipeline_model_parallel_size"] = sizes
    if model.get("num_query_groups", 0) is None:
        # The same model; NeMo's converter of Llamas computes with the number.
        model["num_query_groups"] = model.get("num_attention_heads")
    if sizes[0] == 1:
        model["sequence_parallel"] = False
    optimizer = model.get("optim")
    if isinstance(optimizer, Mapping) and optimizer.get("name") == "mcore_distributed_optim":
        # It is built with the model, and without a training it has no groups of ranks.
        model["optim"] = {**optimizer, "name": "fused_adam"}
    if tokenizer_dir is not None:
        model["tokenizer"] = _move_tokenizer(dict(model.get("tokenizer") or {}), tokenizer_dir)
    precision = str(model.get("precision", "bf16")).removesuffix("-mixed").removesuffix("-true")
    return {**content, "cfg": model}, _PRECISIONS.get(precision, "bf16-mixed")


def _move_tokenizer(tokenizer: dict[str, Any], directory: Path) -> dict[str, Any]:
    for key in _TOKENIZER:
        value = tokenizer.get(key)
        if isinstance(value, str) and "/" in value:
            tokenizer[key] = str(directory / Path(value).name)
            if not Path(tokenizer[key]).is_file():
                raise UserError(f"conversion.tokenizer_dir={directory}: it has no {Path(value).name}")
    return tokenizer


def _run_directory(conversion: Conversion) -> Path:
    if conversion.training.directory is not None:
        return conversion.training.directory
    source = conversion.source if _step(conversion.source) is None else conversion.source.parent
    return source.parent


def _step(path: Path) -> int | None:
    match = _STEP.search(path.name)
    return int(match[1]) if match else None


if __name__ == "__main__":
    sys.exit(main())
