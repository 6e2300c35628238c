"""The specification of a data preparation: the node `data_preparation` of a launch's YAML, checked."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slipway.common import sections
from slipway.common.errors import UserError
from slipway.common.section_types import load as load_section

ROOT = "data_preparation"


class Preparation(sections.DataPreparation):
    """The configuration of a data preparation; `docs/data.md` explains each key."""

    @property
    def units_dir(self) -> Path:
        """Return the directory of finished shards."""
        return self.work_dir / "units"

    @property
    def downloads_dir(self) -> Path:
        """Return the directory of downloaded sources."""
        return self.work_dir / "downloads"

    @property
    def needs_hashes(self) -> bool:
        """Return True if the merge decides by documents' hashes."""
        return self.deduplicate.exact or bool(self.splits)

    def allows(self, bad: int, documents: int) -> bool:
        """Return True if `max_errors` permits `bad` records besides so many documents."""
        if self.max_errors >= 1:
            return bad <= self.max_errors
        return bad <= self.max_errors * (bad + documents)

    def prefix_of(self, split: str | None) -> Path:
        """Return the output prefix of a split; None is the only output."""
        return self.output_prefix if split is None else Path(f"{self.output_prefix}_{split}")


def load(directory: Path, name: str) -> Preparation:
    """Read ``directory/name`` (``.yaml`` may be left out).

    Raises
    ------
    UserError
        If the file is missing or malformed, or a value is not valid.
    """
    import yaml

    path = directory / (name if name.endswith((".yaml", ".yml")) else f"{name}.yaml")
    try:
        config = yaml.safe_load(path.read_bytes().decode())
    except OSError as error:
        raise UserError(f"configuration {path}: {error.strerror}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"configuration {path} is not valid YAML: {error}") from None
    if not isinstance(config, dict) or not isinstance(config.get(ROOT), dict):
        raise UserError(f"configuration {path}: expected a mapping under the root key '{ROOT}'")
    return read(config[ROOT])


def read(config: Mapping[str, Any]) -> Preparation:
    """Check the node `data_preparation`; its `run` is only for the launcher.

    Raises
    ------
    UserError
        Naming the key, its value and what is valid.
    """
    work_dir = config.get("work_dir") or f"{config.get('output_prefix')}.work"
    node = {**config, "work_dir": work_dir}
    node.pop("run", None)
    preparation = load_section(Preparation, node, ROOT)
    source = preparation.tokenizer
    if (source.vocab_url is None) != (source.merges_url is None):
        raise UserError(f"{ROOT}.tokenizer: vocab_url and merges_url are needed together")
    if sum(value is not None for value in (source.vocab_url, source.file, source.url)) > 1:
        raise UserError(f"{ROOT}.tokenizer: expected one of vocab_url with merges_url, file, url")
    return preparation
