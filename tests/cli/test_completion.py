"""Completion in real shells, and the few modules that it imports."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from launcher.cli.verbs import VERBS
from launcher.config.compose import compose, list_options
from launcher.runs.known_trees import remember_trees

SLIPWAY = Path(sys.executable).with_name("slipway")


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The scripts for both shells, as a user saves them."""
    folder = tmp_path_factory.mktemp("completion")
    paths = {}
    for shell in ("bash", "zsh"):
        text = subprocess.run(
            [SLIPWAY, "completion", shell], capture_output=True, text=True, check=True
        ).stdout
        paths[shell] = folder / f"slipway.{shell}"
        paths[shell].write_text(text)
    return paths


def environment() -> dict[str, str]:
    return {**os.environ, "PATH": f"{SLIPWAY.parent}:{os.environ['PATH']}", "TERM": "dumb", "PS1": "> "}


def completions_of(scripts: dict[str, Path], line: str, cwd: Path) -> list[str]:
    """Return the completions of bash's function for a command line with the cursor at its end."""
    program = (
        f"source {scripts['bash']}\n"
        'COMP_LINE=$1 COMP_POINT=${#1}\n_slipway\nprintf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        ["bash", "--norc", "-c", program, "bash", line],
        capture_output=True,
        text=True,
        env=environment(),
        cwd=cwd,
        check=True,
    )
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("slipway sta", ["status"]),
        ("slipway suggest training=gpt3/126", ["gpt3/126m"]),
        ("slipway launch --fol", ["--follow"]),
        ("slipway convert --on", ["--on-cluster"]),
        ("slipway evaluate --ta", ["--tasks"]),
        ("slipway launch --", ["--config-dir", "--dry-run", "--template-dir"]),
        ("slipway sandbox ", ["up", "down", "status", "env"]),
        ("slipway sandbox up --acc", ["--accounting"]),
        ("slipway list f", ["families"]),
        ("slipway completion z", ["zsh"]),
        # readline puts what follows the = in place
        ("slipway launch cluster=b", ["bcm"]),
        ("slipway launch training=gpt3/126", ["gpt3/126m"]),
        ("slipway launch training=t5/tiny cluster=sand", ["sandbox"]),
        ("slipway launch stages=", ["[data_preparation]", "[training]"]),
        ("slipway launch --dry-run clu", ["cluster=", "cluster."]),
        ("slipway show training.trainer.num_n", ["training.trainer.num_nodes="]),
        ("slipway diff training=t5/220m training.model.encod", ["training.model.encoder."]),
        ("slipway render +training.model.opt", ["+training.model.optim."]),
        ("slipway render ~training.model.optim.l", ["~training.model.optim.lr"]),
        ("slipway data tokenize cluster.acc", ["cluster.account="]),
        ("slipway launch training.nope.", []),
        ("slipway launch training.run.name=", []),
        ("slipway image pru", ["prune"]),
        ("slipway image build nem", ["nemo", "nemo-aws"]),
        ("slipway image render --te", ["--template-dir"]),
        ("slipway image import --on-cluster clu", ["cluster=", "cluster."]),
        ("slipway nope ", []),
    ],
)
def test_bash_completes_a_line(
    scripts: dict[str, Path], tmp_path: Path, line: str, expected: list[str]
) -> None:
    completions = completions_of(scripts, line, tmp_path)
    assert set(expected) <= set(completions)
    assert expected or not completions


def test_every_size_and_verb_is_completed(scripts: dict[str, Path], tmp_path: Path) -> None:
    assert completions_of(scripts, "slipway launch training=", tmp_path) == list_options("training")
    assert completions_of(scripts, "slipway ", tmp_path) == list(VERBS)


def test_every_key_of_the_tree_is_completed(scripts: dict[str, Path], tmp_path: Path) -> None:
    """The keys that Hydra composes are those that are offered, also where files build on others."""
    training = compose(["training=t5/220m"]).config.training
    assert training is not None
    for node, keys in (("model", training.model), ("trainer", training.trainer)):
        completions = completions_of(scripts, f"slipway launch training=t5/220m training.{node}.", tmp_path)
        assert {
            name.rpartition(".")[2].removesuffix("=") or name.split(".")[-2] for name in completions
        } == set(keys)


def test_the_users_own_tree_is_completed(scripts: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "conf/cluster").mkdir(parents=True)
    (tmp_path / "conf/cluster/ours.yaml").write_text("defaults: [bcm, _self_]\nspecial: 1\n")
    (tmp_path / "conf/cluster/broken.yaml").write_text("a: [\n")
    assert "ours" in completions_of(scripts, "slipway launch --config-dir conf cluster=", tmp_path)
    line = "slipway launch --config-dir=conf cluster=ours cluster.s"
    assert {"cluster.special=", "cluster.scheduler="} <= set(completions_of(scripts, line, tmp_path))
    assert (
        completions_of(scripts, "slipway launch --config-dir conf cluster=broken cluster.a", tmp_path) == []
    )


def test_images_are_completed(scripts: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    for name in ("megatron-run-1.sqsh", "megatron-run-1.sqsh.json", ".megatron-run-2.sqsh.tmp-1"):
        (tmp_path / "images" / name).touch()
    assert completions_of(scripts, "slipway image inspect megatron", tmp_path)[:2] == [
        "megatron",
        "megatron-run-1.sqsh",
    ]
    assert completions_of(scripts, "slipway image inspect .megatron", tmp_path) == []
    assert "megatron-run-1.sqsh" not in completions_of(scripts, "slipway image build megatron", tmp_path)


def test_runs_are_completed(scripts: dict[str, Path], tmp_path: Path) -> None:
    for name in ("gpt3_a", "gpt3_b", "t5_c"):
        (tmp_path / "results" / name / "launches").mkdir(parents=True)
    assert sorted(completions_of(scripts, "slipway logs gpt3", tmp_path)) == ["gpt3_a", "gpt3_b"]
    assert completions_of(scripts, "slipway status gpt3_a t5", tmp_path) == ["t5_c"]
    assert completions_of(scripts, f"slipway plot --base-results-dir {tmp_path} x", tmp_path) == []


def test_runs_of_other_known_trees_are_completed(scripts: dict[str, Path], tmp_path: Path) -> None:
    near, far = tmp_path / "results" / "gpt3_near", tmp_path / "far" / "gpt3_far"
    for run in (near, far):
        (run / "launches").mkdir(parents=True)
    remember_trees([tmp_path / "far", tmp_path / "gone"])
    assert completions_of(scripts, "slipway history gpt3", tmp_path) == ["gpt3_near", "gpt3_far"]
    assert completions_of(scripts, "slipway list r", tmp_path) == ["runs"]


def test_the_candidates_need_neither_hydra_nor_pydantic() -> None:
    program = (
        "import sys\nfrom launcher.cli.app import main\n"
        "main(['completion', 'words', 'overrides', 'training.model.', 'training=gpt3/5b'])\n"
        "print(*sorted({name.partition('.')[0] for name in sys.modules}), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "training.model.optim." in done.stdout.split()
    heavy = {"hydra", "omegaconf", "pydantic", "jinja2", "submitit", "rich", "antlr4"}
    assert not heavy & set(done.stderr.split())


_BRANCH = re.compile(r'^    "(.*)"\) options="(.*)" valued="(.*)" kind="(.*)" ;;$', re.MULTILINE)


def test_the_commands_are_those_of_the_parsers(scripts: dict[str, Path]) -> None:
    branches = {name: others for name, *others in _BRANCH.findall(scripts["zsh"].read_text())}
    assert set(VERBS) <= set(branches)
    options, valued, kind = branches["launch"]
    assert "--dry-run" in options.split() and "--dry-run" not in valued
    assert "|--config-dir|" in valued
    assert (kind, branches["logs"][2]) == ("overrides", "runs")


def type_into(shell: Sequence[str], lines: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Type lines into an interactive shell; yield its output up to the expected text of each."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvpe(shell[0], [*shell], environment())
    try:
        for line, expected in lines:
            os.write(terminal, line.encode())
            output, end = "", time.monotonic() + 20
            while expected not in output and time.monotonic() < end:
                if select.select([terminal], [], [], 0.1)[0]:
                    output += os.read(terminal, 65536).decode(errors="replace")
            yield output
    finally:
        os.close(terminal)
        os.kill(pid, 9)
        os.waitpid(pid, 0)


# Lines that end with a tab, and the text to which the shell completes them.
TYPED_LINES = [
    ("slipway launch training=gpt3/126\t", "gpt3/126m "),
    ("cluster=sandb\t", "cluster=sandbox "),
    ("training.trainer.num_nod\t", "num_nodes="),
]


def test_an_interactive_bash_completes_lines(scripts: dict[str, Path]) -> None:
    lines = [(f"source {scripts['bash']}; echo rea''dy\n", "ready"), *TYPED_LINES]
    outputs = list(type_into(["bash", "--norc", "--noprofile", "-i"], lines))
    assert [expected in text for (_, expected), text in zip(lines, outputs, strict=True)] == [True] * 4, (
        outputs
    )


@pytest.mark.skipif(shutil.which("zsh") is None, reason="needs zsh")
def test_an_interactive_zsh_completes_lines(scripts: dict[str, Path]) -> None:
    start = f"autoload -Uz compinit && compinit -u -D; source {scripts['zsh']}; echo rea''dy\n"
    lines = [(start, "ready"), *TYPED_LINES]
    outputs = list(type_into(["zsh", "-f", "-i"], lines))
    assert [expected in text for (_, expected), text in zip(lines, outputs, strict=True)] == [True] * 4, (
        outputs
    )


def test_shellcheck_finds_nothing(scripts: dict[str, Path]) -> None:
    command = [SLIPWAY.with_name("shellcheck"), "--shell=bash", scripts["bash"]]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
