"""A job whose launch is deleted, moved or launched anew while it runs leaves no word anywhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.runs.paths import submitted_name
from tests.resilience.scripted_chain import TAG, write_chain

ANOTHER = "ffffffff"
# By the way in which a launch is lost, the commands of a task in its own launch directory L of the run R.
WAYS = {
    "the results": 'rm -rf "${R%/*}"',
    "the run": 'rm -rf "$R"',
    "the launches": 'rm -rf "$R/launches"',
    "moved": 'mv "$R" "$R-before"',
    "moved, and launched anew": (
        'mv "$R" "$R-before"; mkdir -p "$L/marks";'
        f' sed s/{TAG}/{ANOTHER}/ <"$R-before/launches/1/supervisor.json" >"$L/supervisor.json"'
    ),
    "deleted, and launched anew": (
        f'json=$(sed s/{TAG}/{ANOTHER}/ "$L/supervisor.json"); rm -rf "$R"; mkdir -p "$L/marks";'
        ' printf "%s" "$json" >"$L/supervisor.json"'
    ),
}


@pytest.mark.parametrize("code", [0, 1, 75])
@pytest.mark.parametrize("way", WAYS)
def test_job_that_lost_its_launch_leaves_no_word_and_submits_nothing(
    tmp_path: Path, way: str, code: int
) -> None:
    chain = write_chain(tmp_path)
    directory = chain.directory
    chain.tasks(f"R={chain.plan.paths.run_dir} L={directory}; {WAYS[way]}; exit {code}")
    # The submission of the next link fails at first, so that the end would try it again.
    following = submitted_name(chain.plan.paths.script, TAG, 2)
    exit_code, output = chain.run(QUEUE=f"18|PENDING|(null)|{following}")
    assert exit_code == 1, output
    assert output.splitlines()[-1].endswith(
        f"is another launch by now, {ANOTHER}" if "anew" in way else f"{directory} was deleted or moved"
    )
    assert "saves nothing" in output
    assert len(chain.submissions()) == 1
    assert chain.calls_of("scancel") == ["scancel 18"]
    left = sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))
    assert left == (["marks", "supervisor.json"] if "anew" in way else [])


def test_settings_that_are_gone_or_damaged_end_no_job(tmp_path: Path) -> None:
    for number, command in enumerate(("rm", "truncate --size=0")):
        chain = write_chain(tmp_path / str(number))
        chain.tasks(f"{command} {chain.directory}/supervisor.json; exit 75")
        code, output = chain.run()
        assert (code, chain.end_mark()["verdict"]) == (75, "continue"), output
