"""The plan of a preparation: sources, units, tokenizer and options, and the keys of what follows."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib import metadata
from typing import Any

from slipway.corpus import tokenizers
from slipway.corpus.cleaning import identity
from slipway.corpus.shards import ShardPaths
from slipway.corpus.sources import read_sources
from slipway.corpus.spec import Preparation
from slipway.corpus.tokenizers import TokenizerFiles
from slipway.corpus.units import SourceFile, Unit, divide

# Version of a shard's content: with another one, shards are made again.
_SHARD_VERSION = 2
_LIBRARIES = ("slipway", "tokenizers")
_CLEANING = ("datatrove", "spacy")


@dataclass(frozen=True)
class Plan:
    """Sources, tokenizer and options of a preparation; a function of its inputs alone."""

    preparation: Preparation
    files: tuple[SourceFile, ...]
    tokenizer: TokenizerFiles

    @cached_property
    def units(self) -> list[Unit]:
        """Return the units of work."""
        return divide(self.files, self.preparation.shard_bytes)

    @cached_property
    def options(self) -> dict[str, Any]:
        """Return the options that change the result."""
        preparation, limit = self.preparation, self.preparation.max_document_bytes
        limits = {} if limit == Preparation.max_document_bytes else {"max_document_bytes": limit}
        return limits | {
            "append_eod": preparation.append_eod,
            "filters": identity(preparation.filters),
            "deduplicate": {
                "exact": preparation.deduplicate.exact,
                "minhash": preparation.deduplicate.minhash and asdict(preparation.deduplicate.minhash),
            },
            "splits": preparation.splits,
            "on_error": preparation.on_error,
            "seed": preparation.seed,
        }

    @cached_property
    def versions(self) -> dict[str, str | None]:
        """Return the versions of the libraries that decide on the tokens."""
        cleans = bool(self.preparation.filters) or self.preparation.deduplicate.minhash is not None
        return {name: _version(name) for name in (*_LIBRARIES, *(_CLEANING if cleans else ()))}

    @cached_property
    def tokenizer_record(self) -> dict[str, Any]:
        """Return the tokenizer as the manifest names it."""
        return {
            "kind": self.tokenizer.kind,
            "files": [path.name for path in self.tokenizer.paths],
            "sha256": self.tokenizer.sha256,
            "vocabulary_size": self.tokenizer.vocabulary_size,
            "end_of_document": self.tokenizer.end_of_document,
        }

    @cached_property
    def key(self) -> str:
        """Return the digest of all that the result depends on."""
        sources = [_identity(file) for file in self.files]
        return _digest([self.options, self.versions, self.tokenizer_record, sources])

    def shard(self, unit: Unit) -> ShardPaths:
        """Return the paths of a unit's shard."""
        return ShardPaths(self.preparation.units_dir, unit.number)

    def unit_key(self, unit: Unit) -> str:
        """Return the digest of all that a unit's shard depends on."""
        pieces = [asdict(piece) for piece in unit.pieces]
        return _digest(
            [self._shared_key, pieces, [_identity(self.files[piece.file]) for piece in unit.pieces]]
        )

    @cached_property
    def _shared_key(self) -> list[Any]:
        names = ("append_eod", "filters", "max_document_bytes")
        options = {name: self.options[name] for name in names if name in self.options}
        preparation = self.preparation
        minhash = self.options["deduplicate"]["minhash"]
        return [
            _SHARD_VERSION,
            options,
            minhash,
            preparation.needs_hashes,
            self.versions,
            self.tokenizer_record,
        ]


def load_plan(preparation: Preparation) -> Plan:
    """Return the plan of what `fetch` has left.

    Raises
    ------
    UserError
        If it has not run.
    """
    return Plan(preparation, tuple(read_sources(preparation)), tokenizers.describe(preparation))


def _identity(file: SourceFile) -> list[Any]:
    return [file.number, file.name, file.sha256, file.format, file.compression, file.text_key]


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
