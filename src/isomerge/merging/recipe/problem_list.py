"""Everything that is wrong with a recipe, collected first and said at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from isomerge.errors import RequestError

Path = tuple[str | int, ...]
"""Where something stands in a recipe: ("models", 1, "parameters", "weight")."""


class Places:
    """The line of every key and list entry of one document. Recipes made in Python have none.

    All are equal: where a recipe was written is no part of what it says.
    """

    def __init__(self, source: str = "the recipe", lines: Mapping[Path, int] | None = None) -> None:
        self.source, self.lines = source, dict(lines or {})

    def line(self, path: Path) -> int | None:
        """The line of a path, or of the nearest thing around it."""
        for length in range(len(path), -1, -1):
            if path[:length] in self.lines:
                return self.lines[path[:length]]
        return None

    def where(self, path: Path) -> str:
        """'line 12', or the path itself where nothing was read from text."""
        line = self.line(path)
        return spelled(path) if line is None else f"line {line}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Places)

    __hash__ = None  # type: ignore[assignment]


def spelled(path: Path) -> str:
    """
    >>> spelled(("models", 1, "parameters"))
    'models[1].parameters'
    """
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return text.removeprefix(".") or "the recipe"


class RecipeError(RequestError):
    """A recipe that cannot be run. `problems` has each of them, as (line or None, sentence)."""

    def __init__(self, message: str, problems: list[tuple[int | None, str]], *, cause: str | None = None) -> None:
        super().__init__(message, problems, cause=cause)  # both, so that it can be sent from one process to another
        self.problems = problems

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass
class Problems:
    """Collects, then raises once."""

    act: str
    """What was being done: 'reading recipe.yml'."""
    found: list[tuple[int | None, str]] = field(default_factory=list)
    missing: set[str] = field(default_factory=set)
    """Keys that the recipe lacks."""
    keys: set[str] = field(default_factory=set)
    """Keys and arguments that a remedy names."""

    def add(self, places: Places, path: Path, text: str, missing: str | None = None) -> None:
        self.missing |= {missing} if missing else set()
        line = places.line(path)
        shown = f"{places.where(path)}: {text}"
        if (line, shown) not in self.found:
            self.found.append((line, shown))

    def general(self, text: str, *, key: str | None = None) -> None:
        """A problem of the models, not of one line. `key` is one whose change would help."""
        self.keys |= {key} if key else set()
        if (None, text) not in self.found:
            self.found.append((None, text))

    def raise_if_any(self) -> None:
        if not self.found:
            return
        ordered = sorted(self.found, key=lambda problem: problem[0] or 0)
        texts = [text.rstrip(".") for _, text in ordered]
        if len(texts) == 1:
            cause, between = f"{texts[0]}.", ": "
        else:
            numbered = "; ".join(f"({i}) {text}" for i, text in enumerate(texts, start=1))
            cause, between = f"{len(texts)} problems: {numbered}.", ", "
        cause = cause.replace("?.", "?")
        error = RecipeError(f"While {self.act}{between}{cause}", ordered, cause=cause)
        error.missing, error.keys = frozenset(self.missing), tuple(sorted(self.keys))
        raise error
