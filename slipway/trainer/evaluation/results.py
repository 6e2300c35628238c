"""Results of evaluations: ``step-N.json``, one file for each checkpoint. Imports no torch."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipway.common.errors import UserError
from slipway.common.files import write_atomic
from slipway.trainer.checkpoint.files import text_checksum
from slipway.trainer.checkpoint.store import Checkpoint
from slipway.trainer.logs import LOGGER

VERSION = 1
_EARLIER = "earlier"


@dataclass(frozen=True)
class Results:
    """The results of a training's checkpoints.

    A measurement that is there with the same conditions is not repeated. One with others takes its place, and
    the file that had it goes to ``earlier/``.
    """

    directory: Path
    training: str

    def path(self, step: int) -> Path:
        """Return the file of a step."""
        return self.directory / f"step-{step}.json"

    def has_perplexity(self, checkpoint: Checkpoint) -> bool:
        """Return whether a checkpoint has a held-out loss."""
        return self._read(checkpoint).get("perplexity") is not None

    def perplexity(self, checkpoint: Checkpoint, conditions: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return a checkpoint's held-out loss if it was measured under the same conditions."""
        content = self._read(checkpoint)
        there = content.get("provenance", {}).get("perplexity", {}).get("conditions")
        return content["perplexity"] if there == conditions else None

    def lm_eval(self, checkpoint: Checkpoint, task: str, conditions: Mapping[str, Any]) -> bool:
        """Return whether a requested task was measured under the same conditions."""
        asked = self._read(checkpoint).get("provenance", {}).get("lm_eval", {})
        return bool(asked.get(task, {}).get("conditions") == conditions)

    def add_perplexity(
        self,
        checkpoint: Checkpoint,
        values: Mapping[str, Any],
        provenance: Mapping[str, Any],
        versions: Mapping[str, str],
    ) -> Path:
        """Write a held-out loss, and the versions of libraries that it was measured with; return the file."""
        content = self._read(checkpoint) or self._start_result(checkpoint)
        before, earlier = content["perplexity"], content["provenance"].get("perplexity", {})
        replaces = before is not None and (before != values or _differ(earlier, provenance))
        content["perplexity"] = dict(values)
        content["provenance"]["perplexity"] = dict(provenance)
        content["versions"].update(versions)
        return self._write(checkpoint.marker.step, content, replaces)

    def add_lm_eval(
        self,
        checkpoint: Checkpoint,
        metrics: Mapping[str, Mapping[str, Any]],
        provenance: Mapping[str, Mapping[str, Any]],
        versions: Mapping[str, str],
    ) -> Path:
        """Write the metrics of tasks, the provenance by requested task, and versions; return the file.

        Another request, such as a group, may have measured one of the tasks under its own conditions: it
        goes with all its metrics, and the earlier file keeps them.
        """
        content = self._read(checkpoint) or self._start_result(checkpoint)
        before, requests = content["lm_eval"], content["provenance"].get("lm_eval", {})
        kept = {
            name: item for name, item in requests.items() if metrics.keys().isdisjoint(_find_measured(item))
        }
        names = {name for item in kept.values() for name in _find_measured(item)}
        content["lm_eval"] = {**{name: found for name, found in before.items() if name in names}, **metrics}
        content["provenance"]["lm_eval"] = {**kept, **provenance}
        replaces = any(content["lm_eval"].get(name) != found for name, found in before.items()) or any(
            _differ(item, provenance.get(name, {})) for name, item in requests.items() if name not in kept
        )
        content["versions"].update(versions)
        return self._write(checkpoint.marker.step, content, replaces)

    def _start_result(self, checkpoint: Checkpoint) -> dict[str, Any]:
        return {
            "version": VERSION,
            "checkpoint": str(checkpoint.path.resolve()),
            "step": checkpoint.marker.step,
            "training": self.training,
            "perplexity": None,
            "lm_eval": {},
            "versions": {},
            "provenance": {"weights": weights_digest(checkpoint)},
        }

    def _read(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """Return the result of a checkpoint; empty if it is missing, or of other weights."""
        path = self.path(checkpoint.marker.step)
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            is_ours = content["version"] == VERSION and isinstance(content["provenance"], dict)
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path} is no result of an evaluation ({error}): move it away") from None
        if not is_ours:
            raise UserError(f"{path} was written by another version of Slipway: move it away")
        return content if content["provenance"].get("weights") == weights_digest(checkpoint) else {}

    def _write(self, step: int, content: Mapping[str, Any], replaces: bool) -> Path:
        path = self.path(step)
        self.directory.mkdir(parents=True, exist_ok=True)
        if path.exists() and (replaces or content["provenance"]["weights"] != _weights_in(path)):
            LOGGER.info("%s is replaced: other values; the earlier file is %s", path, self._keep(path))
        write_atomic(path, json.dumps(content, indent=1) + "\n")
        return path

    def _keep(self, path: Path) -> Path:
        earlier = self.directory / _EARLIER
        earlier.mkdir(exist_ok=True)
        number = 1
        while (kept := earlier / f"{path.stem}-{number}.json").exists():
            number += 1
        os.link(path, kept)
        return kept


def weights_digest(checkpoint: Checkpoint) -> str:
    """Return a digest that identifies the weights, from the checksums in the marker."""
    marker = checkpoint.marker
    return text_checksum(json.dumps([marker.training, marker.serial, marker.step, marker.checksums]))


def _differ(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return bool(one.get("conditions") != other.get("conditions"))


def _find_measured(request: Mapping[str, Any]) -> list[str]:
    """Return the names of the metrics that a request for a task or a group has."""
    return list(request.get("metrics", request["documents"]))


def _weights_in(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))["provenance"].get("weights")
