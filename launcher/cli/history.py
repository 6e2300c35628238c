"""`slipway history` and `plot`: the launches of a run, the provenance of one, and the losses of all."""

from __future__ import annotations

import argparse
import math
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from launcher.cli.options import Verbs, add_option, add_verb
from launcher.cli.runs import (
    RUNS_HELP,
    add_base_results_dir,
    add_run,
    find_all,
    print_resumable,
    select_run,
)
from launcher.errors import DONE, NOT_KNOWN, escape
from launcher.jobs.launches import open_launch
from launcher.monitor.evaluations import evaluation_table, read_evaluations
from launcher.monitor.history import AttemptRow, Diagnosis, LaunchRow, history, starts_of
from launcher.monitor.provenance_report import provenance, provenance_rows
from launcher.slurm.states import State
from launcher.ui import tables
from launcher.ui.tables import Line, moment, print_listing, print_pairs, print_styled
from launcher.ui.terminal import print_json, print_plot, print_stderr

_HISTORY = """\
List the launches of a run, each with the reason for its end and the overrides that differ from those of the
previous launch. A requeued job has a line for each attempt, one whose tasks started again
for each start, an array for each task, a chain for each link.

With --launch, or when RUN names a launch (its directory, a file in it, its job's id), show its provenance:
its command and overrides, the commit and uncommitted changes, the image, versions, user and host.

examples:
  slipway history gpt3_126m               its launches
  slipway history gpt3_126m --launch 2    the provenance of launch 2
  slipway history 4711                    that of the launch that became job 4711
  slipway history gpt3_126m --json | jq -r '.[] | select(.git_dirty) | .launch'

Below are the results of its checkpoints that were evaluated (slipway evaluate RUN).

COMMIT has a * if there were uncommitted changes, which are in the launch's git.diff. STEPS are the first and
the last step of the launch, LOSS is its last training loss in nats.

exit code:
  0  printed
  2  there is no such run or launch
  3  the state of some launch is UNKNOWN"""

_PLOT = """\
Summarize a run and draw its losses, in the terminal and as a PNG. All launches of the run form one curve.
Several runs, and the points of a sweep, are drawn over each other, the best first.

The held-out loss is compared with the unigram entropy of the same tokens, both in nats per token: a model
below it has learned more than the frequencies of the tokens. Checkpoints that were evaluated (slipway
evaluate RUN) have their own curve, and a line of the table for each task.

examples:
  slipway plot gpt3_126m                         the table, the plot, and <run directory>/loss.png
  slipway plot gpt3_126m --output loss.png --no-terminal
  slipway plot gpt3_126m --json                  the table for programs, without plots
  slipway plot first second                      two runs, and first/comparison.png
  slipway plot results/gpt3_126m_sweep           the points of a sweep

exit code:
  0  printed
  2  there is no such run, it has no training step yet, or the plot cannot be written"""

_COLUMNS = (
    "LAUNCH", "JOB", "STATE", "LAUNCHED", "BY", "STARTED", "RAN", "NODES", "STEPS", "LOSS", "COMMIT",
)  # fmt: skip
_STATE = _COLUMNS.index("STATE")
# The columns that a narrow terminal leaves out, the most dispensable first.
_DROPPED_FIRST = ("STARTED", "NODES", "BY", "RAN", "COMMIT", "LAUNCHED")


def add_parser(verbs: Verbs) -> None:
    plot = add_verb(verbs, "plot", run_plot, text=_PLOT)
    plot.add_argument("runs", nargs="+", metavar="RUN", help=RUNS_HELP)
    add_base_results_dir(plot)
    add_option(plot, "-o --output FILE", "PNG file (default: RUN/loss.png, of several comparison.png)")
    add_option(plot, "--no-terminal", "no plot in the terminal")
    add_option(plot, "--json", "print the summary as an object, of several runs a list, without plots")
    history = add_verb(verbs, "history", run_history, text=_HISTORY)
    add_run(history)
    add_option(history, "--json", "print a list of objects; for one launch an object")


def run_history(args: argparse.Namespace) -> int:
    """Print the launches, or the provenance of one; return the exit code."""
    selected = select_run(args)
    run_dir = selected.run_dir
    if selected.launch is not None:
        launch = open_launch(run_dir, selected.launch)
        if args.json:
            print_json(provenance(launch))
        else:
            print_pairs(f"{launch.manifest.run}, launch {selected.launch}", provenance_rows(launch))
        return DONE
    rows = history(run_dir)
    if args.json:
        print_json([row.to_json() for row in rows])
    elif rows:
        print_styled(_lines(rows))
        print_resumable([rows[-1].status], (State.INTERRUPTED, State.CANCELLED))
        evaluations = read_evaluations(run_dir, starts_of(rows))
        if evaluations:
            print()
            columns, cells = evaluation_table(evaluations)
            print_listing(columns, cells, numbers=len(columns) - 1)
    else:
        print_stderr(f"the run in {escape(str(run_dir))} has no launch yet")
    return NOT_KNOWN if any(row.status.state is State.UNKNOWN for row in rows) else DONE


# Of a launch; --json has all.
_MOST_ALERTS = 10


def _lines(rows: Sequence[LaunchRow]) -> Iterator[Line]:
    """Yield aligned lines, for each launch and each of its attempts, followed by their notes."""
    # The cells of each line, the style of its state, and its notes.
    lines: list[tuple[Sequence[str], str, list[str]]] = []
    for row in rows:
        lines.append((_cells(row), tables.colour(row.status.state), []))
        for attempt in row.attempts:
            state = State.__members__.get(attempt.state, State.PENDING)
            lines.append((_attempt_cells(attempt), tables.colour(state), _attempt_notes(attempt)))
        lines[-1][2].extend(_launch_notes(row))
    room = shutil.get_terminal_size().columns if sys.stdout.isatty() else math.inf
    columns = tables.fitting_columns(_COLUMNS, [cells for cells, _, _ in lines], _DROPPED_FIRST, room)
    head = [_COLUMNS[index] for index in columns]
    texts = tables.align([head, *([cells[index] for index in columns] for cells, _, _ in lines)])
    state_at = texts[0].index("STATE")
    yield ((texts[0], "bold"),)
    for text, (cells, style, notes) in zip(texts[1:], lines, strict=True):
        state_end = state_at + len(cells[_STATE])
        yield (text[:state_at], ""), (text[state_at:state_end], style), (text[state_end:], "")
        for note in notes:
            yield ((f"        {escape(note)}", "dim"),)


def _cells(row: LaunchRow) -> list[str]:
    status, launch = row.status, row.status.launch
    manifest = launch.manifest if launch else None
    values = [
        row.number,
        launch.find_job(status) if launch else None,
        status.state.value,
        moment(manifest.created if manifest else None),
        manifest.user if manifest else None,
        moment(row.started),
        row.elapsed,
        status.nodes,
        row.steps,
        tables.loss(row.steps.loss),
        row.commit,
    ]
    return [escape(tables.text(value)) for value in values]


def _attempt_cells(row: AttemptRow) -> list[str]:
    attempt = row.attempt
    name = attempt.job_id if attempt.number == 0 else f"{attempt.job_id}, attempt {attempt.number + 1}"
    name += f", restart {attempt.restarts}" if attempt.restarts else ""
    link = "" if row.link is None else f"link {row.link}"
    values = [
        link, name, row.state, "", "", moment(attempt.started), tables.duration(row.elapsed), attempt.nodes,
        row.steps, tables.loss(row.steps.loss), "",
    ]  # fmt: skip
    return [escape(str(value)) if value == "" else escape(tables.text(value)) for value in values]


def _attempt_notes(row: AttemptRow) -> list[str]:
    """Return the reason for the end of an attempt and, of a link, the nodes that it excluded."""
    excluded = [f"excluded nodes: {row.attempt.avoids}"] if row.attempt.avoids else []
    excluded += [f"without {row.attempt.left_out}"] if row.attempt.left_out else []
    damaged = [checkpoint.line() for checkpoint in row.damaged]
    return [*excluded, *damaged, *_reasons(row.state, row.reason, row.reading)]


def _launch_notes(row: LaunchRow) -> list[str]:
    last = row.attempts[-1] if row.attempts else None
    reason = row.status.reason if last or row.reading else row.status.full_reason
    if last is not None and last.link is None and reason == last.reason:
        reason = None  # it is printed with the attempt
    if reason and last is not None and last.link is not None:
        reason = reason.removeprefix(last.reason or "").removeprefix("; ")  # it is printed with the link
        if last.reading is not None and reason == last.reading.why:
            reason = None
    printed = {checkpoint for attempt in row.attempts for checkpoint in attempt.damaged}
    damaged = [checkpoint.line() for checkpoint in row.damaged if checkpoint not in printed]
    differs = row.differs.lines() if row.differs else []
    notices = [f"sbatch said: {line}" for line in row.notices]
    alerts = [f"{'alert' if alert.is_open else 'over'}: {alert.first.why}" for alert in row.alerts]
    return [
        *notices,
        *([f"without {row.left_out}"] if row.left_out else []),
        *alerts[-_MOST_ALERTS:],
        *damaged,
        *_reasons(row.status.state.value, reason, row.reading),
        *differs,
        *row.changes.lines(),
    ]


def _reasons(state: str, reason: str | None, reading: Diagnosis | None) -> list[str]:
    if reading is None:
        return [reason] if reason else []
    first, *more = reading.lines()
    # The state INTERRUPTED already means that it saved.
    return [f"{reason}; {first}" if reason and state != State.INTERRUPTED.value else first, *more]


# --- plot


def run_plot(args: argparse.Namespace) -> None:
    """Print the closing table, draw the losses and write them into a PNG."""
    from launcher.monitor.summary import draw, evaluated_losses, summarize, write_png

    run_dirs = list(dict.fromkeys(run.run_dir for run in find_all(args.runs, args.base_results_dir)))
    if len(run_dirs) > 1:
        _plot_several(args, run_dirs)
        return
    run_dir = run_dirs[0]
    summary, curves = summarize(run_dir)
    if args.json:
        print_json(summary.to_json())
        if args.output is not None:
            write_png(args.output, summary, curves)
        return
    print_pairs(summary.run, summary.rows())
    if not args.no_terminal:
        evaluated = evaluated_losses(summary)
        print_plot(lambda width, coloured: draw(curves, evaluated, width, coloured=coloured))
    path: Path = args.output or run_dir / "loss.png"
    write_png(path, summary, curves)
    print(f"\nplot: {path}")


def _plot_several(args: argparse.Namespace, run_dirs: Sequence[Path]) -> None:
    from launcher.monitor import comparison

    runs = comparison.gather(run_dirs)
    path: Path | None = args.output
    if args.json:
        print_json([summary.to_json() for summary, _ in runs])
    else:
        print_listing(comparison.COLUMNS, [comparison.cells(summary) for summary, _ in runs])
        if not args.no_terminal:
            print_plot(lambda width, coloured: comparison.draw(runs, width, coloured=coloured))
        is_sweep = len(args.runs) == 1
        path = path or (run_dirs[0].parent if is_sweep else run_dirs[0]) / "comparison.png"
    if path is not None:
        comparison.write_png(path, runs)
        print_stderr(f"plot: {path}")
