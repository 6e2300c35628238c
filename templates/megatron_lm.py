"""The program of each task with engine=megatron_lm: it finds Megatron-LM's script, and becomes it.

Called as ``megatron_lm.py ROOT MODEL_TYPE [OPTION ...]``. Releases differ in where a script is and in what
its parser takes, and the launcher cannot look into an image: what ROOT holds decides, here.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

# Megatron-LM's pull request 4820, of May 2026, moved T5's and BERT's scripts; core_v0.18.0 has them there.
_PLACES = ("pretrain_{0}.py", "examples/{0}/pretrain_{0}.py")

# core_v0.14 removed the pipeline stages of an encoder.
_ENCODER_STAGES = "--encoder-pipeline-model-parallel-size"

# Without it core_v0.15 and 0.16 ignore --vocab-file, and ask Hugging Face's hub for a tokenizer.
_LEGACY = "--legacy-tokenizer"
_OF_FILES = ("--vocab-file", "--vocab-extra-ids")


def command(root: Path, model_type: str, options: Sequence[str]) -> list[str]:
    """Return the command that replaces this process.

    Raises
    ------
    SystemExit
        If the checkout has no such script, or does not support an option.
    """
    places = [root / place.format(model_type) for place in _PLACES]
    script = next((place for place in places if place.is_file()), None)
    if script is None:
        sys.exit(f"megatron_lm_path={root}: there is no {' and no '.join(map(str, places))}")
    parser = _parser(root)
    if _ENCODER_STAGES in options and _ENCODER_STAGES not in parser:
        sys.exit(
            f"megatron_lm_path={root}: this release has no pipeline stages for T5, as core_v0.13 had; set "
            "training.model.pipeline_model_parallel_size=1"
        )
    legacy = [_LEGACY] if _LEGACY in parser and any(name in options for name in _OF_FILES) else []
    return [sys.executable, "-u", str(script), *options, *legacy]


def _parser(root: Path) -> str:
    """Return the source of the options' parser, or an empty text."""
    try:
        return (root / "megatron" / "training" / "arguments.py").read_text(encoding="utf-8")
    except OSError:
        return ""


if __name__ == "__main__":
    arguments = command(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
    os.execv(arguments[0], arguments)
