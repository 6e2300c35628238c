"""The manifest of a data set: its origin and its contents, a function of inputs and options alone."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from slipway.arithmetic.indexed import manifest_path
from slipway.common.errors import UserError
from slipway.corpus.cleaning import DropCounts
from slipway.corpus.errors import BadRecord, LeftOut, list_omitted, place
from slipway.corpus.plan import Plan
from slipway.corpus.sources import read_left_out

VERSION = 1
_KEYS = {"sources", "tokenizer", "options", "outputs"}
# Bad records that are named; all are counted.
NAMED = 1000
# Bad records that the last line of a run names.
_SHOWN = 5


def read_manifest(prefix: Path) -> dict[str, Any] | None:
    """Return the manifest of a data set; None if it is missing or cannot be read."""
    try:
        manifest = json.loads(manifest_path(prefix).read_bytes())
    except (OSError, ValueError):
        return None
    is_ours = isinstance(manifest, dict) and manifest.get("version") == VERSION and manifest.keys() >= _KEYS
    return manifest if is_ours else None


def is_complete(plan: Plan) -> bool:
    """Return True if the outputs of this plan are there, with the manifest's sizes.

    Raises
    ------
    UserError
        If another data set is there, and `replace` does not allow to replace it.
    """
    prefix = plan.preparation.output_prefix
    manifest = read_manifest(prefix)
    if manifest is None or manifest.get("key") != plan.key:
        _check_replaceable(plan, manifest)
        return False
    for output in manifest["outputs"]:
        path = prefix.parent / output["path"]
        if not path.is_file() or path.stat().st_size != output["size"]:
            return False
    return True


def _check_replaceable(plan: Plan, manifest: dict[str, Any] | None) -> None:
    preparation, marker = plan.preparation, publishing_file(plan)
    if preparation.replace or (marker.is_file() and marker.read_text() == plan.key):
        return
    prefixes = [preparation.prefix_of(name) for name in preparation.splits or (None,)]
    paths = [Path(f"{prefix}{suffix}") for prefix in prefixes for suffix in (".bin", ".idx")]
    what = "without a manifest that can be read"
    if manifest is not None:
        paths += [preparation.output_prefix.parent / output["path"] for output in manifest["outputs"]]
        others = _differences(plan, manifest)
        if not others:
            # The same, under other names, changed since, or by other versions, is made again.
            return
        names = [Path(source["name"]).name for source in manifest["sources"]]
        made_of = f"{', '.join(names[:_SHOWN])}{', ...' if len(names) > _SHOWN else ''}"
        what = f"made from other {' and '.join(others)} (of {made_of})"
    if any(path.is_file() for path in paths):
        raise UserError(
            f"data_preparation.output_prefix={preparation.output_prefix}: another data set is there, {what}, "
            "and a training may read it: choose another output_prefix (--name NAME), or set "
            "data_preparation.replace=True (--replace)"
        )


def _differences(plan: Plan, manifest: dict[str, Any]) -> list[str]:
    """Return in which of the user's wishes the data set of a manifest differs."""
    others, sources = [], manifest["sources"]
    names = [source["name"] for source in sources] == [file.name for file in plan.files]
    if not names and [source["sha256"] for source in sources] != [file.sha256 for file in plan.files]:
        others.append("sources")
    elif any(
        # Manifests of earlier versions name no key.
        (source["format"], source.get("text_key", file.text_key)) != (file.format, file.text_key)
        for source, file in zip(sources, plan.files, strict=True)
    ):
        others.append("formats or keys of the text")
    mine = {"tokenizer": plan.tokenizer_record, "options": plan.options}
    return others + [name for name, value in mine.items() if manifest[name] != value]


def publishing_file(plan: Plan) -> Path:
    """Return the file that holds a plan's key while its outputs are renamed; a kill may leave some."""
    return plan.preparation.units_dir / "publishing"


def data_manifest(
    plan: Plan,
    records: Sequence[dict[str, Any]],
    drops: DropCounts,
    outputs: Sequence[dict[str, Any]],
    per_file: npt.NDArray[np.int64],
    histogram: npt.NDArray[np.int64],
) -> dict[str, Any]:
    """Return the manifest.

    Parameters
    ----------
    outputs
        Path, size, SHA-256, documents and tokens of each file.
    per_file
        Documents of each source file.
    histogram
        Documents by the number of bits of their length in tokens.
    """
    skipped = [entry for record in records for entry in record["skipped"]]
    data = [output for output in outputs if output["path"].endswith(".bin")]
    files = read_left_out(plan.preparation)
    members = [LeftOut(*entry) for record in records for entry in record["left_out"][1]]
    return {
        "version": VERSION,
        "key": plan.key,
        "sources": [
            {
                "name": file.name,
                "size": file.size,
                "sha256": file.sha256,
                "format": file.format,
                "text_key": file.text_key,
                "documents": int(documents),
            }
            for file, documents in zip(plan.files, per_file, strict=True)
        ],
        "tokenizer": plan.tokenizer_record,
        "options": plan.options,
        "versions": plan.versions,
        "counts": {
            "documents": sum(output["documents"] for output in data),
            "tokens": sum(output["tokens"] for output in data),
            "bytes": sum(file.size for file in plan.files),
            "dropped": drops.record()["counts"],
            "left_out": len(files) + sum(record["left_out"][0] for record in records),
            "bad": sum(record["bad"] for record in records),
            "skipped": [
                {"file": file, "offset": offset, "reason": reason} for file, offset, reason in skipped[:NAMED]
            ],
        },
        "lengths": {str(1 << bits >> 1): int(count) for bits, count in enumerate(histogram) if count},
        "samples": drops.samples(),
        "left_out": [asdict(entry) for entry in (*files, *members)[:NAMED]],
        "outputs": list(outputs),
    }


def summary(plan: Plan, manifest: dict[str, Any]) -> str:
    """Return the contents of a manifest in one line."""
    counts = manifest["counts"]
    dropped, bad = counts["dropped"], counts["bad"]
    prefix = plan.preparation.output_prefix
    text = (
        f"{prefix}: {counts['documents']:,} documents, {counts['tokens']:,} tokens of a vocabulary of "
        f"{plan.tokenizer.vocabulary_size:,}, from {counts['bytes']:,} bytes"
    )
    if plan.preparation.splits:
        text += f" ({', '.join(_split_counts(plan, manifest))})"
    if dropped:
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in dropped.items())
        text += f"; {sum(dropped.values()):,} documents dropped ({reasons})"
    if counts["left_out"]:
        text += f"; {list_omitted([LeftOut(**entry) for entry in manifest['left_out']], counts['left_out'])}"
    if bad:
        shown = [
            place(plan.files[entry["file"]], BadRecord(entry["file"], entry["offset"], entry["reason"]))
            for entry in counts["skipped"][:_SHOWN]
        ]
        more = f"; {bad - len(shown):,} more" if bad > len(shown) else ""
        text += f"; {bad:,} bad records skipped ({'; '.join(shown)}{more})"
    return text


def _split_counts(plan: Plan, manifest: dict[str, Any]) -> Iterator[str]:
    documents = {entry["path"]: entry.get("documents") for entry in manifest["outputs"]}
    for split in plan.preparation.splits or ():
        count = documents[f"{plan.preparation.prefix_of(split).name}.bin"]
        yield f"{split} {count:,}" if count else f"{split} is empty"
