"""The Dockerfiles of the recipes: hadolint finds nothing in them, and every value arrives as it is."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.config.overrides import hydra_value
from launcher.errors import UserError
from launcher.images.recipes import quote_for_dockerfile, read_recipe, recipe_names

HADOLINT = Path(sys.executable).parent / "hadolint"
AWKWARD = """a b"c'd\\e$HOME`id`$(id)#{{ x }}${x}"""
DIGEST = "sha256:" + "0123456789abcdef" * 4

# All keys of a recipe.
FULL = [
    "image.packages=[numactl,libnuma1]",
    "image.python_packages=['einops>=0.8,<1']",
    "image.pip_index=https://pip.example.org/simple",
    f"image.env.AWKWARD={hydra_value(AWKWARD)}",
    "image.env.SECOND=2",
    f"image.labels.org.awkward={hydra_value(AWKWARD)}",
    "image.workdir='/a b'",
    f"image.digest={DIGEST}",
    "image.platform=linux/arm64",
]
PARTS = ("efa_installer", "gdrcopy", "nccl", "aws_ofi_nccl", "nccl_tests")
NONE = [f"image.versions.{part}=null" for part in PARTS]


@pytest.fixture(scope="module")
def dockerfiles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Render each recipe in each flavor as shipped, with all its keys set, and with parts left out."""
    folder = tmp_path_factory.mktemp("dockerfiles")
    script = folder / "setup.sh"
    script.write_text("true\n")
    full = [*FULL, f"image.dev_script={script}"]
    cases: dict[str, tuple[str, str, list[str]]] = {
        "nemo-aws-none": ("nemo-aws", "run", NONE),
        "nemo-aws-some": ("nemo-aws", "run", NONE[::2]),
        "nemo-aws-others": ("nemo-aws", "run", NONE[1::2]),
    }
    for name in recipe_names():
        cases |= {f"{name}-{flavor}": (name, flavor, []) for flavor in ("run", "dev")}
        cases[f"{name}-full"] = (name, "dev", full)
    files = {case: folder / f"{case}.Dockerfile" for case in cases}
    for case, (name, flavor, overrides) in cases.items():
        files[case].write_text(read_recipe(name, flavor, overrides).dockerfile)
    return files


def test_hadolint_finds_nothing(dockerfiles: dict[str, Path]) -> None:
    # One process checks all of them: it spends most of its time on its start.
    done = subprocess.run([HADOLINT, *dockerfiles.values()], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_each_exception_has_a_reason(dockerfiles: dict[str, Path]) -> None:
    rules = set()
    for path in dockerfiles.values():
        lines = path.read_text().splitlines()
        for number, line in enumerate(lines):
            if "hadolint ignore" in line:
                assert re.fullmatch(r"# hadolint ignore=DL\d+", line)
                assert re.fullmatch(r"# [^h].{20,}", lines[number - 1])
                rules.add(line.rpartition("=")[2])
    assert rules == {"DL3008", "DL3013"}


def test_no_line_is_left_empty_or_open(dockerfiles: dict[str, Path]) -> None:
    for path in dockerfiles.values():
        content = path.read_text()
        assert "\n\n\n" not in content
        assert "{{ config" not in content
        assert not re.search(r"[ \t]$", content, re.MULTILINE)
        assert not re.search(r"\\\n\s*(\n|#|[A-Z]+ [^=]*$)", content)
        assert content.endswith("\n")


def test_lists_of_packages_are_not_kept(dockerfiles: dict[str, Path]) -> None:
    updates = 0
    for path in dockerfiles.values():
        for command in re.findall(r"^RUN (?:.*\\\n)*.*$", path.read_text(), re.MULTILINE):
            if "apt-get update" in command:
                updates += 1
                assert "rm -rf /var/lib/apt/lists/*" in command
    assert updates


def dockerfile_value(line: str) -> str:
    """Read a double-quoted value as a Dockerfile does."""
    match = re.fullmatch(r'[\w.]+="((?:[^"\\]|\\.)*)"', line)
    assert match, line
    assert not re.search(r"(?<!\\)(?:\\\\)*\$", match[1]), "a variable would be expanded"
    return re.sub(r"\\(.)", r"\1", match[1])


@pytest.mark.parametrize("keyword", ["AWKWARD", "org.awkward"])
def test_values_arrive_as_they_are(dockerfiles: dict[str, Path], keyword: str) -> None:
    content = dockerfiles["nemo-full"].read_text()
    (line,) = (match for match in re.findall(rf"^.*?({re.escape(keyword)}=.*)$", content, re.MULTILINE))
    assert dockerfile_value(line.removesuffix(" \\")) == AWKWARD


def test_words_of_a_shell_arrive_as_they_are() -> None:
    content = read_recipe("nemo", None, ["image.python_packages=['x; touch $(id)', \"it's\"]"]).dockerfile
    command = re.search(r"^RUN (python3(?:.*\\\n)*.*)$", content, re.MULTILINE)
    assert command
    assert shlex.split(command[1].replace("\\\n", " "))[-2:] == ["x; touch $(id)", "it's"]


def test_a_line_break_is_refused() -> None:
    with pytest.raises(UserError, match="line break"):
        read_recipe("nemo", None, ["image.env.A='x\nRUN id'"])


def test_gpu_architectures_reach_the_compiler() -> None:
    content = read_recipe("nemo-aws", None, ["image.cuda_archs=[100,80]"]).dockerfile
    words = re.findall(r"NVCC_GENCODE='([^']*)'", content)
    assert set(words) == {
        "-gencode=arch=compute_80,code=sm_80 -gencode=arch=compute_100,code=sm_100 "
        "-gencode=arch=compute_100,code=compute_100"
    }
    assert len(words) == 2


def test_values_are_quoted_for_a_dockerfile() -> None:
    assert quote_for_dockerfile('a"b\\c$d') == '"a\\"b\\\\c\\$d"'
