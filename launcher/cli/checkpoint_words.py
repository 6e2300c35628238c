"""The checkpoints that a user's words name, shared by `slipway convert` and `slipway evaluate`."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.cli.runs import add_base_results_dir, find_one
from launcher.config.overrides import hydra_value
from launcher.errors import UserError, one_line
from launcher.runs.paths import LAUNCHES
from launcher.runs.trained import TrainingLaunch, training_of
from launcher.secrecy import MASK

# RUN@20; of an evaluation several: RUN@20,40
_AT_STEPS = re.compile(r"(?P<word>.+)@(?P<steps>\d+(?:,\d+)*)", re.ASCII)
# Of a run's overrides, those that say where its jobs run, and in what.
_PLACES = re.compile(
    r"\+{0,2}(cluster|container|container_mounts|container_options|images_dir|env_vars|env_files)\b|stage_cluster"
)
_UNSAFE = re.compile(r"[^A-Za-z0-9._+=-]+")


@dataclass(frozen=True, slots=True)
class NamedCheckpoints:
    """A checkpoint or a directory of checkpoints; `training` is None if no run of ours wrote them."""

    source: Path
    steps: tuple[int, ...]
    training: TrainingLaunch | None

    @property
    def name(self) -> str:
        """The name of the model, safe in the name of a run."""
        name = self.training.manifest.run if self.training is not None else self.source.resolve().name
        return _UNSAFE.sub("_", name).lstrip("._+=-") or "model"


def add_source(parser: argparse.ArgumentParser) -> None:
    """Add the words for the checkpoints, with the options about their run and about the cluster."""
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="SOURCE",
        help="a run, RUN@STEP or a directory; or an override such as cluster=bcm",
    )
    parser.add_argument(
        "--on-cluster",
        action="store_true",
        help="as a job where the run ran, in its image; cluster=... chooses another cluster",
    )
    add_base_results_dir(parser)


def split_words(words: Sequence[str]) -> tuple[str, list[str]]:
    """Return the source and the overrides among the words.

    Raises
    ------
    UserError
        If there is no source, or more than one.
    """
    overrides = [word for word in words if "=" in word and not Path(word).exists()]
    sources = [word for word in words if word not in overrides]
    if not sources:
        raise UserError("no source", hint="name a run, a run's step (RUN@20), or a directory")
    if len(sources) > 1:
        raise UserError(
            f"{', '.join(map(one_line, sources))}: one source at a time",
            hint="an override has the form KEY=VALUE",
        )
    return sources[0], overrides


def find_checkpoints(word: str, base_results_dir: Path) -> NamedCheckpoints:
    """Find the checkpoints that a word names: a directory, else a run.

    Raises
    ------
    UserError
        If there is no such run, or it is none of a training.
    """
    match = None if Path(word).exists() else _AT_STEPS.fullmatch(word)
    name, steps = (match["word"], match["steps"].split(",")) if match else (word, [])
    path = Path(name).absolute()
    if path.is_dir() and not (path / LAUNCHES).is_dir():
        return NamedCheckpoints(path, tuple(map(int, steps)), training_of(path))
    run_dir = find_one(name, base_results_dir).run_dir
    training = training_of(run_dir)
    if training is None:
        raise UserError(
            f"{one_line(name)}: no launch of this run is a training's",
            hint="the run of the training, or a directory of checkpoints",
        )
    return NamedCheckpoints(training.checkpoints, tuple(map(int, steps)), training)


def source_overrides(
    stage: str, checkpoints: NamedCheckpoints, overrides: Sequence[str], *, on_cluster: bool
) -> list[str]:
    """Return the overrides of a launch about some checkpoints, which the user's own follow."""
    training = checkpoints.training
    words = [f"stages=[{stage}]", *(_places(training) if on_cluster else ["cluster=local"])]
    if training is not None:
        base = hydra_value(str(training.paths.run_dir.parent))
        words += [f"engine={training.manifest.engine}", f"base_results_dir={base}"]
    elif not on_cluster or not any(word.startswith("engine=") for word in overrides):
        words.append("engine=megatron")
    words += [
        f"{stage}.run.name={hydra_value(f'{checkpoints.name}_{stage}')}",
        f"{stage}.source={hydra_value(str(checkpoints.source))}",
    ]
    if checkpoints.steps:
        steps = ",".join(map(str, checkpoints.steps))
        words.append(f"{stage}.step={f'[{steps}]' if len(checkpoints.steps) > 1 else steps}")
    return [*words, *overrides]


def _places(training: TrainingLaunch | None) -> Iterator[str]:
    """Yield the overrides with which a run's jobs found their nodes and their image."""
    if training is None:
        return
    for word in training.manifest.overrides:
        if _PLACES.match(word) and MASK not in word:
            yield word
