"""The screen of `slipway check`: its numbers, its table and its bars, of estimates made of literals."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from launcher.cli.check import StageReport, print_screen
from launcher.cli.estimate_views import (
    bar,
    cost_lines,
    folded,
    headline,
    plain_lines,
    print_table,
    require_suffix,
    write_figure,
)
from launcher.config.schema import Assumptions
from launcher.drafting import Request, draft
from launcher.errors import UserError
from launcher.estimates.cost import Cost, MemoryEstimate, overview
from launcher.estimates.memory import StageMemory
from launcher.estimates.parallelism import CountedGpu
from launcher.plan import Plan
from launcher.ui.plotting import new_figure, write_picture
from slipway.arithmetic.gpus import GPUS
from tests.checks.plans import GPT, plan_of
from tests.checks.screens import Terminal

GIB = 2**30
A100 = CountedGpu(GPUS["a100-80gb"], "cluster.gpu")


def stage(number: int, activations: int = 20, logits: int = 0) -> StageMemory:
    return StageMemory(
        stage=number, layers=12, parameters=5 * GIB, weights=10 * GIB, gradients=20 * GIB, optimizer=2 * GIB,
        activations=activations * GIB, logits=logits * GIB,
    )  # fmt: skip


def memory(*stages: StageMemory, margin: float = 0.1) -> MemoryEstimate:
    return MemoryEstimate(stages, A100, margin)


def set_width(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    for name, value in {"COLUMNS": str(columns), "LINES": "40", "TERM": "dumb"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("FORCE_COLOR", raising=False)


@pytest.fixture
def draw_table(monkeypatch: pytest.MonkeyPatch) -> Callable[[MemoryEstimate], list[str]]:
    """Return a function that draws on 80 columns without colours, which carry no information."""
    set_width(monkeypatch, 80)

    def draw(estimate: MemoryEstimate) -> list[str]:
        with contextlib.redirect_stdout(Terminal()) as screen:
            print_table(estimate)
        return screen.getvalue().splitlines()

    return draw


def test_the_headline_names_the_fullest_stage_and_whose_memory_it_is() -> None:
    line = headline(memory(stage(0, 20), stage(1, 30)))
    assert line == (
        "stage 1 is the fullest of 2: 62.0 GiB of 80.0 GiB, 8.0 GiB of it kept free (a100-80gb; cluster.gpu)"
    )
    assert headline(memory(stage(0), margin=0.0)) == "52.0 GiB of 80.0 GiB (a100-80gb; cluster.gpu)"
    assert headline(memory(stage(0, 60, logits=8))) == (
        "100.0 GiB, 20.0 GiB more than the 80.0 GiB of a GPU (a100-80gb; cluster.gpu)"
    )


def test_in_a_pipe_a_stage_is_a_line() -> None:
    assert list(plain_lines(memory(stage(0, 20), stage(1, 15, logits=3)))) == [
        "stage 0 (12 layers): 52.0 GiB"
        " = weights 10.0 + gradients 20.0 + optimizer 2.0 + activations 20.0 + logits 0.0",
        "stage 1 (12 layers): 50.0 GiB"
        " = weights 10.0 + gradients 20.0 + optimizer 2.0 + activations 15.0 + logits 3.0",
    ]


def test_small_sizes_have_a_smaller_unit() -> None:
    small = StageMemory(0, 1, 1000, 2**20, 2**21, 2**22, 2**20, 2**19)
    (line,) = plain_lines(memory(small))
    assert line.startswith("stage 0 (1 layer): 8.5 MiB = weights 1.0 + ")


def test_long_pipeline_is_folded_to_its_ends_and_its_fullest_stage() -> None:
    stages = [stage(number, 40 - number, logits=30 if number == 9 else 0) for number in range(32)]
    rows = folded(stages)
    ends = [(row[0].stage, row[-1].stage) for row in rows]
    assert ends == [(0, 0), (1, 1), (2, 2), (3, 8), (9, 9), (10, 29), (30, 30), (31, 31)]
    assert folded(stages[:10]) == [(stage,) for stage in stages[:10]]
    assert "stages 3 to 8: 64.0–69.0 GiB" in plain_lines(memory(*stages))


def test_no_stage_is_lost_in_folding() -> None:
    for fullest in range(16):
        stages = [stage(number, 30 if number == fullest else 20) for number in range(16)]
        rows = folded(stages)
        assert [stage for row in rows for stage in row] == stages
        assert (stages[fullest],) in rows


def test_a_bar_has_the_proportions_of_its_parts() -> None:
    assert bar([10, 0, 30], usable=72, capacity=80, width=40, scale=80) == [
        (0, 5),
        (2, 15),
        (-1, 16),
        (-2, 4),
    ]
    # Beyond the GPU's memory there is nothing free.
    assert bar([50, 50], usable=72, capacity=80, width=50, scale=100) == [(0, 25), (1, 25)]
    # Parts that are too thin for a cell do not make it longer.
    thin = bar([1] * 80, usable=80, capacity=80, width=40, scale=80)
    assert sum(cells for _, cells in thin) == 40


def test_on_a_terminal_there_are_bars_against_the_gpus_memory(
    draw_table: Callable[[MemoryEstimate], list[str]],
) -> None:
    head, _, first, second, legend = draw_table(memory(stage(0, 20), stage(1, 60, logits=8)))
    assert head.split()[:8] == ["stage", "layers", "weights", "grads", "optim", "activ", "logits", "total"]
    assert first.split()[:8] == ["0", "12", "10.0", "20.0", "2.0", "20.0", "0.0", "52.0"]
    assert second.split()[:8] == ["1", "12", "10.0", "20.0", "2.0", "60.0", "8.0", "100.0"]
    assert max(map(len, (head, first, second))) <= 80
    # The GPU's memory ends at the same place, after what is free or within what is too much.
    assert head.rstrip().endswith("GiB of 80.0 │")
    assert head.index("│") == first.index("│") == second.index("│")
    assert first.rstrip().endswith("·┄│") and second.rstrip().endswith("▚")
    assert "·" not in second and "┄" not in second
    assert legend.startswith("█ weights  ▓ gradients") and legend.endswith("┄ margin 10%")


def test_a_bar_is_as_long_as_the_part_of_the_gpu_that_is_taken(
    draw_table: Callable[[MemoryEstimate], list[str]],
) -> None:
    line = next(line for line in draw_table(memory(stage(0, 8), margin=0.0)) if "·" in line)
    filled, free = (sum(line.count(glyph) for glyph in glyphs) for glyphs in ("█▓▒░▚", "·"))
    assert filled == pytest.approx(free, abs=1)  # 40 of 80 GiB
    assert "┄" not in line


def test_folded_stages_take_a_row_without_a_bar(draw_table: Callable[[MemoryEstimate], list[str]]) -> None:
    lines = draw_table(memory(*(stage(number, 40 - number) for number in range(24))))
    assert [line.split() for line in lines if "–" in line] == [["3–21", "51.0–69.0"]]


COST = Cost(
    parameters=175_000_000_000, steps=143_051, tokens=300_000_000_000, flops_per_token=1.05e12, flops=3.15e23,
    gpus=1024, peak=312e12, mfu=0.45, mfu_source="estimates.mfu", seconds_per_step=20.54,
    seconds=34 * 86400.0, gpu_hours=835_584.0, price=None, links=35, checkpoint_bytes=2345 * GIB,
    kept_checkpoints=11, save_bytes=None,
)  # fmt: skip


def with_price(plan: Plan, price: float) -> Plan:
    return replace(plan, assumptions=Assumptions(gpu_hour_price=price))


def test_time_computing_and_space_are_a_line_each() -> None:
    assert dict(cost_lines(plan_of(GPT), COST)) == {
        "time": "34.0 days: 143,051 steps of 20.5 s; 35 jobs of 1-00:00:00",
        "compute": "175G parameters, 300G tokens, 3.15e+23 FLOPs on 1,024 GPUs at MFU 45% of 312 TFLOP/s"
        " (estimates.mfu): 835,584 GPU-hours",
        "space": "a checkpoint 2.52 TB, 11 kept: 27.7 TB",
    }


def test_price_is_printed_if_set() -> None:
    lines = dict(cost_lines(with_price(plan_of(GPT), 2.5), replace(COST, price=2_088_960.0)))
    assert lines["compute"].endswith("835,584 GPU-hours, 2,088,960 at 2.5 each")


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (None, "a checkpoint 2.52 TB, and all of them are kept"),
        (1, "a checkpoint 2.52 TB"),
    ],
)
def test_number_of_kept_checkpoints_is_printed(count: int | None, text: str) -> None:
    assert dict(cost_lines(plan_of(GPT), replace(COST, kept_checkpoints=count)))["space"] == text


def test_without_a_time_limit_there_are_no_jobs_to_count() -> None:
    line = dict(cost_lines(plan_of(GPT), replace(COST, links=None)))["time"]
    assert line == "34.0 days: 143,051 steps of 20.5 s"


@cache
def report_of(training: str) -> StageReport:
    launch_draft = draft(Request([f"training={training}", "cluster.gpu=a100-80gb"], []))
    return StageReport(launch_draft, overview(launch_draft.plan), ["layout.world"], [])


@pytest.mark.parametrize("width", [40, 60, 72, 80, 100, 200])
@pytest.mark.parametrize("training", ["gpt3/5b", "gpt3/175b"])
def test_a_summary_is_no_wider_than_the_terminal(
    width: int, training: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_width(monkeypatch, width)
    with contextlib.redirect_stdout(Terminal()) as screen:
        print_screen(report_of(training))
    assert max(map(len, screen.getvalue().splitlines())) <= width
    # Lines are broken between words without loss, and their rests are indented.
    text = re.sub(r"\n +", " ", screen.getvalue())
    assert re.search(r" tasks: tensor \d × pipeline \d .* × data \d+; global batch 2048 = micro batch ", text)
    assert re.search(r"^compute: .* FLOPs on \d[\d,]+ GPUs at MFU .* GPU-hours$", text, re.MULTILINE)
    assert text.splitlines()[-1] == "1 of 1 checks passed"


def test_in_a_pipe_no_line_is_broken() -> None:
    with contextlib.redirect_stdout(io.StringIO()) as pipe:
        print_screen(report_of("gpt3/5b"))
    names = [line.partition(":")[0] for line in pipe.getvalue().splitlines()]
    assert names == ["gpt3_5b", "memory", "  stage 0 (24 layers)", "time", "compute", "space", names[-1]]


def test_format_of_a_plot_is_that_of_its_suffix(tmp_path: Path) -> None:
    stages = memory(stage(0, 60), stage(1, 20, logits=8))
    for suffix, magic in {"PNG": b"\x89PNG\r\n\x1a\n", "svg": b"<?xml"}.items():
        path = tmp_path / f"memory.{suffix}"
        path.write_text("an older one")
        write_figure(path, "gpt3_175b", stages)
        assert path.read_bytes().startswith(magic)
    assert "<dc:title>gpt3_175b</dc:title>" in (tmp_path / "memory.svg").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["memory.PNG", "memory.svg"]


def test_a_long_name_ends_within_the_picture_and_beside_the_legend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = []

    def keep_figure(path: Path, figure: Any, title: str, suffix: str) -> None:
        figures.append(figure)

    monkeypatch.setattr("launcher.cli.estimate_views.write_picture", keep_figure)
    name = "40b_h100_precbf16_nodes16_cp1_tp8_pp4_vp12_gbs32_mbs1_ckptNone_seq65536_mmap"
    assumed = CountedGpu(A100.gpu, "assumed: cluster.gpu is null", is_assumed=True)
    stages = memory(stage(0, 60), stage(1, 90))._replace(counted=assumed)
    write_figure(tmp_path / "memory.png", name, stages)
    (figure,) = figures
    figure.canvas.draw()
    (axes,), (legend,) = figure.axes, figure.legends
    (below,) = [text for text in axes.texts if text.get_text() == headline(stages)]
    for line in (axes._left_title, below):
        extent = line.get_window_extent()
        assert extent.x1 < figure.bbox.x1
        assert not extent.overlaps(legend.get_window_extent())


def test_plot_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot write the plot .*none/memory.png: No such file"):
        write_picture(tmp_path / "none" / "memory.png", new_figure(1, 1), "a run")


def test_unknown_plot_suffix_is_refused() -> None:
    require_suffix(Path("Memory.PNG"))
    with pytest.raises(UserError, match=r"--plot 'memory.jpg': unknown picture format") as raised:
        require_suffix(Path("memory.jpg"))
    assert raised.value.hint == "choose a name that ends with .png, .svg, .pdf"
