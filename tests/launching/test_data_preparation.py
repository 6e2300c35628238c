"""A data preparation as a plan of jobs: one, or three that follow each other."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from launcher.cli.app import main
from launcher.cli.data import _lines_after_preparation
from launcher.config.compose import compose
from launcher.config.overrides import hydra_value
from launcher.drafting import Request, drafts
from launcher.errors import Mistakes, UserError
from launcher.jobs.launches import Launch
from launcher.launching import launch_stages
from launcher.plan import Job
from launcher.runs.manifest import read_manifest
from launcher.stages.data_preparation import directory_of
from launcher.stages.planning import plan_launch
from slipway.common.sections import FILTERS
from slipway.corpus.sources import discover
from slipway.corpus.spec import read as read_specification
from tests.launching.fake_slurm import FakeSlurm, install, stages

PREPARE = "stages=[data_preparation]"
TASKS = "data_preparation.tasks=3"


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    return install(tmp_path, monkeypatch)


def submit_stages(tmp_path: Path, *more: str) -> list[Launch]:
    request = Request(stages(tmp_path, *more), ["slipway", "launch", *more])
    return launch_stages(drafts(request), request)


def job_of(*overrides: str) -> Job:
    config = compose([PREPARE, "data_preparation.inputs=[/x]", *overrides]).config
    return plan_launch(config, number=1, tag="x").job


def test_tasks_are_three_jobs_that_each_wait_for_success(tmp_path: Path, slurm: FakeSlurm) -> None:
    fetch, tokenize, merge, training = submit_stages(tmp_path, TASKS, "resilience.after_stage=afterany")
    assert [launch.paths.run_name for launch in (fetch, tokenize, merge, training)] == [
        "tokenize_text_fetch",
        "tokenize_text",
        "tokenize_text_merge",
        "gpt3_tiny",
    ]
    assert [line.split()[0] for line in slurm.submitted()] == [
        f"{fetch.manifest.tag}.1_submission.sh",
        "--dependency=afterok:101",
        "--dependency=afterok:102",
        "--dependency=afterany:103,singleton",
    ]
    scripts = [launch.paths.script.read_text() for launch in (fetch, tokenize, merge)]
    assert ["#SBATCH --array=0-2\n" in script for script in scripts] == [False, True, False]
    assert "    tokenize \\\n" in scripts[1]
    assert '    --tasks=3 \\\n    "--task=$SLURM_ARRAY_TASK_ID"\n' in scripts[1]
    node = yaml.safe_load(tokenize.paths.config.read_text())["data_preparation"]
    assert node["inputs"] == [f"{tmp_path}/text.txt"]
    assert node["work_dir"] == f"{node['output_prefix']}.work"


def test_the_users_dependency_is_that_of_the_first_part(tmp_path: Path, slurm: FakeSlurm) -> None:
    jobs = submit_stages(tmp_path, PREPARE, TASKS, "data_preparation.run.dependency='afterok:7?afterok:8'")
    assert [job.manifest.after for job in jobs] == [None, "afterok:101", "afterok:102"]
    assert "afterok:7?afterok:8" in jobs[0].paths.script.read_text()


def test_a_part_can_be_launched_alone(tmp_path: Path, slurm: FakeSlurm) -> None:
    submit_stages(tmp_path, PREPARE, TASKS)
    (merge,) = submit_stages(tmp_path, PREPARE, TASKS, "data_preparation.phase=merge")
    assert (merge.paths.run_name, merge.paths.number, merge.manifest.after) == (
        "tokenize_text_merge",
        2,
        None,
    )
    (preparation,) = submit_stages(tmp_path, PREPARE)
    assert "    run \\\n" in preparation.paths.script.read_text()


def test_each_part_is_rendered_again_byte_for_byte(
    tmp_path: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = submit_stages(tmp_path, PREPARE, TASKS)
    capsys.readouterr()
    for name, job in zip(("fetch", "tokenize", "merge"), jobs, strict=True):
        command = (job.paths.directory / "launcher_cmd.log").read_text().splitlines()[2]
        assert f"--stage=data_preparation.{name}" in command
        options = ["--dry-run", f"--stage=data_preparation.{name}", f"--tag={job.manifest.tag}"]
        assert main(["launch", *stages(tmp_path, PREPARE, TASKS), *options, "--launch-number=1"]) == 0
        assert capsys.readouterr().out == job.paths.script.read_text()
        stored = ["--launch-dir", str(job.paths.directory)]
        # A stored launch is neither tried nor built again.
        for words in (["render"], ["launch", "--dry-run", "--smoke", "--build=job"]):
            assert main([*words, *stored]) == 0
            assert capsys.readouterr().out == job.paths.script.read_text()


def test_refused_part_names_the_command_to_go_on_with(tmp_path: Path, slurm: FakeSlurm) -> None:
    slurm.refuse("--dependency=afterok:102")
    with pytest.raises(UserError) as raised:
        submit_stages(tmp_path, TASKS)
    assert raised.value.message.startswith("data_preparation.merge: Slurm refused the job")
    assert str(raised.value.hint).splitlines()[-1] == (
        "once this is fixed: the same command with stages=[data_preparation] data_preparation.phase=merge"
        " data_preparation.run.dependency=afterok:102"
    )
    training = read_manifest(tmp_path / "results" / "gpt3_tiny" / "launches" / "1")
    assert training.error == "the stage before it, data_preparation.merge, has no job"


def test_without_a_queue_one_process_does_the_work_of_all_tasks() -> None:
    all_drafts = drafts(Request([PREPARE, "data_preparation.inputs=[/x]", TASKS, "cluster=local"], []))
    assert [draft.plan.paths.run_name for draft in all_drafts] == ["tokenize_text"]
    assert all_drafts[0].plan.job.payload.argv[4] == "run"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["data_preparation.format=josnl"], "format='josnl': expected 'auto'.*did you mean 'jsonl'"),
        (
            ["data_preparation.filters=[gopher_qualty]"],
            "no filter gopher_qualty; .*; did you mean 'gopher_quality'",
        ),
        (["data_preparation.filters=[{regex: 3}]"], "filters.0=.*expected the name of a filter"),
        (["data_preparation.splits={train: 0.9}"], "the shares are 0.9 in all, and must be 1"),
        (["data_preparation.max_errors=1.5"], "expected a share of the documents below 1"),
        (
            ["data_preparation.inputs=[{url: 'https://x/y', sha256: ab}]"],
            "inputs.0.sha256='ab': not a SHA",
        ),
        (["data_preparation.inputs=[{url: x, sha25: ab}]"], "inputs.0.sha25: .*did you mean 'sha256'"),
        (["data_preparation.inputs=['ftp://x/y']"], "inputs.0='ftp://x/y': .*valid: https, http, s3"),
        (["data_preparation.tasks=0"], "tasks=0: expected a whole number, 1 or more"),
        (["data_preparation.phase=merg"], "did you mean 'merge'"),
    ],
)
def test_mistakes_are_named_with_what_is_valid(overrides: list[str], words: str) -> None:
    with pytest.raises((UserError, Mistakes)) as raised:
        job_of("cluster=bcm", *overrides)
    text = " ".join(f"{mistake.message} {mistake.hint}" for mistake in raised.value.mistakes)
    assert re.search(words, text), text


def test_a_point_of_a_sweep_is_one_job(
    tmp_path: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep", *stages(tmp_path, PREPARE, TASKS), "data_preparation.seed=1,2"]) == 2
    assert "data_preparation.tasks=3: a point of a sweep is one job" in capsys.readouterr().err
    assert slurm.calls() == []


def test_an_array_of_the_user_is_refused_only_beside_tasks() -> None:
    assert job_of("cluster=bcm", "cluster.sbatch.array=0-3%1").queue.further == {"array": "0-3%1"}
    with pytest.raises(UserError, match=r"array=0-3%1: data_preparation.tasks=2 is an array already"):
        overrides = [PREPARE, "data_preparation.inputs=[/x]", "cluster=bcm", "data_preparation.tasks=2"]
        drafts(Request([*overrides, "cluster.sbatch.array=0-3%1"], []))


def test_the_filters_are_those_that_the_job_knows() -> None:
    from slipway.corpus.cleaning import FILTERS as KNOWN

    assert set(FILTERS) == set(KNOWN)


@pytest.mark.parametrize("choice", ["text", "jsonl", "parquet", "wikipedia", "mixed"])
def test_the_job_accepts_every_shipped_choice(choice: str) -> None:
    from slipway.corpus.spec import read

    job = job_of(f"data_preparation={choice}", "cluster=local")
    assert job.stage_config is not None
    assert read(job.stage_config["data_preparation"]).output_prefix.name == "corpus_text_document"


def test_all_keys_reach_the_job(tmp_path: Path) -> None:
    from slipway.corpus.spec import read

    job = job_of(
        "data_preparation.inputs=[{url: 's3://b/x', format: parquet, text_key: body}, a.txt]",
        "data_preparation.filters=[gopher_quality, {regex: {regex_exp: x}}]",
        "data_preparation.deduplicate={exact: true, minhash: {ngram: 3}}",
        "data_preparation.tokenizer.url=https://x/tokenizer.json",
        "data_preparation.splits={train: 0.9, test: 0.1}",
        "data_preparation.on_error=skip",
        "data_preparation.max_errors=7",
    )
    assert job.stage_config is not None
    spec = read(job.stage_config["data_preparation"])
    assert [(source.location, source.format, source.text_key) for source in spec.inputs] == [
        ("s3://b/x", "parquet", "body"),
        (str(Path("a.txt").absolute()), None, None),
    ]
    assert [(rule.name, dict(rule.options)) for rule in spec.filters] == [
        ("gopher_quality", {}),
        ("regex", {"regex_exp": "x"}),
    ]
    duplicates = spec.deduplicate
    assert (duplicates.exact, duplicates.minhash.ngram if duplicates.minhash else None) == (True, 3)
    assert (spec.splits, spec.on_error, spec.max_errors) == ({"train": 0.9, "test": 0.1}, "skip", 7)
    assert spec.tokenizer.url == "https://x/tokenizer.json"


@pytest.mark.parametrize(
    ("overrides", "value"),
    [
        ([], "void"),
        (["env_vars.NVIDIA_VISIBLE_DEVICES=all"], "all"),
        (["stage_cluster.data_preparation={gres: 'gpu:1'}", "cluster.gpus_per_node=null"], None),
        (["container=null"], None),
    ],
)
def test_a_container_on_cpu_nodes_looks_for_no_gpu(overrides: list[str], value: str | None) -> None:
    job = job_of("cluster=bcm", *overrides)
    assert job.environment.get("NVIDIA_VISIBLE_DEVICES") == value
    assert value is None or "NVIDIA_VISIBLE_DEVICES" in job.container_variables


def test_prepare_distinguishes_sources_from_overrides(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a=1.jsonl").touch()
    words = ["data", "prepare", "a=1.jsonl", "https://x/y?part=1", "b/*.txt", "s3://c/d", "data_dir=here"]
    options = ["--dry-run", "--tasks=4", "--text-key=body", "cluster=bcm", "cluster.partition=cpu"]
    assert main([*words, *options]) == 0
    script = capsys.readouterr().out
    assert script.count("#SBATCH --partition=cpu\n") == 3
    assert script.count("#SBATCH --array=0-3\n") == 1
    listed = ",".join(f"'{word}'" for word in words[2:6])
    overrides = [f"data_preparation.inputs=[{listed}]", "data_dir=here", "data_preparation=mixed"]
    assert main(["render", "--config", PREPARE, "cluster=local", *overrides]) == 0
    node = yaml.safe_load(capsys.readouterr().out)["data_preparation"]
    assert node["inputs"] == [
        f"{tmp_path}/a=1.jsonl",
        "https://x/y?part=1",
        f"{tmp_path}/b/*.txt",
        "s3://c/d",
    ]
    assert node["output_prefix"] == f"{tmp_path}/here/corpus_text_document"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["no.jsonl"], "no.jsonl: no such file or directory"),
        ([], "no input"),
        (["b/*.txt"], "no file has a name of this pattern"),
        (["ftp://x/y"], "no source can be read by ftp"),
        (["s3://x/y", "--format=josnl"], "did you mean 'jsonl'?"),
    ],
)
def test_prepare_refuses_what_it_cannot_read(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "b").mkdir()
    assert main(["data", "prepare", *words]) == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


def source_findings(capsys: pytest.CaptureFixture[str], *overrides: str) -> dict[str, Any]:
    """Return the findings of `slipway check` about sources, by severity."""
    main(["check", "--json", PREPARE, "cluster=local", *overrides])
    content = json.loads(capsys.readouterr().out)
    return {
        finding["message"]: finding["severity"]
        for finding in content["findings"]
        if finding["id"] == "path.sources"
    }


def test_check_names_missing_sources_and_tokenizers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").touch()
    assert (
        source_findings(capsys, "data_preparation.inputs=[a.jsonl, '*.jsonl', 'https://x/y', {path: .}]")
        == {}
    )
    findings = source_findings(capsys, "data_preparation.inputs=[b.jsonl, 'c*.jsonl', {path: no/d}]")
    assert findings == {
        f"data_preparation.inputs='{tmp_path}/b.jsonl': there is no such file or directory; likewise"
        f" {tmp_path}/no/d": "error",
        f"data_preparation.inputs='{tmp_path}/c*.jsonl': no file has a name of this pattern": "error",
    }
    (tmp_path / "bpe").mkdir()
    (tmp_path / "bpe" / "vocab.json").touch()
    half = [f"data_preparation.tokenizer_dir={tmp_path}/bpe", "data_preparation.inputs=[a.jsonl]"]
    findings = source_findings(capsys, *half, "data_preparation.tokenizer.file=t.json")
    assert any("it has vocab.json and no merges.txt" in text for text in findings)
    assert any(f"tokenizer.file='{tmp_path}/t.json': there is no such file" in text for text in findings)


@pytest.mark.parametrize(
    ("input_", "overrides", "found"),
    [
        ("'a[1].jsonl'", [], ["valid: content"]),
        ("d", ["data_preparation.text_key=contnt"], ["did you mean 'content'?"]),
        ("d/*.jsonl", [], ["valid: content"]),
        ("{path: d, text_key: contnt}", [], ["did you mean 'content'?"]),
        ("d", ["data_preparation.text_key=content"], []),
        ("d", ["data_preparation.on_error=skip"], []),
        ("d", ["data_preparation.format=txt"], []),
        ("{path: d, text_key: content}", [], []),
        ("torn.jsonl", [], []),
    ],
)
def test_a_text_key_that_the_first_document_lacks_is_refused(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    input_: str,
    overrides: list[str],
    found: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "d").mkdir()
    for name in ("a[1].jsonl", "d/b.jsonl"):
        (tmp_path / name).write_text('{"content": "a text", "number": 3}\n')
    (tmp_path / "torn.jsonl").write_text('{"content')
    words = [PREPARE, "data_preparation=mixed", "cluster=local", f"data_preparation.inputs=[{input_}]"]
    main(["check", "--json", *words, *overrides])
    findings = [
        each for each in json.loads(capsys.readouterr().out)["findings"] if each["id"] == "path.sources"
    ]
    assert [each["fix"] for each in findings] == found
    assert all("has no such key" in each["message"] for each in findings)


def test_a_name_that_looks_like_a_glob_is_that_of_a_file_if_there_is_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dir[1]").mkdir()
    for name in ("a[1].jsonl", "what?.txt", "dir[1]/b.jsonl"):
        (tmp_path / name).write_text('{"text": "a text"}\n')
    names = ["a[1].jsonl", "what?.txt", "dir[1]", "dir[1]/*.jsonl", "dir[1]/[b].jsonl"]
    assert source_findings(capsys, f"data_preparation.inputs=[{','.join(map(hydra_value, names))}]") == {}
    (finding,) = source_findings(capsys, "data_preparation.inputs=['dir[1]/[c].jsonl']")
    assert "dir[1]/[c].jsonl': no file has a name of this pattern" in finding
    # The job finds what the check has found.
    node = {"inputs": [str(tmp_path / name) for name in names], "output_prefix": "/x", "tokenizer_dir": "/y"}
    sources = discover(read_specification(node))
    assert sorted(source.name for source in sources) == [
        f"{tmp_path}/{name}" for name in ("a[1].jsonl", "dir[1]/b.jsonl", "what?.txt")
    ]
    assert directory_of(tmp_path / "dir[1]/*.jsonl") == tmp_path / "dir[1]"
    assert directory_of(tmp_path / "dir[2]/*.jsonl") == tmp_path


@pytest.mark.parametrize("verb", ["prepare", "tokenize"])
def test_replacing_a_data_set_is_an_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    launched: list[list[str]] = []

    def launch(args: Any, overrides: list[str], lines_after: object) -> int:
        launched.append(overrides)
        return 0

    monkeypatch.setattr("launcher.cli.data.launch_and_follow", launch)
    (tmp_path / "a.txt").touch()
    for options in (["--replace"], []):
        main(["data", verb, str(tmp_path / "a.txt"), *options])
    assert ["data_preparation.replace=True" in words for words in launched] == [True, False]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "data_dir={data}"),
        (["data_preparation.output_prefix={data}/a b"], "vocab_file={data}/bpe/vocab.json"),
        (["data_preparation.splits={{train:0.9,validation:0.1}}"], "text_document_train],validation:["),
        (["data_preparation.tokenizer_dir={data}/pieces"], "tokenizer.library=sentencepiece"),
        (["data_preparation.tokenizer_dir={data}/fast"], "tokenizer.type={data}/fast"),
        (["data_preparation.phase=fetch"], None),
    ],
)
def test_a_preparation_ends_with_a_command_that_trains_on_its_data(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    expected: str | None,
) -> None:
    data, ids = tmp_path / "data", {"<|endoftext|>": 0, "a": 1}
    for name in ("bpe", "pieces", "fast"):
        (data / name).mkdir(parents=True)
    (data / "bpe" / "vocab.json").write_text(json.dumps(ids))
    (data / "pieces" / "t.model").touch()
    config, job = tmp_path / "config.yaml", job_of(f"data_dir={data}", *(w.format(data=data) for w in words))
    config.write_text(yaml.safe_dump(job.stage_config))
    launched: Any = SimpleNamespace(paths=SimpleNamespace(config=config))
    assert list(_lines_after_preparation(launched)) == []
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    lines = list(_lines_after_preparation(launched))
    if expected is None:
        assert lines == []
        return
    (line,) = lines
    assert expected.format(data=data) in line
    program, *typed = shlex.split(line)
    assert program == "slipway"
    assert main([*typed, "--dry-run"]) == 0, capsys.readouterr().err


def test_a_mistake_that_the_program_finds_has_the_exit_code_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").write_text('{"text": "a"}\n{"content": "a"}')
    assert main(["data", "prepare", "a.jsonl"]) == 2
    assert "no key 'text' among content" in capfd.readouterr().out


def test_a_data_set_has_a_name_beside_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").touch()
    with monkeypatch.context() as context:
        context.setattr(
            "launcher.cli.data.launch_and_follow", lambda args, overrides, lines: print(overrides) or 0
        )
        assert main(["data", "prepare", "a.jsonl", "--name", "wiki"]) == 0
    assert "'data_preparation.output_prefix=${data_dir}/wiki_text_document'" in capsys.readouterr().out
    assert main(["data", "prepare", "a.jsonl", "--name", "../x"]) == 2
    assert "--name ../x: expected letters, digits" in capsys.readouterr().err


def test_the_model_of_a_filter_is_mounted_by_its_whole_path() -> None:
    job = job_of(
        "data_preparation.filters=[gopher_quality,{language:{languages:[en],model:lid.bin}}]",
        "container=/x.sqsh",
    )
    assert job.stage_config is not None and job.container is not None
    model = str(Path("lid.bin").absolute())
    filters = job.stage_config["data_preparation"]["filters"]
    assert filters == ["gopher_quality", {"language": {"languages": ["en"], "model": model}}]
    assert [mount.flags for mount in job.container.mounts if mount.source == model] == ["ro"]


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("data_dir=/proc/nope", "data_dir"),
        ("data_preparation.output_prefix=/proc/nope/x", "data_preparation.output_prefix"),
    ],
)
def test_the_error_for_an_impossible_directory_names_its_key(
    tmp_path: Path, slurm: FakeSlurm, override: str, key: str
) -> None:
    with pytest.raises(UserError, match="cannot write /proc/nope") as raised:
        submit_stages(tmp_path, override)
    assert raised.value.key == key
    assert slurm.submitted() == []
