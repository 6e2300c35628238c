"""`slipway launch`: plan a launch and submit it, show what would be submitted, or try two steps first."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from launcher import errors
from launcher.checks.facts import Facts
from launcher.checks.gate import CheckReport, check_launch
from launcher.cli.options import Verbs, add_option, add_overrides, add_verb, whole_number
from launcher.cli.requests import add_launch_options, is_workspace, print_drafts, read_request
from launcher.config.compose import Composition
from launcher.config.overrides import WORKSPACE, parse_override
from launcher.config.site_trees import site_trees
from launcher.drafting import Draft, Request, drafts
from launcher.errors import UserError
from launcher.runs.paths import display_path
from launcher.ui.terminal import print_message

if TYPE_CHECKING:
    from launcher.jobs.launches import Launch
    from launcher.runs.manifest import Manifest
    from launcher.runs.paths import LaunchPaths

_EXAMPLE = "gpt3/126m"  # what config.yaml chooses: a day on 64 GPUs

_HOST, _JOB = "host", "job"

_HELP = """\
Compose the configuration, check it, render the job script and submit it.

examples:
  slipway launch training=gpt3/126m cluster=bcm --dry-run
  slipway launch training=gpt3/126m cluster=bcm training.trainer.num_nodes=2 cluster.partition=gpu
  slipway launch training=gpt3/tiny cluster=sandbox --follow
  slipway launch training=gpt3/tiny cluster=local training.run.name=first_try
  slipway launch training=gpt3/5b cluster=bcm --smoke       two steps on one node first
  slipway launch training=gpt3/5b cluster=bcm --ramp 1,2,8  a short job on 1, 2 and 8 nodes, and no launch
  slipway launch training=gpt3/5b cluster=bcm container=nemo --build       first its image, if missing
  slipway launch stages=[data_preparation,training] training=gpt3/126m cluster=bcm
  slipway launch stages=[workspace] training=gpt3/126m cluster=bcm            a shell on a node, in its image
  slipway launch stages=[workspace] training=gpt3/126m cluster=bcm --print    the command that opens it

An override is KEY=VALUE for a key of the tree in conf/, GROUP=CHOICE for a file of a folder there, +KEY=VALUE
for a key that the tree does not show, ~KEY to drop one. UNIQUE_OUTPUT_DIR=1 is unique_output_dir=true.

exit code:
  0    submitted; with --follow: the job completed
  any  with stages=[workspace]: that of the shell
  1    with --smoke: the two steps failed, and nothing else was launched; with --follow: the job failed;
       with --ramp: a rung failed, or was slower than the one before
  2    a mistake in the request; or the scheduler does not answer, and nothing was launched
  3    the scheduler stopped answering: the job may or may not exist; the next launch of the run checks that
       first
  4    a job was submitted, but a later step failed: the output could not be written, or a later stage was
       refused; stderr names the job, which continues
  130  interrupted; stderr names the submitted jobs
"""

# Of the verbs that launch a stage, and show its log until the end.
EXIT_CODES = """
exit code:
  0    {done}; with --dry-run: the script was printed
  1    {failed}; its log, above, says why
  2    a mistake in the command line, the configuration or a file that it names; the log may say which
  130  Ctrl-C; the job continues: slipway cancel RUN
"""


def add_parser(verbs: Verbs) -> None:
    parser = add_verb(verbs, "launch", run, text=_HELP)
    add_overrides(parser, "such as training=gpt3/126m")
    add_option(parser, "--follow", "show the progress until the job ends")
    add_option(parser, "--json", "print the submitted jobs as JSON")
    # As two options: argparse would take the next override for the value of a bare --build.
    text = "first make the image that `container` names, if it does not exist yet:"
    text = f"{text} a recipe is built, an image of a registry imported"
    build = {"dest": "build", "action": "store_const"}
    add_option(parser, f"--build --build={_HOST}", text, const=_HOST, **build)
    text = "the same in a job without GPUs, which the launch waits for"
    add_option(parser, f"--build={_JOB}", text, const=_JOB, **build)
    text = "run two steps on one node first, as run <name>_smoke, and launch only if they succeed."
    text = f"{text} With --dry-run: print the script of the smoke test"
    add_option(parser, "--smoke", text)
    text = "run a short job on each number of nodes, such as 1,2,16,128, as long as the one before was good;"
    text = f"{text} compare their speed, and print the command of the launch"
    add_option(parser, "--ramp NODES", text, type=_node_counts)
    text = "how much slower per GPU than the rung before is too slow (default: 10)"
    add_option(parser, "--ramp-drop PERCENT", text, type=whole_number(1))
    add_launch_options(parser)
    add_option(parser, "--print", "like --dry-run; for a workspace it prints the command", dest="dry_run")


def run(args: argparse.Namespace) -> int:
    """Launch, or print what would be launched; return the exit code."""
    if args.ramp_drop is not None and args.ramp is None:
        raise UserError("--ramp-drop: only with --ramp", hint="--ramp 1,2,4")
    if args.launch_dir is None and (args.build or args.smoke or args.ramp):
        launched, code = _build_and_try(args)
    else:
        launched, code = draft_and_launch(args, args.overrides), errors.DONE
    return finish(args, launched, code)


def finish(args: argparse.Namespace, launched: Sequence[Launch], code: int = errors.DONE) -> int:
    """Print the submitted jobs, and with --follow the progress; return the exit code."""
    print_outcomes(launched, as_json=args.json)
    if not (args.follow and launched):
        return code
    code, last = _follow(launched), launched[-1]
    if code == errors.DONE and sys.stdout.isatty() and last.manifest.stage == "training" and not args.json:
        run_dir = shlex.quote(display_path(last.paths.run_dir))
        print(f"\nslipway plot {run_dir}")
        if last.manifest.engine == "megatron":
            print(f'slipway generate {run_dir} "a text to continue"')
    return code


def draft_and_launch(args: argparse.Namespace, overrides: list[str]) -> list[Launch]:
    """Draft the launches of some overrides, check them and submit them; in a dry run print their scripts."""
    request = read_request(args, overrides)
    return launch_drafts(args, drafts(request), request)


def launch_drafts(args: argparse.Namespace, drafted: Sequence[Draft], request: Request) -> list[Launch]:
    """Check drafts and submit them; in a dry run print their scripts."""
    return _launch(args, _check(args, drafted, request), request)


def launch_and_follow(
    args: argparse.Namespace,
    overrides: list[str],
    lines_after: Callable[[Launch], Iterable[str]] = lambda launched: (),
) -> int:
    """Launch the jobs of a stage, and show their logs until the end, or the first failure; return its code.

    The lines are printed after a job that completed.
    """
    from launcher.cli.logs import follow_to_end
    from launcher.jobs.launches import open_launch

    for launched in draft_and_launch(args, overrides):
        code = follow_to_end(open_launch(launched.paths.run_dir, launched.paths.number))
        if code:
            return code
        for line in lines_after(launched):
            print(line)
    return errors.DONE


def _check(
    args: argparse.Namespace, drafted: Sequence[Draft], request: Request, skipped: Sequence[str] = ()
) -> list[CheckReport]:
    """Check drafts, and the options against them; a stored launch was checked when it was launched."""
    dry = _is_dry(args, drafted)
    if not dry:
        require_chosen(drafted[0].composition)
    for option in ("smoke", "follow", "json") if is_workspace(drafted) else ():
        if getattr(args, option, False):
            message = f"--{option}: stages=[{WORKSPACE}] is a shell to sit at, and no job that is submitted"
            raise UserError(message, key="stages")
    if request.launch_dir is None:
        reports = check_launch(drafted, (*args.no_check, *skipped), look=not dry)
    else:
        reports = [CheckReport(draft, Facts(), ()) for draft in drafted]
    if not dry and (request.number, request.tag, request.stage, request.launch_dir) != (None,) * 4:
        options = "--launch-dir, --launch-number, --tag and --stage"
        raise UserError(f"{options} render a launch again: they need --dry-run")
    return reports


def require_chosen(composition: Composition) -> None:
    """Raise UserError if neither the user nor a tree of the user's own has chosen what to launch."""
    typed = {override.key for override in map(parse_override, composition.overrides)}
    example = composition.choices.get("training")
    is_own = not set(composition.config_dirs) <= set(site_trees())
    if typed.isdisjoint(("training", "stages")) and not is_own and example == _EXAMPLE:
        raise UserError(
            "no training is chosen: name it with training=, or a stage with stages=",
            hint="slipway list training has the sizes; slipway launch --help has examples\n"
            f"what would be launched: slipway launch training={example} --dry-run",
        )


def _is_dry(args: argparse.Namespace, drafted: Sequence[Draft]) -> bool:
    return bool(args.dry_run or drafted[0].composition.config.dry_run)


def _launch(args: argparse.Namespace, reports: Sequence[CheckReport], request: Request) -> list[Launch]:
    """Submit checked drafts, or become the shell of a workspace; in a dry run print their scripts."""
    drafted = [report.draft for report in reports]
    if _is_dry(args, drafted):
        print_drafts([(draft, draft.script) for draft in drafted], "bash")
        return []
    # Imported late: a dry run neither writes nor submits.
    if is_workspace(drafted):
        from launcher.launching.workspace import open_workspace

        open_workspace(reports[0])
    from launcher.launching import launch_stages

    try:
        launched = launch_stages(drafted, request, reports=reports)
    except KeyboardInterrupt:
        runs = shlex.join(display_path(draft.plan.paths.run_dir) for draft in drafted)
        print_message(f"interrupted; whether there is a job: slipway status {runs}")
        raise
    for warning in dict.fromkeys(warning for launch in launched for warning in launch.warnings):
        print_message(warning)
    return launched


def _follow(launched: Sequence[Launch]) -> int:
    """Follow the jobs one after the other; return the worst of their exit codes."""
    from launcher.monitor.follow import follow_and_tell

    codes: list[int] = []
    for launch in launched:
        codes.append(follow_and_tell(launch.paths.run_dir, launch.paths.number))
        if codes[-1] == errors.WATCHING_ENDED:
            return errors.WATCHING_ENDED
    return errors.worst_code(codes)


def print_outcomes(launched: Sequence[Launch], *, as_json: bool) -> None:
    """Print the submitted jobs: as JSON an object, or a list of them for several stages."""
    if not as_json:
        for launch in launched:
            _print_submitted(launch.paths, launch.manifest)
    elif launched:
        jobs = [(launch.manifest.job_id, launch.paths) for launch in launched]
        content = [
            {"job_id": job_id, "run_dir": str(paths.run_dir), "launch": paths.number}
            for job_id, paths in jobs
        ]
        print(json.dumps(content[0] if len(content) == 1 else content))


def _print_submitted(paths: LaunchPaths, manifest: Manifest) -> None:
    from launcher.schedulers.job_status import declared_tasks

    task = "".join(f"_{number}" for number in declared_tasks(paths.directory)[:1])  # an array's first
    log = paths.run_dir / paths.log(f"{manifest.job_id}{task}").name
    places = {"local": "on this machine", "allocation": "in this allocation"}
    place = places.get(manifest.scheduler, "to Slurm")
    nodes = f"{manifest.nodes}" if manifest.max_nodes is None else f"{manifest.nodes}-{manifest.max_nodes}"
    layout = f"{nodes} × {manifest.tasks_per_node} tasks"
    if manifest.links > 1:
        layout += f", link 1 of at most {manifest.links}"
    if manifest.after is not None:
        layout += f", waits for {manifest.after}"
    print(f"Submitted {place}: job {manifest.job_id}, run {paths.run_name}, launch {paths.number}, {layout}")
    if manifest.granted_text is not None:
        print(f"  granted    {errors.escape(manifest.granted_text)}")
    print(f"  directory  {display_path(paths.run_dir)}")
    print(f"  log        {display_path(log)}")
    print(f"  follow it  slipway follow {shlex.quote(display_path(paths.run_dir))}", flush=True)


# --- --build, --smoke and --ramp


def _node_counts(text: str) -> list[int]:
    if not re.fullmatch(r"[1-9]\d{0,5}(,[1-9]\d{0,5})*", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers of nodes, such as 1,2,16,128")
    return [int(word) for word in text.split(",")]


def _build_and_try(args: argparse.Namespace) -> tuple[list[Launch], int]:
    """Launch with an image that is made first, after a smoke, or both.

    Return the launches and the exit code. A smoke that failed, or that is only printed, ends the way: there
    are no launches then, and the code is the smoke's.
    """
    others = {"--smoke": args.smoke, "--follow": args.follow, "--build=job": args.build == _JOB}
    if args.ramp and (option := next((name for name, value in others.items() if value), None)):
        message = f"--ramp and {option}: a ramp launches its rungs alone"
        raise UserError(message, hint=f"--ramp without {option}")
    request = read_request(args, args.overrides)
    if args.build:
        reports, request = _make_image_first(args, request)
    else:
        reports = _check(args, drafts(request), request)
    if args.ramp:
        return [], _climb(args, reports, request)
    if args.smoke:
        # Imported late, as all that only a mode of a launch needs.
        from launcher.smoke import drop_smoke, try_smoke

        if len(reports) > 1:
            message = "--smoke: the two steps would need outputs of earlier stages"
            raise UserError(message, key="stages", hint="launch these first; then stages=[training] --smoke")
        dry = _is_dry(args, [reports[0].draft])
        report, code = try_smoke(reports[0], request, args.no_check, dry=dry, is_for_program=args.json)
        if code is not None:
            return [], code
        reports, request = [report], replace(request, command=drop_smoke(request.command))
    return _launch(args, reports, request), errors.DONE


def _climb(args: argparse.Namespace, reports: Sequence[CheckReport], request: Request) -> int:
    """Run the rungs of a ramp, and print them; return the exit code."""
    from launcher.ramp import DROP, plan_ramp, print_plan, print_results

    if len(reports) > 1:
        message = "--ramp: the rungs would need outputs of earlier stages"
        raise UserError(message, key="stages", hint="launch these first; then stages=[training] --ramp")
    ramp = plan_ramp(reports[0], request, args.ramp, args.no_check)
    ramp.drop = args.ramp_drop or DROP
    if _is_dry(args, [reports[0].draft]):
        print_plan(ramp)
        return errors.DONE
    code = ramp.run()
    print_results(ramp, as_json=args.json)
    return code


def _make_image_first(args: argparse.Namespace, request: Request) -> tuple[list[CheckReport], Request]:
    """Check a launch and make its image, or draft the job that makes it first."""
    from launcher.images.progress import show_progress
    from launcher.launching.building import draft_with_image, make_here

    if args.smoke and args.build == _JOB:
        raise UserError("--smoke: it would not wait for the job of --build=job", hint="--smoke --build=host")
    building = draft_with_image(request, as_job=args.build == _JOB)
    reports = _check(args, building.drafts, building.request, building.skipped)
    if building.needed is not None:
        if _is_dry(args, building.drafts):
            print_message(f"first: slipway {shlex.join(building.needed.command)}")
        else:
            with show_progress(quiet=args.json) as progress:
                done = make_here(building.needed, progress)
            print_message(f"image {done.path}: {'made by another process' if done.reused else 'made'}")
    return reports, building.request
