"""Images and engines: the errors and warnings about each pair, by the table of releases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from launcher.checks.facts import Facts, ImageFacts
from launcher.checks.findings import Finding, Severity
from launcher.checks.gathering.images import image_facts
from launcher.checks.registry import run_checks
from launcher.checks.rules.images import ENCODER_STAGES, TRAINER_CORE
from launcher.images.references import Reference, contents_of_reference
from launcher.plan import Container, Mount, Payload
from launcher.releases import Contents, add_installed, contents_of
from tests.checks.path_jobs import draft_with
from tests.checks.plans import GPT, KNOWN, changed, plan_of
from tests.stages.test_megatron_lm_start import load_start

NEW_OPTIMIZER = {"model.optim.name": "mcore_distributed_optim"}
OLD_OPTIMIZER = {"model.optim.name": "distributed_fused_adam"}
PROGRAM = "/opt/NeMo/examples/nlp/language_modeling/megatron_gpt_pretraining.py"


def payload_of(engine: str, python: str = "python3") -> Payload:
    if engine == "nemo":
        return Payload((python, "-u", PROGRAM), "/opt/NeMo")
    return Payload((python, "-m", "trainer"), "/results")


def findings(
    image: str,
    engine: str = "nemo",
    *,
    contents: Contents | None = None,
    changes: Mapping[str, Any] = OLD_OPTIMIZER,
    payload: Payload | None = None,
    mounts: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    nodes: int = 2,
) -> list[Finding]:
    """Return the findings of the two checks for a job in an image."""
    image_contents = contents or contents_of_reference(Reference.parse(image))
    plan = plan_of(changed(GPT, dict(changes)), engine=engine, resources={"nodes": nodes})
    container = Container(image, tuple(Mount(f"/host{target}", target) for target in mounts))
    job = replace(
        plan.job,
        container=container,
        payload=payload or payload_of(engine),
        environment=environment or {},
    )
    facts: Facts = replace(
        KNOWN, image=ImageFacts(image_contents, {} if image_contents else {"contents": "not recorded"})
    )
    results = run_checks(replace(plan, job=job), facts)
    return [finding for finding in results if finding.id.startswith("image.")]


def outcome(results: list[Finding]) -> tuple[Severity, str]:
    (finding,) = results
    return finding.severity, f"{finding.message}\n{finding.fix}"


ERROR, WARNING = Severity.ERROR, Severity.WARNING
BEST = "container=nvcr.io#nvidia/nemo:25.07"


@pytest.mark.parametrize(
    "image",
    [
        "nvcr.io#nvidia/nemo:26.04",
        "nvcr.io/nvidia/nemo:26.04",
        "docker://nvcr.io/nvidia/nemo:26.04",
        "docker://nvcr.io#nvidia/nemo:26.04",
        "docker://$oauthtoken@nvcr.io#nvidia/nemo:26.04",
        f"nvcr.io#nvidia/nemo:26.04@sha256:{'0' * 64}",
        "nvcr.io#nvidia/nemo:26.04.01",
    ],
)
def test_every_spelling_of_an_image_is_known(image: str) -> None:
    severity, text = outcome(findings(image))
    assert severity is ERROR and "does not have NeMo's megatron_*_pretraining.py" in text and BEST in text


@pytest.mark.parametrize("tag", ["25.09", "25.09.01", "25.11", "26.02", "26.04", "26.06", "26.08"])
def test_engine_nemo_is_refused_where_nemo_has_no_models(tag: str) -> None:
    assert outcome(findings(f"nvcr.io#nvidia/nemo:{tag}"))[0] is ERROR


@pytest.mark.parametrize("tag", ["24.05", "24.07", "24.09", "24.12", "25.02", "25.04", "25.07", "25.07.02"])
def test_engine_nemo_passes_images_with_its_models(tag: str) -> None:
    assert findings(f"nvcr.io#nvidia/nemo:{tag}", changes=NEW_OPTIMIZER) == []


@pytest.mark.parametrize("tag", ["27.01", "25.05", "latest", "dev"])
def test_engine_nemo_is_warned_of_a_tag_that_the_table_lacks(tag: str) -> None:
    severity, text = outcome(findings(f"nvcr.io#nvidia/nemo:{tag}"))
    assert severity is WARNING and "is not known" in text and BEST in text


@pytest.mark.parametrize("name", ["nvcr.io#nvidia/nemo", "docker://nvcr.io/nvidia/nemo"])
def test_image_by_digest_is_named_by_its_digest(name: str) -> None:
    digest = f"sha256:{'a' * 64}"
    for contents in (None, contents_of_reference(Reference.parse(f"{name}@{digest}"))):
        severity, text = outcome(findings(f"{name}@{digest}", contents=contents))
        assert severity is WARNING and f"whether nvcr.io/nvidia/nemo@{digest} has " in text


def test_the_speech_image_of_a_month_is_not_its_framework() -> None:
    severity, _ = outcome(findings("nvcr.io#nvidia/nemo:24.01.speech", changes=NEW_OPTIMIZER))
    assert severity is WARNING


@pytest.mark.parametrize(
    ("tag", "is_certain"),
    [("26.02-py3", True), ("26.02", False), ("26.02-py3-igpu", False), ("26.02.01", False)],
)
def test_a_release_of_pytorch_has_one_form_of_tag(tag: str, is_certain: bool) -> None:
    contents = contents_of("nvcr.io", "nvidia/pytorch", tag)
    assert contents is not None and (contents.month, contents.is_certain) == ("26.02", is_certain)


def test_engine_nemo_is_warned_of_an_image_without_nemo() -> None:
    severity, text = outcome(findings("nvcr.io#nvidia/pytorch:25.06-py3"))
    assert severity is WARNING and "not known to have NeMo" in text


@pytest.mark.parametrize(
    "image",
    [
        "nvcr.io#ea-bignlp/nemofw-training:23.07-py3",
        "nvcr.io#ea-bignlp/ga-participants/nemofw-training:23.08.03",
        "nvcr.io#ea-bignlp/ga-participants/nemofw-training:23.11",
        "nvcr.io#nvidia/nemo:24.01.01.framework",
        "nvcr.io#nvidia/nemo:24.03.01.framework",
    ],
)
def test_optimizer_that_an_old_nemo_lacks_is_refused(image: str) -> None:
    severity, text = outcome(findings(image, changes=NEW_OPTIMIZER))
    assert severity is ERROR and "training.model.optim.name='mcore_distributed_optim'" in text
    assert "training.model.optim.name=distributed_fused_adam" in text and BEST in text
    assert findings(image, changes=OLD_OPTIMIZER) == []


@pytest.mark.parametrize(
    "image",
    [
        "registry.example.org#mirror/nvidia/nemo:26.04",
        "nvcr.io#nvstaging/nvidia/nemo:26.04",
        "nvcr.io#nvidia/nemo:26.04-custom",
        "nvcr.io#nvidia/nemo:26.04.nemotron_3_nano",
        "nvcr.io#nvidia/nemo:26.04-py3",
        "/images/nvidia+nemo+26.04.sqsh",
        "/i/nemo-26.04.sqsh",
    ],
)
def test_fact_known_by_name_alone_is_a_warning(image: str) -> None:
    severity, text = outcome(findings(image))
    assert severity is WARNING and "judging by the image's name only" in text


def test_unknown_image_is_skipped_with_the_reason() -> None:
    (finding,) = findings("registry.example.org#ml/train:1")
    assert finding.severity is Severity.SKIPPED and finding.why == "not recorded"


@pytest.mark.parametrize("tag", ["24.07", "25.07", "25.11", "26.04", "26.08"])
def test_our_trainer_is_refused_with_another_megatron_core(tag: str) -> None:
    severity, text = outcome(findings(f"nvcr.io#nvidia/nemo:{tag}", "megatron"))
    assert severity is ERROR and "the trainer is written for 0.16" in text
    assert "container=megatron" in text and "container=nvcr.io#nvidia/nemo:26.02" in text


def test_our_trainer_passes_images_with_its_megatron_core() -> None:
    assert findings("nvcr.io#nvidia/nemo:26.02", "megatron") == []


@pytest.mark.parametrize("image", ["nvcr.io#nvidia/nemo:25.04", "nvcr.io#nvidia/pytorch:26.02-py3"])
def test_our_trainer_is_warned_where_megatron_core_is_not_known(image: str) -> None:
    severity, text = outcome(findings(image, "megatron"))
    assert severity is WARNING and "is not known" in text


@pytest.mark.parametrize(
    ("engine", "payload", "mounts"),
    [
        ("megatron", payload_of("megatron", python="/sw/venv/bin/python"), ("/sw",)),
        ("nemo", None, ("/opt/NeMo",)),
        ("nemo", None, ("/opt",)),
    ],
)
def test_mounted_paths_are_not_the_images(
    engine: str, payload: Payload | None, mounts: tuple[str, ...]
) -> None:
    image = "nvcr.io#nvidia/nemo:26.06"
    assert findings(image, engine, payload=payload, mounts=mounts) == []
    assert findings(image, engine, mounts=("/opt/NeMo2", "/opt/megatron-lm2")) != []


def t5_findings(pipeline: int, image: str, *words: str) -> list[Finding]:
    """Return the findings of the checks of images for a drafted job of Megatron-LM."""
    sizes = [
        *(f"training.model.{stack}.activation=gelu" for stack in ("encoder", "decoder")),
        f"training.model.pipeline_model_parallel_size={pipeline}",
        f"training.model.pipeline_model_parallel_split_rank={pipeline // 2}",
    ]
    overrides = (
        "training=t5/220m",
        "engine=megatron_lm",
        "cluster=bcm",
        f"container={image}",
        *sizes,
        *words,
    )
    draft = draft_with(*overrides)
    facts: Facts = replace(KNOWN, image=image_facts(draft, look=False))
    return [finding for finding in run_checks(draft.plan, facts) if finding.id == "image.engine"]


@pytest.mark.parametrize("tag", ["25.09", "26.04", "26.08"])
def test_t5_pipeline_is_refused_if_the_release_has_none(tag: str) -> None:
    severity, text = outcome(t5_findings(2, f"nvcr.io#nvidia/nemo:{tag}"))
    assert severity is ERROR and "training.model.pipeline_model_parallel_size=2" in text
    assert "no pipeline for a T5" in text and BEST in text
    assert t5_findings(1, f"nvcr.io#nvidia/nemo:{tag}") == []
    assert outcome(t5_findings(2, f"registry.example.org#nvidia/nemo:{tag}"))[0] is WARNING


def test_t5_pipeline_passes_if_nothing_is_known_against_it() -> None:
    assert t5_findings(2, "nvcr.io#nvidia/nemo:25.07") == []
    assert t5_findings(2, "nvcr.io#nvidia/nemo:26.08", "container_mounts=[/opt/megatron-lm]") == []


def test_the_option_of_an_encoders_stages_is_the_one_that_the_job_looks_for() -> None:
    assert load_start()._ENCODER_STAGES == ENCODER_STAGES


EFA = {"FI_PROVIDER": "efa"}
PLUGIN = "/opt/amazon/ofi-nccl/lib/libnccl-net.so"


@pytest.mark.parametrize(
    ("image", "words"),
    [
        ("nvcr.io#nvidia/nemo:26.08", (f"env_vars.NCCL_NET_PLUGIN={PLUGIN}", "sets it to spcx")),
        ("nvcr.io#nvidia/pytorch:26.06-py3", ("sets it to spcx", "has no aws-ofi-nccl")),
        ("nvcr.io#nvidia/nemo:26.02", ("aws-ofi-nccl 1.17.0", "leaks memory", "1.17.3")),
    ],
)
def test_efa_with_a_plugin_that_does_not_fit_is_a_warning(image: str, words: tuple[str, ...]) -> None:
    results = [
        finding
        for finding in findings(image, "megatron_lm", environment=EFA)
        if finding.id == "image.network"
    ]
    severity, text = outcome(results)
    assert severity is WARNING
    for word in words:
        assert word in text


@pytest.mark.parametrize(
    ("image", "environment", "nodes"),
    [
        ("nvcr.io#nvidia/nemo:26.08", {}, 2),
        ("nvcr.io#nvidia/nemo:26.08", EFA, 1),
        ("nvcr.io#nvidia/nemo:26.08", {**EFA, "NCCL_NET_PLUGIN": PLUGIN}, 2),
        ("nvcr.io#nvidia/nemo:26.02", {**EFA, "NCCL_NET_PLUGIN": "/fsx/libnccl-net.so"}, 2),
        ("nvcr.io#nvidia/nemo:26.04", EFA, 2),
        ("nvcr.io#nvidia/pytorch:26.05-py3", EFA, 2),
        ("registry.example.org#ml/train:1", EFA, 2),
    ],
)
def test_efa_without_a_known_problem_passes(image: str, environment: dict[str, str], nodes: int) -> None:
    results = findings(image, "megatron_lm", environment=environment, nodes=nodes)
    assert "image.network" not in {finding.id for finding in results}


INSTALLED: dict[str, str | None] = {
    "python": "3.12.3",
    "nemo": "2.4.1",
    "megatron_core": "0.16.1",
    "transformer_engine": None,
    "cuda": "12.9",
    "nemo_models": "bert gpt t5",
    "nemo_scripts": "bert gpt t5",
}


def test_answer_of_the_images_python_counts_more_than_the_table() -> None:
    image = "/images/ours.sqsh"
    old = contents_of("nvcr.io", "nvidia/nemo", "26.04")
    assert old is not None
    mended = add_installed(old, INSTALLED)
    assert findings(image, contents=mended) == [] == findings(image, "megatron", contents=mended)
    without = add_installed(
        Contents("ours.sqsh"), {**INSTALLED, "megatron_core": None, "nemo_models": None, "nemo": None}
    )
    assert outcome(findings(image, contents=without))[0] is ERROR
    severity, text = outcome(findings(image, "megatron", contents=without))
    assert severity is ERROR and "has no megatron-core" in text


def test_job_without_an_image_has_no_findings() -> None:
    assert run_checks(plan_of(GPT), replace(KNOWN, image=None)) == []


def test_the_trainers_megatron_core_is_the_one_that_is_pinned() -> None:
    import configparser
    from pathlib import Path

    parser = configparser.ConfigParser()
    parser.read(Path(__file__).parents[2] / "setup.cfg")
    pin = f"megatron-core=={TRAINER_CORE[0]}.{TRAINER_CORE[1]}."
    assert pin in parser["options.extras_require"]["train"]


def test_refused_image_does_not_hide_the_trainers_error() -> None:
    plan = plan_of(GPT, engine="megatron")
    container = Container("nvcr.io#nvidia/nemo:25.07", ())
    plan = replace(plan, job=replace(plan.job, container=container, payload=payload_of("megatron")))
    contents = contents_of("nvcr.io", "nvidia/nemo", "25.07")
    facts = replace(KNOWN, image=ImageFacts(contents), trainer_verdict="model.x=1: unknown")
    assert {finding.id for finding in run_checks(plan, facts)} == {"image.engine", "engine.megatron"}
