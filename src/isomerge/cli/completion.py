"""What a shell offers after a flag when TAB is pressed. It must be quick, so nothing here imports torch."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

MERGE = Path(__file__).parents[1] / "merging"
DECORATORS = {"methods": "method", "whole": "whole_method"}
"""By the folder of the methods' files: what enters a function into the list of methods."""

Offer = list[tuple[str, str]]


def complete_method(incomplete: str) -> Offer:
    """Methods whose name begins so, each with its summary.

    >>> complete_method("sm")
    [('sma', 'Tail averaging: the mean of the last share of the checkpoints, at least one.')]
    """
    return [(name, summary) for name, summary in method_names().items() if name.startswith(incomplete)]


def method_names() -> dict[str, str]:
    """Every merge method with its summary, read off the sources: the list of methods itself would import torch."""
    found: dict[str, str] = {}
    for folder, decorator in DECORATORS.items():
        for file in sorted((MERGE / folder).glob("*.py")):
            text = file.read_text(encoding="utf-8")
            if f"{decorator}(" in text:
                found |= dict(_entered(ast.parse(text), decorator))
    return dict(sorted(found.items()))


def _entered(tree: ast.Module, decorator: str) -> Iterator[tuple[str, str]]:
    """Functions under the decorator, and those that are given to it: `sma = method(name="sma")(tail)`."""
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    pairs = [(call, function.name) for function in functions.values() for call in function.decorator_list]
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Name):
            pairs.append((node.func, node.args[0].id))
    for call, given in pairs:
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == decorator:
            named = (key.value for key in call.keywords if key.arg == "name")
            own = next((str(value.value) for value in named if isinstance(value, ast.Constant)), given)
            yield own, (ast.get_docstring(functions[given]) or "").split("\n", 1)[0]


def offer(values: Iterable[str]) -> Callable[[str], list[str]]:
    """Completion from values that are known beforehand.

    >>> offer(["grid", "together"])("t")
    ['together']
    """
    known = list(values)

    def complete(incomplete: str) -> list[str]:
        return [value for value in known if value.startswith(incomplete)]

    return complete
