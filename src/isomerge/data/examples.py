"""Examples of a text data set: rows of tables, records, tagged words, and texts beside a file of labels."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from isomerge.checkpoint.base import name_some
from isomerge.data.options import DataOptions
from isomerge.data.splits import pick_split, same_split
from isomerge.data.tables import LABELS, NOTHING, PAIRS, SPLITS, TEXTS, Columns, TextTable, choose_columns, read_lines
from isomerge.errors import RequestError, did_you_mean

TAGGED_SUFFIXES = (".conll", ".iob", ".iob2", ".bio")

_TAG = re.compile(r"O|[BIESLU]-\S+")
_DOCUMENT = "-DOCSTART-"
WORDS = ("tokens", "words")
TAGS = ("ner_tags", "tags", "labels", "ner", "pos_tags")
Label = str | float | tuple[str, ...] | None
"""A class, a number to predict, several classes at once, the tags of the words; None where it is missing."""


@dataclass(frozen=True)
class Example:
    text: str | tuple[str, ...]
    """A text, or the words of a tagged sentence."""
    pair: str | None = None
    """The second text."""
    label: Label = None


ExamplesAndNotes = tuple[list[Example], list[str]]
"""Examples, and notes on how they were read."""


def from_table(table: TextTable, source: str, options: DataOptions, prefer: str) -> ExamplesAndNotes:
    columns, split = choose_columns(table.rows, options.text, options.label, source), options.split
    body = table.rows[1:] if columns.header else table.rows
    notes = [_layout(columns)] if columns.guessed else []
    if table.ragged:
        notes.append(f"{table.ragged} rows of {source} have another number of columns and were left out")
    if columns.split is not None:
        where = columns.split
        chosen, more = pick_split([same_split(row[where].strip()) for row in body], split, prefer, source)
        body = [row for row in body if same_split(row[where].strip()) == chosen]
        notes += more
    elif split is not None:
        pick_split([], split, prefer, source)  # refuses: the part that was asked for is not there
    return _several([_example(row, columns) for row in body]), notes


def _several(examples: list[Example]) -> list[Example]:
    """Numbers of classes with commas between are several classes at once: '4,27'."""
    labels = [example.label for example in examples if isinstance(example.label, str)]
    if not any("," in x for x in labels) or not all(part.isdecimal() for x in labels for part in x.split(",")):
        return examples
    return [replace(x, label=tuple(x.label.split(","))) if isinstance(x.label, str) else x for x in examples]


def _layout(columns: Columns) -> str:
    def call(positions: Sequence[int]) -> str:
        names = columns.header
        return ", ".join(f"'{names[i]}'" if names else str(i) for i in positions) or "none"

    return f"texts were read from column {call(columns.texts)} and labels from {call(columns.labels)}"


def _example(row: Sequence[str], columns: Columns) -> Example:
    texts = [row[i].strip() for i in columns.texts]
    label: Label
    if len(columns.labels) > 1:
        names = columns.header or tuple(map(str, range(len(row))))
        label = tuple(names[i] for i in columns.labels if row[i].strip().casefold() not in NOTHING)
    elif columns.labels:
        label = row[columns.labels[0]].strip().removeprefix("::").strip() or None
    else:
        label = None
    return Example(texts[0], texts[1] if len(texts) > 1 else None, label)


def from_records(
    records: Sequence[Mapping[str, Any]],
    source: str,
    options: DataOptions,
    prefer: str,
    call: Callable[[Any], Any] = lambda value: value,
) -> ExamplesAndNotes:
    """`call` turns the value of a label into its name, where the source knows names for numbers."""
    text, label, split = options.text, options.label, options.split
    fields = list(dict.fromkeys(key for record in records[:100] for key in record))
    plain = {field.casefold(): field for field in reversed(fields)}
    notes: list[str] = []
    parts = next((plain[name] for name in SPLITS if name in plain), None)
    if parts is not None:
        chosen, notes = pick_split([same_split(str(r.get(parts))) for r in records], split, prefer, source)
        records = [record for record in records if same_split(str(record.get(parts))) == chosen]
    elif split is not None:
        pick_split([], split, prefer, source)  # refuses, as above
    words = _field("text", text, plain, source)[:1] if text else [plain[n] for n in WORDS if n in plain][:1]
    if words and isinstance(records[0].get(words[0]), (list, tuple)):
        tags = _field("label", label, plain, source) if label else [plain[n] for n in TAGS if n in plain]
        return [_tagged(record, words[0], tags[0] if tags else None, call, source) for record in records], notes
    texts = _field("text", text, plain, source) if text else _text_fields(plain, label)
    if not texts:
        raise RequestError(
            f"While reading {source}: none of its fields {name_some(fields, 20)} is known to hold texts. "
            "Name one with the option text, two with a comma between.",
            keys=("text",),
        )
    labels = _field("label", label, plain, source) if label else [
        plain[name] for name in LABELS if name in plain and plain[name] not in texts
    ][:1]  # fmt: skip
    return [_from_record(record, texts, labels, call, source) for record in records], notes


def _text_fields(plain: Mapping[str, str], label: str | None) -> list[str]:
    taken = (label or "").casefold()
    for pair in PAIRS:
        if all(name in plain and name != taken for name in pair):
            return [plain[name] for name in pair]
    return [plain[name] for name in TEXTS if name in plain and name != taken][:1]


def _field(option: str, given: str, plain: Mapping[str, str], source: str) -> list[str]:
    names = [given] if given.casefold() in plain else [part.strip() for part in given.split(",")]
    wrong = [name for name in names if name.casefold() not in plain]
    if wrong:
        raise RequestError(
            f"While reading {source}: {option} '{wrong[0]}' is not a field of it. It has "
            f"{name_some(list(plain.values()), 20)}. {did_you_mean(wrong[0], plain.values())}",
            keys=(option,),
        )
    return [plain[name.casefold()] for name in names]


def _from_record(
    record: Mapping[str, Any], texts: Sequence[str], labels: Sequence[str], call: Callable[[Any], Any], source: str
) -> Example:
    values = [record.get(name) for name in texts]
    if not all(isinstance(value, str) for value in values):
        wrong = next(name for name, value in zip(texts, values, strict=True) if not isinstance(value, str))
        raise RequestError(f"While reading {source}: field '{wrong}' of a record is no text but {record.get(wrong)!r}.")
    if len(labels) > 1:
        label: Label = tuple(n for n in labels if str(record.get(n)).casefold() not in NOTHING)
    else:
        label = _plain_label(record.get(labels[0]), call) if labels else None
    return Example(str(values[0]), None if len(values) < 2 else str(values[1]), label)


def _plain_label(value: Any, call: Callable[[Any], Any]) -> Label:
    if value is None or value == "":
        return None
    if isinstance(value, (list, tuple)):
        return tuple(str(call(part)) for part in value)
    value = call(value)
    if isinstance(value, bool):
        return str(int(value))
    return value if isinstance(value, float) else str(value)


def _tagged(
    record: Mapping[str, Any], words: str, tags: str | None, call: Callable[[Any], Any], source: str
) -> Example:
    given = [record.get(words), record.get(tags) if tags is not None else None]
    if not isinstance(given[0], (list, tuple)) or not isinstance(given[1], (list, tuple, type(None))):
        raise RequestError(f"While reading {source}: words and tags of a record are lists, and one of them is not.")
    sentence = tuple(map(str, given[0]))
    if given[1] is None:
        return Example(sentence)
    label = tuple(str(call(tag)) for tag in given[1])
    if len(label) != len(sentence):
        raise RequestError(f"While reading {source}: a sentence has {len(sentence)} words and {len(label)} tags.")
    return Example(sentence, None, label)


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
    examples: list[Example] = []
    words: list[str] = []
    tags: list[str] = []
    wrong = []

    def close() -> None:
        if words:
            examples.append(Example(tuple(words), None, tuple(tags)))
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
    return examples


def _cells(line: str) -> list[str]:
    cells = [cell.strip() for cell in line.rstrip("\r\n").split("\t")] if "\t" in line else line.split()
    return [*cells[:1], *(cell for cell in cells[1:] if cell)]


def parallel_labels(path: Path) -> bool:
    """Whether this is the file of labels of another."""
    return path.stem.endswith("_labels") and path.with_name(path.name.replace("_labels", "_text")).is_file()


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
