"""Texts in one file and their labels in another, line by line: `test_text.txt` beside `test_labels.txt`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from isomerge.data.examples import Example
from isomerge.data.rows import ExamplesAndNotes
from isomerge.data.tables import read_lines
from isomerge.errors import RequestError


def parallel_labels(path: Path) -> bool:
    """Whether this is the file of labels of another."""
    return path.stem.endswith("_labels") and _texts_of(path).is_file()


def _texts_of(path: Path) -> Path:
    return path.with_name(path.name.replace("_labels", "_text"))


def beside(path: Path) -> Callable[[Sequence[str]], ExamplesAndNotes] | None:
    """How to put the labels to the lines of `path`, if there is a file of labels beside it."""
    labels = path.with_name(path.name.replace("_text", "_labels"))
    if not path.stem.endswith("_text") or not labels.is_file():
        return None

    def read(lines: Sequence[str]) -> ExamplesAndNotes:
        given = [line.strip() for line in read_lines(labels)]
        if len(given) != len(lines):
            raise RequestError(f"While reading {path}: it has {len(lines)} lines and {labels.name} has {len(given)}.")
        names = _mapping(path.with_name("mapping.txt"))
        return [
            Example(line.strip(), None, names.get(label, label)) for line, label in zip(lines, given, strict=True)
        ], [f"labels were read from {labels.name}"]

    return read


def _mapping(path: Path) -> dict[str, str]:
    """Numbers to names, where a file says so."""
    if not path.is_file():
        return {}
    cells = [line.split("\t", 1) for line in read_lines(path) if "\t" in line]
    return {number.strip(): name.strip() for number, name in cells}
