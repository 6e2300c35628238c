#!/usr/bin/env python3
"""Figures of the structure of the Python packages, printed by `make lint`.

An import inside a function counts like one at the top of a module; an import for types alone does not.
The column `docstrings` counts those that begin with a relative clause or a genitive ("What a plan
needs", "Of a run"). `--verbose` lists what the columns count. Exit code 1: there is such a
docstring, or the launcher or the supervisor has an import circle or two classes of one name.
"""

import ast
import sys
from collections import defaultdict
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp

_ROOT = Path(__file__).resolve().parents[1]
_SIDES = ("arithmetic", "common", "corpus", "supervisor", "trainer", "watch")
_PACKAGES = ("launcher", *(f"slipway.{side}" for side in _SIDES))
_CIRCLES_ALLOWED = ("slipway.trainer",)
_SUBORDINATE = frozenset(
    [
        "what",
        "whatever",
        "whether",
        "where",
        "how",
        "which",
        "who",
        "whoever",
        "whose",
        "whom",
        "why",
        "when",
        "of",
    ]
)


def main() -> int:
    """Print a line per package, and what is against the rules."""
    faults = []
    heads = f"{'lines':>8}{'modules':>9}{'one importer':>14}{'docstrings':>12}{'longest module':>50}"
    print(f"{'package':<20}{heads}")
    for package in _PACKAGES:
        modules = {path: path.read_text() for path in (_ROOT / package.replace(".", "/")).rglob("*.py")}
        graph = graph_of(package)
        lines = {path: text.count("\n") for path, text in modules.items()}
        longest = max(lines, key=lambda path: lines[path])
        alone = single_importers(graph)
        inverted = inverted_docstrings(modules)
        tail = f"{longest.relative_to(_ROOT)} {lines[longest]}"
        print(
            f"{package:<20}{sum(lines.values()):>8}{len(modules):>9}{len(alone):>14}{len(inverted):>12}{tail:>50}"
        )
        if "--verbose" in sys.argv:
            print("".join(f"    {module}  (by {importer})\n" for module, importer in alone.items()), end="")
            print("".join(f"    {text}\n" for text in inverted), end="")
        faults += [f"docstring: {text}" for text in inverted]
        if package not in _CIRCLES_ALLOWED:
            if circle := find_circle(graph):
                faults.append(f"import circle: {' -> '.join(circle)}")
            for name, paths in duplicate_classes(modules).items():
                faults.append(f"class {name} is defined {len(paths)} times: {', '.join(paths)}")
    print("\n".join(faults) or "No import circle, no class name twice, no inverted docstring.")
    return 1 if faults else 0


def graph_of(package: str) -> grimp.ImportGraph:
    """Return the graph of a package alone; grimp builds those of top-level packages."""
    graph = grimp.build_graph(package.split(".")[0], exclude_type_checking_imports=True, cache_dir=None)
    for module in graph.modules - {package} - graph.find_descendants(package):
        graph.remove_module(module)
    return graph


def single_importers(graph: grimp.ImportGraph) -> dict[str, str]:
    """Return the modules, packages left out, that exactly one module imports, each with that module."""
    importers = {
        module: graph.find_modules_that_directly_import(module)
        for module in sorted(graph.modules)
        if not graph.find_children(module)
    }
    return {module: next(iter(by)) for module, by in importers.items() if len(by) == 1}


def find_circle(graph: grimp.ImportGraph) -> list[str]:
    """Return the modules of one import circle, or nothing."""
    sorter = TopologicalSorter(
        {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    )
    try:
        sorter.prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def duplicate_classes(modules: dict[Path, str]) -> dict[str, list[str]]:
    """Return the names that several classes bear, each with the files that define them."""
    places = defaultdict(list)
    for path, text in sorted(modules.items()):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(str(path.relative_to(_ROOT)))
    return {name: paths for name, paths in places.items() if len(paths) > 1}


def inverted_docstrings(modules: dict[Path, str]) -> list[str]:
    """Return the docstrings that begin with a relative clause or a genitive, each as `file:line: text`."""
    inverted = []
    for path, text in sorted(modules.items()):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                words = (ast.get_docstring(node) or "").split()
                if words and words[0].strip(",").lower() in _SUBORDINATE:
                    line = getattr(node, "lineno", 1)
                    inverted.append(f"{path.relative_to(_ROOT)}:{line}: {' '.join(words[:12])}")
    return inverted


if __name__ == "__main__":
    sys.exit(main())
