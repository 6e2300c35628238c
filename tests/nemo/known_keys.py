"""Print, as JSON, the keys that NeMo and Lightning themselves know; run with NeMo's interpreter.

For `trainer` and `exp_manager` these are schemas that refuse all others. For `model` there is none: NeMo's
code is read for the names under which it asks a configuration: they decide whether a key there does anything.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# The code that builds, feeds, optimises and trains the GPT, T5 and BERT models.
_READ = (
    "collections/common/metrics",
    "collections/nlp/data/language_modeling",
    "collections/nlp/models/language_modeling",
    "collections/nlp/models/nlp_model.py",
    "collections/nlp/modules/common",
    "collections/nlp/parts",
    "core/classes",
    "core/config",
    "core/optim",
    "utils/callbacks",
)


def keys_of_schema(schema: Any, prefix: str = "") -> Iterator[str]:
    for key, value in schema.items():
        yield f"{prefix}{key}"
        if isinstance(value, dict):
            yield from keys_of_schema(value, f"{prefix}{key}.")


def requested_names(source: str) -> Iterator[str]:
    """Yield the names that code reads: ``x.name``, ``x["name"]``, ``x.get("name")``, ``"name" in x``.

    Parameters' names too: nodes are handed on as keyword arguments.
    """
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(attr=name) | ast.Subscript(slice=ast.Constant(value=str(name))):
                yield name
            case ast.Call(args=[ast.Constant(value=str(name)), *_]):
                yield name
            case ast.Call(args=[_, ast.Constant(value=str(name)), *_]):
                yield name
            case ast.Compare(left=ast.Constant(value=str(name))):
                yield name
            case ast.arg(arg=name):
                yield name


def main() -> None:
    import nemo
    from lightning.pytorch import Trainer
    from megatron.core.transformer.transformer_config import MLATransformerConfig
    from nemo.utils.exp_manager import ExpManagerConfig
    from omegaconf import OmegaConf

    schema = OmegaConf.to_container(OmegaConf.structured(ExpManagerConfig))
    names = {field.name for field in dataclasses.fields(MLATransformerConfig)}
    root = Path(nemo.__file__).parent
    for place in _READ:
        path = root / place
        for file in [path] if path.is_file() else path.rglob("*.py"):
            names.update(requested_names(file.read_text()))
    known = {
        "trainer": sorted(set(inspect.signature(Trainer.__init__).parameters) - {"self"}),
        "exp_manager": sorted(keys_of_schema(schema)),
        "model": sorted(names),
    }
    print(json.dumps(known))


if __name__ == "__main__":
    main()
