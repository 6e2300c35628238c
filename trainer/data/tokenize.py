"""Text files to Megatron's ``.bin``/``.idx``: ``python -m trainer.data.tokenize --input DIR ...``.

Trains a byte-level BPE first if ``--tokenizer-dir`` has none. One document per file, with the end-of-text
token appended. What is written does not depend on the number of workers. Running it again with the same
inputs and options changes nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainer import requirements
from trainer.data import bpe
from trainer.data.corpus import TextFile, collect, fingerprint
from trainer.errors import EXIT_OK, EXIT_USER_ERROR, UserError
from trainer.logs import quiet


@dataclass(frozen=True)
class Summary:
    """Counts of a data set.

    Attributes
    ----------
    documents, tokens
        What was written.
    bytes
        Size of the files that were read, those left out included.
    skipped
        Files left out: empty, or not UTF-8.
    vocabulary_size
        Tokens in the vocabulary.
    unigram_entropy
        Of all tokens, in nats per token.
    tokenizer_sha256
        Of ``vocab.json`` and ``merges.txt``.
    request
        The options and a fingerprint of the inputs.
    """

    documents: int
    tokens: int
    bytes: int
    skipped: int
    vocabulary_size: int
    unigram_entropy: float
    tokenizer_sha256: str
    request: dict[str, Any]

    def line(self, prefix: Path) -> str:
        """Return the summary in one line."""
        return (
            f"{prefix}: {self.documents:,} documents, {self.tokens:,} tokens of a vocabulary of "
            f"{self.vocabulary_size:,}, {self.bytes:,} bytes, {self.skipped:,} files skipped, "
            f"unigram entropy {self.unigram_entropy:.4f} nats per token"
        )

    def write(self, path: Path) -> None:
        """Write as JSON."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")


def read_summary(prefix: Path) -> Summary | None:
    """Return the summary of a complete data set, or None if any of its files is missing or unreadable."""
    if not all(Path(f"{prefix}{suffix}").is_file() for suffix in (".bin", ".idx", ".json")):
        return None
    try:
        return Summary(**json.loads(Path(f"{prefix}.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def main(arguments: Sequence[str] | None = None) -> int:
    """Tokenize; return the exit code: 0 done or nothing to do, 2 a mistake in the options."""
    try:
        options = _parse(arguments)
        requirements.check(requirements.TOKENIZING)
        _run(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return EXIT_USER_ERROR
    return EXIT_OK


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    summary = "Make Megatron's .bin/.idx, and a GPT-2-style tokenizer if there is none, from text files."
    parser = argparse.ArgumentParser(prog="python -m trainer.data.tokenize", description=summary)
    add = parser.add_argument
    add(
        "--input", type=Path, nargs="+", required=True, metavar="PATH", help="files, or directories to search"
    )
    add("--pattern", default="*.txt", help="names to take from directories (default: %(default)s)")
    add(
        "--output-prefix", type=Path, required=True, help="path of the .bin and .idx files without the suffix"
    )
    add("--tokenizer-dir", type=Path, required=True, help="directory of vocab.json and merges.txt")
    add("--vocab-size", type=int, default=2048, help="of a tokenizer trained here (default: %(default)s)")
    add("--workers", type=_positive, default=2, help="processes (default: %(default)s)")
    add("--seed", type=int, default=1234, help="of the order of documents (default: %(default)s)")
    add("--max-files", type=_positive, help="take no more files than this")
    add("--max-bytes", type=_positive, help="take no more bytes than this")
    return parser.parse_args(arguments)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not at least 1")
    return number


def _run(options: argparse.Namespace) -> None:
    began = time.monotonic()
    prefix: Path = options.output_prefix
    if options.vocab_size < bpe.SMALLEST_VOCABULARY:
        raise UserError(f"--vocab-size {options.vocab_size}: expected at least {bpe.SMALLEST_VOCABULARY}")
    files = collect(options.input, options.pattern, options.seed, options.max_files, options.max_bytes)
    request = _request(options, files)
    done = _reusable(options, request)
    if done is not None:
        _say(f"already there, from the same inputs and options: {done.line(prefix)}")
        return
    _say(f"{len(files):,} files, {sum(file.size for file in files):,} bytes")
    _ensure_tokenizer(options, files)
    summary = _tokenize(options, files, request)
    summary.write(Path(f"{prefix}.json"))
    _say(f"{summary.line(prefix)}, {time.monotonic() - began:.1f} s")


def _request(options: argparse.Namespace, files: Sequence[TextFile]) -> dict[str, Any]:
    return {
        "inputs": [str(item) for item in options.input],
        "files": len(files),
        "files_sha256": fingerprint(files, options.workers),
        "pattern": options.pattern,
        "vocab_size": options.vocab_size,
        "seed": options.seed,
        "max_files": options.max_files,
        "max_bytes": options.max_bytes,
    }


def _reusable(options: argparse.Namespace, request: dict[str, Any]) -> Summary | None:
    """Return the summary of an existing data set of the same request and tokenizer."""
    summary = read_summary(options.output_prefix)
    if summary is None or summary.request != request or not bpe.exists(options.tokenizer_dir):
        return None
    return summary if summary.tokenizer_sha256 == _tokenizer_sha256(options.tokenizer_dir) else None


def _ensure_tokenizer(options: argparse.Namespace, files: Sequence[TextFile]) -> None:
    directory: Path = options.tokenizer_dir
    if bpe.exists(directory):
        _say(f"using the tokenizer in {directory}: {bpe.sizes(directory)[0]:,} tokens")
        return
    began = time.monotonic()
    _say(f"training a byte-level BPE of {options.vocab_size:,} tokens")
    bpe.train(directory, files, options.vocab_size)
    _say(f"tokenizer in {directory}: {bpe.sizes(directory)[0]:,} tokens, {time.monotonic() - began:.1f} s")


def _tokenize(options: argparse.Namespace, files: Sequence[TextFile], request: dict[str, Any]) -> Summary:
    quiet()
    # megatron-core takes seconds to import; a mistake in the options is told before that.
    from trainer.data.encode import encode
    from trainer.data.write import write_indexed

    vocabulary = bpe.sizes(options.tokenizer_dir)[0]
    chunks = encode(files, options.tokenizer_dir, options.workers, _say)
    written = write_indexed(options.output_prefix, chunks, vocabulary)
    return Summary(
        documents=written.documents,
        tokens=written.tokens,
        bytes=sum(file.size for file in files),
        skipped=written.skipped,
        vocabulary_size=vocabulary,
        unigram_entropy=written.unigram_entropy,
        tokenizer_sha256=_tokenizer_sha256(options.tokenizer_dir),
        request=request,
    )


def _tokenizer_sha256(directory: Path) -> str:
    digest = hashlib.sha256()
    for name in (bpe.VOCAB, bpe.MERGES):
        digest.update((directory / name).read_bytes())
    return digest.hexdigest()


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
