"""The code blocks of a document, and the commands that its sentences name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>[\w-]*)[^\n]*\n(?P<code>.*?)^(?P=indent)```", re.DOTALL | re.MULTILINE
)
SPAN = re.compile(r"(?<!`)`([^`]+)`(?!`)")


def documents() -> list[Path]:
    """Every page that a user reads."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def name_of(page: Path) -> str:
    """How the tables here call a page: `README.md`, `docs/guides/strangers.md`."""
    return page.relative_to(ROOT).as_posix()


@dataclass(frozen=True)
class Block:
    """One fenced block: where it stands, its language, its text."""

    page: str
    line: int
    language: str
    code: str

    @property
    def first(self) -> str:
        """Its first line, by which the table of exceptions knows it."""
        return next((line.strip() for line in self.code.splitlines() if line.strip()), "")

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(name_of(page), text.count("\n", 0, found.start()) + 1, found["language"], _unindented(found))
        for found in FENCE.finditer(text)
    ]


def _unindented(found: re.Match[str]) -> str:
    return re.sub(rf"^{found['indent']}", "", found["code"], flags=re.MULTILINE)


def prose_of(page: Path) -> str:
    """A page without its blocks."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def spans_of(page: Path) -> Iterator[str]:
    """What stands between backticks in sentences and tables, on one line each."""
    for found in SPAN.finditer(prose_of(page)):
        yield " ".join(found[1].replace("\\|", "|").split())
