"""`slipway image push` and `prune`: what leaves the store, to registries or for good."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.cli.image_options import (
    Verbs,
    add_access,
    add_overrides,
    add_store,
    add_template_dir,
    add_verb,
    find_store,
    split_overrides,
)
from launcher.cli.runs import add_base_results_dir
from launcher.errors import Mistakes, UserError, explain_refusal, one_line
from launcher.images.progress import format_size
from launcher.images.references import Reference, absolute_path, recipe_and_flavor
from launcher.images.tools import BUILDERS, ending_cleanly
from launcher.ui.tables import print_listing

if TYPE_CHECKING:
    from launcher.images.pruning import NamedContainer, PruneDecision
    from launcher.images.recipes import Recipe
    from launcher.images.registry import Pushed
    from launcher.images.store import Store

_EPILOG = """\
examples:
  slipway image prune --dry-run                show what would be removed, and why the others stay
  slipway image prune --older-than 30d         remove older images that no run was ever launched with
  slipway image prune --ended --keep 3         also images of runs that have ended; the newest 3 stay
  slipway image prune --yes                    do not ask
  slipway image prune --named nemo cluster=bcm containers of this name on the nodes, not images
  slipway image prune --named '*' cluster=bcm cluster.nodelist=n1,n2 --dry-run

An image stays while a job that was launched with it waits or runs, or may. Known are the launches in
results/, in the directories that $SLIPWAY_RESULTS_DIR lists and in those where `slipway` saw runs before;
nothing is known of jobs that were not launched with `slipway`, nor of colleagues' in other directories. An
image without a record beside it was not made by `slipway`, and stays; so does another user's image.
The partial file of a killed import is removed too.

With --named: containers that your launches left on nodes (container_options.name), with the files that were
written in them; of any image, unless a process runs in it. A short job looks on each node of the partition.
A node that has no room for it within 20 s is named and skipped.

exit code:
  0  removed, or there was nothing to remove
  1  an image could not be removed
  2  a mistake in the arguments; or no terminal to ask on, and no --yes
"""


def add_parsers(verbs: Verbs) -> None:
    parser = add_verb(
        verbs,
        "prune",
        "remove images that no run needs",
        "Remove the images of the store that no run was launched with, and ask before.",
        _EPILOG,
        _prune,
        "print a list of objects; ask nothing",
    )
    add_overrides(parser)
    add_store(parser)
    add_base_results_dir(parser)
    parser.add_argument("--dry-run", action="store_true", help="remove nothing")
    parser.add_argument("--keep", type=int, default=0, metavar="N", help="keep the newest N of them")
    parser.add_argument(
        "--older-than", metavar="AGE", help="only images made longer ago, such as 30d, 12h, 2w"
    )
    parser.add_argument("--ended", action="store_true", help="also images of runs that have ended")
    parser.add_argument(
        "--named",
        metavar="NAME",
        help="remove containers of this name on the nodes, and no images; '*' for all",
    )
    parser.add_argument("-y", "--yes", action="store_true", help="do not ask")


def _prune(args: argparse.Namespace) -> int:
    from launcher.images.pruning import PruneRules, decide, decide_leftovers, images_in_use, parse_age

    if args.named is not None:
        return _prune_named(args)
    if args.keep < 0:
        raise UserError(f"--keep {args.keep}: this is no number of images", hint="0 or more")
    older = parse_age(args.older_than) if args.older_than is not None else 0.0
    store = find_store(args, args.overrides)

    def decide_now() -> list[PruneDecision]:
        uses = images_in_use(args.base_results_dir, store.directory)
        decisions = decide(store.entries(), uses, PruneRules(args.keep, older, args.ended), time.time())
        return decisions + decide_leftovers(store.directory, uses)

    decisions = decide_now()
    removals = [decision for decision in decisions if decision.remove]
    if not args.json:
        _print_decisions(decisions, store.directory)
    failed: dict[Path, str] = {}
    if removals and not args.dry_run:
        if _ask(args, len(removals)):
            # A launch may have been given one of them meanwhile.
            free = {decision.entry.path for decision in decide_now() if decision.remove}
            needed = [decision.entry.path for decision in removals if decision.entry.path not in free]
            failed = {path: f"{one_line(str(path))}: needed just now; it stays" for path in needed}
            removals = [decision for decision in removals if decision.entry.path in free]
        failed |= _remove(removals)
        for message in failed.values():
            print(f"slipway: {message}", file=sys.stderr)
    if args.json:
        rows = [_decision_to_json(decision, args.dry_run, failed) for decision in decisions]
        print(json.dumps(rows, indent=2))
    return 1 if failed else 0


def _prune_named(args: argparse.Namespace) -> int:
    """Remove containers with names from the nodes; return the exit code."""
    from launcher.config.compose import compose
    from launcher.images import pruning

    if args.keep or args.older_than is not None or args.ended:
        raise UserError("--named: containers have no --keep, --older-than and --ended")
    cluster = compose(args.overrides, args.config_dir).config.cluster
    containers, skipped = pruning.look(cluster, pruning.nodes_of(cluster), args.named)
    removals = [container for container in containers if container.state == "idle"]
    if not args.json:
        _print_named(containers, args.named)
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
        print(f"slipway: {place.node}: skipped: {place.why}", file=sys.stderr)
    for container in failed:
        print(f"slipway: {container.node}: {container.name} was not removed", file=sys.stderr)
    if args.json:
        rows = [{"node": item.node, "name": item.name, "state": item.state} for item in containers]
        print(json.dumps(rows, indent=2))
    return 1 if skipped or failed else 0


def _print_named(containers: Sequence[NamedContainer], pattern: str) -> None:
    if not containers:
        print(f"no launch of yours left a container named {one_line(pattern)}", file=sys.stderr)
        return
    rows = [
        (item.node, one_line(item.name), "remove" if item.state == "idle" else item.state)
        for item in containers
    ]
    print_listing(("NODE", "CONTAINER", ""), rows)


def _print_decisions(decisions: Sequence[PruneDecision], directory: Path) -> None:
    if not decisions:
        print(f"there is no image in {one_line(str(directory))}", file=sys.stderr)
        return
    rows = [
        (
            one_line(decision.entry.path.name),
            format_size(decision.entry.size),
            "remove" if decision.remove else "stays",
            decision.why,
        )
        for decision in decisions
    ]
    print_listing(("IMAGE", "SIZE", "", "WHY"), rows, numbers=1)
    sizes = [decision.entry.size for decision in decisions if decision.remove]
    print(f"{len(sizes)} of {len(decisions)} to remove: {format_size(sum(sizes))}")


def _ask(args: argparse.Namespace, count: int) -> bool:
    """Return True if the user was asked and agreed, False if `--yes` was given.

    Raise UserError if they do not agree, or cannot be asked.
    """
    if args.yes:
        return False
    if args.json or not sys.stdin.isatty():
        raise UserError("nothing was removed: there is nobody to ask", hint="to remove them: --yes")
    print(f"remove {count}? [y/N] ", end="", flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
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

_PUSH_EPILOG = """\
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
    description, json_help = (
        "Push an image to registries, by skopeo.",
        "print a list of objects, and no progress",
    )
    parser = add_verb(
        verbs, "push", "push an image to registries", description, _PUSH_EPILOG, _push, json_help
    )
    parser.add_argument("source", metavar="IMAGE", help="a recipe that was built here, or a reference")
    parser.add_argument(
        "targets",
        nargs="*",
        metavar="TO",
        help="REGISTRY/NAME:TAG (default: the recipe's); and overrides such as image.tag=2 or images_dir=DIR",
    )
    add_store(parser)
    add_template_dir(parser)
    parser.add_argument(
        "--temp-dir", type=absolute_path, metavar="DIR", help="where to pack (default: where there is room)"
    )
    parser.add_argument(
        "--builder", choices=BUILDERS, metavar="NAME", help="the builder whose storage has a recipe's image"
    )
    add_access(parser)


def _push(args: argparse.Namespace) -> int:
    from launcher.images import registry
    from launcher.images.progress import show_progress
    from launcher.images.tools import NO_IMAGE, ToolError

    overrides = [word for word in args.targets if "=" in word]
    targets = [Reference.parse(text, "TO") for text in args.targets if text not in overrides]
    own, others = split_overrides(overrides)
    recipe = _recipe(args, own)
    if recipe is not None and not targets:
        names = filter(None, [recipe.config.registry, *recipe.config.registries])
        targets = [Reference.parse(recipe.name_in(name), "image.registries") for name in names]
    if not targets:
        raise UserError("where to? no registry is named", hint="such as registry.example/team/nemo:25.07")
    registry.check_targets(targets)  # before a builder is looked for
    access = registry.Access(args.plain_http, args.authfile)
    with show_progress(quiet=args.json) as progress, ending_cleanly(), ExitStack() as storage:
        source = Reference.parse(args.source, "image") if recipe is None else _built(args, recipe, storage)
        try:
            pushed = registry.push(source, targets, progress, access, args.temp_dir)
        except ToolError as error:
            if recipe is None or error.why != NO_IMAGE:
                raise
            hint = f"build it first: slipway image build {args.source}"
            raise UserError(error.message, hint=hint) from error
        if recipe is not None:
            _record(find_store(args, others), recipe.file_name, source, pushed)
        progress.done()
    return _print_pushed(pushed, args.json)


def _recipe(args: argparse.Namespace, overrides: list[str]) -> Recipe | None:
    """Return the recipe; ``None`` if the source is no recipe."""
    named = recipe_and_flavor(args.source)
    if named is None:
        if overrides:
            raise UserError(f"{overrides[0]}: {args.source} is no recipe, and has no such keys")
        return None
    from launcher.images.recipes import read_recipe

    return read_recipe(*named, overrides, args.config_dir, args.template_dir)


def _built(args: argparse.Namespace, recipe: Recipe, storage: ExitStack) -> Reference:
    """Return the recipe's image in its builder's storage, and let skopeo find that storage."""
    from launcher.images.building import find_builder

    builder = find_builder(args.builder or recipe.config.builder)
    storage.enter_context(builder.environment())
    return builder.reference(recipe.image_name)


def _record(store: Store, file_name: str, source: Reference, pushed: Sequence[Pushed]) -> None:
    """Write the digest that registries have into the record of the file that was made of the same image.

    A builder's storage and a registry pack an image differently, so that its digests differ.
    """
    from launcher.images.registry import Access, look_up
    from launcher.images.store import read_sidecar

    image = store.path(file_name)
    record = read_sidecar(image)
    digest = next((push.digest for push in pushed if push.digest is not None), None)
    if record is None or digest in (None, record.pushed):
        return
    if look_up(source, Access()).digest == record.digest:
        try:
            replace(record, pushed=digest).write(image)
        except OSError as error:
            message = f"{one_line(str(image))}: its record does not get the digest: {error.strerror}"
            print(f"slipway: warning: {message}", file=sys.stderr)


def _print_pushed(pushed: Sequence[Pushed], as_json: bool) -> int:
    errors = [push.error for push in pushed if push.error is not None]
    if as_json:
        rows = [
            {
                "target": str(push.target),
                "digest": push.digest,
                "was_there": push.was_there,
                "error": push.error.message if push.error else None,
            }
            for push in pushed
        ]
        print(json.dumps(rows, indent=2))
    else:
        for push in pushed:
            if push.error is None:
                has = "has it already" if push.was_there else "has it now"
                print(f"{one_line(str(push.target))} {has}: {push.digest}")
    if len(errors) == len(pushed):
        raise Mistakes(errors)
    for error in errors:
        print(f"slipway: {error}", file=sys.stderr)
    return 1 if errors else 0
