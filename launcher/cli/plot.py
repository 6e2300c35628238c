"""`slipway plot`: the closing table and the loss curves of a run."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from pathlib import Path

from launcher.cli.runs import RUN_HELP, add_base_results_dir, find_one
from launcher.monitor.curves import Curves
from launcher.monitor.summary import RunSummary, summarize
from launcher.ui.tables import print_pairs
from launcher.ui.terminal import unescaped

_DESCRIPTION = """\
Summarize a run and draw its losses, in the terminal and as a PNG. All launches of the run form one curve.

The held-out loss is compared with the unigram entropy of the same tokens, both in nats per token: a model
below it has learned more than the frequencies of the tokens. Checkpoints that were evaluated (slipway
evaluate RUN) are a curve of their own, and a line of the table for each task.

examples:
  slipway plot gpt3_126m                         the table, the plot, and <run directory>/loss.png
  slipway plot gpt3_126m --output loss.png --no-terminal
  slipway plot gpt3_126m --json                  the table for programs, without plots

exit code:
  0  printed
  2  there is no such run, it has no training step yet, or the plot cannot be written"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "plot", help="summarize a run and plot its losses", description=_DESCRIPTION
    )
    parser.add_argument("run_name", metavar="RUN", help=RUN_HELP)
    add_base_results_dir(parser)
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="PNG file (default: RUN/loss.png)",
    )
    parser.add_argument("--no-terminal", action="store_true", help="no plot in the terminal")
    parser.add_argument("--json", action="store_true", help="print the summary as one object, without plots")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print and draw."""
    run_dir = find_one(args.run_name, args.base_results_dir).run_dir
    summary, curves = summarize(run_dir)
    output: Path | None = args.output
    if args.json:
        print(json.dumps(summary.to_json(), indent=2))
        if output is not None:
            _save(output, summary, curves)
        return 0
    print_pairs(summary.run, summary.rows())
    if not args.no_terminal:
        _draw(summary, curves)
    path = output or run_dir / "loss.png"
    _save(path, summary, curves)
    print(f"\nplot: {path}")
    return 0


def _draw(summary: RunSummary, curves: Curves) -> None:
    from launcher.monitor.summary import draw, evaluated_losses

    coloured = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    # Unescaped: the plot has numbers alone, and the colours are ours.
    plot = draw(curves, evaluated_losses(summary), shutil.get_terminal_size().columns, coloured=coloured)
    print(f"\n{plot}", file=unescaped(sys.stdout))


def _save(path: Path, summary: RunSummary, curves: Curves) -> None:
    from launcher.monitor.summary import write_png

    write_png(path, summary, curves)
