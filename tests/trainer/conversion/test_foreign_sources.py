"""Sources of somebody else: what their files say is data, and what is missing or too much is named."""

from __future__ import annotations

import json
import os
import pathlib
import pickle
import resource
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from slipway.common.errors import UserError
from slipway.trainer.checkpoint.marker import MARKER
from slipway.trainer.checkpoint.reader import read_index
from slipway.trainer.checkpoint.tensor_files import TensorFiles
from slipway.trainer.conversion import __main__ as program
from slipway.trainer.conversion import convert as conversions
from slipway.trainer.conversion.families import config_of, rows_of
from tests.trainer.conversion.checkpoints import write_checkpoint
from tests.trainer.conversion.test_weight_map import description
from tests.trainer.parity.test_parity import FAMILIES

pytestmark = [pytest.mark.trainer, pytest.mark.timeout(120)]

LLAMA = description(FAMILIES["llama"])
UNTIED = replace(LLAMA, decoder=replace(LLAMA.decoder, tied_embeddings=False))
SECRET, ESCAPE = "-----BEGIN PRIVATE KEY-----", "\x1b]52;c;aGk=\x07"


@pytest.fixture(autouse=True)
def small_files() -> Iterator[None]:
    """Let no file become large: what is copied of a hole of a terabyte would fill the disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def write_llama(
    directory: Path, change: Callable[[dict[str, Any]], Any] = lambda _: None, **config: Any
) -> Path:
    """Write a Hugging Face directory; `change` is called with its tensors."""
    directory.mkdir(parents=True)
    model = LLAMA if config.get("tie_word_embeddings") else UNTIED
    generator = torch.Generator().manual_seed(1)
    tensors = {
        name: torch.randn(shape, generator=generator).bfloat16()
        for row in rows_of(model)
        for name, shape in zip(row.theirs, row.their_shapes, strict=True)
    }
    change(tensors)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    content = {**config_of(model, "bfloat16"), "eos_token_id": 1, "bos_token_id": 0, **config}
    (directory / "config.json").write_text(json.dumps(content))
    return directory


def convert(source: Path, output: Path, *options: str) -> int:
    return program.main(["export", str(source), "--to", str(output), *options])


def there_and_back(source: Path, tmp_path: Path, *options: str) -> Path:
    assert convert(source, tmp_path / "ours", "--format", "slipway", *options) == 0
    assert convert(tmp_path / "ours", tmp_path / "back") == 0
    return tmp_path / "back"


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(directory / "model.safetensors")


# --- what the files say is kept


@pytest.mark.parametrize(
    "missing",
    ["lm_head.weight", "model.embed_tokens.weight", "model.norm.weight", "model.layers.1.mlp.up_proj.weight"],
)
def test_weight_that_the_configuration_has_is_never_inferred(
    missing: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_llama(tmp_path / "source", lambda tensors: tensors.pop(missing))
    assert convert(source, tmp_path / "out", "--format", "slipway") == 2
    assert f"it lacks {missing}, which config.json makes part of the model" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_weights_of_several_types_keep_their_values(
    dtype: torch.dtype, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def widen(tensors: dict[str, Any]) -> None:
        for name, tensor in tensors.items():
            if "norm" in name:
                tensors[name] = (torch.randn(tensor.shape) / 3).to(dtype)

    source = write_llama(tmp_path / "source", widen)
    back = tensors_of(there_and_back(source, tmp_path))
    for name, tensor in tensors_of(source).items():
        assert torch.equal(back[name], tensor.float()), name
    assert "float32 holds them all; conversion.dtype names another" in capsys.readouterr().out
    assert convert(source, tmp_path / "half", "--format", "slipway", "--dtype", "bfloat16") == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8])
def test_weights_that_ours_cannot_hold_are_refused_by_name(
    dtype: torch.dtype, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    source = write_llama(tmp_path / "source", lambda tensors: tensors.update({name: tensors[name].to(dtype)}))
    assert convert(source, tmp_path / "out", "--format", "slipway") == 2
    assert f"{name}: {str(dtype)[6:]} does not fit our weights" in capsys.readouterr().err


@pytest.mark.parametrize(
    "tokens",
    [
        {"eos_token_id": None, "bos_token_id": None},
        {"eos_token_id": [1, 2]},
        {"pad_token_id": -1, "mlp_bias": None},
        {},
    ],
)
def test_special_tokens_and_settings_of_generation_come_back(tokens: dict[str, Any], tmp_path: Path) -> None:
    source = write_llama(tmp_path / "source", **tokens)
    generation = {"eos_token_id": [1, 7], "temperature": 0.6, "top_p": 0.9, "do_sample": True}
    (source / "generation_config.json").write_text(json.dumps(generation))
    back = there_and_back(source, tmp_path)
    before, after = (json.loads((path / "config.json").read_text()) for path in (source, back))
    keys = ("bos_token_id", "eos_token_id", "pad_token_id")
    assert [after.get(key, "absent") for key in keys] == [before.get(key, "absent") for key in keys]
    assert json.loads((back / "generation_config.json").read_text()) == generation


def write_tokenizer(directory: Path) -> None:
    from tokenizers import ByteLevelBPETokenizer

    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(["the train"], vocab_size=257, special_tokens=["<|endoftext|>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))


def test_chat_templates_are_part_of_the_tokenizer(tmp_path: Path) -> None:
    source = write_llama(tmp_path / "source")
    write_tokenizer(source)
    (source / "additional_chat_templates").mkdir()
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "additional_chat_templates/tool_use.jinja").symlink_to("../chat_template.jinja")
    back = there_and_back(source, tmp_path)
    from transformers import AutoTokenizer

    assert AutoTokenizer.from_pretrained(back).chat_template == {
        "default": "{{ messages }}",
        "tool_use": "{{ messages }}",
    }


def test_pickled_weights_are_named_with_the_way_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_llama(tmp_path / "source")
    (source / "model.safetensors").rename(source / "pytorch_model.bin")
    assert convert(source, tmp_path / "out", "--format", "slipway") == 2
    message = capsys.readouterr().err
    assert "pytorch_model.bin is a pickle, which is not read" in message
    assert ".save_pretrained(" in message


@pytest.mark.parametrize("rank", ["mp_rank_00", "mp_rank_01_003", "."])
@pytest.mark.parametrize("name", ["iter_0000002", "release", "."])
def test_megatron_lms_checkpoints_of_single_ranks_are_named_with_the_way_out(
    name: str, rank: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "source" / name / rank).mkdir(parents=True)
    (tmp_path / "source" / name / rank / "model_optim_rng.pt").touch()
    if name != ".":
        latest = name.removeprefix("iter_").lstrip("0")
        (tmp_path / "source" / "latest_checkpointed_iteration.txt").write_text(latest)
    assert convert(tmp_path / "source", tmp_path / "out") == 2
    message = capsys.readouterr().err
    assert "in the format torch (mp_rank_00/model_optim_rng.pt)" in message
    assert "--ckpt-convert-format torch_dist" in message


# --- files that are none, or lie elsewhere


def private(path: Path) -> None:
    target = path.parents[1] / "id_rsa"
    target.write_text(SECRET)
    path.unlink(missing_ok=True)
    path.symlink_to(target)


def fifo(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def endless(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")


def huge(path: Path) -> None:
    path.write_bytes(b"{")
    os.truncate(path, 1 << 40)


FILES = [
    *(
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "model.safetensors",
    ),
    *("merges.txt", "chat_template.jinja", "model.safetensors.index.json"),
]


@pytest.mark.parametrize("make", [private, fifo, endless, huge])
@pytest.mark.parametrize("name", FILES)
def test_file_that_is_none_or_lies_elsewhere_is_refused_or_left_out(
    name: str, make: Callable[[Path], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_llama(tmp_path / "source")
    write_tokenizer(source)
    if name.endswith(".index.json"):
        (source / "model.safetensors").unlink()
    make(source / name)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 30, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    if convert(source, tmp_path / "ours", "--format", "slipway") == 0 and make in (private, huge):
        convert(tmp_path / "ours", tmp_path / "back")
    error = capsys.readouterr().err
    written = [path for path in tmp_path.glob("*/**/*") if path.is_file() and source not in path.parents]
    assert not any(SECRET.encode() in path.read_bytes() for path in written)
    # What is no file is none of the tokenizer's.
    assert name in error or (make in (fifo, endless) and not (tmp_path / "back" / name).exists()), error


@pytest.mark.parametrize("name", ["lost+found", "."])
def test_directory_that_may_not_be_read_is_passed_over_or_named(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "source" / "lost+found").mkdir(parents=True)
    (tmp_path / "source" / "zarr").mkdir()
    hidden = tmp_path / "source" / name
    monkeypatch.setattr(os, "access", lambda path, _: Path(path) != hidden)
    assert convert(tmp_path / "source", tmp_path / "out") == 2
    words = "no weights of a known format" if name != "." else "Permission denied"
    assert words in capsys.readouterr().err


def test_links_of_a_hubs_cache_are_followed(tmp_path: Path) -> None:
    plain = write_llama(tmp_path / "plain")
    write_tokenizer(plain)
    cache = tmp_path / "models--a--b"
    snapshot, blobs = cache / "snapshots" / "0f3c", cache / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted(plain.iterdir())):
        path.rename(blobs / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    assert (there_and_back(snapshot, tmp_path) / "tokenizer.json").read_bytes()
    # What only looks like a cache leads nowhere else.
    (tmp_path / "id_rsa").write_text(SECRET)
    (blobs / "9").symlink_to(tmp_path / "id_rsa")
    (snapshot / "tokenizer.json").unlink()
    (snapshot / "tokenizer.json").symlink_to("../../blobs/9")
    assert convert(snapshot, tmp_path / "third", "--format", "slipway") == 0
    assert convert(tmp_path / "third", tmp_path / "fourth") == 2


# --- what no configuration says

DEEP = '{"a":' * 100_000 + "1" + "}" * 100_000
NUMBERS = [10**7, 10**18, 10**400, 0, -1, 1.5, "x", [1], {"a": 1}, True]
KEYS = [
    "num_hidden_layers",
    "hidden_size",
    "vocab_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
]


@pytest.mark.parametrize("key", [*KEYS, "intermediate_size", "max_position_embeddings"])
def test_numbers_of_a_configuration_have_bounds(
    key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_llama(tmp_path / "source")
    content = json.loads((source / "config.json").read_text())
    for value in NUMBERS:
        (source / "config.json").write_text(json.dumps({**content, key: value}))
        code = convert(source, tmp_path / "out", "--format", "slipway")
        message = capsys.readouterr().err
        # A model with 10 million positions is fine.
        assert code == 2 or (key, value) == ("max_position_embeddings", 10**7), (value, message)
        assert code == 0 or key in message or "config.json" in message, (value, message)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(
            (key, value)
            for key in ("rms_norm_eps", "rope_theta", "attention_dropout")
            for value in ("1e999", '"x"')
        ),
        *(("eos_token_id", value) for value in ('"x"', "-1", "1e999", '{"a": 1}', '["x"]', "true")),
        *(("rope_scaling", value) for value in ("[1]", '"x"', '{"rope_type": "linear"}', "7")),
        *(("rope_scaling", '{"rope_type": "llama3"}'), ("hidden_act", '["silu"]'), ("model_type", "[1]")),
        *(("tie_word_embeddings", "1"), ("attention_bias", '"yes"'), ("rms_norm_eps", "NaN"), ("a", DEEP)),
        *(("rope_theta", "0"), ("generation", "1"), ("num_attention_heads", "3")),
    ],
)
def test_a_configuration_of_other_types_is_refused(
    key: str, value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_llama(tmp_path / "source")
    content = json.loads((source / "config.json").read_text())
    content.pop(key, None)
    text = json.dumps(content)[:-1] + f', "{key}": {value}}}'
    (source / "config.json").write_text(text)
    code = convert(source, tmp_path / "out", "--format", "slipway")
    assert code == (0 if key == "generation" else 2)
    assert code == 0 or "config.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", [DEEP, "[" * 100_000, "[]", '{"weight_map": [1]}', '{"weight_map": {"a": "\\ud800/x"}}', "\0", ""]
)
def test_an_index_of_another_form_is_refused(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_llama(tmp_path / "source")
    (source / "model.safetensors").unlink()
    (source / "model.safetensors.index.json").write_text(text)
    for form in ("slipway", "safetensors"):
        assert convert(source, tmp_path / "out", "--format", form) == 2
        assert "model.safetensors.index.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    "change", [{"num_layers": 10**7}, {"hidden_size": "x"}, {"norm_epsilon": float("inf")}]
)
def test_numbers_of_a_markers_model_have_bounds(
    change: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoints", LLAMA)
    content = LLAMA.to_json()
    model = {**content, "decoder": {**content["decoder"], **change}}
    replace(checkpoint.marker, model=model).write(checkpoint.path)
    assert convert(checkpoint.path, tmp_path / "out") == 2
    assert next(iter(change)) in capsys.readouterr().err


# --- indexes of DCP


def setting(target: bytes, attribute: bytes, slots: bool) -> bytes:
    """Return a pickle that sets an attribute of what `target` leaves on the stack."""
    state = b"}" + pickle.SHORT_BINUNICODE + bytes([len(attribute)]) + attribute
    state += pickle.SHORT_BINUNICODE + b"\x05OWNED" + pickle.SETITEM
    return (
        b"\x80\x04" + target + (pickle.NONE + state + pickle.TUPLE2 if slots else state) + pickle.BUILD + b"."
    )


METADATA = b"ctorch.distributed.checkpoint.metadata\n"
TARGETS = [
    (b"cpathlib\nPosixPath\n", b"name"),
    (METADATA + b"Metadata\n", b"storage_data"),
    (METADATA + b"TensorStorageMetadata\n", b"size"),
    (METADATA + b"_MEM_FORMAT_ENCODING\n", b"mro"),
    (METADATA + b"_MEM_FORMAT_ENCODING\nK\x00\x85R", b"_value_"),
    (b"ccollections\nOrderedDict\n", b"get"),
    (b"ctorch\nSize\n", b"numel"),
    (b"ctorch.serialization\n_get_layout\n", b"__doc__"),
    (b"cbuiltins\ngetattr\n", b"__doc__"),
]


def process_state() -> list[Any]:
    from torch.distributed.checkpoint import metadata

    member = metadata._MEM_FORMAT_ENCODING(0)
    layout: Any = torch.serialization._get_layout
    from slipway.trainer.checkpoint import reader

    return [
        *(pathlib.Path("/a/b").name, pathlib.PurePosixPath.__dict__.get("name"), dict(vars(member))),
        *(dict(vars(kind)) for kind in (metadata.Metadata, metadata.TensorStorageMetadata, type(member))),
        *(layout.__doc__, dict(vars(layout)), reader._member.__doc__, dict(vars(reader._member))),
    ]


@pytest.mark.parametrize("slots", [True, False])
@pytest.mark.parametrize(("target", "attribute"), TARGETS)
def test_an_index_changes_nothing_of_the_process(
    target: bytes, attribute: bytes, slots: bool, tmp_path: Path
) -> None:
    before = process_state()
    (tmp_path / ".metadata").write_bytes(setting(target, attribute, slots))
    with pytest.raises(UserError, match=r"\.metadata cannot be read"):
        TensorFiles(tmp_path)
    assert process_state() == before


@pytest.mark.parametrize("content", [{}, [1], "x", None, {"state_dict_metadata": {}}])
def test_an_index_that_is_none_is_refused(content: Any, tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(content))
    with pytest.raises(UserError, match=r"\.metadata cannot be read: it is no index"):
        TensorFiles(tmp_path)


def test_parts_of_an_index_of_other_types_are_refused(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoints", LLAMA).path
    path = checkpoint / ".metadata"
    pristine = path.read_bytes()

    def changed(change: Callable[[Any, Any, Any], Any]) -> None:
        index = pickle.loads(pristine)
        name = next(iter(index.state_dict_metadata))
        change(index, index.state_dict_metadata[name], next(iter(index.storage_data.values())))
        path.write_bytes(pickle.dumps(index))
        with pytest.raises(UserError, match=r"\.metadata"), TensorFiles(checkpoint) as files:
            files.read(name)

    def put(part: Any, name: str, value: Any) -> None:
        object.__setattr__(part, name, value)

    changed(lambda index, *_: put(index, "state_dict_metadata", [1]))
    changed(lambda index, *_: put(index, "storage_data", None))
    changed(lambda index, *_: index.state_dict_metadata.update({3: 1}))
    changed(lambda _, entry, __: put(entry, "size", ["x"]))
    changed(lambda _, entry, __: put(entry, "size", torch.Size([10**14])))
    changed(lambda _, entry, __: put(entry, "chunks", 7))
    changed(lambda _, entry, __: put(entry, "properties", None))
    changed(lambda _, entry, __: put(entry.properties, "dtype", "x"))
    changed(lambda _, entry, __: put(entry.chunks[0], "offsets", torch.Size([0] * 9)))
    changed(lambda *parts: put(parts[2], "offset", "x"))
    changed(lambda *parts: put(parts[2], "length", -1))
    changed(lambda *parts: put(parts[2], "relative_path", "a\0b"))
    changed(lambda *parts: put(parts[2], "relative_path", 7))
    path.write_bytes(pristine)
    assert read_index(path)


def test_a_tensor_of_a_terabyte_takes_no_memory(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoints", LLAMA).path
    index = pickle.loads((checkpoint / ".metadata").read_bytes())
    name, entry = next((n, e) for n, e in index.state_dict_metadata.items() if len(e.size) == 3)
    entry.size = torch.Size([1 << 28, *entry.size[1:]])
    (checkpoint / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(UserError, match="more than all files have"), TensorFiles(checkpoint) as files:
        files.read(name)


# --- what reaches the screen


def test_names_of_a_source_reach_the_screen_escaped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = write_llama(tmp_path / "names", lambda tensors: tensors.update({ESCAPE: torch.zeros(1)}))
    deepspeed = tmp_path / "deepspeed"
    deepspeed.mkdir()
    (deepspeed / "latest").write_text(ESCAPE)
    config = write_llama(tmp_path / "config", hidden_act=ESCAPE)
    link = write_llama(tmp_path / "link")
    (link / "tokenizer.json").symlink_to(f"/{ESCAPE}")
    for source in (ours, deepspeed, config, link, tmp_path / ESCAPE):
        form = "safetensors" if source == deepspeed else "slipway"
        code = convert(source, tmp_path / f"{source.name}-out", "--format", form)
        output = capsys.readouterr()
        assert code == 2 or source == link
        assert "\x1b" not in output.out + output.err
        assert code == 0 or "\\x1b" in output.err


def test_a_checkpoint_that_is_removed_meanwhile_is_replaced_by_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints = tmp_path / "checkpoints"
    write_checkpoint(checkpoints, LLAMA, step=1)
    original = conversions._convert_checkpoint

    def with_training(conversion: Any, checkpoint: Any) -> Any:
        if checkpoint.marker.step < 3:
            write_checkpoint(checkpoints, LLAMA, step=checkpoint.marker.step + 1)
            for path in checkpoint.path.glob("*.distcp"):
                path.unlink()
            (checkpoint.path / MARKER).unlink()
        return original(conversion, checkpoint)

    monkeypatch.setattr(conversions, "_convert_checkpoint", with_training)
    assert convert(checkpoints, tmp_path / "out-{step}") == 0
    assert (tmp_path / "out-3").is_dir()
    assert capsys.readouterr().out.count("removed by the training meanwhile") == 2


def test_a_check_of_a_model_with_many_positions_has_bounds() -> None:
    from slipway.trainer.conversion import check

    shape = replace(LLAMA.decoder, max_positions=131072, seq_length=131072)
    tokens, _ = check._tokens(Path("/nowhere"), replace(LLAMA, decoder=shape), None, 8)
    assert tuple(tokens.shape) == (8, 2049)
