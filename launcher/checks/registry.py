"""The table of checks in their order, and its application to a plan and its facts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from launcher.checks.facts import Facts
from launcher.checks.findings import REGISTERED, REMEDIES, Check, Finding, Severity

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
from launcher.checks.rules.keys import TRAINER
from launcher.errors import UserError, did_you_mean
from launcher.plan import Plan

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
    data.tokenizer
    secret.file secret.permissions
    path.tokenizer path.data path.sources path.checkpoint path.image
    image.fetch image.engine image.network
    path.script path.mounts path.writable path.shared space.checkpoints space.output
    cluster.partition cluster.time_limit cluster.nodes cluster.gpus cluster.cpus cluster.memory
    cluster.account cluster.qos cluster.array cluster.pyxis machine scheduler
"""
_PLACES = {name: place for place, name in enumerate(_ORDER.split())}

CHECKS: tuple[Check, ...] = tuple(sorted(REGISTERED, key=lambda check: _PLACES[check.id]))
# Parts examined beside the keys: the trainer does not report on these.
_OF_OTHERS = (
    *("path.", "image.", "secret.", "cluster.", "memory.", "space.", "run."),
    *("data.identity", "data.tokenizer", TRAINER),
)


def require_known(ids: Iterable[str], others: Sequence[str] = ()) -> None:
    """Refuse ids that no check has, nor the `others` that a verb looks at beside the checks."""
    known = [*(check.id for check in CHECKS), *others]
    for name in ids:
        if name not in known:
            text = f"--no-check={name}: there is no such check"
            raise UserError(text, hint=did_you_mean(name, known))


def run_checks(plan: Plan, facts: Facts, skipped: Sequence[str] = ()) -> list[Finding]:
    """Apply every check that is not to be skipped, and return what they find, the worst first."""
    checks = [check for check in CHECKS if check.id not in skipped]
    findings = [finding for check in checks for finding in check.apply(plan, facts)]
    if any(
        finding.severity is Severity.ERROR and not finding.id.startswith(_OF_OTHERS) for finding in findings
    ):
        # Our trainer, which sees the keys alone, stops at the first mistake, which is among the others.
        findings = [finding for finding in findings if finding.id != TRAINER]
    if any(finding.severity is not Severity.SKIPPED for finding in findings):
        # Imported late: looking for layouts is a good part of this package, and most launches need none.
        import launcher.checks.remedies  # noqa: F401 - enters them into their table

        findings = [_remedied(finding, plan, facts) for finding in findings]
    return worst_first(findings)


def _remedied(finding: Finding, plan: Plan, facts: Facts) -> Finding:
    """Return a finding with the remedy of its check, unless it names its own."""
    find_remedy = REMEDIES.get(finding.id)
    if find_remedy is None or finding.fix is not None or finding.severity is Severity.SKIPPED:
        return finding
    return replace(finding, fix=find_remedy(plan, facts))


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    """Return errors first, then warnings, then what was skipped."""
    order = list(Severity)
    return sorted(findings, key=lambda finding: order.index(finding.severity))
