"""Convert weights: ``python -m slipway.trainer.conversion``; one process, on a CPU.

Exit codes: 0 done, or the result is there already; 2 a mistake in the configuration, a damaged checkpoint, or
an output that cannot be written; 1 anything else, or a check that did not pass.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from slipway.common.errors import EXIT_FAILURE, EXIT_OK, EXIT_USER_ERROR, UserError, escape
from slipway.common.sections import Target, WeightsFormat, WeightType
from slipway.trainer import requirements
from slipway.trainer.conversion.spec import ROOT, Conversion, load_conversion, read_conversion
from slipway.trainer.logs import silence_warnings
from slipway.trainer.startup_cost import pause_garbage_collection

_REQUIRED = ("torch", "numpy", "safetensors")
_EXAMPLES = """\
examples:
  python -m slipway.trainer.conversion export results/llama_1b/checkpoints --to llama-hf
  python -m slipway.trainer.conversion export results/llama_1b/checkpoints --step 2000 --to llama-{step}
  python -m slipway.trainer.conversion run --config-path DIR --config-name NAME_hydra.yaml
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Convert; return the exit code."""
    options = _parse(arguments)
    silence_warnings()
    # An unfinished output is removed on the way out.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        requirements.check(_REQUIRED)
        is_file = options.command == "run"
        return _convert(
            load_conversion(options.config_path, options.config_name) if is_file else _read_options(options)
        )
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return EXIT_USER_ERROR


def _convert(conversion: Conversion) -> int:
    # Importing torch takes a second: a mistake in the configuration is reported before that.
    with pause_garbage_collection():
        from slipway.trainer.conversion.convert import convert

    results = convert(conversion)
    for result in results:
        print(
            f"{escape(str(result.output))}: {'written' if result.is_new else 'is there already'}", flush=True
        )
    if not results:
        print(f"{conversion.source}: no complete checkpoint yet, nothing to do", flush=True)
    return EXIT_OK if all(result.is_equal for result in results) else EXIT_FAILURE


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m slipway.trainer.conversion",
        description=str(__doc__).partition(":")[0] + " between formats, tensor by tensor, without a GPU.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help=f"convert as the key `{ROOT}` of a configuration says")
    run.add_argument("--config-path", type=Path, required=True, help="directory of the configuration")
    run.add_argument("--config-name", required=True, help="its file name, with or without .yaml")
    export = commands.add_parser("export", help="convert a checkpoint")
    export.add_argument("source", type=Path, help="a checkpoint, or a directory of them: its newest")
    export.add_argument("--to", dest="output", type=Path, required=True, help="directory; {step} is the step")
    # NeMo's own script writes the last of them.
    export.add_argument("--format", dest="to", choices=get_args(Target)[:-1], default="huggingface")
    export.add_argument("--step", type=int, help="which checkpoint of a directory")
    export.add_argument("--source-format", choices=get_args(WeightsFormat))
    export.add_argument("--dtype", choices=get_args(WeightType), help="of the weights; else as they are")
    export.add_argument("--shard-bytes", type=int, help="of a safetensors file")
    export.add_argument("--tokenizer-dir", type=Path, help="the tokenizer, if not that of the training")
    export.add_argument("--check", action="store_true", help="compare the result with our model on a text")
    export.add_argument("--model", help="the training's configuration, if it is needed")
    return parser.parse_args(arguments)


def _read_options(options: argparse.Namespace) -> Conversion:
    node = {name: value for name, value in vars(options).items() if name != "command"}
    return read_conversion({**node, "check": {"enabled": options.check}})


if __name__ == "__main__":
    sys.exit(main())
