"""`slipway export`: the steps of runs, brought to Weights & Biases or MLflow."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import time
from pathlib import Path

from launcher.cli.options import Verbs, add_option, add_verb
from launcher.cli.runs import RUNS_HELP, add_base_results_dir, find_all
from launcher.errors import UserError, escape
from launcher.jobs.lookup import RunRef
from launcher.jobs.status import current_statuses
from launcher.runs.paths import display_path
from launcher.ui.tables import print_lines

_HELP = """\
Bring the steps of runs, of any engine, to a tracker: losses, gradient norm, learning rate and throughput,
with configuration and provenance. Nothing of the tracker runs in the job. All links and launches of a run
are one run of the tracker. Where a later launch went back and trained otherwise, a new one begins, which
names its parent and the step. Repeat it as often as you like: each step is there once. Secrets are masked.

The tracker's own settings say where: WANDB_PROJECT, WANDB_ENTITY, WANDB_BASE_URL, WANDB_DIR, WANDB_MODE and
`wandb login`; MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME and MLflow's credentials.

examples:
  slipway export gpt3_126m --to wandb
  slipway export gpt3_126m --to mlflow --follow           until its job has ended
  WANDB_MODE=offline slipway export gpt3_126m --to wandb  files for `wandb sync`
  slipway export results/gpt3_126m_sweep --to wandb       each point of a sweep

exit code:
  0  exported
  1  the tracker refused or did not answer: the same command goes on from where it was
  2  a mistake, there is no such run, or the tracker's library is not installed"""

_SECONDS = 30.0


def add_parser(verbs: Verbs) -> None:
    parser = add_verb(verbs, "export", run, text=_HELP)
    parser.add_argument("runs", nargs="+", metavar="RUN", help=RUNS_HELP)
    add_option(parser, "--to", "the tracker", action="store", choices=("wandb", "mlflow"), required=True)
    add_option(parser, "--follow", "go on until the job of the run has ended")
    add_base_results_dir(parser)


def run(args: argparse.Namespace) -> None:
    run_dirs = list(dict.fromkeys(ref.run_dir for ref in find_all(args.runs, args.base_results_dir)))
    if args.follow and len(run_dirs) > 1:
        raise UserError(f"--follow: it takes one run, not {len(run_dirs)}")
    for run_dir in run_dirs:
        descriptor = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY)
        try:
            # Two at once would double steps. Some file systems have no locks.
            with contextlib.suppress(PermissionError, NotImplementedError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _export(run_dir, args.to, follow=args.follow)
        except BlockingIOError as error:
            raise UserError(f"{escape(display_path(run_dir))}: another export is under way") from error
        finally:
            os.close(descriptor)


def _export(run_dir: Path, name: str, *, follow: bool) -> None:
    # Imported late, as the trackers' libraries are.
    from launcher.monitor.export import TRACKERS, Exporter, explained

    with explained(name):
        exporter = Exporter(run_dir, TRACKERS[name]())
        try:
            while True:
                # The state first: once the job is known to have ended, everything that it wrote is there.
                is_over = all(status.state.is_final for status in current_statuses([RunRef(run_dir)]))
                exporter.take_new(is_over=is_over)
                if is_over or not follow:
                    break
                time.sleep(_SECONDS)
        finally:
            exporter.close()
    if not exporter.exported:
        raise UserError(f"{escape(display_path(run_dir))} has no training step yet")
    print_lines(*map(escape, exporter.exported))
