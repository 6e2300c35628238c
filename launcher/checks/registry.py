"""The table of checks: their ids, what each looks at, and which facts it needs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from launcher.checks.findings import REGISTERED, Check

# Each enters its checks into the table.
from launcher.checks.rules import (  # noqa: F401
    accounts,
    cluster,
    cluster_nodes,
    files,
    keys,
    layout,
    model,
    resources,
    runs,
    training,
)
from launcher.errors import UserError, did_you_mean

# The order in which they are applied and their findings told.
_ORDER = """
    type.whole type.number type.flag
    layout.world layout.tensor layout.layers layout.virtual layout.sequence_parallel layout.context
    layout.split_rank layout.experts layout.gpus memory.fits
    batch.global batch.interleaved batch.rampup elastic.counts elastic.gpus batch.accumulation
    model.heads model.experts model.attention model.sequence model.recompute
    data.prefix profile.ranks schedule.warmup schedule.min_lr schedule.validation
    time.limit time.max_time time.training time.save chain.requeue chain.dependency chain.resume
    keys.unknown engine.megatron job.python run.singleton run.training run.shards data.identity
    secret.file secret.permissions
    path.tokenizer path.data path.sources path.checkpoint path.image
    image.fetch image.engine image.network
    path.script path.mounts path.writable path.shared space.checkpoints space.output
    cluster.partition cluster.time_limit cluster.nodes cluster.gpus cluster.cpus cluster.memory
    cluster.account cluster.qos cluster.array cluster.pyxis machine scheduler
"""
_PLACES = {name: place for place, name in enumerate(_ORDER.split())}

CHECKS: tuple[Check, ...] = tuple(sorted(REGISTERED, key=lambda check: _PLACES[check.id]))


def require_known(ids: Iterable[str], others: Sequence[str] = ()) -> None:
    """Refuse ids that no check has, nor the `others` that a verb looks at beside the checks."""
    known = [*(check.id for check in CHECKS), *others]
    for name in ids:
        if name not in known:
            text = f"--no-check={name}: there is no such check"
            raise UserError(text, hint=did_you_mean(name, known))
