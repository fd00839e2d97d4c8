"""Rows of a table or records of a JSON file as examples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from isomerge.checkpoint.base import name_some
from isomerge.data.columns import LABELS, NOTHING, PAIRS, SPLITS, TEXTS, Columns, choose_columns
from isomerge.data.examples import Example, Label
from isomerge.data.options import DataOptions
from isomerge.data.splits import pick_split, same_split
from isomerge.data.tables import TextTable
from isomerge.errors import RequestError, did_you_mean

WORDS = ("tokens", "words")
TAGS = ("ner_tags", "tags", "labels", "ner", "pos_tags")

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
    words = _field("--text", text, plain, source)[:1] if text else [plain[n] for n in WORDS if n in plain][:1]
    if words and isinstance(records[0].get(words[0]), (list, tuple)):
        tags = _field("--label", label, plain, source) if label else [plain[n] for n in TAGS if n in plain]
        return [_tagged(record, words[0], tags[0] if tags else None, call, source) for record in records], notes
    texts = _field("--text", text, plain, source) if text else _text_fields(plain, label)
    if not texts:
        raise RequestError(
            f"While reading {source}: none of its fields {name_some(fields, 20)} is known to hold texts. "
            "Name one with --text NAME, two with a comma between."
        )
    labels = _field("--label", label, plain, source) if label else [
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
            f"{name_some(list(plain.values()), 20)}. {did_you_mean(wrong[0], plain.values())}"
        )
    return [plain[name.casefold()] for name in names]


def _from_record(
    record: Mapping[str, Any], texts: Sequence[str], labels: Sequence[str], call: Callable[[Any], Any], source: str
) -> Example:
    found = [record.get(name) for name in texts]
    if not all(isinstance(value, str) for value in found):
        wrong = next(name for name, value in zip(texts, found, strict=True) if not isinstance(value, str))
        raise RequestError(f"While reading {source}: field '{wrong}' of a record is no text but {record.get(wrong)!r}.")
    if len(labels) > 1:
        label: Label = tuple(n for n in labels if str(record.get(n)).casefold() not in NOTHING)
    else:
        label = _plain_label(record.get(labels[0]), call) if labels else None
    return Example(str(found[0]), None if len(found) < 2 else str(found[1]), label)


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
    said = tuple(map(str, record[words]))
    if tags is None or record.get(tags) is None:
        return Example(said)
    label = tuple(str(call(tag)) for tag in record[tags])
    if len(label) != len(said):
        raise RequestError(f"While reading {source}: a sentence has {len(said)} words and {len(label)} tags.")
    return Example(said, None, label)
