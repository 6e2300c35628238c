"""`slipway data audit` names the data that a training read: over a blend, a ramp, a resume and a rewind."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from slipway.arithmetic.indexed import ORIGIN
from slipway.trainer.config.load import flatten, load_config
from slipway.trainer.config.settings import read_settings
from slipway.trainer.data.audit import audit
from tests.forked_slipway import SLIPWAY
from tests.integration import recording_trainer
from tests.integration.conftest import run_command
from tests.trainer import indexed_files
from tests.warm import WarmPool

pytestmark = [pytest.mark.trainer, pytest.mark.timeout(300)]

VOCABULARY, LENGTH = 300, 32
PARAMS = "training.exp_manager.checkpoint_callback_params"
SETTINGS = (
    "cluster=local",
    "training=gpt3/tiny",
    "training.run.name=audited",
    "training.trainer.num_nodes=1",
    "training.trainer.devices=2",
    "training.trainer.limit_val_batches=0",
    "training.trainer.val_check_interval=100",
    "training.model.tensor_model_parallel_size=1",
    "training.model.micro_batch_size=2",
    "training.model.global_batch_size=8",
    # A third of 40 samples an increment: 4 from 0, 8 from 40 consumed samples on.
    "training.model.rampup_batch_size=[4,4,20]",
    f"training.model.encoder_seq_length={LENGTH}",
    f"training.model.max_position_embeddings={LENGTH}",
    "training.model.hidden_size=32",
    f"{PARAMS}.every_n_train_steps=2",
    f"{PARAMS}.save_top_k=-1",
)
STEPS = {1: range(1, 7), 2: range(7, 11), 3: range(5, 9)}


@dataclass(frozen=True)
class AuditedRun:
    """A run of three launches: 6 steps, 4 more, and back to step 4 with another order of the data."""

    directory: Path
    documents: dict[str, list[list[int]]]
    fed: dict[int, list[list[list[int]]]]

    def audit(self, step: int, *options: str, code: int = 0) -> dict[str, Any]:
        """Return the answer of the command."""
        command = [SLIPWAY, "data", "audit", "audited", "--step", str(step), "--json", *options]
        done = run_command(*command, cwd=self.directory, check=code)
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    def trainer_audit(self, launch: int, step: int) -> dict[str, Any]:
        """Return the trainer's own answer, counted from the state in which the launch began."""
        directory = self.directory / "results/audited/launches" / str(launch)
        settings = read_settings(flatten(load_config(directory, "audited_hydra.yaml")))
        lines = map(json.loads, (directory / "results/metrics.jsonl").read_text().splitlines())
        start = next(line for line in lines if line["kind"] == "start")
        return audit(settings, step, start["step"], start["consumed_samples"])

    def tokens(self, answer: dict[str, Any]) -> list[list[int]]:
        """Return the tokens of each sample, of the documents as they were written."""
        return [
            [
                token
                for piece in sample["pieces"]
                for token in self.documents[sample["data_set"]][piece["document"]][
                    piece["first"] : piece["end"]
                ]
            ]
            for sample in answer["samples"]
        ]


def _data_sets(directory: Path) -> dict[str, list[list[int]]]:
    """Write three data sets, whose documents differ in every token; one has empty ones among them."""
    documents = {}
    for number, (name, count) in enumerate({"books": 40, "web": 25, "code": 60}.items()):
        texts = [
            [(number * 97 + document * 31 + place * 7) % VOCABULARY for place in range(document * 13 % 45)]
            for document in range(count)
        ]
        prefix = directory / name
        indexed_files.write(prefix, [[text] for text in texts], "uint16")
        documents[str(prefix)] = texts
    return documents


@pytest.fixture(scope="module")
def audited_run(pool: WarmPool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AuditedRun]:
    directory = tmp_path_factory.mktemp("audited")
    documents = _data_sets(directory)
    record = directory / "fed"
    record.mkdir()
    python = pool.write_interpreter(directory / "python", recording_trainer.__name__)
    vocabulary = {"<|endoftext|>": 0, **{f"t{number}": number for number in range(1, VOCABULARY)}}
    (directory / "vocab.json").write_text(json.dumps(vocabulary))
    (directory / "merges.txt").write_text("#version: 0.2\n")
    prefixes = ",".join(
        f"{weight},{prefix}" for weight, prefix in zip((0.5, 0.2, 0.3), documents, strict=True)
    )
    settings = [
        *SETTINGS,
        f"cluster.python={python}",
        f"env_vars.{recording_trainer.RECORD}={record}",
        f"training.model.data.data_prefix=[{prefixes}]",
        f"training.model.tokenizer.vocab_file={directory}/vocab.json",
        f"training.model.tokenizer.merge_file={directory}/merges.txt",
    ]
    for further in (
        ["training.trainer.max_steps=6"],
        ["training.trainer.max_steps=10"],
        [
            "training.trainer.max_steps=8",
            "training.resume.checkpoint=STEP4",
            "training.resume.data_generation=1",
            # Step 5 begins with sample 16.
            "training.resume.skip_samples=[[17,21]]",
            "training.resume.data_weights=[[16,[1,2,0]],[28,[0,1,4]]]",
        ],
    ):
        (step4,) = [path.name for path in (directory / "results/audited/checkpoints").glob("*step=4-*")] or [
            ""
        ]
        changes = [word.replace("STEP4", f"'{step4}'") for word in further]
        run_command(SLIPWAY, "launch", *settings, *changes, "--follow", cwd=directory)
    fed = {}
    for launch in STEPS:
        ranks = [
            [json.loads(line) for line in (record / f"{launch}.rank{rank}.jsonl").read_text().splitlines()]
            for rank in (0, 1)
        ]
        fed[launch] = [first + second for first, second in zip(*ranks, strict=True)]
    yield AuditedRun(directory, documents, fed)


def test_audit_names_the_documents_that_each_step_was_fed(audited_run: AuditedRun) -> None:
    batches = []
    for launch, steps in STEPS.items():
        assert len(audited_run.fed[launch]) == len(steps)
        for step, fed in zip(steps, audited_run.fed[launch], strict=True):
            answer = audited_run.trainer_audit(launch, step)
            assert audited_run.tokens(answer) == fed
            batches.append(answer["global_batch"])
    assert set(batches) == {4, 8}, "the ramp is passed"
    assert {sample["data_set"] for sample in answer["samples"]} <= set(audited_run.documents)


def test_the_command_counts_from_the_launch_that_trained_the_step(audited_run: AuditedRun) -> None:
    # Launch 3 went back to step 4: the steps of launches 1 and 2 after it are forgotten.
    for step, launch, options in (
        (6, 1, ["--launch", "1"]),
        (7, 2, ["--launch", "2"]),
        (2, 1, []),
        (7, 3, []),
    ):
        answer = audited_run.audit(step, *options)
        assert (answer["launch"], answer["trained"]) == (launch, True)
        assert audited_run.tokens(answer) == audited_run.fed[launch][step - STEPS[launch].start]


def test_passed_over_samples_and_changed_weights_are_proved(audited_run: AuditedRun) -> None:
    answers = [audited_run.audit(step) for step in (5, 6, 7, 8)]
    samples = [sample for answer in answers for sample in answer["samples"]]
    assert [sample["sample"] for sample in samples] == [16, *range(21, 48)]
    books, web, code = audited_run.documents
    assert {sample["data_set"] for sample in samples if sample["sample"] < 28} == {books, web}
    assert {sample["data_set"] for sample in samples if sample["sample"] >= 28} == {web, code}
    windows = Counter((sample["data_set"], sample["window"]) for sample in samples)
    for row in answers[-1]["data_sets"]:
        shown = [count for (name, _), count in windows.items() if name == row["data_set"]]
        assert max(shown) <= -(-row["samples"] // row["windows"])
    assert answers[-1]["skipped"] == [[17, 21]]
    counts = {row["data_set"]: row for row in answers[-1]["data_sets"]}
    assert sum(row["samples"] for row in counts.values()) == 48
    assert sum(row["skipped"] for row in counts.values()) == 4 and counts[code]["skipped"] == 0
    # The history that the checkpoint has is that of launch 1.
    before = {row["data_set"]: row["samples"] for row in audited_run.audit(4)["data_sets"]}
    now = {row["data_set"]: row["samples"] for row in answers[-1]["data_sets"]}
    assert now[books] - before[books] == 4 and now[code] - before[code] > 5
    command = [SLIPWAY, "data", "audit", "audited", "--step", "8"]
    lines = run_command(*command, cwd=audited_run.directory).stdout.splitlines()
    assert "passed over: samples 17 to 20" in lines
    epochs = -(-counts[web]["samples"] // counts[web]["windows"])
    assert counts[books]["samples"] <= counts[books]["windows"] and epochs > 1
    assert f"up to here: 48 samples, web {epochs} times at most in this order" in lines


def test_an_intervention_into_the_past_is_refused_before_it_is_launched(audited_run: AuditedRun) -> None:
    # On from the newest checkpoint: one that is named would be gone back to again.
    command = [SLIPWAY, "resume", "audited", "training.resume.checkpoint=null"]
    command += ["training.resume.skip_samples=[[17,30]]"]
    refusal = run_command(*command, cwd=audited_run.directory, check=2).stderr
    assert "training.resume.skip_samples=[[17, 30]]: the checkpoint" in refusal
    assert "was trained up to sample 48 with [[17, 21]] [run.order]" in refusal
    # The trainer refuses it too.
    command += ["training.trainer.max_steps=9", "--no-check=run.order", "--follow"]
    done = run_command(*command, cwd=audited_run.directory, check=1)
    assert "resume.skip_samples=[[17, 30]]: the checkpoint" in done.stdout + done.stderr


def test_a_step_beyond_the_training_is_a_mistake(audited_run: AuditedRun) -> None:
    # Launch 1 was to end with step 6, launch 2 with 10, launch 3 with 8.
    refusal = run_command(
        SLIPWAY, "data", "audit", "audited", "--step", "9", cwd=audited_run.directory, check=2
    ).stderr
    assert "--step 9: expected 1 to trainer.max_steps=8 of this training" in refusal


def test_the_table_names_sources_and_offsets(audited_run: AuditedRun) -> None:
    prefix = next(name for name in audited_run.documents if name.endswith("books"))
    count = len(audited_run.documents[prefix])
    Path(f"{prefix}.origins").write_bytes(b"".join(ORIGIN.pack(n % 2, 100 * n) for n in range(count)))
    sources = {"sources": [{"name": "s3://raw/a.jsonl"}, {"name": "b.jsonl.zst"}]}
    Path(f"{prefix}.manifest.json").write_text(json.dumps(sources))
    command = [SLIPWAY, "data", "audit", "audited", "--step", "2", "--sample", "0"]
    lines = run_command(*command, cwd=audited_run.directory).stdout.splitlines()
    assert lines[0] == "audited step 2: samples 4 to 7, epoch 0, data generation 0, launch 1"
    assert lines[1] == "up to here: 8 samples, none twice"
    (sample,) = audited_run.audit(2, "--sample", "0")["samples"]
    assert sum(piece["end"] - piece["first"] for piece in sample["pieces"]) == LENGTH + 1
    assert lines[4].split() == ["SAMPLE", "DOCUMENT", "TOKENS", "DATA", "SET", "SOURCE", "OFFSET"]
    assert len(lines) == 5 + len(sample["pieces"])
    for line, piece in zip(lines[5:], sample["pieces"], strict=True):
        number, tokens = piece["document"], f"{piece['first']}-{piece['end'] - 1}"
        origin = ["-", "-"]
        if sample["data_set"] == prefix:
            origin = [["s3://raw/a.jsonl", "b.jsonl.zst"][number % 2], str(100 * number)]
        assert line.split() == ["0", str(number), tokens, Path(sample["data_set"]).name, *origin]


def test_the_text_is_that_of_the_tokens(audited_run: AuditedRun) -> None:
    options = ["--sample", "3", "--text"]
    answer = audited_run.audit(7, "--launch", "2", *options)
    fed = audited_run.fed[2][0][3]
    assert "".join(piece["text"] for piece in answer["samples"][0]["pieces"]) == "".join(
        f"t{token}" if token else "<|endoftext|>" for token in fed
    )
    command = [SLIPWAY, "data", "audit", "audited", "--step", "7", "--launch", "2", *options]
    lines = run_command(*command, cwd=audited_run.directory).stdout.splitlines()
    first = answer["samples"][0]["pieces"][0]
    tokens = f"tokens {first['first']}-{first['end'] - 1}"
    assert lines[4].startswith(
        f"sample 3, {answer['samples'][0]['data_set']} document {first['document']}, {tokens}"
    )
    assert lines[5] == f"    {first['text']}"


def test_data_that_changed_since_the_launch_are_reported(audited_run: AuditedRun) -> None:
    prefix = next(iter(audited_run.documents))
    path = Path(f"{prefix}.bin")
    before = path.read_bytes()
    try:
        path.write_bytes(before[:-2] + b"\x01\x01")
        command = [SLIPWAY, "data", "audit", "audited", "--step", "2"]
        done = run_command(*command, cwd=audited_run.directory, check=1)
        assert f"the data are not those of launch 1: {path}" in done.stderr
        path.unlink()
        refusal = run_command(*command, cwd=audited_run.directory, check=2).stderr
        assert f"{path}: there is no such file" in refusal and "Traceback" not in refusal
    finally:
        path.write_bytes(before)


def test_a_run_without_such_a_launch_or_sample_is_a_mistake(audited_run: AuditedRun) -> None:
    for options, message in {
        ("--step", "2", "--launch", "9"): "audited has no training as launch 9",
        ("--step", "2", "--launch", "2"): "--step 2: expected more than 6",
        ("--step", "2", "--sample", "4"): "--sample 4: expected 0 to 3",
        ("--step", "0"): "'0' is not a whole number of at least 1",
    }.items():
        refusal = run_command(
            SLIPWAY, "data", "audit", "audited", *options, cwd=audited_run.directory, check=2
        )
        assert message in refusal.stderr
        assert "Traceback" not in refusal.stderr


def test_audit_imports_no_torch(audited_run: AuditedRun) -> None:
    launch = audited_run.directory / "results/audited/launches/1"
    program = (
        "import sys; from slipway.trainer.data import audit; audit.main(sys.argv[1:]); "
        "print('torch' in sys.modules, file=sys.stderr)"
    )
    options = ["--config-path", launch, "--config-name", "audited_hydra.yaml", "--step", "1"]
    done = run_command(sys.executable, "-c", program, *options, cwd=Path(__file__).parents[2])
    assert json.loads(done.stdout)["step"] == 1
    assert done.stderr.strip() == "False"
