"""Pretrain a GPT or a T5: ``python -m slipway.trainer.pretrain --config-path DIR --config-name NAME``.

The world is read from torchrun's environment variables (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR,
MASTER_PORT); without them one process trains alone. Exit codes: 0 done, 2 a mistake in the configuration,
3 the loss is no longer finite, 75 stopped before its end by its time limit, SIGUSR1 or SIGTERM and to be
launched again, 1 anything else.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slipway.common.errors import EXIT_FAILURE, EXIT_OK, EXIT_USER_ERROR, UserError
from slipway.trainer import errors, failures, logs, requirements, startup_cost
from slipway.trainer.config.check import check_keys, find_unused, report_unused
from slipway.trainer.config.layout import Layout, make_layout
from slipway.trainer.config.load import flatten, load_config
from slipway.trainer.config.settings import Settings, read_settings
from slipway.trainer.device import make_deterministic, prepare_environment
from slipway.trainer.report.provenance import overridden_keys, write_git_info, write_packages
from slipway.trainer.signals import StopSignals
from slipway.trainer.world import World


def main(arguments: Sequence[str] | None = None) -> int:
    """Train; return the exit code."""
    started = time.monotonic()
    options = _parse(arguments)
    try:
        world = World.from_environment(os.environ)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return EXIT_USER_ERROR
    signals = StopSignals(world.rank)
    signals.install()
    return _pretrain(options, _Process(world, signals, started))


@dataclass
class _Process:
    """The process of a rank, and what becomes known of it on the way."""

    world: World
    signals: StopSignals
    started: float
    log_dir: Path | None = None
    peers: failures.Peers = field(default_factory=failures.Peers)


def _pretrain(options: argparse.Namespace, process: _Process) -> int:
    world = process.world
    try:
        requirements.check(requirements.TRAINING)
        requirements.check_versions()
        config = load_config(options.config_path, options.config_name)
        flat = flatten(config)
        check_keys(flat)
        settings = read_settings(flat)
        layout = make_layout(settings, world.size)
        if settings.output.tensorboard:
            requirements.check(requirements.TENSORBOARD, "; or exp_manager.create_tensorboard_logger=False")
        process.log_dir = settings.output.log_dir
        # Before torch is imported: that loads OpenMP, and rank 0 writes torch's version down.
        prepare_environment(settings, world, os.environ)
        startup_cost.skip_s3()
        _open_logs(settings.output.log_dir, world, config)
        return _train(settings, layout, process, flat, options)
    except UserError as error:
        # The rank that reports it may leave first, and bring signals to those that wait for it.
        process.signals.mark_ended(EXIT_USER_ERROR)
        logs.record_mistake(process.log_dir, world, error)
        return EXIT_USER_ERROR
    except errors.DivergedError as error:
        logs.LOGGER.error("%s", error)
        return errors.EXIT_DIVERGED
    except Exception as error:
        logs.record_failure(process.log_dir, world, error, process.peers)
        return EXIT_FAILURE


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m slipway.trainer.pretrain", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--config-path", type=Path, required=True, help="directory of the configuration")
    parser.add_argument("--config-name", required=True, help="its file name, with or without .yaml")
    parser.add_argument(
        "--stop-after",
        type=int,
        metavar="STEP",
        help="save and stop once STEP steps are completed; for tests and smoke runs",
    )
    return parser.parse_args(arguments)


def _open_logs(log_dir: Path, world: World, config: dict[str, Any]) -> None:
    logs.silence_warnings()
    try:
        logs.start_logging(log_dir, world)
    except OSError as error:
        raise UserError(f"exp_manager.explicit_log_dir={log_dir}: {error.strerror}", "node") from None
    failures.forget(log_dir, world.rank)
    if not world.is_main:
        return
    import yaml

    (log_dir / "cmd-args.log").write_text(shlex.join(sys.argv) + "\n", encoding="utf-8")
    (log_dir / "hparams.yaml").write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    write_git_info(log_dir)
    write_packages(log_dir)


def _train(
    settings: Settings, layout: Layout, process: _Process, flat: dict[str, Any], options: argparse.Namespace
) -> int:
    # Importing torch and megatron-core takes seconds: report a mistake in the configuration before.
    with startup_cost.pause_garbage_collection():
        from slipway.trainer import cpu_shim
        from slipway.trainer.distributed import make_rank_context, process_group

        on_cpu = cpu_shim.install()
        if settings.deterministic:
            make_deterministic()

        from slipway.trainer.loop.run import train
        from slipway.trainer.loop.saving import lock_directory
        from slipway.trainer.loop.session import open_session
        from slipway.trainer.loop.startup_report import startup_report
        from slipway.trainer.loop.stopping import REASONS, Stopping
        from slipway.trainer.model.kernels import use_ordered_kernels

    with (
        process_group(process.world, settings.accelerator, settings.timeouts) as device,
        use_ordered_kernels(device),
    ):
        process.peers = failures.Peers.introduce()
        rank_context = make_rank_context(process.world, layout, device, settings.timeouts)
        with lock_directory(settings, rank_context) as lock:
            session = open_session(settings, rank_context)
            keys, overridden = find_unused(flat, cuda=not on_cpu), overridden_keys(options.config_path)
            log = settings.output.log_dir / logs.rank_log_name(process.world)
            for line in (*startup_report(session), *report_unused(keys, overridden, log)):
                logs.LOGGER.info(line)
            for key, reason in keys.items():
                logs.LOGGER.debug("%s: no effect here: %s", key, reason)
            stopping = Stopping(settings, rank_context, process.signals, process.started)
            try:
                reason = train(session, stopping, options.stop_after, lock)
            except UserError:
                if lock is not None and lock.find_lost():
                    process.log_dir = None  # by now it may be another training's
                raise
            code = errors.EXIT_STOPPED if reason in REASONS else EXIT_OK
            # The first rank to leave with another code than 0 may bring signals to those that are behind it.
            process.signals.mark_ended(code)
    return code


if __name__ == "__main__":
    exit_code = main()
    if exit_code != EXIT_OK:
        logs.end_at_once(exit_code)
