"""`slipway sweep`: a training launched once for each combination of values, as a job array."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.checks.gate import require_skippable
from launcher.checks.rules.files import MACHINE
from launcher.cli.options import Verbs, add_option, add_overrides, add_tree_options, add_verb
from launcher.cli.requests import add_no_check
from launcher.cli.runs import add_base_results_dir
from launcher.errors import UserError, one_line
from launcher.runs.paths import short
from launcher.ui.tables import print_listing

if TYPE_CHECKING:
    from launcher.sweeps.arrays import Array, LaunchedSweep
    from launcher.sweeps.points import SweepDraft, SweepRequest
    from launcher.sweeps.results import Results

_INTERVAL = 5.0  # seconds; a controller serves thousands of users
_SHOWN = 20  # points of the preview; --dry-run shows all

_HELP = """\
Combine the overrides that have several values, check every point, and submit all points as one job array.
Each point is a run of its own, in a directory below the sweep's. Points with different Slurm options, such as
numbers of nodes, go into several arrays; so do more points than the site's MaxArraySize.

examples:
  slipway sweep training=gpt3/126m training.model.micro_batch_size=1,2,4 training.model.optim.lr=1e-4,3e-4
  slipway sweep training=gpt3/126m,gpt3/400m_improved 'training.model.optim.lr=choice(1e-4,3e-4)' --dry-run
  slipway sweep training=gpt3/tiny cluster=sandbox 'training.model.seed=range(0,8)' --throttle 4 --wait
  slipway sweep --results gpt3_126m_sweep                     the table, the best point first
  slipway status results/gpt3_126m_sweep                      the state of all points
  slipway cancel results/gpt3_126m_sweep                      end all of them

Values are written as for Hydra's own sweeper: a,b,c, choice(...), range(START,STOP,STEP), glob(...).
A key whose value is text, such as env_vars.NAME, is swept by choice(...) only.

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
    parser = add_verb(verbs, "sweep", run, "launch a training for each combination of values", _HELP)
    add_overrides(parser, "such as training.model.seed=1,2,3")
    add_option(
        parser, "--name NAME", "name of the sweep and its directory (default: the run's name and _sweep)"
    )
    add_option(parser, "--throttle N", "run at most so many points at once", type=_count)
    add_option(parser, "--dry-run", "show points and scripts; write and submit nothing")
    add_option(parser, "--wait", "wait until all points have ended, then print the table")
    add_option(parser, "--results SWEEP", "print the table of a sweep, by its name or its directory")
    add_option(parser, "--json", "print an object, or with --wait or --results a list")
    add_base_results_dir(parser)
    add_no_check(parser)
    add_tree_options(parser)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


def run(args: argparse.Namespace) -> int:
    """Launch a sweep, or show the results of one; return the exit code."""
    if args.results is not None:
        return _show_results(args)
    from launcher.sweeps.arrays import launch_sweep, prepare_sweep
    from launcher.sweeps.points import check_sweep, draft_sweep

    require_skippable(args.no_check)
    request = _request(args)
    sweep = draft_sweep(request)
    dry = args.dry_run or sweep.points[0].draft.composition.config.dry_run
    # A dry run does not look at this machine.
    check_sweep(sweep, [*args.no_check, MACHINE] if dry else args.no_check)
    if not args.json:
        _preview(sweep, all_of_them=dry)
    if dry:
        return _show_scripts(sweep, request)
    ready = prepare_sweep(sweep, request)
    if sweep.again:
        _tell(f"{len(sweep.again)} of these points were launched before, and resume from their checkpoints")
    try:
        launched = launch_sweep(sweep, ready, request)
    except KeyboardInterrupt:
        where = shlex.quote(short(sweep.directory))
        _tell(f"interrupted; to show the submitted jobs: slipway sweep --results {where}")
        raise
    for warning in launched.warnings:
        _tell(warning)
    _tell_launched(args, sweep, ready.arrays, launched)
    return _wait(args, sweep.directory) if args.wait else 0


def _request(args: argparse.Namespace) -> SweepRequest:
    from launcher.sweeps.points import SweepRequest

    program = [sys.executable, sys.argv[0]] if sys.argv[0].endswith(".py") else [sys.argv[0]]
    return SweepRequest(
        overrides=args.overrides,
        command=[*program, *sys.argv[1:]],
        name=args.name,
        throttle=args.throttle,
        config_dir=args.config_dir,
        template_dir=args.template_dir,
    )


def _tell(line: str) -> None:
    print(f"slipway: {line}", file=sys.stderr, flush=True)


def _preview(sweep: SweepDraft, *, all_of_them: bool) -> None:
    """Print the points in a table, and how many there are."""
    labels = sweep.grid.labels
    counts = " × ".join(str(len(axis.values)) for axis in sweep.grid.axes)
    preview = sweep.points if all_of_them else sweep.points[:_SHOWN]
    rows = []
    for number, point in enumerate(preview, start=1):
        values = [one_line(point.grid_point.values[key]) for key in labels]
        resources = point.plan.job.resources
        layout = f"{resources.nodes} × {resources.tasks_per_node}"
        rows.append((str(number), *values, layout, point.grid_point.name))
    print_listing(("POINT", *labels.values(), "NODES×TASKS", "RUN"), rows)
    rest = len(sweep.points) - len(preview)
    more = f"; {rest} more points, --dry-run shows all" if rest else ""
    print(f"{counts} = {len(sweep.points)} points, each a run in {short(sweep.directory)}{more}", flush=True)


def _show_scripts(sweep: SweepDraft, request: SweepRequest) -> int:
    from launcher.sweeps.arrays import next_array, plan_arrays, render_array
    from launcher.ui.tables import print_code

    for array in plan_arrays(sweep, request.throttle, len(sweep.points)):
        script = render_array(array, next_array(sweep.directory), "TAG", request.template_dir)
        print(f"\nthe script of an array of {len(array.points)}:")
        print_code(script, "bash")
    return 0


def _tell_launched(
    args: argparse.Namespace, sweep: SweepDraft, arrays: list[Array], launched: LaunchedSweep
) -> None:
    if args.json and args.wait:
        return  # the list at the end has everything
    if args.json:
        points = [
            {
                "run_dir": str(point.plan.paths.run_dir),
                "job_id": f"{job_id}_{task}",
                "values": point.grid_point.values,
            }
            for array, job_id in zip(launched.arrays, launched.job_ids, strict=True)
            for task, point in enumerate(array.points)
        ]
        content = {"sweep": str(sweep.directory), "arrays": launched.job_ids, "points": points}
        print(json.dumps(content), flush=True)
        return
    from launcher.sweeps.arrays import differing

    where = shlex.quote(short(sweep.directory))
    for array, job_id in zip(launched.arrays, launched.job_ids, strict=True):
        print(f"Submitted to Slurm: job array {job_id}, {len(array.points)} points")
    if len(arrays) > 1:
        flags = differing(arrays)
        print(f"  several arrays  {_why_several(flags)}")
    print(f"  results         slipway sweep --results {where}")
    print(f"  states          slipway status {where}", flush=True)


def _why_several(flags: list[str]) -> str:
    return f"the points differ in {', '.join(flags)}" if flags else "Slurm's MaxArraySize is smaller"


def _show_results(args: argparse.Namespace) -> int:
    from launcher.errors import DONE, NOT_KNOWN
    from launcher.slurm.states import State
    from launcher.sweeps.record import broken_records, find_sweep
    from launcher.sweeps.results import failures, gather

    if args.overrides:
        raise UserError("--results shows a launched sweep: it takes no overrides")
    directory = find_sweep(args.results, args.base_results_dir)
    if args.wait:
        return _wait(args, directory)
    results = gather(directory)
    _print(results, as_json=args.json)
    for failure in failures(directory):
        _tell(failure)
    return NOT_KNOWN if State.UNKNOWN in results.states or broken_records(directory) else DONE


def _wait(args: argparse.Namespace, directory: Path) -> int:
    """Print changes until every point has ended, then the table; return the exit code."""
    from launcher.errors import NOT_KNOWN, WATCHING_ENDED, worst_code
    from launcher.slurm.states import worst_exit_code
    from launcher.sweeps.record import broken_records
    from launcher.sweeps.results import failures, gather

    printed = ""
    try:
        while True:
            results = gather(directory)
            if (summary := results.summary()) != printed:
                print(summary, file=sys.stderr, flush=True)
                printed = summary
            if not any(state.is_live for state in results.states):
                break
            time.sleep(_INTERVAL)
    except KeyboardInterrupt:
        print("stopped waiting; the jobs continue", file=sys.stderr)
        return WATCHING_ENDED
    _print(results, as_json=args.json)
    for line in failures(directory):
        _tell(line)
    blind = [NOT_KNOWN] if broken_records(directory) else []
    return worst_code([worst_exit_code(results.states), *blind])


def _print(results: Results, *, as_json: bool) -> None:
    from launcher.ui.tables import print_table

    if as_json:
        print(json.dumps([point.to_json() for point in results.points], indent=2), flush=True)
    else:
        print_table(results.columns, results.rows(), results.states)
