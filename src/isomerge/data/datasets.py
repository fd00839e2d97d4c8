"""Objects of the `datasets` package. It is never imported here: whoever has such an object has imported it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from isomerge.data.base import Data
from isomerge.data.columns import LABELS
from isomerge.data.rows import TAGS, from_records
from isomerge.data.splits import pick_split, same_split
from isomerge.data.texts import TextData
from isomerge.errors import RequestError


def is_dataset(source: Any) -> bool:
    return type(source).__module__.split(".")[0] == "datasets" and hasattr(source, "column_names")


def open_dataset(
    source: Any,
    *,
    split: str | None,
    text: str | None,
    label: str | None,
    length: int | None,
    tokenizer: Any,
    prefer: str,
) -> Data:
    """Texts of a `Dataset` or of one part of a `DatasetDict`."""
    notes: list[str] = []
    name = "a datasets object"
    if isinstance(source, Mapping):
        parts = {same_split(part): part for part in source}
        chosen, notes = pick_split(parts, split, prefer, name)
        source, name = source[parts[str(chosen)]], f"{name} ({chosen})"
    if not hasattr(source, "__len__"):
        raise RequestError(f"While reading {name}: it is a stream without an end. Take a part of it: Dataset.take(n).")
    features = getattr(source, "features", None) or {}
    column = next((c for c in ([label] if label else [*TAGS, *LABELS]) if c in features), None)
    feature = features.get(column) if column else None
    names = getattr(feature, "names", None) or getattr(getattr(feature, "feature", None), "names", None)

    def call(value: Any) -> Any:
        return names[value] if names and isinstance(value, int) and value >= 0 else value

    records = [dict(record) for record in source]
    if not records:
        raise RequestError(f"While reading {name}: it is empty.")
    examples, more = from_records(records, name, text=text, label=label, split=None, prefer=prefer, call=call)
    data = TextData(examples, name, tokenizer=tokenizer, length=length)
    data.notes += [*notes, *more]
    return data
