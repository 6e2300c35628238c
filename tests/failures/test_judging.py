"""Every end that was recorded or documented is judged."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from slipway.common.node.evidence import TAIL_BYTES, evidence
from slipway.common.node.judging import RULES, Facts, Judgement, judge
from tests.failures.failure_samples import DOCUMENTED, FAILED, ON_REAL_CLUSTERS, SAMPLES, XID, Sample


def judge_sample(sample: Sample, tmp_path: Path) -> Judgement:
    """Judge a sample from files, as the launcher does."""
    log = tmp_path / "job.out"
    log.write_text(sample.log, encoding="utf-8", newline="")
    if sample.left:
        (tmp_path / "globalrank-0.json").write_text(f"{sample.left}\n", encoding="utf-8")
    lines = evidence([log, tmp_path / "job.err"], tmp_path, 1000.0)
    return judge(sample.facts, lines, sample.hosts, sample.tasks_per_node, sample.down)


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.name)
def test_each_end_is_judged(sample: Sample, tmp_path: Path) -> None:
    judgement = judge_sample(sample, tmp_path)
    assert (judgement.rule.name, judgement.verdict, judgement.nodes) == (
        sample.rule,
        sample.verdict,
        sample.nodes,
    )


def test_each_rule_has_an_end_that_it_is_for(tmp_path: Path) -> None:
    matched = set()
    for number, sample in enumerate(SAMPLES):
        place = tmp_path / str(number)
        place.mkdir()
        matched.add(judge_sample(sample, place).rule)
    assert [rule for rule in RULES if rule not in matched] == []


def test_the_sandbox_provoked_each_end_that_it_can() -> None:
    assert {sample.rule for sample in ON_REAL_CLUSTERS} >= {
        "time_limit", "cancelled", "preempted", "node_failed", "saved", "mistake", "diverged", "killed",
    }  # fmt: skip
    assert not {sample.rule for sample in DOCUMENTED} & {sample.rule for sample in ON_REAL_CLUSTERS} - {
        "collective_timeout"
    }


@pytest.mark.parametrize("log", ["trainer_saved.log", "../../monitor/recorded/nemo_progress.log"])
def test_a_sound_log_matches_no_rule(log: str, repository: Path) -> None:
    lines = evidence([repository / "tests" / "failures" / "recorded" / log])
    assert len(lines) > 5
    assert judge(FAILED, lines, ["n1"]).rule.name == "failed"


HOSTILE = {
    "a stranger's node": f"g99 and login1: {XID.format('79')}, GPU has fallen off the bus",
    "part of a name": f"g011 xg01 g01-ib0 my.g01 g01_b: {XID.format('79')}, GPU has fallen off the bus",
    "a rank that is none": "[rank4096]: CUDA error: uncorrectable ECC error encountered",
    "a number too long": "rank 18446744073709551617: uncorrectable ECC error",
    "a range": "[ranks 0-9]*: GPU is lost /etc/passwd * ? g0[1-4]",
}


@pytest.mark.parametrize("line", HOSTILE.values(), ids=HOSTILE)
def test_a_log_excludes_no_node_but_the_jobs_own(line: str, tmp_path: Path) -> None:
    sample = Sample("hostile", FAILED, "", log=f"{line}\n", hosts=("g01", "g02"), tasks_per_node=8)
    judgement = judge_sample(sample, tmp_path)
    assert (judgement.rule.verdict, judgement.verdict, judgement.nodes) == ("exclude", "continue", ())


def test_first_node_of_a_line_that_names_all_is_at_fault(tmp_path: Path) -> None:
    line = "g02 of g01,g02,g03: GPU is lost\n"
    sample = Sample("all", FAILED, "gpu_lost", log=line, hosts=("g01", "g02", "g03"))
    assert judge_sample(sample, tmp_path).nodes == ("g02",)


def test_the_end_of_a_long_log_counts_and_a_progress_bar_is_many_lines(tmp_path: Path) -> None:
    early = "g01: GPU is lost\n"
    bar = "g02 is at\r  1%|  | 1/99 [00:01<00:09]\0\r  2%|  | 2/99 [00:02<00:08]\rrank 1: GPU is lost"
    log = early + "x" * TAIL_BYTES + f"\n{bar}"
    sample = Sample("long", FAILED, "gpu_lost", log=log, hosts=("g01", "g02", "g03"), tasks_per_node=1)
    judgement = judge_sample(sample, tmp_path)
    assert (judgement.line, judgement.nodes) == ("rank 1: GPU is lost", ("g02",))


def test_reports_of_ranks_of_an_earlier_link_are_left_out(tmp_path: Path) -> None:
    left = '{"time": 999.5, "rank": 0, "host": "n1", "error": "uncorrectable ECC error", "log": null}'
    old = Sample("old", FAILED, "failed", left=left)
    new = replace(old, left=left.replace("999.5", "1000.5"))
    for sample, rule in ((old, "failed"), (new, "gpu_memory")):
        assert judge_sample(sample, tmp_path).rule.name == rule


def test_first_rule_of_the_table_decides() -> None:
    lines = ["g01: GPU is lost", "torch.OutOfMemoryError: CUDA out of memory."]
    assert judge(FAILED, lines, ["g01"]).rule.name == "gpu_lost"
    assert judge(FAILED, lines[::-1], ["g01"]).rule.name == "gpu_lost"
    assert judge(Facts(75, "RUNNING"), lines, ["g01"]).rule.name == "saved"
    assert judge(Facts(75, "COMPLETING", "NodeDown"), lines, ["g01"], down=["g01"]).nodes == ("g01",)
