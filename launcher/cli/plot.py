"""`slipway plot`: the closing table and the loss curves of a run."""

from __future__ import annotations

import argparse
from pathlib import Path

from launcher.cli.options import Verbs, add_option, add_verb
from launcher.cli.runs import RUN_HELP, add_base_results_dir, find_one
from launcher.monitor.summary import draw, evaluated_losses, summarize, write_png
from launcher.ui.tables import print_pairs
from launcher.ui.terminal import print_json, print_plot

_HELP = """\
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


def add_parser(verbs: Verbs) -> None:
    parser = add_verb(verbs, "plot", run, "summarize a run and plot its losses", _HELP)
    parser.add_argument("run_name", metavar="RUN", help=RUN_HELP)
    add_base_results_dir(parser)
    add_option(parser, "-o --output FILE", "PNG file (default: RUN/loss.png)")
    add_option(parser, "--no-terminal", "no plot in the terminal")
    add_option(parser, "--json", "print the summary as one object, without plots")


def run(args: argparse.Namespace) -> int:
    """Print and draw."""
    run_dir = find_one(args.run_name, args.base_results_dir).run_dir
    summary, curves = summarize(run_dir)
    if args.json:
        print_json(summary.to_json())
        if args.output is not None:
            write_png(args.output, summary, curves)
        return 0
    print_pairs(summary.run, summary.rows())
    if not args.no_terminal:
        evaluated = evaluated_losses(summary)
        print_plot(lambda width, coloured: draw(curves, evaluated, width, coloured=coloured))
    path: Path = args.output or run_dir / "loss.png"
    write_png(path, summary, curves)
    print(f"\nplot: {path}")
    return 0
