"""Files as jobs read them, made of bytes: data sets, tokenizers, images; and tables of file systems."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import struct
from collections.abc import Sequence
from pathlib import Path

# The first 96 of the 226 bytes that mksquashfs 4.5.1 made of a directory with a file of six bytes.
SQUASHFS = bytes.fromhex(
    "68737173020000005178026b000002000100000001001100c0000100040000002000000000000000e200000000000000"
    "da00000000000000ffffffffffffffff66000000000000008f00000000000000b400000000000000cc00000000000000"
)
SQUASHFS_SIZE = 226

NFS = "40 1 0:40 / / rw,relatime shared:1 - nfs4 server:/export rw,vers=4.2\n"
DISK = "27 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw\n"


def image(path: Path, size: int = 4096) -> Path:
    """Write an image as mksquashfs does, padded to whole pages."""
    path.write_bytes(SQUASHFS.ljust(4096, b"\0")[:size])
    return path


def index(lengths: list[int], code: int = 8, version: int = 1) -> bytes:
    """Return an ``.idx`` of documents of one sequence each; tokens of code 8 have two bytes."""
    size = {4: 4, 8: 2}[code]
    count = len(lengths)
    starts = [tokens * size for tokens in itertools.accumulate(lengths, initial=0)][:count]
    return b"".join(
        (
            struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", version, code, count, count + 1),
            struct.pack(f"<{count}i", *lengths),
            struct.pack(f"<{count}q", *starts),
            struct.pack(f"<{count + 1}q", *range(count + 1)),
        )
    )


def data_set(prefix: Path, lengths: tuple[int, ...] = (3, 4)) -> Path:
    """Write a data set of tokens of two bytes."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    prefix.with_name(f"{prefix.name}.idx").write_bytes(index(list(lengths)))
    content = prefix.with_name(f"{prefix.name}.bin")
    content.touch()
    os.truncate(content, 2 * sum(lengths))
    return prefix


def manifest(prefix: Path, tokenizer: Sequence[Path]) -> None:
    """Write the manifest of a data set that a tokenizer of one token made."""
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in tokenizer)).hexdigest()
    record = {"kind": "gpt2", "files": [path.name for path in tokenizer], "sha256": digest}
    content = {
        "tokenizer": {**record, "vocabulary_size": 1, "end_of_document": 0},
        "options": {},
        "outputs": [{"path": f"{prefix.name}.bin", "size": Path(f"{prefix}.bin").stat().st_size}],
    }
    prefix.with_name(f"{prefix.name}.manifest.json").write_text(json.dumps(content))


def stock(data_dir: Path) -> Path:
    """Write the files that the shipped GPTs and T5s read: each split has a window."""
    data_set(data_dir / "corpus_text_document", (2100,) * 6300)
    (data_dir / "bpe").mkdir()
    (data_dir / "bpe/vocab.json").write_text('{"<|endoftext|>": 0}')
    (data_dir / "bpe/merges.txt").write_text("#version: 0.2\n")
    (data_dir / "bpe/vocab.txt").write_text("[PAD]\n[CLS]\n[SEP]\n")
    return data_dir
