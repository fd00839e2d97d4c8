"""Tables of text: rows of cells, records of JSON, and which columns are the texts and which the label."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isomerge.checkpoint.base import name_some
from isomerge.errors import RequestError, near_miss
from isomerge.json_files import JsonError, parse_json

DELIMITERS = "\t,;|"
SAMPLE_LINES = 200  # that tell a format
PAIRS = (
    ("sentence1", "sentence2"), ("#1 string", "#2 string"), ("premise", "hypothesis"), ("question1", "question2"),
    ("question", "sentence"), ("text1", "text2"), ("text_a", "text_b"), ("question", "answer"), ("source", "target"),
    ("prompt", "completion"), ("prompt", "response"), ("input", "output"), ("instruction", "output"),
)  # fmt: skip
TEXTS = (
    "text", "sentence", "utterance", "content", "headline", "tweet", "review", "document", "body", "comment",
    "message", "title", "sit", "sequence", "input", "prompt",
)  # fmt: skip
LABELS = (
    "label", "labels", "label_name", "emotion", "emotions", "class", "category", "target", "quality", "gold_label",
    "score", "rating", "similarity_score", "sentiment", "field1", "intent", "topic",
)  # fmt: skip
SPLITS = ("split", "set", "fold", "partition")
OTHERS = ("id", "index", "idx", "guid")
NOTHING = ("", "0", "---", "-", "0.0", "false", "none")  # how tables write that a label does not apply
SAMPLE_ROWS = 300

csv.field_size_limit(1 << 30)  # whole documents are cells too


@dataclass(frozen=True)
class TextTable:
    """Cells as they are written. `ragged` counts the rows of another length, which are left out."""

    rows: list[list[str]]
    ragged: int = 0


def read_lines(path: Path) -> list[str]:
    """Lines of UTF-8 without their ends. Only real line ends count: texts hold other separators of Unicode."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RequestError(
            f"While reading {path}: byte {error.start} is not UTF-8. Convert the file (iconv -f latin1 -t utf-8)."
        ) from error
    except OSError as error:
        raise RequestError(f"While reading {path}: {error.strerror or error}.") from error
    lines = text.replace("\r\n", "\n").split("\n")
    if lines and not lines[-1]:
        lines.pop()
    if not any(line.strip() for line in lines):
        raise RequestError(f"While reading {path}: the file is empty. Name another.")
    return lines


def find_delimiter(lines: Sequence[str], candidates: str = DELIMITERS) -> str | None:
    """The character that cuts nearly all lines into the same number of cells, more than one; None if none does.

    >>> find_delimiter(["a;b, c", "d, e, f;g"])
    ';'
    """
    best: tuple[float, str] | None = None
    for delimiter in candidates:
        counts = Counter(len(row) for row in _rows(lines[:SAMPLE_LINES], delimiter, csv.QUOTE_MINIMAL))
        columns, often = counts.most_common(1)[0]
        share = often / sum(counts.values())
        if columns > 1 and (best is None or share > best[0] + 0.02):
            best = (share, delimiter)
    return best[1] if best and best[0] >= 0.9 else None


def cut(lines: Sequence[str], delimiter: str) -> TextTable:
    """Cells of a table. Quotes are text in some files and marks in others: the reading with the fewest broken rows.

    Tables by tabs are mostly written without quoting, all others mostly with it; that decides where both readings work.
    """
    ways = [csv.QUOTE_NONE, csv.QUOTE_MINIMAL]
    quoted = all(cell.startswith('"') and cell.endswith('"') for cell in lines[0].split(delimiter))
    if delimiter != "\t" or quoted:
        ways = ways[::-1]
    tables = [_cells(lines, delimiter, way) for way in ways]
    return min(tables, key=lambda table: (table.ragged, -len(table.rows)) if table.ragged else (0, 0))


def _cells(lines: Sequence[str], delimiter: str, way: int) -> TextTable:
    rows = [row for row in _rows([line + "\n" for line in lines], delimiter, way) if row]
    width = Counter(map(len, rows)).most_common(1)[0][0]
    kept = [row for row in rows if len(row) == width]
    return TextTable(kept, len(rows) - len(kept))


def _rows(lines: Sequence[str], delimiter: str, way: int) -> Iterator[list[str]]:
    # A carriage return inside a line is no line end here, and csv refuses it.
    return csv.reader((line.replace("\r", " ") for line in lines), delimiter=delimiter, quoting=way)  # type: ignore[arg-type]


def read_records(path: Path) -> list[dict[str, Any]]:
    """The objects of a .jsonl file, or of a list in a .json file."""
    lines = read_lines(path)
    if path.suffix.lower() == ".json":
        lines = ["\n".join(lines)]
    records: list[Any] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            records.append(parse_json(line))
        except JsonError as error:
            raise RequestError(
                f"While reading {path}, line {number}: {error}. One JSON object a line is needed."
            ) from None
    if path.suffix.lower() == ".json":
        inner = records[0]
        records = next((v for v in inner.values() if isinstance(v, list)), []) if isinstance(inner, dict) else inner
    if not isinstance(records, list) or not records or not all(isinstance(record, dict) for record in records):
        raise RequestError(f"While reading {path}: it does not hold objects with named fields. Write one a line.")
    return records


@dataclass(frozen=True)
class Columns:
    """Positions. Several labels: each is a class that applies or not."""

    texts: tuple[int, ...]
    labels: tuple[int, ...] = ()
    split: int | None = None
    header: tuple[str, ...] | None = None
    guessed: bool = False


def choose_columns(rows: Sequence[Sequence[str]], text: str | None, label: str | None, source: str) -> Columns:
    """`text` and `label` are names or positions from 0 (negative: from the end), several with commas between."""
    first = [cell.strip() for cell in rows[0]]
    plain = [cell.casefold() for cell in first]
    known = {*TEXTS, *LABELS, *SPLITS, *OTHERS, *(name for pair in PAIRS for name in pair)}
    asked = [part for value in (text, label) if value for part in _parts(value, plain)]
    named = any(part.casefold() in plain for part in asked if not _is_position(part))
    # A sentence that happens to be one word of the list is not a header: headers are short and all different.
    has_header = named or (any(cell in known for cell in plain) and all(len(cell) < 60 for cell in plain))
    header = tuple(first) if has_header else None
    body = rows[1:] if header else rows
    if not body:
        raise RequestError(f"While reading {source}: there is a header and no row below it. Name a file with rows.")
    sample = body[:: max(1, len(body) // SAMPLE_ROWS)][:SAMPLE_ROWS]
    texts = _positions("text", text, header, len(first), source) if text else None
    labels = _positions("label", label, header, len(first), source) if label else None
    guessed = texts is None or (labels is None and header is None)
    if texts is None:
        texts = _text_columns(header, sample, labels or ())
        if not texts:
            columns = name_some(list(header), 20) if header else f"{len(first)} columns without names"
            raise RequestError(
                f"While reading {source}: it is not clear which of {columns} holds the texts. Name it with "
                "the option text, by name or position; two of them with a comma between.",
                keys=("text",),
            )
    split = next((i for i, name in enumerate(plain) if header and name in SPLITS), None)
    if labels is None:
        labels = _label_columns(header, sample, (*texts, *(() if split is None else (split,))))
    return Columns(texts, labels, split, header, guessed)


def _text_columns(
    header: tuple[str, ...] | None, sample: Sequence[Sequence[str]], taken: Sequence[int]
) -> tuple[int, ...]:
    if header:
        plain = [name.casefold() for name in header]
        for pair in PAIRS:
            if all(name in plain for name in pair):
                return (plain.index(pair[0]), plain.index(pair[1]))
        named = [plain.index(name) for name in TEXTS if name in plain and plain.index(name) not in taken]
        return (named[0],) if named else ()
    words = [sum(len(row[i].split()) for row in sample) / len(sample) for i in range(len(sample[0]))]
    long = [i for i, mean in enumerate(words) if mean >= 3 and i not in taken]
    if len(long) < 2:
        return tuple(long)
    longest = max(words[i] for i in long)
    return tuple(i for i in long if words[i] > longest / 8)[:2]


def _label_columns(
    header: tuple[str, ...] | None, sample: Sequence[Sequence[str]], taken: Sequence[int]
) -> tuple[int, ...]:
    free = [i for i in range(len(sample[0])) if i not in taken]
    if header:
        plain = [name.casefold() for name in header]
        named = next((plain.index(n) for n in LABELS if n in plain and plain.index(n) in free), None)
        if named is not None:
            return (named,)
        return tuple(free) if len(free) > 1 and all(_is_flag(header[i], sample, i) for i in free) else ()
    few = [i for i in free if _looks_like_label(sample, i)]
    # The label is usually last; elsewhere a number says more than a word, which may be the source of the text.
    if few and few[-1] == len(sample[0]) - 1:
        return (few[-1],)
    numbers = [i for i in few if all(is_number(part) for row in sample for part in row[i].split(","))]
    return tuple((numbers or few)[:1])


def _looks_like_label(sample: Sequence[Sequence[str]], column: int) -> bool:
    values = [row[column].strip() for row in sample]
    if not all(values):
        return False
    if all(is_number(value) for value in values) and any("." in value for value in values):
        return True
    single = {part for value in values for part in value.split(",")}
    return 1 < len(single) <= max(2, len(values) // 3) and max(map(len, single)) < 40


def _is_flag(name: str, sample: Sequence[Sequence[str]], column: int) -> bool:
    """A column that says whether one class applies: 0 or 1, or the name of the class or a dash."""
    values = {row[column].strip().casefold() for row in sample}
    return values <= {*NOTHING, "1", "1.0", "true", name.casefold()}


def _positions(option: str, given: str, header: tuple[str, ...] | None, width: int, source: str) -> tuple[int, ...]:
    plain = [name.casefold() for name in header] if header else []
    positions = []
    for part in _parts(given, plain):
        if part.casefold() in plain:
            positions.append(plain.index(part.casefold()))
        elif _is_position(part) and -width <= int(part) < width:
            positions.append(int(part) % width)
        else:
            known = f"It has {name_some(list(header), 20)}: name one of these." if header else (
                f"It has {width} columns without names: give a position from 0 to {width - 1}."
            )  # fmt: skip
            hint = near_miss(part, header or ())
            known += f" {hint}" if hint else ""
            message = f"While reading {source}: {option} '{part}' is not a column of it. {known}"
            raise RequestError(message, keys=(option,))
    return tuple(positions)


def _parts(given: str, plain: Sequence[str]) -> list[str]:
    """A name may hold a comma itself."""
    return [given] if given.casefold() in plain else [part.strip() for part in given.split(",")]


def _is_position(text: str) -> bool:
    return text.removeprefix("-").isdecimal()


def is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
