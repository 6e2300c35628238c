"""`slipway image push` and `prune`: what leaves the store, to registries or for good."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.filesize import decimal

from launcher.cli import image_options as shared
from launcher.cli.options import Verbs, add_option, add_overrides, add_verb, parse_age
from launcher.cli.runs import add_base_results_dir
from launcher.config.overrides import recipe_and_flavor
from launcher.errors import Mistakes, UserError, absolute_path, escape, explain_refusal
from launcher.images import registry
from launcher.images.progress import show_progress
from launcher.images.references import Reference
from launcher.images.store import list_images, read_sidecar
from launcher.images.tools import BUILDERS, NO_IMAGE, ToolError, ending_cleanly
from launcher.ui.tables import print_listing
from launcher.ui.terminal import agrees, print_json, print_message, print_stderr

if TYPE_CHECKING:
    from launcher.images.pruning import PruneDecision

_PRUNE = """\
Remove the images of the store that no run was launched with, and ask before.

examples:
  slipway image prune --dry-run                show what would be removed, and why the others stay
  slipway image prune --older-than 30d         remove older images that no run was ever launched with
  slipway image prune --ended --keep 3         also images of runs that have ended; the newest 3 stay
  slipway image prune --yes                    do not ask
  slipway image prune --named nemo cluster=bcm containers of this name on the nodes, not images
  slipway image prune --named '*' cluster=bcm cluster.nodelist=n1,n2 --dry-run

An image stays while a job that was launched with it is, or may be, pending or running. `prune` knows the
launches in results/, in the directories of $SLIPWAY_RESULTS_DIR and in those where `slipway` saw runs before;
it knows nothing of jobs that were not launched with `slipway`, nor of colleagues' in other directories. An
image without a record next to it was not made by `slipway`, and stays; so does another user's image.
The partial file of a killed import is removed too.

With --named: containers that your launches left on nodes (container_options.name), with the files that were
written in them; of any image, unless a process runs in it. A short job looks on each node of the partition.
A node that has no room for it within 20 s is named and skipped.

exit code:
  0  removed, or there was nothing to remove
  1  an image could not be removed
  2  a mistake in the arguments; or no terminal to ask on, and no --yes
"""


def add_prune(verbs: Verbs) -> None:
    parser = add_verb(verbs, "prune", _prune, "remove images that no run needs", _PRUNE)
    add_option(parser, "--json", "print a list of objects; ask nothing")
    add_overrides(parser, shared.OVERRIDES_HELP)
    shared.add_store(parser)
    add_base_results_dir(parser)
    add_option(parser, "--dry-run", "remove nothing")
    add_option(parser, "--keep N", "keep the newest N of them", default=0)
    add_option(parser, "--older-than AGE", "only images made longer ago, such as 30d, 12h, 2w")
    add_option(parser, "--ended", "also images of runs that have ended")
    text = "remove containers of this name on the nodes, and no images; '*' for all"
    add_option(parser, "--named NAME", text)
    add_option(parser, "-y --yes", "do not ask")


def _prune(args: argparse.Namespace) -> int:
    from launcher.images.pruning import PruneRules, decide, decide_leftovers, images_in_use

    if args.named is not None:
        return _prune_named(args)
    if args.keep < 0:
        raise UserError(f"--keep {args.keep}: not a number of images", hint="0 or more")
    older = parse_age(args.older_than, "--older-than") if args.older_than is not None else 0.0
    store = shared.find_store(args, args.overrides)

    def decide_now() -> list[PruneDecision]:
        uses = images_in_use(args.base_results_dir, store)
        decisions = decide(list_images(store), uses, PruneRules(args.keep, older, args.ended), time.time())
        return decisions + decide_leftovers(store, uses)

    decisions = decide_now()
    removals = [decision for decision in decisions if decision.remove]
    if not args.json:
        _print_decisions(decisions, store)
    failed: dict[Path, str] = {}
    if removals and not args.dry_run:
        if _ask(args, len(removals)):
            # A launch may have been given one of them meanwhile.
            free = {decision.entry.path for decision in decide_now() if decision.remove}
            needed = [decision.entry.path for decision in removals if decision.entry.path not in free]
            failed = {path: f"{escape(str(path))}: needed just now; it stays" for path in needed}
            removals = [decision for decision in removals if decision.entry.path in free]
        failed |= _remove(removals)
        for message in failed.values():
            print_message(message)
    if args.json:
        print_json([_decision_to_json(decision, args.dry_run, failed) for decision in decisions])
    return 1 if failed else 0


def _prune_named(args: argparse.Namespace) -> int:
    """Remove containers with names from the nodes; return the exit code."""
    from launcher.config.compose import compose
    from launcher.images import pruning

    if args.keep or args.older_than is not None or args.ended:
        raise UserError("--named: containers have no --keep, --older-than and --ended")
    cluster = compose(args.overrides, args.config_dirs).config.cluster
    containers, skipped = pruning.look(cluster, pruning.nodes_of(cluster), args.named)
    removals = [container for container in containers if container.state == "idle"]
    if not args.json and containers:
        words = {"idle": "remove"}
        rows = [(item.node, escape(item.name), words.get(item.state, item.state)) for item in containers]
        print_listing(("NODE", "CONTAINER", ""), rows)
    elif not args.json:
        print_stderr(f"no launch of yours left a container named {escape(args.named)}")
    if removals and not args.dry_run:
        _ask(args, len(removals))
        removed, silent = pruning.remove_containers(cluster, removals)
        states = {(item.node, item.container): item.state for item in removed}
        containers = [
            replace(item, state=states.get((item.node, item.container), item.state)) for item in containers
        ]
        skipped += silent
    failed = [container for container in containers if container in removals and not args.dry_run]
    for place in skipped:
        print_message(f"{place.node}: skipped: {place.why}")
    for container in failed:
        print_message(f"{container.node}: {container.name} was not removed")
    if args.json:
        print_json([{"node": item.node, "name": item.name, "state": item.state} for item in containers])
    return 1 if skipped or failed else 0


def _print_decisions(decisions: Sequence[PruneDecision], directory: Path) -> None:
    if not decisions:
        print_stderr(f"there is no image in {escape(str(directory))}")
        return
    rows = []
    for decision in decisions:
        name, size = escape(decision.entry.path.name), decimal(decision.entry.size)
        rows.append((name, size, "remove" if decision.remove else "stays", decision.why))
    print_listing(("IMAGE", "SIZE", "", "WHY"), rows, numbers=1)
    sizes = [decision.entry.size for decision in decisions if decision.remove]
    print(f"{len(sizes)} of {len(decisions)} to remove: {decimal(sum(sizes))}")


def _ask(args: argparse.Namespace, count: int) -> bool:
    """Return True if the user agrees, False if `--yes` was given; raise UserError if neither is so."""
    if args.yes:
        return False
    if args.json or not sys.stdin.isatty():
        raise UserError("nothing was removed: no terminal to ask on", hint="to remove them: --yes")
    print(f"remove {count}? ", end="")
    if not agrees(sys.stdout):
        raise UserError("nothing was removed")
    return True


def _remove(removals: Sequence[PruneDecision]) -> dict[Path, str]:
    """Remove images; return the error of each that could not be removed."""
    from launcher.images.pruning import remove

    failed = {}
    for decision in removals:
        path = decision.entry.path
        try:
            remove(decision.entry)
        except UserError as error:
            failed[path] = str(error)
        except OSError as error:
            failed[path] = str(explain_refusal(error) or f"{path}: {error.strerror}")
    return failed


def _decision_to_json(decision: PruneDecision, dry_run: bool, failed: dict[Path, str]) -> dict[str, Any]:
    path = decision.entry.path
    return {
        "path": str(path),
        "size": decision.entry.size,
        "remove": decision.remove,
        "removed": decision.remove and not dry_run and path not in failed,
        "why": failed.get(path, decision.why),
    }


# --- push

_PUSH = """\
Push an image to registries, by skopeo.

examples:
  slipway image push nemo registry.example/team/nemo:25.07      the recipe's image, as it was built here
  slipway image push nemo                                       to image.registry and all of image.registries
  slipway image push nvcr.io#nvidia/nemo:25.07 eu.example/nemo:25.07 us.example/nemo:25.07
  slipway image push oci-archive:nemo.tar registry.example/team/nemo:1 --json

The layers are packed once and sent to each registry unchanged; the digest is read back from each, and is
the same in all. If an image of this digest has this name already, nothing is sent.

exit code:
  0  all registries have it
  1  some have it, and some refused; run it again
  2  none has it, or a mistake in the arguments
"""


def add_push(verbs: Verbs) -> None:
    parser = add_verb(verbs, "push", _push, "push an image to registries", _PUSH)
    add_option(parser, "--json", "print a list of objects, and no progress")
    parser.add_argument("source", metavar="IMAGE", help="a recipe that was built here, or a reference")
    text = "REGISTRY/NAME:TAG (default: the recipe's); and overrides such as image.tag=2 or images_dir=DIR"
    parser.add_argument("targets", nargs="*", metavar="TO", help=text)
    shared.add_store(parser, recipes=True)
    text = "where to pack (default: where there is room)"
    add_option(parser, "--temp-dir DIR", text, type=absolute_path)
    text = "the builder that stores a recipe's image"
    add_option(parser, "--builder NAME", text, choices=BUILDERS)
    shared.add_access(parser)


def _push(args: argparse.Namespace) -> int:
    # Imported late: they compose configurations.
    from launcher.images.building import find_builder
    from launcher.images.recipes import read_recipe

    overrides = [word for word in args.targets if "=" in word]
    targets = [Reference.parse(text, "TO") for text in args.targets if text not in overrides]
    own, others = shared.split_overrides(overrides)
    named, recipe = recipe_and_flavor(args.source), None
    if named is not None:
        recipe = read_recipe(*named, own, args.config_dirs, args.template_dir)
    elif own:
        raise UserError(f"{own[0]}: {args.source} is not a recipe, and has no such keys")
    if recipe is not None and not targets:
        names = filter(None, [recipe.config.registry, *recipe.config.registries])
        targets = [Reference.parse(recipe.name_in(name), "image.registries") for name in names]
    if not targets:
        raise UserError("where to? no registry is named", hint="such as registry.example/team/nemo:25.07")
    registry.check_targets(targets)  # before a builder is looked for
    access = registry.Access(args.plain_http, args.authfile)
    with show_progress(quiet=args.json) as progress, ending_cleanly(), ExitStack() as storage:
        if recipe is None:
            source = Reference.parse(args.source, "image")
        else:
            builder = find_builder(args.builder or recipe.config.builder)
            storage.enter_context(builder.environment())  # in which skopeo finds its images
            source = builder.reference(recipe.image_name)
        try:
            pushed = registry.push(source, targets, progress, access, args.temp_dir)
        except ToolError as error:
            if recipe is None or error.why != NO_IMAGE:
                raise
            hint = f"build it first: slipway image build {args.source}"
            raise UserError(error.message, hint=hint) from error
        if recipe is not None:
            _record(shared.find_store(args, others), recipe.file_name, source, pushed)
        progress.done()
    return _print_pushed(pushed, args.json)


def _record(store: Path, file_name: str, source: Reference, pushed: Sequence[registry.Pushed]) -> None:
    """Write the digest that registries have into the record of the file that was made of the same image.

    A builder's storage and a registry pack an image differently, so that its digests differ.
    """
    image = store / file_name
    record = read_sidecar(image)
    digest = next((push.digest for push in pushed if push.digest is not None), None)
    if record is None or digest in (None, record.pushed):
        return
    if registry.look_up(source, registry.Access()).digest == record.digest:
        try:
            replace(record, pushed=digest).write(image)
        except OSError as error:
            place = escape(str(image))
            print_message(f"warning: {place}: its record does not get the digest: {error.strerror}")


def _print_pushed(pushed: Sequence[registry.Pushed], as_json: bool) -> int:
    errors = [push.error for push in pushed if push.error is not None]
    if as_json:
        rows = [
            {
                "target": str(push.target),
                "digest": push.digest,
                "was_there": push.was_there,
                "error": push.error and push.error.message,
            }
            for push in pushed
        ]
        print_json(rows)
    for push in pushed:
        if not as_json and push.error is None:
            has = "has it already" if push.was_there else "has it now"
            print(f"{escape(str(push.target))} {has}: {push.digest}")
    if len(errors) == len(pushed):
        raise Mistakes(errors)
    for error in errors:
        print_message(str(error))
    return 1 if errors else 0
