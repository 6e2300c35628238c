"""`slipway list`: the choices of the configuration, and the existing runs."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from launcher.cli.options import Verbs, add_config_dir, add_option, add_verb
from launcher.cli.runs import NEWEST, add_base_results_dir
from launcher.errors import UserError, escape
from launcher.jobs.launches import Launch
from launcher.jobs.locator import RunLocator, originals
from launcher.runs.known_trees import why_not_remembered
from launcher.runs.paths import display_path
from launcher.ui.tables import UNKNOWN, count, moment, print_listing, text
from launcher.ui.terminal import print_json, print_message, print_stderr

_HELP = """\
List the configuration's choices (stages, model families and sizes, clusters), or runs.

examples:
  slipway list                     the stages, model families and clusters
  slipway list training            every model size with its parameters, as training=SIZE takes it
  slipway list clusters --config-dir conf
  slipway list training --json | jq -r '.[] | select(.parameters < 1e9) | .size'
  slipway list runs                the newest twenty runs in results/
  slipway list --all               every known run: of all users, in all directories seen before
  slipway list --all --json | jq -r '.[] | select(.user == "ada") | .run_dir'

PARAMETERS are counted from the sizes of the model and the published vocabulary of its tokenizer, padded as in
the training. With an unknown tokenizer they are those of the layers alone, marked with a +.

Known runs are those in results/, in the directories that $SLIPWAY_RESULTS_DIR lists (separated by :), and in
those where `slipway` saw runs before. No scheduler is asked; `slipway status` shows the state of runs.

exit code:
  0  listed
  1  a size could not be composed; its row has a -, the reason is on stderr
  2  a mistake in the command line
"""

Row = dict[str, Any]

_RUNS = "runs"
_SHAPE = ("num_layers", "hidden_size", "num_attention_heads", "sequence_length", "global_batch_size")


def add_parser(verbs: Verbs) -> None:
    parser = add_verb(verbs, "list", run, text=_HELP)
    names = ["stages", "training", "clusters", "families", _RUNS]
    parser.add_argument("what", nargs="?", choices=names, metavar="WHAT", help=", ".join(names))
    add_option(parser, "--all", "every known run, in all directories")
    add_option(parser, "--json", "print a list of objects, or one of such lists")
    add_config_dir(parser)
    add_base_results_dir(parser)


def run(args: argparse.Namespace) -> int:
    if args.all and args.what not in (None, _RUNS):
        raise UserError(f"--all lists runs: slipway list --all, not slipway list {args.what} --all")
    if args.all or args.what == _RUNS:
        return list_runs(args.base_results_dir, everywhere=args.all, as_json=args.json)
    names = [args.what] if args.what else ["stages", "families", "clusters"]
    lists = {name: list(_choices(name, args.config_dirs)) for name in names}
    if args.json:
        print_json(lists[args.what] if args.what else lists)
    else:
        for index, (name, rows) in enumerate(lists.items()):
            if index:
                print()
            _print_choices(name, rows)
    errors = [row["error"] for rows in lists.values() for row in rows if "error" in row]
    for error in errors:
        print_message(error)
    return 1 if errors else 0


def _choices(name: str, config_dirs: tuple[Path, ...]) -> Iterator[Row]:
    """Yield the choices of the configuration trees, as objects for programs."""
    # Imported late: it composes configurations, which listing runs does not need.
    from launcher.config.compose import list_options, tree_roots
    from launcher.config.overrides import STAGES, about

    def tree_of(group: str, choice: str) -> Row:
        """Return the tree that has a choice, where there are several; None for Slipway's own."""
        trees = (tree for tree in config_dirs if (tree / group / f"{choice}.yaml").is_file())
        return {"tree": next(map(str, trees), None)} if config_dirs else {}

    if name == "stages":
        for stage in STAGES:
            yield {"stage": stage, "choices": list_options(stage, config_dirs)}
    elif name == "clusters":
        for cluster in list_options("cluster", config_dirs):
            text = about("cluster", cluster, tree_roots(config_dirs))
            yield {"cluster": cluster, "about": text, **tree_of("cluster", cluster)}
    elif name == "training":
        for row in _model_sizes(list_options("training", config_dirs), config_dirs):
            yield row | tree_of("training", row["size"])
    else:
        families: dict[str, list[str]] = {}
        for size in list_options("training", config_dirs):
            family, _, own = size.rpartition("/")
            families.setdefault(family or size, []).append(own)
        for family, sizes in families.items():
            yield {"family": family, "sizes": sizes}


def _model_sizes(sizes: Iterable[str], config_dirs: tuple[Path, ...]) -> Iterator[Row]:
    from omegaconf import OmegaConf

    from launcher.cli.completion import composed
    from launcher.config.compose import BatchComposer, tree_roots
    from launcher.config.hydra_setup import register_resolvers
    from launcher.config.overrides import STAGES
    from slipway.arithmetic.parameters import count_parameters, vocabulary_size

    register_resolvers()
    sweep, unused = BatchComposer(["stages=[training]"], config_dirs), {*STAGES} - {"training"}
    *others, ours = tree_roots(config_dirs)
    files = [path.relative_to(root) for root in others for path in root.rglob("*.yaml")]
    is_replaced = any((ours / path).exists() for path in files)
    for size in sizes:
        training: Any
        if not is_replaced and (ours / f"training/{size}.yaml").is_file():
            # Hydra and the schema would take six times as long.
            tree = composed([f"training={size}"], [ours])
            training = OmegaConf.create({key: tree[key] for key in tree if key not in unused}).training
        else:
            try:
                training = sweep.compose([f"training={size}"]).config.training
            except UserError as error:
                yield {"size": size, "error": str(error)}
                continue
        model, trainer, model_type = training.model, training.trainer, training.run.model_type
        vocabulary = vocabulary_size(model)
        # T5's two stacks differ in a few keys only; the encoder's values are shown.
        encoder = model.get("encoder") or {}
        shape = {key: encoder.get(key, model.get(key)) for key in _SHAPE}
        shape["sequence_length"] = model.get("encoder_seq_length") or model.get("seq_length")
        yield {
            "size": size,
            "type": model_type,
            "parameters": count_parameters(model, vocabulary or 0, model_type),
            "vocabulary": vocabulary,
            **shape,
            **{key: trainer.get(key) for key in ("num_nodes", "devices")},
        }


def _print_choices(name: str, rows: list[Row]) -> None:
    if name == "stages":
        print_listing(
            ("STAGE", "CHOICES"), [(row["stage"], ", ".join(_shorten(row["choices"]))) for row in rows]
        )
    elif name == "families":
        print_listing(("FAMILY", "SIZES"), [(row["family"], ", ".join(row["sizes"])) for row in rows])
    elif name == "clusters":
        cells = [(row["cluster"], row["about"] or "", *_tree(row)) for row in rows]
        print_listing(("CLUSTER", "ABOUT", "TREE")[: len(cells[0])], cells)
    else:
        columns = ("SIZE", "PARAMETERS", "LAYERS", "HIDDEN", "HEADS", "SEQUENCE", "BATCH", "NODES×GPUS")
        cells = [(*_cells(row), *_tree(row)) for row in rows]
        print_listing((*columns, "TREE")[: len(cells[0])], cells, numbers=7)


def _tree(row: Row) -> list[str]:
    return [escape(display_path(Path(row["tree"]))) if row["tree"] else ""] if "tree" in row else []


def _shorten(choices: list[str]) -> list[str]:
    return choices if len(choices) <= 8 else [*choices[:3], f"… {len(choices)} in all: slipway list training"]


def _cells(row: Row) -> tuple[str, ...]:
    if "error" in row:
        return (row["size"], *([UNKNOWN] * 7))
    # Parameters are counted in billions, not giga.
    parameters = count(row["parameters"]).replace("G", "B") + ("" if row["vocabulary"] else "+")
    shape = (f"{row[key]:,}" if isinstance(row[key], int) else UNKNOWN for key in _SHAPE)
    return (row["size"], parameters, *shape, f"{row['num_nodes']}×{row['devices']}")


# --- runs

_COLUMNS = ("RUN", "LAUNCHES", "LAST LAUNCHED", "USER", "JOB", "IN")


def list_runs(base_results_dir: Path, *, everywhere: bool, as_json: bool) -> int:
    """Print the runs, the newest first; return the exit code."""
    known = RunLocator(base_results_dir).launches(None if everywhere else [base_results_dir.absolute()])
    launches: dict[Path, list[Launch]] = {}
    for launch in originals(known) if everywhere else known:
        launches.setdefault(launch.paths.run_dir, []).append(launch)
    runs = [(found[-1], len(found)) for found in launches.values()]
    runs.sort(key=lambda run: run[0].manifest.created, reverse=True)
    if as_json:
        print_json([_run_to_json(newest, number) for newest, number in runs])
    elif runs:
        shown = runs if everywhere else runs[:NEWEST]
        print_listing(_COLUMNS, [_run_cells(newest, number) for newest, number in shown], numbers=1)
        if len(shown) < len(runs):
            print_message(f"{len(runs) - len(shown)} older runs: slipway list --all")
    if not runs:
        where = "in the known directories" if everywhere else f"in {base_results_dir}"
        print_stderr(f"no run was launched {where} yet")
    if trouble := why_not_remembered():
        print_message(escape(trouble))
    return 0


def _run_cells(newest: Launch, launches: int) -> list[str]:
    run_dir, manifest = newest.paths.run_dir, newest.manifest
    created, tree = moment(manifest.created), display_path(run_dir.parent)
    values = (run_dir.name, launches, created, manifest.user, manifest.job_id, tree)
    return [escape(text(value)) for value in values]


def _run_to_json(newest: Launch, launches: int) -> Row:
    run_dir, manifest = newest.paths.run_dir, newest.manifest
    return {
        "run": run_dir.name,
        "run_dir": str(run_dir),
        "tree": str(run_dir.parent),
        "launches": launches,
        "last_launched": manifest.created,
        "user": manifest.user,
        "job_id": manifest.job_id,
        "scheduler": manifest.scheduler,
    }
