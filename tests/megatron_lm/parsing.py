"""Read the arguments of many trainings with Megatron-LM's own parser; run with its interpreter.

Standard input is a JSON list of trainings, each with its ``arguments``, ``environment``, ``world_size`` and
``model_type``; the output's last line is a JSON list with the fields of each ``TransformerConfig`` and the
parsed arguments, or the ``error``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import sys
from types import SimpleNamespace
from typing import Any

# The defaults that each script passes to `pretrain`.
_DEFAULTS = {
    "gpt": {"tokenizer_type": "GPT2BPETokenizer"},
    "t5": {"tokenizer_type": "BertWordPieceLowerCase"},
    "bert": {"tokenizer_type": "BertWordPieceLowerCase"},
}


def plain(value: Any) -> Any:
    return value if isinstance(value, (int, float, str, bool, type(None))) else str(value)


def pretend_kernels() -> None:
    """Let options pass that need kernels of Transformer Engine, which is not installed."""
    from megatron.core.models.common.embeddings import rope_utils

    rope_utils.fused_apply_rotary_pos_emb = rope_utils.fused_apply_rotary_pos_emb_thd = object()


def parse(training: dict[str, Any]) -> dict[str, Any]:
    from megatron.training import arguments, global_vars
    from megatron.training.training import get_optimizer_param_scheduler

    if "refused" in training:
        return training
    sys.argv = ["pretrain", *training["arguments"]]
    os.environ.update(training["environment"], RANK="0", WORLD_SIZE=str(training["world_size"]))
    stderr = io.StringIO()
    try:
        with contextlib.redirect_stderr(stderr), contextlib.redirect_stdout(io.StringIO()):
            args = arguments.parse_args()
            arguments.validate_args(args, _DEFAULTS[training["model_type"]])
            config = arguments.core_transformer_config_from_args(args)
            global_vars.set_args(args)
            get_optimizer_param_scheduler(SimpleNamespace(param_groups=[]))
    except SystemExit:
        return {"error": stderr.getvalue().strip().splitlines()[-1]}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        for name in training["environment"]:
            del os.environ[name]
    fields = {field.name: plain(getattr(config, field.name)) for field in dataclasses.fields(config)}
    return {"config": fields, "args": {name: plain(value) for name, value in vars(args).items()}}


if __name__ == "__main__":
    pretend_kernels()
    print(json.dumps([parse(training) for training in json.load(sys.stdin)]))
