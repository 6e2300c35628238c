"""Pretrain a GPT: ``python -m trainer.pretrain --config-path DIR --config-name NAME``.

The world is read from torchrun's environment variables (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR,
MASTER_PORT); without them one process trains alone. Exit codes: 0 done, 2 a mistake in the configuration,
3 the loss is no longer finite, 1 anything else.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from trainer import errors, logs, requirements
from trainer.config.check import check_keys, unused
from trainer.config.layout import Layout, make_layout
from trainer.config.load import flatten, load_config
from trainer.config.settings import Settings, read_settings
from trainer.world import World


def main(arguments: Sequence[str] | None = None) -> int:
    """Train; return the exit code."""
    started = time.monotonic()
    options = _parse(arguments)
    try:
        world = World.from_environment(os.environ)
    except errors.UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return errors.EXIT_USER_ERROR
    return _pretrain(options, world, started)


def _pretrain(options: argparse.Namespace, world: World, started: float) -> int:
    log_dir: Path | None = None
    try:
        requirements.check(requirements.TRAINING)
        config = load_config(options.config_path, options.config_name)
        flat = flatten(config)
        check_keys(flat)
        settings = read_settings(flat)
        layout = make_layout(settings, world.size)
        if settings.output.tensorboard:
            requirements.check(requirements.TENSORBOARD, "; or exp_manager.create_tensorboard_logger=False")
        log_dir = settings.output.log_dir
        _open_logs(log_dir, world, config)
        _train(settings, layout, world, flat, started, options.stop_after)
    except errors.UserError as error:
        logs.record_mistake(log_dir, world, error)
        return errors.EXIT_USER_ERROR
    except errors.DivergedError as error:
        logs.LOGGER.error("%s", error)
        return errors.EXIT_DIVERGED
    except Exception:
        logs.record_failure(log_dir, world)
        return errors.EXIT_FAILURE
    return errors.EXIT_OK


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m trainer.pretrain", description=__doc__.split("\n")[0])
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
    logs.quiet()
    try:
        logs.start_logging(log_dir, world)
    except OSError as error:
        raise errors.UserError(f"exp_manager.explicit_log_dir={log_dir}: {error.strerror}", "node") from None
    if not world.is_main:
        return
    import yaml

    (log_dir / "cmd-args.log").write_text(shlex.join(sys.argv) + "\n", encoding="utf-8")
    (log_dir / "hparams.yaml").write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")


def _train(
    settings: Settings,
    layout: Layout,
    world: World,
    flat: dict[str, Any],
    started: float,
    stop_after: int | None,
) -> None:
    if settings.accelerator == "cpu":
        # CUDA, and all that asks for it, is then not there: torch reads this when it first looks for devices.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # Importing torch and megatron-core takes seconds: a mistake in the configuration is told before that.
    from trainer import cpu_shim
    from trainer.distributed import make_place, process_group

    on_cpu = cpu_shim.install()

    from trainer.loop.header import header
    from trainer.loop.run import train
    from trainer.loop.saving import sole_writer
    from trainer.loop.session import open_session

    with process_group(world) as device:
        place = make_place(world, layout, device)
        with sole_writer(settings.saving, place):
            session = open_session(settings, place)
            for line in header(session, unused(flat, cuda=not on_cpu)):
                logs.LOGGER.info(line)
            train(session, started, stop_after)


def _end_at_once(code: int) -> NoReturn:
    """End this process without waiting for anything: the other ranks may be in a collective with it."""
    logs.flush()
    os._exit(code)


if __name__ == "__main__":
    exit_code = main()
    if exit_code != errors.EXIT_OK:
        _end_at_once(exit_code)
