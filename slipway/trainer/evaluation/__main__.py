"""Measure checkpoints: ``python -m slipway.trainer.evaluation run --config-path DIR --config-name NAME``.

The file is a training's configuration with a root key ``evaluation`` besides. The world is read from
torchrun's environment variables, as by ``slipway.trainer.pretrain``; all ranks compute the held-out loss, and
rank 0 alone runs lm-eval. Exit codes: 0 done, 2 a mistake in the configuration, 3 a loss is not finite, 1
anything else.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipway.common.errors import EXIT_FAILURE, EXIT_OK, EXIT_USER_ERROR, UserError
from slipway.common.sections import TrainedRun
from slipway.trainer import errors, failures, logs, requirements, startup_cost
from slipway.trainer.checkpoint.files import file_checksum
from slipway.trainer.checkpoint.marker import MARKER
from slipway.trainer.checkpoint.store import Checkpoint, split_rule
from slipway.trainer.config.check import check_keys
from slipway.trainer.config.load import flatten, load_config
from slipway.trainer.config.settings import Settings
from slipway.trainer.config.t5 import is_t5
from slipway.trainer.data import identity
from slipway.trainer.device import make_deterministic, prepare_environment
from slipway.trainer.evaluation import harness
from slipway.trainer.evaluation.results import Results
from slipway.trainer.evaluation.spec import (
    Evaluation,
    Perplexity,
    evaluation_layout,
    read_evaluation,
    read_heldout_settings,
)
from slipway.trainer.report.provenance import packages
from slipway.trainer.world import World

if TYPE_CHECKING:
    from slipway.trainer.evaluation.perplexity import HeldOutEvaluation, Measured


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; return the exit code."""
    options = _parse(arguments)
    world = World(0, 1, 0, 1, "", 0)
    try:
        world = World.from_environment(os.environ)
        requirements.check(requirements.TRAINING)
        requirements.check_versions()
        config = load_config(options.config_path, options.config_name, "evaluation")
        evaluation = read_evaluation(config.pop("evaluation"))
        flat = flatten(config)
        check_keys(flat)
        _start_logging(world)
        _run(_Run(evaluation, config, flat, world))
    except UserError as error:
        logs.record_mistake(None, world, error)
        return EXIT_USER_ERROR
    except errors.DivergedError as error:
        logs.LOGGER.error("%s", error)
        return errors.EXIT_DIVERGED
    except Exception as error:
        logs.record_failure(None, world, error, failures.Peers())
        return EXIT_FAILURE
    return EXIT_OK


@dataclass(frozen=True)
class _Run:
    """The evaluation, the configuration of the training and its dotted keys, and this process."""

    evaluation: Evaluation
    config: dict[str, Any]
    flat: dict[str, Any]
    world: World

    @property
    def results(self) -> Results:
        name = str(self.flat.get("run.name") or self.evaluation.results.parent.name)
        return Results(self.evaluation.results, name)

    def checkpoints(self) -> list[Checkpoint]:
        return self.evaluation.checkpoints(self._has_result)

    def _has_result(self, checkpoint: Checkpoint) -> bool:
        """Return whether everything requested was measured, under any conditions."""
        is_complete = not self.evaluation.perplexity.enabled or self.results.has_perplexity(checkpoint)
        return is_complete and not self.list_missing_tasks(checkpoint)

    def list_missing_tasks(self, checkpoint: Checkpoint) -> list[str]:
        """Return the tasks that a checkpoint was not measured on under the same conditions."""
        options, step = self.evaluation.lm_eval, checkpoint.marker.step
        return [
            task
            for task in options.tasks
            if not self.results.lm_eval(
                checkpoint,
                task,
                harness.conditions(options, task, self.evaluation.model_directory(step)),
            )
        ]


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m slipway.trainer.evaluation", description=__doc__.split("\n")[0]
    )
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    run = verbs.add_parser("run", help="measure the checkpoints that the configuration names")
    run.add_argument("--config-path", type=Path, required=True, help="directory of the configuration")
    run.add_argument("--config-name", required=True, help="its file name, with or without .yaml")
    return parser.parse_args(arguments)


def _start_logging(world: World) -> None:
    logs.silence_warnings()
    logs.LOGGER.setLevel(logging.INFO if world.is_main else logging.ERROR)
    logs.LOGGER.addHandler(logging.StreamHandler(sys.stdout))


def _run(run: _Run) -> None:
    evaluation = run.evaluation
    has_tasks = bool(evaluation.lm_eval.tasks) and run.world.is_main
    tasks: harness.Tasks | None = None
    if has_tasks and any(run.list_missing_tasks(checkpoint) for checkpoint in run.checkpoints()):
        # Before anything is computed: a missing task would otherwise be reported after hours.
        tasks = harness.Tasks(evaluation.lm_eval)
    checkpoints = _measure_perplexity(run, evaluation.perplexity) if evaluation.perplexity.enabled else None
    if not has_tasks:
        return
    for checkpoint in run.checkpoints() if checkpoints is None else checkpoints:
        missing = run.list_missing_tasks(checkpoint)
        for task in evaluation.lm_eval.tasks:
            if task not in missing:
                logs.LOGGER.info("step %d | %s: there already", checkpoint.marker.step, task)
        if missing:
            tasks = tasks or harness.Tasks(evaluation.lm_eval)
            try:
                _measure_tasks(run, tasks, missing, checkpoint)
            except UserError as error:
                if not evaluation.follows:
                    raise
                logs.LOGGER.warning("step %d is left out: %s", checkpoint.marker.step, error)


def _measure_perplexity(run: _Run, perplexity: Perplexity) -> list[Checkpoint]:
    """Measure the held-out loss of all checkpoints; return those that have one, as rank 0 chose them."""
    settings = read_heldout_settings(run.flat, perplexity)
    layout = evaluation_layout(settings, run.world.size)
    prepare_environment(settings, run.world, os.environ)
    # Importing torch and megatron-core takes seconds: report a mistake in the configuration before.
    with startup_cost.pause_garbage_collection():
        from slipway.trainer import cpu_shim
        from slipway.trainer.distributed import broadcast_from_rank0, make_rank_context, process_group

        cpu_shim.install()
        if settings.deterministic:
            make_deterministic()
        from slipway.trainer.evaluation.perplexity import HeldOutEvaluation
        from slipway.trainer.model.kernels import use_ordered_kernels

    with (
        process_group(run.world, settings.accelerator, settings.timeouts) as device,
        use_ordered_kernels(device),
    ):
        rank_context = make_rank_context(run.world, layout, device, settings.timeouts)
        rule = broadcast_from_rank0(partial(split_rule, run.evaluation.source))
        settings = settings.set_split_rule(rule)
        checkpoints = broadcast_from_rank0(run.checkpoints)
        if not checkpoints:
            logs.LOGGER.info("nothing to do: each checkpoint in %s has a result", run.evaluation.source)
            return []
        heldout = HeldOutEvaluation(settings, rank_context, perplexity)
        # Rank 0 alone reads the files.
        conditions = broadcast_from_rank0(lambda: _conditions(settings, perplexity, heldout.windows))
        have_loss = []

        def is_known(checkpoint: Checkpoint) -> bool:
            heldout.check_data(checkpoint)
            values = broadcast_from_rank0(partial(run.results.perplexity, checkpoint, conditions))
            if values is not None:
                logs.LOGGER.info("%s | there already", _line(checkpoint, values))
                have_loss.append(checkpoint)
            return values is not None

        for measured in _measure_all(heldout, checkpoints, run.evaluation.follows, is_known):
            have_loss.append(measured.checkpoint)
            logs.LOGGER.info("%s | %.1f s", _line(measured.checkpoint, measured.values()), measured.seconds)
            if run.world.is_main:
                provenance = {
                    "conditions": conditions,
                    "layout": {
                        "tensor": layout.tensor,
                        "pipeline": layout.pipeline,
                        "virtual": layout.virtual,
                    }
                    | {"context": layout.context, "data": layout.data},
                    "device": device.type,
                    "seconds": round(measured.seconds, 1),
                    "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                }
                path = run.results.add_perplexity(
                    measured.checkpoint, measured.values(), provenance, packages()
                )
                logs.LOGGER.info("results: %s", path)
    return have_loss


def _measure_all(
    evaluation: HeldOutEvaluation,
    checkpoints: list[Checkpoint],
    skips_damaged: bool,
    is_known: Callable[[Checkpoint], bool],
) -> Iterator[Measured]:
    """Yield the held-out loss of checkpoints as each is measured; every rank iterates.

    Parameters
    ----------
    checkpoints
        The same on all ranks.
    skips_damaged
        Whether a checkpoint that cannot be measured is logged and left out.
    is_known
        A function, the same on all ranks, that says if a checkpoint was measured before, or raises UserError
        if it cannot be.
    """
    for checkpoint in checkpoints:
        try:
            if is_known(checkpoint):
                continue
            measured = evaluation.measure(checkpoint)
        except (UserError, errors.DivergedError) as error:
            if not skips_damaged:
                raise
            logs.LOGGER.warning("step %d is left out: %s", checkpoint.marker.step, error)
            continue
        yield measured


def _conditions(settings: Settings, perplexity: Perplexity, windows: int) -> dict[str, Any]:
    """Return the settings, besides the weights, that determine the held-out loss."""
    blend = settings.data.heldout
    files = identity.identify(identity.input_files(blend.prefixes, {})) if blend else ()
    return {
        "split": perplexity.split,
        "data": str(blend) if blend else "mock",
        # Of a file that is too large to hash whole, what its manifest says.
        "checksums": {
            file.name: file.checksum if file.origin is None or file.is_whole else file.origin["sha256"]
            for file in files
        },
        "seed": settings.seed,
        "splits": list(settings.data.splits) if blend and settings.data.splits else None,
        "windows": windows,
        "window_tokens": settings.seq_length,
        "precision": settings.operands,
    }


def _line(checkpoint: Checkpoint, values: dict[str, Any]) -> str:
    perplexity = values["perplexity"]
    shown = (
        "not finite"
        if perplexity is None
        else f"{perplexity:.2f}"
        if perplexity < 1e6
        else f"{perplexity:.2e}"
    )
    return (
        f"step {checkpoint.marker.step} | held-out loss {values['loss']:.4f} | perplexity {shown} | "
        f"{values['tokens']:,} tokens"
    )


def _convert_if_missing(run: _Run, checkpoint: Checkpoint) -> Path:
    """Return the model of a checkpoint in Hugging Face's format; it is converted if it is not there."""
    model = run.evaluation.model_directory(checkpoint.marker.step)
    record = model / "conversion.json"
    if not record.is_file():
        if (model / "config.json").is_file():
            # The work of another program.
            return model
        from slipway.trainer.conversion.convert import convert_checkpoint
        from slipway.trainer.conversion.spec import Conversion

        conversion = Conversion(
            source=checkpoint.path,
            to="huggingface",
            output=model,
            model=run.config["model"],
            model_type="t5" if is_t5(run.flat) else "gpt",
            training=TrainedRun(run.results.training),
        )
        logs.LOGGER.info("converted: %s", convert_checkpoint(conversion, checkpoint).output)
    elif _read_source_checksum(record) != file_checksum(checkpoint.path / MARKER):
        raise UserError(
            f"evaluation.converted={model}: it was converted from another checkpoint than {checkpoint.path}"
        )
    return model


def _read_source_checksum(record: Path) -> str | None:
    """Return the checksum of the checkpoint that a conversion was made of."""
    try:
        return str(json.loads(record.read_text(encoding="utf-8"))["made_of"]["checkpoint"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _measure_tasks(run: _Run, tasks: harness.Tasks, missing: list[str], checkpoint: Checkpoint) -> None:
    step, model = checkpoint.marker.step, _convert_if_missing(run, checkpoint)
    outcome = tasks.measure(model, missing)
    for line in harness.format_metrics(outcome.metrics):
        logs.LOGGER.info("step %d | %s", step, line)
    path = run.results.add_lm_eval(
        checkpoint, outcome.metrics, outcome.provenance, packages(*harness.PACKAGES)
    )
    logs.LOGGER.info("results: %s", path)


if __name__ == "__main__":
    exit_code = main()
    if exit_code != EXIT_OK:
        logs.end_at_once(exit_code)
