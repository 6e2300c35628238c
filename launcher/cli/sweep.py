"""`slipway sweep`: a training launched once for each combination of values, as a job array."""

from __future__ import annotations

import argparse
import json
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.checks.gate import require_skippable
from launcher.checks.rules.launch import MACHINE
from launcher.cli.options import Verbs, add_option, add_overrides, add_tree_options, add_verb, whole_number
from launcher.cli.requests import add_no_check, this_command
from launcher.cli.runs import add_base_results_dir
from launcher.errors import DONE, NOT_KNOWN, WATCHING_ENDED, UserError, escape, worst_code
from launcher.jobs.asking import AskingTimes
from launcher.runs.paths import display_path
from launcher.slurm.states import State, choose_exit_code
from launcher.sweeps.record import broken_records, find_sweep
from launcher.ui.tables import print_code, print_listing, print_table
from launcher.ui.terminal import print_json, print_message, print_stderr

if TYPE_CHECKING:
    from launcher.sweeps.arrays import Array, LaunchedSweep
    from launcher.sweeps.points import SweepDraft

_LOOK_SECONDS = 1.0  # between two looks at the files of the points
_SHOWN = 20  # points of the preview; --dry-run shows all

_HELP = """\
Combine the overrides that have several values, check every point, and submit all points as one job array.
Each point is a run, in a directory below the sweep's. Points with different Slurm options, such as
numbers of nodes, go into several arrays; so do more points than the site's MaxArraySize.

examples:
  slipway sweep training=gpt3/126m training.model.micro_batch_size=1,2,4 training.model.optim.lr=1e-4,3e-4
  slipway sweep training=gpt3/126m,gpt3/400m_improved 'training.model.optim.lr=choice(1e-4,3e-4)' --dry-run
  slipway sweep training=gpt3/tiny cluster=sandbox 'training.model.seed=range(0,8)' --throttle 4 --wait
  slipway sweep --results gpt3_126m_sweep                     the table, the best point first
  slipway status results/gpt3_126m_sweep                      the state of all points
  slipway cancel results/gpt3_126m_sweep                      end all of them

Values are written as for Hydra's own sweeper: a,b,c, choice(...), range(START,STOP,STEP), glob(...).
Text values, such as those of env_vars.NAME, are swept by choice(...) only.

exit code:
  0    submitted; with --wait: every point completed; with --results: every state is known
  1    with --wait: a point failed
  2    a mistake in the command line or the configuration; nothing was submitted
  3    the scheduler stopped answering; with --results: the state of some point is UNKNOWN
  4    an array was submitted, but something failed afterwards: the output could not be written, or a later
       array was refused; stderr names the array, and it continues
  75   with --wait: a point was interrupted, and sweeping again resumes it
  130  Ctrl-C; the jobs continue"""


def add_parser(verbs: Verbs) -> None:
    parser = add_verb(verbs, "sweep", run, text=_HELP)
    add_overrides(parser, "such as training.model.seed=1,2,3")
    text = "name of the sweep and its directory (default: the run's name and _sweep)"
    add_option(parser, "--name NAME", text)
    add_option(parser, "--throttle N", "run at most N points at once", type=whole_number(1))
    add_option(parser, "--dry-run", "show points and scripts; write and submit nothing")
    add_option(parser, "--wait", "wait until all points have ended, then print the table")
    add_option(parser, "--results SWEEP", "print the table of a sweep, by its name or its directory")
    add_option(parser, "--json", "print an object, or with --wait or --results a list")
    add_base_results_dir(parser)
    add_no_check(parser)
    add_tree_options(parser)


def run(args: argparse.Namespace) -> int:
    """Launch a sweep, or show the results of one; return the exit code."""
    if args.results is not None:
        if args.overrides:
            raise UserError("--results shows a launched sweep: it takes no overrides")
        return _show_results(args, find_sweep(args.results, args.base_results_dir))
    from launcher.sweeps.arrays import launch_sweep, pick_array, plan_arrays, prepare_sweep, render_array
    from launcher.sweeps.points import SweepRequest, check_sweep, draft_sweep

    require_skippable(args.no_check)
    keys = ("overrides", "name", "throttle", "config_dirs", "template_dir")
    request = SweepRequest(command=this_command(), **{key: getattr(args, key) for key in keys})
    sweep = draft_sweep(request)
    dry = args.dry_run or sweep.points[0].draft.composition.config.dry_run
    if not dry:
        from launcher.cli.launch import require_chosen

        require_chosen(sweep.points[0].draft.composition)
    # A dry run does not look at this machine.
    check_sweep(sweep, [*args.no_check, MACHINE] if dry else args.no_check)
    if not args.json:
        _preview(sweep, all_of_them=dry)
    if dry:
        for array in plan_arrays(sweep, request.throttle, len(sweep.points)):
            script = render_array(array, pick_array(sweep.directory), "TAG", request.template_dir)
            print(f"\nthe script of an array of {len(array.points)}:")
            print_code(script, "bash")
        return 0
    ready = prepare_sweep(sweep, request)
    if sweep.again:
        print_message(
            f"{len(sweep.again)} of these points were launched before, and resume from their checkpoints"
        )
    try:
        launched = launch_sweep(sweep, ready, request)
    except KeyboardInterrupt:
        where = shlex.quote(display_path(sweep.directory))
        print_message(f"interrupted; to show the submitted jobs: slipway sweep --results {where}")
        raise
    for warning in launched.warnings:
        print_message(warning)
    _print_launched(args, sweep, ready.arrays, launched)
    return _show_results(args, sweep.directory) if args.wait else DONE


def _preview(sweep: SweepDraft, *, all_of_them: bool) -> None:
    """Print the points in a table, and how many there are."""
    labels = sweep.grid.labels
    counts = " × ".join(str(len(axis.values)) for axis in sweep.grid.axes)
    counts = f"{counts} = " if len(sweep.grid.axes) > 1 else ""
    preview = sweep.points if all_of_them else sweep.points[:_SHOWN]
    rows = []
    for number, point in enumerate(preview, start=1):
        values = [escape(point.grid_point.values[key]) for key in labels]
        resources = point.plan.job.resources
        layout = f"{resources.nodes} × {resources.tasks_per_node}"
        rows.append((str(number), *values, layout, point.grid_point.name))
    print_listing(("POINT", *labels.values(), "NODES×TASKS", "RUN"), rows)
    rest = len(sweep.points) - len(preview)
    more = f"; {rest} more points, --dry-run shows all" if rest else ""
    where = display_path(sweep.directory)
    print(f"{counts}{len(sweep.points)} points, each a run in {where}{more}", flush=True)


def _print_launched(
    args: argparse.Namespace, sweep: SweepDraft, arrays: list[Array], launched: LaunchedSweep
) -> None:
    if args.json and args.wait:
        return  # the list at the end has everything
    submitted = list(zip(launched.arrays, launched.job_ids, strict=True))
    if args.json:
        points = [
            {
                "run_dir": str(point.plan.paths.run_dir),
                "job_id": f"{job_id}_{task}",
                "values": point.grid_point.values,
            }
            for array, job_id in submitted
            for task, point in enumerate(array.points)
        ]
        content = {"sweep": str(sweep.directory), "arrays": launched.job_ids, "points": points}
        print(json.dumps(content), flush=True)
        return
    from launcher.sweeps.arrays import list_differences

    where = shlex.quote(display_path(sweep.directory))
    for array, job_id in submitted:
        print(f"Submitted to Slurm: job array {job_id}, {len(array.points)} points")
    if len(arrays) > 1:
        flags = ", ".join(list_differences(arrays))
        why = f"the points differ in {flags}" if flags else "Slurm's MaxArraySize is smaller"
        print(f"  several arrays  {why}")
    print(f"  results         slipway sweep --results {where}")
    print(f"  states          slipway status {where}", flush=True)


def _show_results(args: argparse.Namespace, directory: Path) -> int:
    """Print the table and what failed; with --wait print changes first until every point has ended."""
    from launcher.sweeps.results import failures, gather

    printed, times = "", AskingTimes()
    try:
        while True:
            results = gather(directory)
            times.note_answer([point.status for point in results.points])
            if args.wait and (summary := results.summary()) != printed:
                print_stderr(summary)
                printed = summary
            if not (args.wait and any(state.is_live for state in results.states)):
                break
            while not times.is_due():
                time.sleep(_LOOK_SECONDS)
    except KeyboardInterrupt:
        if args.wait:
            print_stderr("stopped waiting; the jobs continue")
        return WATCHING_ENDED
    if args.json:
        print_json([point.to_json() for point in results.points])
    else:
        print_table(results.columns, results.rows(), results.states)
    for failure in failures(directory):
        print_message(failure)
    codes = [NOT_KNOWN] if broken_records(directory) else []
    if args.wait:
        return worst_code([choose_exit_code(results.states), *codes])
    return NOT_KNOWN if codes or State.UNKNOWN in results.states else DONE
