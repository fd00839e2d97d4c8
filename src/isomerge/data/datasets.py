"""Objects of the `datasets` package, which is imported only to read what it has saved."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from isomerge.data.base import Data
from isomerge.data.columns import LABELS
from isomerge.data.options import DataOptions
from isomerge.data.rows import TAGS, from_records
from isomerge.data.splits import pick_split, same_split
from isomerge.data.texts import TextData
from isomerge.errors import RequestError


def is_dataset(source: Any) -> bool:
    return type(source).__module__.split(".")[0] == "datasets" and hasattr(source, "column_names")


def is_saved_dataset(source: Any) -> bool:
    """A folder that `save_to_disk` wrote."""
    if not isinstance(source, (str, os.PathLike)):
        return False
    return any((Path(source).expanduser() / name).is_file() for name in ("state.json", "dataset_dict.json"))


def load_saved_dataset(path: Any) -> Any:
    try:
        from datasets import load_from_disk
    except ImportError as error:
        raise RequestError(
            f"While opening data {path}: the 'datasets' package saved it and is needed to read it (pip install "
            "isomerge[eval])."
        ) from error
    try:
        return load_from_disk(str(Path(path).expanduser()))
    except (OSError, ValueError, KeyError) as error:
        raise RequestError(f"While opening data {path}: the 'datasets' package could not read it ({error}).") from error


def open_dataset(source: Any, options: DataOptions, tokenizer: Any, prefer: str) -> Data:
    """Texts of a `Dataset` or of one part of a `DatasetDict`."""
    notes: list[str] = []
    name = "a datasets object"
    if isinstance(source, Mapping):
        parts = {same_split(part): part for part in source}
        chosen, notes = pick_split(parts, options.split, prefer, name)
        source, name = source[parts[str(chosen)]], f"{name} ({chosen})"
    if not hasattr(source, "__len__"):
        raise RequestError(f"While reading {name}: it is a stream without an end. Take a part of it: Dataset.take(n).")
    features = getattr(source, "features", None) or {}
    column = next((c for c in ([options.label] if options.label else [*TAGS, *LABELS]) if c in features), None)
    feature = features.get(column) if column else None
    names = getattr(feature, "names", None) or getattr(getattr(feature, "feature", None), "names", None)

    def call(value: Any) -> Any:
        return names[value] if names and isinstance(value, int) and value >= 0 else value

    records = [dict(record) for record in source]
    if not records:
        raise RequestError(f"While reading {name}: it is empty.")
    examples, more = from_records(records, name, replace(options, split=None), prefer, call)
    data = TextData(examples, name, tokenizer=tokenizer, length=options.length)
    data.notes += [*notes, *more]
    return data
