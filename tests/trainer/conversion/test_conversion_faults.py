"""Faults of conversions: damaged and foreign checkpoints, outputs that are there, full disks, and kills."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from slipway.common.errors import UserError
from slipway.trainer.checkpoint.marker import MARKER
from slipway.trainer.conversion import __main__ as program
from slipway.trainer.conversion import outputs
from tests.trainer.conftest import config_with
from tests.trainer.conversion.checkpoints import contents, digest, write_checkpoint
from tests.trainer.conversion.test_weight_map import description
from tests.trainer.damages import damage
from tests.trainer.parity.test_parity import FAMILIES
from tests.trainer.probing import run_probe

pytestmark = [pytest.mark.trainer, pytest.mark.timeout(300)]

GPT2, LLAMA = description(FAMILIES["gpt2"]), description(FAMILIES["llama"])
DAMAGES = 60


def export(source: Path, output: Path, *options: str) -> int:
    return program.main(["export", str(source), "--to", str(output), *options])


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory of two checkpoints, of steps 2 and 4."""
    directory = tmp_path_factory.mktemp("pristine")
    write_checkpoint(directory, GPT2, step=2)
    write_checkpoint(directory, GPT2, step=4, seed=1)
    return directory


@pytest.fixture
def source(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "checkpoints", symlinks=True))


def newest(directory: Path) -> Path:
    return directory / "megatron_gpt--step=4"


def hidden(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.name.startswith("."))


def test_damaged_checkpoints_are_refused_by_name(
    source: Path, pristine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chance = random.Random(5)
    output = tmp_path / "out"
    for number in range(DAMAGES):
        path = newest(source)
        kind = damage(path, source / "megatron_gpt--step=2", chance)
        before = sorted(entry.name for entry in path.iterdir())
        assert export(path, output) == 2, (number, kind)
        message = capsys.readouterr().err
        assert str(path) in message, (number, kind, message)
        assert "Traceback" not in message
        assert not output.exists()
        assert hidden(tmp_path) == [], (number, kind)
        assert sorted(entry.name for entry in path.iterdir()) == before
        shutil.rmtree(path)
        shutil.copytree(newest(pristine), path)
    assert export(newest(source), output) == 0


def test_unfinished_checkpoint_is_passed_over_and_refused_by_name(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (newest(source) / MARKER).unlink()
    assert export(newest(source), tmp_path / "out") == 2
    assert f"one of Slipway's has {MARKER}, and is unfinished without it" in capsys.readouterr().err
    assert export(source, tmp_path / "out-{step}") == 0
    assert (tmp_path / "out-2").is_dir()
    assert export(source, tmp_path / "out", "--step", "4") == 2
    assert "conversion.step=4" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "message"),
    [
        # Another architecture of the same names, other names, and another vocabulary.
        (
            replace(GPT2, decoder=replace(GPT2.decoder, ffn_hidden_size=8)),
            "has the shape .* another architecture",
        ),
        (replace(GPT2, decoder=replace(GPT2.decoder, num_layers=1)), "has the shape .* another architecture"),
        (LLAMA, "it is of another architecture"),
        (replace(GPT2, padded_vocabulary=312), r"has the shape \[304, .* or vocabulary"),
        (
            replace(GPT2, vocabulary=replace(GPT2.vocabulary, size=305)),
            "the tokenizer has 305 tokens .* another tokenizer",
        ),
    ],
    ids=["sizes", "layers", "family", "padding", "tokens"],
)
def test_weights_of_another_model_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], model: Any, message: str
) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoints", GPT2)
    marker = replace(checkpoint.marker, model=model.to_json())
    marker.write(checkpoint.path)
    assert export(checkpoint.path, tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert re.search(message, error)
    assert hidden(tmp_path) == []
    assert not (tmp_path / "out").exists()


def configuration(directory: Path, **changes: Any) -> Path:
    """Write the configuration of the training of a checkpoint that does not describe its model."""
    path = directory / "config.yaml"
    base = {"exp_manager.explicit_log_dir": "/x", "model.data.data_impl": "mock"}
    path.write_text(
        yaml.safe_dump(config_with({**base, **FAMILIES["gpt2"], "model.override_vocab_size": 304, **changes}))
    )
    return path


def test_checkpoint_of_an_earlier_version_needs_the_configuration_of_its_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = replace(GPT2, vocabulary=replace(GPT2.vocabulary, size=304))
    described = write_checkpoint(tmp_path / "described", model)
    bare = write_checkpoint(tmp_path / "bare", model, with_model=False)
    assert export(bare.path, tmp_path / "out") == 2
    assert "does not describe its model" in capsys.readouterr().err
    assert export(bare.path, tmp_path / "out", "--model", str(configuration(tmp_path))) == 0
    assert export(described.path, tmp_path / "expected") == 0
    assert digest(tmp_path / "out") == digest(tmp_path / "expected")
    other_epsilon = configuration(tmp_path, **{"model.layernorm_epsilon": 0.5})
    assert export(bare.path, tmp_path / "out", "--model", str(other_epsilon)) == 2
    assert re.search(r"model=\w+, now \w+", capsys.readouterr().err)
    # The tokenizer of the configuration has another number of tokens than the embedding has rows.
    other_tokenizer = configuration(tmp_path, **{"model.override_vocab_size": 320})
    assert export(bare.path, tmp_path / "other", "--model", str(other_tokenizer)) == 2
    assert "it was trained with another" in capsys.readouterr().err
    assert export(bare.path, tmp_path / "other", "--model", str(tmp_path / "no.yaml")) == 2


def test_existing_output_is_reused_or_refused_and_never_changed(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    # An empty directory is taken.
    output.mkdir()
    assert export(newest(source), output) == 0
    before = contents(output)
    assert export(newest(source), output) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"{output}: is there already"
    # A copy of the checkpoint is the same one.
    copy = shutil.copytree(newest(source), tmp_path / "copy")
    assert export(Path(copy), output) == 0
    assert export(source / "megatron_gpt--step=2", output) == 2
    assert f"conversion.output={output}: the result of another conversion" in capsys.readouterr().err
    assert export(newest(source), output, "--dtype", "bfloat16") == 2
    assert "dtype=None, now bfloat16" in capsys.readouterr().err
    assert contents(output) == before
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_text("{}")
    assert export(newest(source), output, "--tokenizer-dir", str(tokenizer)) == 2
    assert "tokenizer=None, now " in capsys.readouterr().err
    # An earlier version's record says nothing of it.
    record = json.loads(before["conversion.json"])
    made_of = {name: value for name, value in record["made_of"].items() if name not in ("tokenizer", "model")}
    (output / "conversion.json").write_text(json.dumps({**record, "made_of": made_of}))
    assert export(newest(source), output) == 0
    (output / "model.safetensors").unlink()
    assert export(newest(source), output) == 2
    assert "its model.safetensors is missing" in capsys.readouterr().err
    user_directory = tmp_path / "own"
    user_directory.mkdir()
    (user_directory / "notes.txt").write_text("mine")
    assert export(newest(source), user_directory) == 2
    assert "is no result of a conversion" in capsys.readouterr().err
    assert contents(user_directory) == {"notes.txt": b"mine"}
    (tmp_path / "link").symlink_to("nowhere")
    assert export(newest(source), tmp_path / "link") == 2
    (tmp_path / "file").write_text("x")
    assert export(newest(source), tmp_path / "file" / "below") == 2
    assert hidden(tmp_path) == []


def test_output_that_another_process_writes_is_refused(source: Path, tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from slipway.trainer.conversion import outputs\n"
        "with outputs.create_directory(Path(sys.argv[1]), {}, 1):\n"
        "    print('writing', flush=True); sys.stdin.read()\n"
    )
    output = tmp_path / "out"
    command = [sys.executable, "-c", script, str(output)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "writing\n"
        busy_error = pytest.raises(UserError, match="another process is writing it")
        with busy_error, outputs.create_directory(output, {}, 1):
            pass
        assert len(hidden(tmp_path)) == 2
    finally:
        process.communicate("")
    assert output.is_dir()
    assert hidden(tmp_path) == []


def test_output_that_another_process_finishes_meanwhile_is_used(source: Path, tmp_path: Path) -> None:
    output, record = tmp_path / "out", {"step": 4}
    with outputs.create_directory(output, record, 1) as unfinished:
        assert unfinished is not None
        (unfinished / "first").write_text("x")
    before = contents(output)
    with outputs.create_directory(output, record, 1) as unfinished:
        assert unfinished is None
        # The lock is still held.
        assert hidden(tmp_path) == [".out.lock"]
    other_error = pytest.raises(UserError, match="the result of another conversion is there")
    with other_error, outputs.create_directory(output, {"step": 2}, 1):
        pass
    assert contents(output) == before
    # A directory that no conversion wrote, and so without the lock.
    taken_error = pytest.raises(UserError, match=f"conversion.output={tmp_path}/new: Directory not empty")
    with taken_error, outputs.create_directory(tmp_path / "new", record, 1):
        (tmp_path / "new").mkdir()
        (tmp_path / "new" / "notes.txt").write_text("mine")
    assert contents(tmp_path / "new") == {"notes.txt": b"mine"}
    assert hidden(tmp_path) == []


def test_file_that_cannot_be_read_is_named_and_not_the_output(tmp_path: Path) -> None:
    output, file = tmp_path / "out", tmp_path / "file"
    file.write_text("x")
    read_error = pytest.raises(
        UserError, match=f"^{file}/below: Not a directory; nothing was written to {output}$"
    )
    with read_error, outputs.create_directory(output, {}, 1):
        (file / "below").read_bytes()
    own_error = pytest.raises(
        UserError, match=f"^conversion.output={output}: Not a directory; nothing was written"
    )
    with own_error, outputs.create_directory(output, {}, 1) as unfinished:
        assert unfinished is not None
        (unfinished / "file").write_text("x")
        (unfinished / "file" / "below").write_text("x")
    assert hidden(tmp_path) == []


_SMALL_DISK = 'mount -t tmpfs -o size=1m tmpfs "$1" && shift && exec "$@"'
_FULL = """
import sys
from pathlib import Path
from slipway.trainer.conversion import __main__ as program, safetensors_files
directory, source = map(Path, sys.argv[1:])
assert program.main(["export", str(source), "--to", str(directory / "large")]) == 2
assert list(directory.iterdir()) == []
write = safetensors_files._write_tensor
def filling(*arguments):
    # Another process fills the disk when the first tensor has been written.
    write(*arguments)
    if not (directory / "filler").exists():
        with (directory / "filler").open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError:
                pass
safetensors_files._write_tensor = filling
small = source.with_name("megatron_gpt--step=2")
assert program.main(["export", str(small), "--to", str(directory / "small")]) == 2
assert [path.name for path in directory.iterdir()] == ["filler"]
(directory / "filler").unlink()
safetensors_files._write_tensor = write
assert program.main(["export", str(small), "--to", str(directory / "small")]) == 0
assert [path.name for path in directory.iterdir()] == ["small"]
"""


def test_full_disk_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root may mount a file system")
    disk = tmp_path / "disk"
    disk.mkdir()
    source = tmp_path / "checkpoints"
    write_checkpoint(source, GPT2, step=2)
    wide = description({**FAMILIES["gpt2"], "model.ffn_hidden_size": 8192})
    large = write_checkpoint(source, wide, step=4)
    script = [sys.executable, "-c", _FULL, str(disk), str(large.path)]
    command = ["unshare", "--mount", "sh", "-c", _SMALL_DISK, "sh", str(disk), *script]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "bytes, and 1,0" in result.stderr
    assert f"conversion.output={disk}/small: No space left on device; nothing was written" in result.stderr


def test_conversion_that_is_killed_at_any_moment_leaves_the_whole_output_or_none(
    pool: Any, source: Path, tmp_path: Path
) -> None:
    counts = run_probe(
        pool, "tests.trainer.conversion.probe_kills", [str(newest(source)), str(tmp_path / "kills")], tmp_path
    )
    assert counts["wrong"] == []
    # Kills before, during and after the writing; most of the first leave files, which are removed later.
    assert counts["absent"] > 20
    assert counts["whole"] >= 1
    assert counts["leftovers"] > 10
    assert counts["terminated"] == []
