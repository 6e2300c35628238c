"""From raw sources on servers to a model that learns: one command, on a real Slurm."""

from __future__ import annotations

import bz2
import hashlib
import io
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from launcher.sandbox.lifecycle import Sandbox
from tests.corpus.servers import faulty_server, s3_server
from tests.integration.conftest import SLIPWAY, run_command

pytestmark = [pytest.mark.slow, pytest.mark.slurm, pytest.mark.trainer, pytest.mark.timeout(300)]

WORDS = {
    "subject": ["the ship", "a sailor", "our captain", "the harbour", "an old engine", "the crew"],
    "verb": ["sees", "leaves", "repairs", "follows", "remembers", "finds"],
    "object": ["the quiet bay", "a broken mast", "the northern light", "many barrels", "the last chart"],
    "end": ["at dawn", "in the fog", "before the storm", "every winter"],
}
STEPS = 30
TRAINING = [
    "training=gpt3/tiny",
    "training.trainer.num_nodes=1",
    "training.trainer.val_check_interval=15",
    "training.trainer.limit_val_batches=1",
    "training.model.encoder_seq_length=32",
    "training.model.hidden_size=64",
    "training.model.optim.sched.warmup_steps=5",
]


def text(dice: random.Random, sentences: int = 30) -> str:
    """Return a text of a small grammar, which a model learns soon and token frequencies do not predict."""
    return " ".join(
        " ".join(dice.choice(choices) for choices in WORDS.values()) + "." for _ in range(sentences)
    )


def wikipedia_dump(dice: random.Random, pages: int) -> bytes:
    """Return a dump as Wikipedia has it, with a redirect and a talk page that are no articles."""
    page = "<page><title>{title}</title><ns>{ns}</ns><id>{id}</id>{more}<revision><id>1</id>\n"
    page += '<text bytes="1" xml:space="preserve">{text}</text></revision></page>\n'
    contents = [
        page.format(
            title=f"Page {number}",
            ns=1 if number == 1 else 0,
            id=number + 1,
            more='<redirect title="Page 3" />' if number == 2 else "",
            text=f"'''Page''' [[Ship|ships]] and &lt;b&gt;more&lt;/b&gt;. {text(dice)}",
        )
        for number in range(pages)
    ]
    head = '<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.11/" version="0.11" xml:lang="en">\n'
    return bz2.compress(f"{head}{''.join(contents)}</mediawiki>\n".encode())


def jsonl(dice: random.Random, lines: int, broken: bool = False) -> bytes:
    """Return compressed JSONL; a broken line is in the middle."""
    import zstandard

    rows = [json.dumps({"id": number, "body": text(dice)}) for number in range(lines)]
    if broken:
        rows[lines // 2] = '{"id": 7, "body": "the ship'
    return zstandard.compress("".join(f"{row}\n" for row in rows).encode())


def parquet(dice: random.Random, rows: int) -> bytes:
    import pyarrow
    from pyarrow import parquet as files

    file = io.BytesIO()
    files.write_table(pyarrow.table({"text": [text(dice) for _ in range(rows)]}), file, row_group_size=10)
    return file.getvalue()


@dataclass
class Site:
    """A directory of a user, whose sources lie on an HTTP server and in a bucket."""

    directory: Path
    conf: dict[str, str]
    client: Any
    inputs: str
    settings: list[str]

    def slipway(self, *words: str, check: int | None = 0) -> subprocess.CompletedProcess[str]:
        return run_command(SLIPWAY, *words, cwd=self.directory, check=check, **self.conf)

    def put(self, content: bytes) -> None:
        """Put the JSONL into the bucket."""
        self.client.put_object(Bucket="raw", Key="crawl/part 1.jsonl.zst", Body=content)

    def states(self, *runs: str) -> list[str]:
        rows = json.loads(self.slipway("status", *runs, "--json", check=None).stdout)
        return [row["state"] for row in rows]

    def manifest(self, name: str = "data") -> dict[str, Any]:
        path = self.directory / name / "corpus_text_document.manifest.json"
        content: dict[str, Any] = json.loads(path.read_text())
        return content


@pytest.fixture
def site(
    tmp_path: Path, sandbox: Sandbox, warm_python: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Site]:
    pytest.importorskip("moto")
    dice, home = random.Random(5), tmp_path / "home"
    home.mkdir()
    with faulty_server() as server, s3_server(monkeypatch, home) as client:
        dump = wikipedia_dump(dice, 40)
        wiki = server.put("wiki/tiny-pages-articles.xml.bz2", dump)
        client.create_bucket(Bucket="raw")
        client.put_object(Bucket="raw", Key="rows.parquet", Body=parquet(dice, 40))
        sha256 = hashlib.sha256(dump).hexdigest()
        inputs = (
            f"data_preparation.inputs=[{{url: '{wiki}', sha256: {sha256}}}, 's3://raw/rows.parquet',"
            " {url: 's3://raw/crawl/', text_key: body}]"
        )
        settings = ["data_preparation=mixed", "data_preparation.vocab_size=400", "data_preparation.workers=1"]
        settings += ["data_preparation.shard_bytes=20000", "cluster=sandbox", f"cluster.python={warm_python}"]
        conf = {"SLURM_CONF": sandbox.environment()["SLURM_CONF"]}
        yield Site(tmp_path, conf, client, inputs, settings)


def test_sources_on_servers_become_tokens_that_a_model_learns_from(site: Site) -> None:
    parts = ["tokenize_mixed_fetch", "tokenize_mixed", "tokenize_mixed_merge"]
    prepare = [site.inputs, *site.settings, "data_preparation.tasks=2"]

    # The sources and the tokenizer alone.
    site.put(jsonl(random.Random(6), 40))
    site.slipway("data", "prepare", *prepare, "data_preparation.phase=fetch")
    assert (site.directory / "data/bpe/vocab.json").exists()

    # A broken line: its task fails and is shown, whichever log was followed; nothing is merged.
    site.put(jsonl(random.Random(6), 40, broken=True))
    failure = site.slipway("data", "prepare", *prepare, check=2)
    assert "error: s3://raw/crawl/part 1.jsonl.zst, byte " in failure.stdout
    assert "the end of the log of task 0, results/tokenize_mixed/launches/1/log-" in failure.stderr
    assert site.states(*parts[:2]) == ["COMPLETED", "FAILED"]
    (state,) = site.states(parts[2])
    assert state in ("CANCELLED", "PENDING"), "it waits for a success that cannot come"
    assert not (site.directory / "data/corpus_text_document.bin").exists()

    # The same command after the repair: finished work is not repeated; then the training.
    site.put(jsonl(random.Random(6), 40))
    arguments = [*prepare, *TRAINING, f"training.trainer.max_steps={STEPS}", "--follow"]
    site.slipway("launch", "stages=[data_preparation,training]", *arguments)
    assert site.states(*parts, "gpt3_tiny") == ["COMPLETED"] * 4
    tasks = [site.slipway("logs", "tokenize_mixed", "--task", number).stdout for number in "01"]
    assert "task 1 of 2: 3 units, 2 of them done before" in tasks[0]
    assert "task 2 of 2: 2 units, 2 of them done before" in tasks[1]
    manifest = site.manifest()
    assert {source["name"].rpartition("/")[2]: source["documents"] for source in manifest["sources"]} == {
        "rows.parquet": 40,
        "tiny-pages-articles.xml.bz2": 38,
        "part 1.jsonl.zst": 40,
    }
    assert manifest["counts"]["documents"] == 118
    verdict = json.loads(site.slipway("verify", parts[2], "--json").stdout)
    assert verdict["verdict"] == "verified"

    # It learned more than how often each token occurs.
    lines = (site.directory / "results/gpt3_tiny/results/metrics.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    losses = [event["loss"] for event in events if event["kind"] == "train"]
    (entropy,) = [event["unigram_entropy"] for event in events if event["kind"] == "data"]
    held_out = [event["val_loss"] for event in events if event["kind"] == "validation"]
    assert len(losses) == STEPS
    assert losses[-1] < losses[0] / 2
    assert held_out[-1] < 0.7 * entropy

    # Other data under the same names: the training is refused with what changed.
    site.put(jsonl(random.Random(7), 40))
    launch = site.directory / "results/tokenize_mixed/launches/2"
    corpus = [
        "-m",
        "slipway.corpus",
        "run",
        f"--config-path={launch}",
        "--config-name=tokenize_mixed_hydra.yaml",
    ]
    run_command(sys.executable, *corpus, cwd=Path(__file__).parents[2])
    more = [*TRAINING, *site.settings[-2:], f"training.trainer.max_steps={STEPS + 2}"]
    refusal = site.slipway("launch", *more, check=2).stderr
    assert "was trained on other data" in refusal
    assert "source s3://raw/crawl/part 1.jsonl.zst changed (" in refusal
    assert "training.resume.accept_data=data-" in refusal
