"""Tagged words: one word a line with its tag last, sentences apart by blank lines."""

from __future__ import annotations

import re
from collections.abc import Sequence

from isomerge.checkpoint.base import name_some
from isomerge.data.examples import Example
from isomerge.errors import RequestError

SUFFIXES = (".conll", ".iob", ".iob2", ".bio")
_TAG = re.compile(r"O|[BIESLU]-\S+")
_DOCUMENT = "-DOCSTART-"


def looks_tagged(lines: Sequence[str]) -> bool:
    """
    >>> looks_tagged(["Rome\\tB-LOC", "is\\tO", "", "Hello\\tO"])
    True
    """
    words = [line for line in lines if line.strip()]
    cells = [_cells(line) for line in words]
    tagged = sum(len(cell) > 1 and bool(_TAG.fullmatch(cell[-1])) for cell in cells)
    return bool(words) and tagged >= 0.98 * len(words)


def read_tagged(lines: Sequence[str], source: str) -> list[Example]:
    found: list[Example] = []
    words: list[str] = []
    tags: list[str] = []
    wrong = []

    def close() -> None:
        if words:
            found.append(Example(tuple(words), None, tuple(tags)))
            words.clear()
            tags.clear()

    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.startswith(_DOCUMENT):
            close()
            continue
        cells = _cells(line)
        if len(cells) < 2:
            wrong.append(f"line {number} ({line.strip()[:30]!r})")
            continue
        words.append(cells[0])
        tags.append(cells[-1])
    close()
    if wrong:
        raise RequestError(f"While reading {source}: a word without a tag in {name_some(wrong)}. Write 'word tag'.")
    return found


def _cells(line: str) -> list[str]:
    cells = [cell.strip() for cell in line.rstrip("\r\n").split("\t")] if "\t" in line else line.split()
    return [*cells[:1], *(cell for cell in cells[1:] if cell)]
