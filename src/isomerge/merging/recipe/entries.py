"""The one walk over a recipe, as it was written or as it was read: every model, slice, source and module in it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from isomerge.merging.recipe.problem_list import Path


@dataclass(frozen=True)
class RecipeEntry:
    """One part of a recipe that may have `parameters`."""

    kind: Literal["recipe", "module", "model", "slice", "source"]
    path: Path
    content: Any
    """A mapping as it was written, or a definition as it was read."""

    @property
    def of_model(self) -> bool:
        """Whether what is set here is set for one model."""
        return self.kind in ("model", "source")

    def get(self, key: str) -> Any:
        return _get(self.content, key)


def walk(recipe: Any) -> Iterator[RecipeEntry]:
    """The recipe itself, then its models, its slices with their sources, and its modules with the same inside.

    Parts that do not have the right form are passed over: what is wrong with them is said elsewhere.
    """
    yield RecipeEntry("recipe", (), recipe)
    yield from _inside(recipe, ())
    modules = _get(recipe, "modules")
    for name, module in modules.items() if isinstance(modules, dict) else ():
        if _is_part(module):
            yield RecipeEntry("module", ("modules", name), module)
            yield from _inside(module, ("modules", name))


def parameter_blocks(recipe: Any) -> Iterator[tuple[Path, dict[str, Any], bool]]:
    """Every `parameters` in a recipe, with whether it belongs to one model."""
    for entry in walk(recipe):
        block = entry.get("parameters")
        if isinstance(block, dict):
            yield (*entry.path, "parameters"), block, entry.of_model


def _inside(holder: Any, path: Path) -> Iterator[RecipeEntry]:
    for i, model in _parts(holder, "models"):
        yield RecipeEntry("model", (*path, "models", i), model)
    for i, one in _parts(holder, "slices"):
        yield RecipeEntry("slice", (*path, "slices", i), one)
        for j, source in _parts(one, "sources"):
            yield RecipeEntry("source", (*path, "slices", i, "sources", j), source)


def _parts(holder: Any, key: str) -> Iterator[tuple[int, Any]]:
    listed = _get(holder, key)
    if isinstance(listed, (list, tuple)):
        yield from ((i, part) for i, part in enumerate(listed) if _is_part(part))


def _get(content: Any, key: str) -> Any:
    return content.get(key) if isinstance(content, dict) else getattr(content, key, None)


def _is_part(value: Any) -> bool:
    return isinstance(value, dict) or hasattr(value, "model_fields_set")
