"""The facts about a job's image: by its name, the record beside a file, a recipe; and about a checkout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.checks.facts import ImageFacts
from launcher.checks.findings import Severity
from launcher.checks.gathering.images import image_facts
from launcher.checks.gathering.paths import MEGATRON_LM_PLACES
from launcher.cli.image import judge_engines
from launcher.images import probe
from launcher.images.recipes import read_recipe
from launcher.images.resolve import BASE_NAME, contents_of_file, contents_of_recipe
from launcher.images.store import ImageConfig, Sidecar, read_sidecar, record_installed, sidecar_path
from launcher.releases import megatron_lm
from tests.checks.path_jobs import BARE, LOCAL, SLURM, drafted, found
from tests.checks.shelves import image
from tests.checks.test_image_checks import INSTALLED
from tests.stages.test_megatron_lm_start import load_start

RECORD = Sidecar(
    source="nvcr.io#nvidia/nemo:26.04",
    digest=None,
    sha256="1" * 64,
    size=4096,
    compression="lz4",
    squash_options=(),
    block_size=131072,
    created="2026-01-02T03:04:05+00:00",
    made_by="slipway",
)


def facts(*overrides: str, look: bool = True) -> ImageFacts | None:
    return image_facts(drafted(*overrides), look=look)


def recorded(path: Path, **changes: object) -> Path:
    """An image with a record."""
    image(path)
    replace(RECORD, **changes).write(path)  # type: ignore[arg-type]
    return path


@pytest.mark.parametrize("look", [True, False])
@pytest.mark.parametrize(
    "name",
    [
        "nvcr.io#nvidia/nemo:26.04",
        "nvcr.io/nvidia/nemo:26.04",
        f"nvcr.io/nvidia/nemo:26.04@sha256:{'0' * 64}",
    ],
)
def test_an_image_of_a_registry_is_known_by_its_name_in_a_dry_run_too(name: str, look: bool) -> None:
    known = facts(*SLURM, f"container={name}", look=look)
    assert known is not None and known.contents is not None
    assert (known.contents.month, known.contents.pretraining) == ("26.04", False)


@pytest.mark.parametrize("look", [True, False])
@pytest.mark.parametrize(
    "name", ["nvcr.io#NVIDIA/nemo:25.07", "nvcr.io#nvidia/nemo:", "nvcr.io#nvidia/nemo:25.07@sha256:abc"]
)
def test_nothing_is_known_of_an_image_with_an_odd_name(name: str, look: bool) -> None:
    known = facts(*SLURM, f"container='{name}'", look=look)
    assert known is not None and known.contents is None
    assert f"nobody recorded what is in {name}" in known.missing["contents"]


@pytest.mark.parametrize("overrides", [BARE, LOCAL, (*LOCAL, "container=nvcr.io#nvidia/nemo:26.04")])
def test_jobs_that_run_in_no_image_have_none(overrides: tuple[str, ...]) -> None:
    assert facts(*overrides) is None


def test_a_file_is_what_its_record_says_whatever_its_name(here: Path) -> None:
    path = recorded(here / "nemo-25.07.sqsh")
    known = facts(*SLURM, f"container={path}")
    assert known is not None and known.contents is not None
    assert (known.contents.month, known.contents.is_certain) == ("26.04", True)
    assert facts(*SLURM, f"container={path}", look=False).contents.month == "25.07"  # type: ignore[union-attr]


def test_a_file_of_a_recipe_is_what_that_was_built_on(here: Path) -> None:
    config = ImageConfig(labels={BASE_NAME: "nvcr.io/nvidia/nemo:25.09"})
    path = recorded(here / "nemo-run-0123456789ab.sqsh", source="localhost/me/nemo:run-01", config=config)
    contents = contents_of_file(path)
    assert contents is not None and (contents.month, contents.is_certain) == ("25.09", True)


def test_a_file_without_a_record_is_known_by_its_name_alone(here: Path) -> None:
    known = facts(*SLURM, f"container={image(here / 'nvidia+nemo+26.04.sqsh')}")
    assert known is not None and known.contents is not None
    assert (known.contents.month, known.contents.is_certain) == ("26.04", False)


def test_a_file_of_which_nobody_knows_says_how_to_find_out(here: Path) -> None:
    known = facts(*SLURM, f"container={image(here / 'ours.sqsh')}")
    assert known is not None and known.contents is None
    assert "slipway image inspect --deep" in known.missing["contents"]
    assert facts(*SLURM, f"container={here}/ours.sqsh", look=False) is None


def test_a_record_of_another_file_is_not_believed(here: Path) -> None:
    path = recorded(here / "ours.sqsh")
    path.write_bytes(b"x" * 5000)
    assert contents_of_file(path) is None


def test_facts_of_an_image_are_remembered(here: Path) -> None:
    path = recorded(here / "ours.sqsh")
    assert contents_of_file(path).pretraining is False  # type: ignore[union-attr]
    record_installed(path, INSTALLED)
    record = read_sidecar(path)
    assert record is not None and record.installed == INSTALLED
    contents = contents_of_file(path)
    assert contents is not None and (contents.pretraining, contents.megatron_core) == (True, "0.16.1")
    fits = {engine: fit["fits"] for engine, fit in judge_engines(path, INSTALLED).items()}
    assert fits == {"nemo": True, "megatron": True}


def test_an_image_without_a_record_gets_none(here: Path) -> None:
    path = image(here / "ours.sqsh")
    record_installed(path, INSTALLED)
    assert not sidecar_path(path).exists()
    without = {**INSTALLED, "nemo_models": None, "megatron_core": "0.13.1"}
    fits = {engine: fit["fits"] for engine, fit in judge_engines(path, without).items()}
    assert fits == {"nemo": False, "megatron": False}


def test_a_record_of_an_earlier_version_has_nothing_installed(here: Path) -> None:
    path = recorded(here / "ours.sqsh")
    text = sidecar_path(path).read_text().replace(',\n  "installed": null', "")
    assert "installed" not in text
    sidecar_path(path).write_text(text)
    assert read_sidecar(path) == RECORD


@pytest.mark.parametrize(
    "odd", [5, ["nemo"], "nemo_models", {"nemo_models": 5}, {"megatron_core": 5}, {"nemo": ["2.4.1"]}]
)
def test_an_odd_word_on_what_is_installed_is_none(here: Path, odd: object) -> None:
    path = recorded(here / "ours.sqsh", installed=odd)
    assert read_sidecar(path) == RECORD
    assert contents_of_file(path).month == "26.04"  # type: ignore[union-attr]


def test_a_recipe_is_known_before_it_is_built() -> None:
    assert contents_of_recipe(read_recipe("nemo")).month == "25.07"
    assert contents_of_recipe(read_recipe("nemo-aws")).pretraining is True
    assert (
        contents_of_recipe(
            read_recipe("nemo", overrides=["image.base=nvcr.io#nvidia/nemo:26.04"])
        ).pretraining
        is False
    )
    ours = contents_of_recipe(read_recipe("megatron"))
    assert (ours.family, ours.megatron_core) == ("pytorch", "0.16.1")


LM = ("engine=megatron_lm", "training=bert/110m", "cluster=bcm")


@pytest.mark.parametrize("container", ["null", "/x.sqsh"])
@pytest.mark.parametrize("place", ["pretrain_bert.py", "examples/bert/pretrain_bert.py"])
def test_a_script_may_lie_at_either_place_of_a_checkout(here: Path, container: str, place: str) -> None:
    checkout = here / "Megatron-LM"
    (checkout / place).parent.mkdir(parents=True)
    given = (
        *LM,
        f"container={container}",
        f"megatron_lm_path={checkout}",
        *([f"container_mounts=[{here}]"] if container != "null" else []),
    )
    (one,) = (each for each in found(*given) if each.id == "path.script")
    assert one.severity is Severity.ERROR and one.key == "megatron_lm_path"
    assert one.message.endswith(
        "there is no pretrain_bert.py and no examples/bert/pretrain_bert.py in this checkout"
    )
    assert "core_v0" in (one.fix or "")
    (checkout / place).touch()
    assert [each for each in found(*given) if each.id == "path.script"] == []


def test_a_checkout_of_megatron_lm_has_its_script(here: Path) -> None:
    (here / "mlm").mkdir()
    (here / "mlm/pretrain_gpt.py").touch()
    given = ("training=gpt3/126m", "engine=megatron_lm", "container=null", f"megatron_lm_path={here}/mlm")
    assert [each for each in found(*given) if each.id == "path.script"] == []


def test_a_script_is_looked_for_where_the_job_does() -> None:
    assert load_start()._PLACES == MEGATRON_LM_PLACES
    for release in megatron_lm():
        for kind, script in release.scripts.items():
            assert script in [place.format(kind) for place in MEGATRON_LM_PLACES]


@pytest.mark.parametrize("path", ["/opt/megatron-lm", "/no/such/checkout"])
def test_a_checkout_that_is_not_here_is_not_judged(here: Path, path: str) -> None:
    assert "path.script" not in {one.id for one in found(*LM, f"megatron_lm_path={path}")}


def test_a_checkout_of_nemo_without_its_scripts(here: Path) -> None:
    (here / "NeMo").mkdir()
    given = (*BARE, "training=gpt3/126m", f"nemo_path={here}/NeMo")
    (one,) = (each for each in found(*given) if each.id == "path.script")
    assert one.severity is Severity.ERROR and "megatron_gpt_pretraining.py" in one.message
    assert one.fix == "a checkout of NeMo up to v2.4.0"


def test_the_probe_finds_nemos_models_and_scripts_without_importing_nemo(tmp_path: Path) -> None:
    models = tmp_path / "nemo/collections/nlp/models/language_modeling"
    models.mkdir(parents=True)
    (tmp_path / "nemo/__init__.py").write_text("raise ImportError('there is no GPU')\n")
    for kind in ("gpt", "t5"):
        (models / f"megatron_{kind}_model.py").touch()
    scripts = tmp_path / "examples/nlp/language_modeling"
    scripts.mkdir(parents=True)
    (scripts / "megatron_gpt_pretraining.py").touch()
    done = subprocess.run(
        [sys.executable, "-c", Path(probe.__file__).read_text()],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    told = json.loads(done.stdout)
    assert (told["nemo_models"], told["nemo_scripts"]) == ("gpt t5", "gpt")
