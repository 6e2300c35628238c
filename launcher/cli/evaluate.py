"""`slipway evaluate`: a checkpoint measured on held-out data and on tasks of lm-eval."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from launcher.cli.checkpoint_words import add_source, find_checkpoints, source_overrides, split_words
from launcher.cli.launch import draft_and_launch
from launcher.cli.logs import follow_to_end
from launcher.cli.requests import add_launch_options
from launcher.config.overrides import hydra_value
from launcher.jobs.launches import open_launch
from launcher.runs.paths import short

_STAGE = "evaluation"

_EPILOG = """\
examples:
  slipway evaluate gpt3_126m                    the held-out loss of the newest checkpoint
  slipway evaluate gpt3_126m@1000,2000          of two of them
  slipway evaluate gpt3_126m@2000 --tasks hellaswag,arc_easy --limit 200
  slipway evaluate gpt3_126m --tasks ./own.yaml --no-perplexity
  slipway evaluate gpt3_126m --on-cluster evaluation.perplexity.layout.tensor=1

SOURCE is a run, RUN@STEP or RUN@STEP,STEP, or a directory of checkpoints. Tasks are lm-eval's, by name or as
YAML files of your own; they run on the model converted to Hugging Face, which is made if it is not there. The
results are in RUN/evaluations/step-N.json; `slipway history RUN` and `slipway plot RUN` show them.

exit code:
  0    the results are there; with --dry-run: the script was printed
  1    the evaluation failed; its log, above, says why
  2    a mistake in the command line or the configuration, before there is a job
  130  Ctrl-C; the job continues: slipway cancel RUN
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "evaluate",
        help="measure a checkpoint on held-out data, and with lm-eval",
        description="Measure a checkpoint: loss and perplexity on held-out data, and tasks of lm-eval.",
        epilog=_EPILOG,
    )
    add_source(parser)
    parser.add_argument("--tasks", metavar="TASK,...", help="tasks of lm-eval, by name or as YAML files")
    parser.add_argument("--limit", type=float, metavar="N", help="so many documents of each task at most")
    parser.add_argument("--batches", type=int, metavar="N", help="so many held-out batches")
    parser.add_argument("--split", choices=("validation", "test"), help="which held-out data")
    parser.add_argument("--no-perplexity", action="store_true", help="only the tasks")
    add_launch_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Evaluate, and show the log until the end; return the exit code."""
    word, overrides = split_words(args.overrides)
    checkpoints = find_checkpoints(word, args.base_results_dir)
    options = [*_options(args), *overrides]
    words = source_overrides(_STAGE, checkpoints, options, on_cluster=args.on_cluster)
    for launched in draft_and_launch(args, words):
        code = follow_to_end(open_launch(launched.paths.run_dir, launched.paths.number))
        if code:
            return code
        if checkpoints.training is not None:
            print(f"\nslipway history {short(checkpoints.training.paths.run_dir)}")
    return 0


def _options(args: argparse.Namespace) -> Iterator[str]:
    """Yield the overrides that the options stand for."""
    if args.tasks is not None:
        tasks = ",".join(hydra_value(name) for name in args.tasks.split(",") if name)
        yield f"evaluation.lm_eval.tasks=[{tasks}]"
    if args.limit is not None:
        yield f"evaluation.lm_eval.limit={args.limit}"
    if args.batches is not None:
        yield f"evaluation.perplexity.batches={args.batches}"
    if args.split is not None:
        yield f"evaluation.perplexity.split={args.split}"
    if args.no_perplexity:
        yield "evaluation.perplexity.enabled=False"
