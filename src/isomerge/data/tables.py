"""Tables of text as rows of cells: .csv, .tsv, and .txt that turn out to be tables; .jsonl and .json as records."""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isomerge.errors import RequestError

DELIMITERS = "\t,;|"
SAMPLE = 200  # lines that tell a format

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
        counts = Counter(len(row) for row in csv.reader(lines[:SAMPLE], delimiter=delimiter))
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
    tables = [_whole([row for row in _cells(lines, delimiter, way) if row]) for way in ways]
    return min(tables, key=lambda table: (table.ragged, -len(table.rows)) if table.ragged else (0, 0))


def _cells(lines: Sequence[str], delimiter: str, way: int) -> list[list[str]]:
    rows = csv.reader((line + "\n" for line in lines), delimiter=delimiter, quoting=way)  # type: ignore[arg-type]
    return list(rows)


def _whole(rows: list[list[str]]) -> TextTable:
    width = Counter(map(len, rows)).most_common(1)[0][0]
    kept = [row for row in rows if len(row) == width]
    return TextTable(kept, len(rows) - len(kept))


def read_records(path: Path) -> list[dict[str, Any]]:
    """The objects of a .jsonl file, or of a list in a .json file."""
    lines = read_lines(path)
    if path.suffix.lower() == ".json":
        lines = ["\n".join(lines)]
    found: list[Any] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            found.append(json.loads(line))
        except ValueError as error:
            raise RequestError(
                f"While reading {path}, line {number}: {error}. One JSON object a line is needed."
            ) from None
    if path.suffix.lower() == ".json":
        inner = found[0]
        found = next((v for v in inner.values() if isinstance(v, list)), []) if isinstance(inner, dict) else inner
    if not found or not all(isinstance(record, dict) for record in found):
        raise RequestError(f"While reading {path}: it does not hold objects with named fields. Write one a line.")
    return found
