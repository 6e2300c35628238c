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
from tests.checks.path_jobs import BARE, LOCAL, SLURM, draft_with, path_findings
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


def image_facts_with(*overrides: str, look: bool = True) -> ImageFacts | None:
    return image_facts(draft_with(*overrides), look=look)


def image_with_record(path: Path, **changes: object) -> Path:
    """Write an image with a record."""
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
    facts = image_facts_with(*SLURM, f"container={name}", look=look)
    assert facts is not None and facts.contents is not None
    assert (facts.contents.month, facts.contents.pretraining) == ("26.04", False)


@pytest.mark.parametrize("look", [True, False])
@pytest.mark.parametrize(
    "name", ["nvcr.io#NVIDIA/nemo:25.07", "nvcr.io#nvidia/nemo:", "nvcr.io#nvidia/nemo:25.07@sha256:abc"]
)
def test_nothing_is_known_of_an_image_with_an_odd_name(name: str, look: bool) -> None:
    facts = image_facts_with(*SLURM, f"container='{name}'", look=look)
    assert facts is not None and facts.contents is None
    assert f"the contents of {name} are not recorded" in facts.missing["contents"]


@pytest.mark.parametrize("overrides", [BARE, LOCAL, (*LOCAL, "container=nvcr.io#nvidia/nemo:26.04")])
def test_jobs_without_an_image_have_no_facts_of_one(overrides: tuple[str, ...]) -> None:
    assert image_facts_with(*overrides) is None


def test_record_of_a_file_counts_more_than_its_name(workdir: Path) -> None:
    path = image_with_record(workdir / "nemo-25.07.sqsh")
    facts = image_facts_with(*SLURM, f"container={path}")
    assert facts is not None and facts.contents is not None
    assert (facts.contents.month, facts.contents.is_certain) == ("26.04", True)
    assert image_facts_with(*SLURM, f"container={path}", look=False).contents.month == "25.07"  # type: ignore[union-attr]


def test_file_of_a_recipe_has_the_contents_of_its_base(workdir: Path) -> None:
    config = ImageConfig(labels={BASE_NAME: "nvcr.io/nvidia/nemo:25.09"})
    path = image_with_record(
        workdir / "nemo-run-0123456789ab.sqsh", source="localhost/me/nemo:run-01", config=config
    )
    contents = contents_of_file(path)
    assert contents is not None and (contents.month, contents.is_certain) == ("25.09", True)


def test_a_file_without_a_record_is_known_by_its_name_alone(workdir: Path) -> None:
    facts = image_facts_with(*SLURM, f"container={image(workdir / 'nvidia+nemo+26.04.sqsh')}")
    assert facts is not None and facts.contents is not None
    assert (facts.contents.month, facts.contents.is_certain) == ("26.04", False)


def test_unknown_file_names_the_command_that_inspects_it(workdir: Path) -> None:
    facts = image_facts_with(*SLURM, f"container={image(workdir / 'ours.sqsh')}")
    assert facts is not None and facts.contents is None
    assert "slipway image inspect --deep" in facts.missing["contents"]
    assert image_facts_with(*SLURM, f"container={workdir}/ours.sqsh", look=False) is None


def test_a_record_of_another_file_is_not_believed(workdir: Path) -> None:
    path = image_with_record(workdir / "ours.sqsh")
    path.write_bytes(b"x" * 5000)
    assert contents_of_file(path) is None


def test_facts_of_an_image_are_remembered(workdir: Path) -> None:
    path = image_with_record(workdir / "ours.sqsh")
    assert contents_of_file(path).pretraining is False  # type: ignore[union-attr]
    record_installed(path, INSTALLED)
    record = read_sidecar(path)
    assert record is not None and record.installed == INSTALLED
    contents = contents_of_file(path)
    assert contents is not None and (contents.pretraining, contents.megatron_core) == (True, "0.16.1")
    fits = {engine: fit["fits"] for engine, fit in judge_engines(path, INSTALLED).items()}
    assert fits == {"nemo": True, "megatron": True}


def test_image_without_a_record_gets_no_record(workdir: Path) -> None:
    path = image(workdir / "ours.sqsh")
    record_installed(path, INSTALLED)
    assert not sidecar_path(path).exists()
    without = {**INSTALLED, "nemo_models": None, "megatron_core": "0.13.1"}
    fits = {engine: fit["fits"] for engine, fit in judge_engines(path, without).items()}
    assert fits == {"nemo": False, "megatron": False}


def test_a_record_of_an_earlier_version_has_nothing_installed(workdir: Path) -> None:
    path = image_with_record(workdir / "ours.sqsh")
    text = sidecar_path(path).read_text().replace(',\n  "installed": null', "")
    assert "installed" not in text
    sidecar_path(path).write_text(text)
    assert read_sidecar(path) == RECORD


@pytest.mark.parametrize(
    "odd", [5, ["nemo"], "nemo_models", {"nemo_models": 5}, {"megatron_core": 5}, {"nemo": ["2.4.1"]}]
)
def test_malformed_entry_of_installed_packages_is_ignored(workdir: Path, odd: object) -> None:
    path = image_with_record(workdir / "ours.sqsh", installed=odd)
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
def test_a_script_may_lie_at_either_place_of_a_checkout(workdir: Path, container: str, place: str) -> None:
    checkout = workdir / "Megatron-LM"
    (checkout / place).parent.mkdir(parents=True)
    overrides = (
        *LM,
        f"container={container}",
        f"megatron_lm_path={checkout}",
        *([f"container_mounts=[{workdir}]"] if container != "null" else []),
    )
    (error,) = (finding for finding in path_findings(*overrides) if finding.id == "path.script")
    assert error.severity is Severity.ERROR and error.key == "megatron_lm_path"
    assert error.message.endswith(
        "there is no pretrain_bert.py and no examples/bert/pretrain_bert.py in this checkout"
    )
    assert "core_v0" in (error.fix or "")
    (checkout / place).touch()
    assert [finding for finding in path_findings(*overrides) if finding.id == "path.script"] == []


def test_a_checkout_of_megatron_lm_has_its_script(workdir: Path) -> None:
    (workdir / "mlm").mkdir()
    (workdir / "mlm/pretrain_gpt.py").touch()
    overrides = (
        "training=gpt3/126m",
        "engine=megatron_lm",
        "container=null",
        f"megatron_lm_path={workdir}/mlm",
    )
    assert [finding for finding in path_findings(*overrides) if finding.id == "path.script"] == []


def test_script_is_looked_for_where_the_job_looks() -> None:
    assert load_start()._PLACES == MEGATRON_LM_PLACES
    for release in megatron_lm():
        for kind, script in release.scripts.items():
            assert script in [place.format(kind) for place in MEGATRON_LM_PLACES]


@pytest.mark.parametrize("path", ["/opt/megatron-lm", "/no/such/checkout"])
def test_checkout_that_is_not_on_this_machine_is_not_checked(workdir: Path, path: str) -> None:
    assert "path.script" not in {finding.id for finding in path_findings(*LM, f"megatron_lm_path={path}")}


def test_checkout_of_nemo_without_its_scripts_is_an_error(workdir: Path) -> None:
    (workdir / "NeMo").mkdir()
    overrides = (*BARE, "training=gpt3/126m", f"nemo_path={workdir}/NeMo")
    (error,) = (finding for finding in path_findings(*overrides) if finding.id == "path.script")
    assert error.severity is Severity.ERROR and "megatron_gpt_pretraining.py" in error.message
    assert error.fix == "a checkout of NeMo up to v2.4.0"


def test_the_probe_finds_nemos_models_and_scripts_without_importing_nemo(tmp_path: Path) -> None:
    models = tmp_path / "nemo/collections/nlp/models/language_modeling"
    models.mkdir(parents=True)
    (tmp_path / "nemo/__init__.py").write_text("raise ImportError('there is no GPU')\n")
    for kind in ("gpt", "t5"):
        (models / f"megatron_{kind}_model.py").touch()
    scripts = tmp_path / "examples/nlp/language_modeling"
    scripts.mkdir(parents=True)
    (scripts / "megatron_gpt_pretraining.py").touch()
    process = subprocess.run(
        [sys.executable, "-c", Path(probe.__file__).read_text()],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    answer = json.loads(process.stdout)
    assert (answer["nemo_models"], answer["nemo_scripts"]) == ("gpt t5", "gpt")
