"""`slipway image`: its words, its help, and the job that it becomes; tests/images tests the images."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.cli.app import main
from launcher.drafting import Request, draft
from launcher.stages.image import ImageWork

Capsys = pytest.CaptureFixture[str]

VERBS = ("render", "build", "import", "list", "inspect", "verify", "push", "prune")


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_examples_and_exit_codes(verb: str, capsys: Capsys) -> None:
    with pytest.raises(SystemExit) as raised:
        main(["image", verb, "--help"])
    output = capsys.readouterr().out
    assert raised.value.code == 0
    assert f"  slipway image {verb}" in output and "exit code:\n" in output


def test_a_recipe_is_rendered(capsys: Capsys) -> None:
    assert main(["image", "render", "megatron:dev", "image.packages=[g++,zstd]"]) == 0
    output = capsys.readouterr()
    assert "\nFROM nvcr.io/nvidia/pytorch:" in output.out and "zstd" in output.out and "tmux" in output.out
    assert "is not pinned" in output.err
    assert main(["image", "render", "megatron", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["file_name"] == f"megatron-run-{record['hash'][:12]}.sqsh"
    assert record["dockerfile"].count("FROM ") == 1 and record["warnings"]


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        (("render", "nimo"), "nimo", "nemo"),
        (("render", "nemo", "cluster=bcm"), "cluster=bcm: not a key of a recipe", "image.tag=2"),
        (
            ("render", "nvcr.io#nvidia/nemo:1"),
            "not the name of a recipe",
            "slipway image import nvcr.io#nvidia",
        ),
        (("build", "nemo", "--dry-run"), "the script of a job", "--on-cluster"),
        (("build", "nemo", "images_dirs=/x"), "images_dirs", "images_dir"),
        (("import", "nvcr.io#NVIDIA/x:1"), "lower case", "nvidia/x:1"),
        (("import", "nvcr.io#nvidia/x:1", "stray"), "stray: not an override", "KEY=VALUE"),
        (("import", "podman://x:1", "--on-cluster"), "which a job does not see", "slipway image push"),
        (
            ("import", "nvcr.io#nvidia/x:1", "--on-cluster", "cluster=local"),
            "cluster.scheduler=local",
            "without",
        ),
        (("import", "/tmp/x.sqsh"), "is a squashfs already", "container=/tmp/x.sqsh"),
        (
            ("inspect", "a.sqsh", "b.sqsh", "images_dir=/none"),
            "image='a.sqsh': there is no such image",
            "nemo",
        ),
        (("inspect", "images_dir=/none"), "one image at a time", ""),
    ],
)
def test_mistakes(
    words: tuple[str, ...],
    message: str,
    hint: str,
    capsys: Capsys,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["image", *words]) == 2
    error = capsys.readouterr().err
    assert message in error and hint in error
    assert list(tmp_path.iterdir()) == []


def script_of(capsys: Capsys, *words: str) -> str:
    assert main(["image", *words, "--on-cluster", "--dry-run", "cluster=bcm"]) == 0
    return capsys.readouterr().out


def words_in_job(script: str) -> list[str]:
    """Return the words that `slipway` gets in the job, from `image` on."""
    text = script[script.index("launcher.cli.app") :].split("\n\n")[0]
    words = shlex.split(text.replace("\\\n", " "))
    return words[words.index("image") :]


def test_an_import_becomes_a_job(capsys: Capsys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    options = ("--compression=lz4", "--temp-dir=scratch", "--plain-http", "--output=here/x.sqsh")
    script = script_of(capsys, "import", "docker://nvcr.io/nvidia/nemo:24.07", *options)
    assert "#SBATCH --nodes=1\n" in script and "--container-image" not in script and "gpus" not in script
    job_words = words_in_job(script)
    assert job_words[:3] == ["image", "import", "nvcr.io#nvidia/nemo:24.07"]
    expected = {f"--output={tmp_path}/here/x.sqsh", f"--temp-dir={tmp_path}/scratch", "--plain-http"}
    assert expected | {"--compression=lz4"} <= set(job_words)
    # The job does not start in the user's working directory.
    job_words = words_in_job(script_of(capsys, "import", "oci:layout:1", f"--images-dir={tmp_path}/images"))
    assert job_words[2:4] == [f"oci:{tmp_path}/layout:1", f"--output={tmp_path}/images/layout+1.sqsh"]
    assert list(tmp_path.iterdir()) == []


def test_a_build_becomes_a_job(capsys: Capsys, tmp_path: Path) -> None:
    words = ("build", "megatron:dev", "image.tag=2", f"images_dir={tmp_path}/images", "--force")
    job_words = words_in_job(script_of(capsys, *words, "--builder=buildah"))
    assert job_words[:4] == ["image", "build", "megatron:dev", "image.tag=2"]
    assert {f"--images-dir={tmp_path}/images", "--force", "--builder=buildah"} <= set(job_words)
    # The job has no cluster to ask, and submits no further job.
    assert not any("cluster" in word or word == "--dry-run" for word in job_words)


def test_launch_stores_the_container_as_resolved(tmp_path: Path) -> None:
    overrides = ["container=megatron", f"images_dir={tmp_path}/images"]
    stored = draft(Request(overrides, [])).stored_config
    assert stored.container is not None
    image = Path(stored.container)
    assert (image.parent, image.suffix) == (tmp_path / "images", ".sqsh")


def test_job_of_an_image_needs_no_container(tmp_path: Path) -> None:
    overrides = ["container=megatron", f"images_dir={tmp_path}/images"]
    work = ImageWork("megatron", ("image", "build", "megatron"), tmp_path / "images/megatron.sqsh")
    job = draft(Request(overrides, [], work=work)).plan.job
    assert (job.container, job.payload.argv[0]) == (None, sys.executable)


def test_list_reads_the_configured_directory(capsys: Capsys, tmp_path: Path) -> None:
    for words in ((f"images_dir={tmp_path}/a",), (f"--images-dir={tmp_path}/a",)):
        assert main(["image", "list", *words]) == 0
        assert f"there is no image in {tmp_path}/a yet" in capsys.readouterr().err


def test_verify_of_a_file_composes_nothing(tmp_path: Path) -> None:
    (tmp_path / "x.sqsh").write_bytes(b"")
    program = (
        "import sys\nfrom launcher.cli.app import main\n"
        f"main(['image', 'verify', {str(tmp_path / 'x.sqsh')!r}])\n"
        "print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "an empty file" in done.stderr
    heavy = {"hydra", "omegaconf", "pydantic", "jinja2", "submitit", "rich.console"}
    assert not heavy & set(done.stderr.split())
