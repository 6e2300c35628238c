"""Loading of checkpoints: none that is damaged, executes code, or belongs to an untrusted user."""

from __future__ import annotations

import io
import json
import os
import pickle
import pwd
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from slipway.common.errors import UserError
from slipway.trainer.checkpoint import store
from slipway.trainer.checkpoint.choice import Choice, Chooser
from slipway.trainer.checkpoint.files import share
from slipway.trainer.checkpoint.marker import MARKER, examine_marker, parse_marker, read_marker
from slipway.trainer.config.resume import Resume, read_resume
from slipway.trainer.config.saving import Saving
from slipway.trainer.config.values import Values
from tests.trainer.test_choice import choose
from tests.trainer.test_damages import TRAINING
from tests.trainer.test_retention import BLANK_MARKER

pytestmark = [pytest.mark.trainer, pytest.mark.timeout(300)]

NOBODY = pwd.getpwnam("nobody")


@pytest.fixture
def saving(tmp_path: Path) -> Saving:
    directory = tmp_path / "checkpoints"
    return Saving(True, directory, "m-{step}", every=1, background=True, keep=-1, monitor="step", mode="max")


def save(saving: Saving, step: int) -> store.Checkpoint:
    unfinished = store.begin(saving.directory, f"m-step={step}")
    (unfinished / "__0_0.distcp").write_text(f"weights {step}")
    checksums = store.checksum_part(unfinished, 0)
    files = store.sync_part(unfinished, 0)
    marker = replace(BLANK_MARKER, step=step, files=files, checksums=checksums)
    return store.finish(unfinished, f"m-step={step}", marker)


def test_each_byte_of_a_marker_counts(saving: Saving) -> None:
    content = (save(saving, 1).path / MARKER).read_bytes()
    assert parse_marker(content)[1] is None
    for at in range(len(content)):
        for bit in (0, 3, 5):
            changed = bytearray(content)
            changed[at] ^= 1 << bit
            marker, problem = parse_marker(bytes(changed))
            assert marker is None
            assert problem is not None
        assert parse_marker(content[:at])[0] is None


def test_a_marker_without_checksums_is_of_an_earlier_version(saving: Saving) -> None:
    checkpoint = save(saving, 1)
    values = json.loads((checkpoint.path / MARKER).read_text())
    del values["checksum"], values["checksums"]
    (checkpoint.path / MARKER).write_text(json.dumps(values, indent=1) + "\n")
    old = read_marker(checkpoint.path)
    assert old == replace(checkpoint.marker, checksums={})
    for odd in ({"step": "1"}, {"files": [1]}, {"serial": None}, {"files": {"common.pt": "big"}}):
        (checkpoint.path / MARKER).write_text(json.dumps({**values, **odd}))
        assert examine_marker(checkpoint.path) == (None, f"{MARKER} is not as it was written")


def test_a_named_pipe_is_no_marker_and_no_shard(saving: Saving) -> None:
    first, second, third = (save(saving, step) for step in (1, 2, 3))
    for path in (second.path / "__0_0.distcp", third.path / MARKER):
        path.unlink()
        os.mkfifo(path)
    newest, skipped = store.find_newest(saving.directory)
    assert newest == first
    assert set(skipped) == {second.path, third.path}


def test_each_rank_reads_its_share_and_each_file_is_read_once() -> None:
    sizes = {f"__{rank}_0.distcp": 1000 + rank for rank in range(10)} | {".metadata": 50, "common.pt": 2}
    for ranks in (1, 3, 4, 40):
        shares = [share(sizes, rank, ranks) for rank in range(ranks)]
        assert sorted(name for names in shares for name in names) == sorted(sizes)
        loads = [sum(sizes[name] for name in names) for names in shares]
        assert max(loads) - min(loads) <= max(sizes.values())


def test_a_damaged_checkpoint_is_set_aside_and_nothing_is_overwritten(saving: Saving) -> None:
    first = save(saving, 1)
    for number in range(2):
        damaged = save(saving, 2)
        (damaged.path / "__0_0.distcp").write_text("weights")
        tell = Mock()
        choice = Chooser(saving, Resume(), tell).choose()
        assert choice
        assert choice.checkpoint == first
        tell.assert_called_once()
        path, _, moved_to = tell.call_args.args
        assert path == damaged.path
        assert moved_to == saving.directory / "damaged" / ("m-step=2" if number == 0 else "m-step=2-v1")
        assert (moved_to / "__0_0.distcp").read_text() == "weights"
        assert not damaged.path.exists()
        assert (saving.directory / "latest").readlink() == Path(first.path.name)
    assert store.list_complete(saving.directory) == [first]


def test_checkpoint_read_as_damaged_is_replaced_by_the_next_older(saving: Saving) -> None:
    checkpoints = [save(saving, step) for step in (1, 2, 3)]
    chooser = Chooser(saving, Resume())
    for expected in reversed(checkpoints):
        choice = chooser.choose()
        assert choice == Choice(expected, load_optimizer=True, is_branch=False)
        chooser.reject(choice, "__0_0.distcp has checksum 1, not 2")
    # Never from the start in silence: neither now nor when they have been set aside.
    for candidate in (chooser, Chooser(saving, Resume())):
        with pytest.raises(UserError, match="no whole checkpoint is left") as error:
            candidate.choose()
        assert str(saving.directory / "damaged") in str(error.value)
    store.list_damaged(saving.directory)[0].parent.rename(saving.directory.parent / "elsewhere")
    assert choose(saving, Resume()) is None


def test_damaged_checkpoint_that_cannot_be_moved_is_skipped(
    saving: Saving, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = save(saving, 1), save(saving, 2)

    def refuse(path: Path) -> Path:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(store, "set_aside", refuse)
    chooser = Chooser(saving, Resume())
    chooser.reject(Choice(second, load_optimizer=True, is_branch=False), "it is torn")
    choice = chooser.choose()
    assert choice
    assert choice.checkpoint == first
    assert second.path.is_dir()
    assert "is damaged (it is torn), and cannot be moved: Read-only file system" in caplog.text


def test_a_training_that_writes_no_checkpoints_moves_none(saving: Saving) -> None:
    first, second = save(saving, 1), save(saving, 2)
    (second.path / "__0_0.distcp").write_text("torn")
    choice = choose(replace(saving, enabled=False), Resume())
    assert choice
    assert choice.checkpoint == first
    assert second.path.is_dir()


def test_a_named_checkpoint_that_is_damaged_is_refused_and_stays(saving: Saving) -> None:
    first, _ = save(saving, 1), save(saving, 2)
    chooser = Chooser(saving, Resume(checkpoint="m-step=1", data_generation=1))
    choice = chooser.choose()
    assert choice
    assert choice.checkpoint == first
    with pytest.raises(UserError, match=r"m-step=1 is damaged.*complete ones in .* are m-step=2"):
        chooser.reject(choice, "common.pt is missing")
    assert first.path.is_dir()


@pytest.mark.parametrize("name", ["evaluation", "notes.txt"])
def test_files_that_a_user_adds_are_no_damage(saving: Saving, name: str) -> None:
    checkpoint = save(saving, 1)
    (checkpoint.path / name).mkdir()
    (checkpoint.path / name / "link").symlink_to("nowhere")
    assert store.find_newest(saving.directory) == (checkpoint, {})
    assert choose(saving, Resume()) is not None


def test_another_programs_directories_are_not_moved(saving: Saving) -> None:
    directory = saving.directory
    for name in ("weights", "m-step=9-last"):
        (directory / name / "model_weights").mkdir(parents=True)
        (directory / name / "common.pt").touch()
    assert choose(saving, Resume()) is None
    assert sorted(path.name for path in directory.iterdir()) == ["m-step=9-last", "weights"]


@pytest.mark.skipif(os.geteuid() != 0, reason="files of another user")
@pytest.mark.parametrize("entry", [".", "__0_0.distcp", MARKER])
def test_another_users_checkpoint_is_refused_unless_it_is_trusted(saving: Saving, entry: str) -> None:
    checkpoint = save(saving, 1)
    os.chown(checkpoint.path / entry, NOBODY.pw_uid, NOBODY.pw_gid)
    with pytest.raises(UserError, match=r"training\.resume\.trust_owner=nobody trusts that user") as error:
        choose(saving, Resume())
    assert f"belongs to nobody (user {NOBODY.pw_uid}), neither to you nor to root" in str(error.value)
    with pytest.raises(UserError, match="belongs to nobody"):
        choose(saving, Resume(checkpoint=str(checkpoint.path), trust_owner="daemon"))
    for owner in ("nobody", str(NOBODY.pw_uid)):
        assert choose(saving, Resume(trust_owner=owner)) is not None


def test_trusting_an_owner_is_no_intervention() -> None:
    trusting = read_resume(Values({"resume.trust_owner": 65534}))
    assert trusting == Resume(trust_owner="65534")
    assert trusting.was_made({})
    assert "trust_owner" not in trusting.record()
    with pytest.raises(UserError, match=r"resume.trust_owner=True"):
        read_resume(Values({"resume.trust_owner": True}))


class Canary:
    """A pickle that leaves a file when it is read."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._path),)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("os", "mkdir"),
        ("builtins", "eval"),
        ("torch", "load"),
        ("torch.distributed.checkpoint.filesystem", "os.system"),
        ("torch.distributed.checkpoint.filesystem", "pickle"),
        ("torch.distributed.checkpoint.filesystem", "FileSystemWriter"),
        ("torch.distributed.checkpoint.metadata", "Tensor"),
    ],
)
def test_an_index_names_nothing_but_records(module: str, name: str) -> None:
    from slipway.trainer.checkpoint.reader import _IndexUnpickler

    content = b"\x80\x04" + b"".join(b"\x8c" + bytes([len(text)]) + text.encode() for text in (module, name))
    with pytest.raises(pickle.UnpicklingError, match="nothing that a checkpoint holds"):
        _IndexUnpickler(io.BytesIO(content + b"\x93.")).load()


class AsIn311:
    """A pickle of an attribute, as Python 3.11.0 to 3.11.3 write a member of an enumeration."""

    def __init__(self, owner: type, name: str) -> None:
        self._owner, self._name = owner, name

    def __reduce__(self) -> Any:
        return getattr, (self._owner, self._name)


def test_members_of_enumerations_are_read_as_each_python_writes_them() -> None:
    from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, TensorStorageMetadata

    from slipway.trainer.checkpoint.reader import _IndexUnpickler

    member = _MEM_FORMAT_ENCODING.TORCH_PRESERVE_FORMAT
    for item in (member, AsIn311(_MEM_FORMAT_ENCODING, member.name)):
        assert _IndexUnpickler(io.BytesIO(pickle.dumps(item))).load() is member
    for owner, name in [
        (_MEM_FORMAT_ENCODING, "__class__"),
        (_MEM_FORMAT_ENCODING, "mro"),
        (TensorStorageMetadata, "__init__"),
    ]:
        with pytest.raises(pickle.UnpicklingError, match="nothing that a checkpoint holds"):
            _IndexUnpickler(io.BytesIO(pickle.dumps(AsIn311(owner, name)))).load()


def test_an_object_in_a_shard_executes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from slipway.trainer.checkpoint.reader import restrict_pickles

    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    canary, content = tmp_path / "canary", io.BytesIO()
    torch.save(Canary(canary), content)
    content.seek(0)
    # torch's planner does this for each object.
    with restrict_pickles(), pytest.raises(pickle.UnpicklingError):
        torch.load(content, weights_only=False)
    assert not canary.exists()
    assert os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] == "1"
    assert "TORCH_FORCE_WEIGHTS_ONLY_LOAD" not in os.environ


def poison(file: Path, canary: Path) -> None:
    """Make a file of a checkpoint a pickle that executes, and its marker one that fits."""
    import torch

    if file.name == ".metadata":
        file.write_bytes(pickle.dumps(Canary(canary)))
    else:
        torch.save({"step": 1, "consumed_samples": 1, "optimizer": Canary(canary)}, file)
    checkpoint = file.parent
    marker = read_marker(checkpoint)
    assert marker
    checksums = {name: store.file_checksum(checkpoint / name) for name in marker.files}
    files = {name: (checkpoint / name).stat().st_size for name in marker.files}
    replace(marker, files=files, checksums=checksums).write(checkpoint)


@pytest.mark.parametrize("name", [".metadata", "common.pt"])
def test_a_checkpoint_that_would_execute_is_damaged_and_executes_nothing(
    trainings: Any, tmp_path: Path, name: str
) -> None:
    canary, run = tmp_path / "canary", f"poisoned{name}"
    changes = {**TRAINING, "trainer.max_steps": 6}
    first = trainings(run, changes, arguments=["--stop-after", "4"])
    assert first.codes == [0], first.stderr
    poison(first.log_dir / "checkpoints" / "m-step=4" / name, canary)
    second = trainings(run, changes)
    assert second.codes == [0], second.stderr
    assert not canary.exists()
    assert second.lines("start")[1]["step"] == 2
    (line,) = (first.log_dir / "damaged_checkpoints.jsonl").read_text().splitlines()
    record = json.loads(line)
    assert record["path"] == str(first.log_dir / "checkpoints" / "m-step=4")
    assert record["moved_to"] == str(first.log_dir / "checkpoints" / "damaged" / "m-step=4")
    assert record["reason"].startswith(f"{name} cannot be read: ")
    # Named, it is refused.
    changes_with_name = {**changes, "resume.checkpoint": record["moved_to"], "resume.data_generation": 1}
    refused = trainings(run, changes_with_name)
    assert refused.codes == [2]
    assert f"{record['moved_to']} is damaged ({name} cannot be read: " in refused.stderr[0]
    assert not canary.exists()


def test_no_whole_checkpoint_ends_a_training_with_a_message(trainings: Any) -> None:
    changes = {**TRAINING, "trainer.max_steps": 4}
    first = trainings("lost", changes, arguments=["--stop-after", "2"])
    checkpoints = first.log_dir / "checkpoints"
    (checkpoints / "m-step=2" / ".metadata").write_bytes(b"")
    for _ in range(2):
        again = trainings("lost", changes)
        assert again.codes == [2]
        (message,) = again.stderr[0].splitlines()
        assert f"no whole checkpoint is left in {checkpoints}" in message
        assert "lr" not in message
    assert len(again.lines("start")) == 1


def test_checkpoint_of_an_earlier_version_is_loaded_with_a_note(trainings: Any) -> None:
    changes = {**TRAINING, "trainer.max_steps": 4}
    first = trainings("old", changes, arguments=["--stop-after", "2"])
    path = first.log_dir / "checkpoints" / "m-step=2" / MARKER
    values = json.loads(path.read_text())
    del values["checksum"], values["checksums"]
    path.write_text(json.dumps(values))
    second = trainings("old", changes)
    assert second.codes == [0], second.stderr
    assert second.stdout[0].count("m-step=2 has no checksums") == 1
    assert trainings("old", changes).stdout[0].count("has no checksums") == 0


def test_a_node_that_reads_something_else_condemns_no_checkpoint(
    saving: Saving, monkeypatch: pytest.MonkeyPatch
) -> None:
    from slipway.trainer.checkpoint import reader

    checkpoint = save(saving, 1)
    rank_context: Any = SimpleNamespace(
        world=SimpleNamespace(rank=0), layout=SimpleNamespace(world=2), is_main=True
    )
    finding = reader._Finding("__0_0.distcp", "__0_0.distcp has checksum 1, not 2")

    def gather(findings: list[Any], _: Any) -> None:
        findings[1] = finding

    monkeypatch.setattr("torch.distributed.all_gather_object", gather)
    monkeypatch.setattr(reader, "broadcast_from_rank0", lambda action: action())
    with pytest.raises(RuntimeError, match=r"rank 1 finds that .* and rank 0 does not"):
        reader.verify(checkpoint, rank_context)
    (checkpoint.path / "__0_0.distcp").write_text("weights 7")
    assert "has checksum" in (reader.verify(checkpoint, rank_context) or "")
    finding = reader._Finding("__0_0.distcp", error="Stale file handle")
    with pytest.raises(RuntimeError, match=r"rank 1 cannot read .*: Stale file handle"):
        reader.verify(checkpoint, rank_context)
