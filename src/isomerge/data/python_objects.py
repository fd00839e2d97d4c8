"""Data that is given as Python objects: ready batches, and objects of the `datasets` package."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from isomerge.checkpoint.base import Checkpoint
from isomerge.data.base import Batch, Data, Wanted
from isomerge.data.examples import TAGS, from_records
from isomerge.data.options import DataOptions
from isomerge.data.splits import pick_split, same_split
from isomerge.data.tables import LABELS
from isomerge.data.texts import TextData
from isomerge.errors import RequestError
from isomerge.packages import why_not_imported


class ReadyData(Data):
    """Taken as they are: no preprocessing, no shuffling; `limit` takes the first examples."""

    kind = "batches"

    def __init__(self, batches: Iterable[Batch] | Callable[[], Iterable[Batch]], name: str = "ready batches") -> None:
        super().__init__()
        self.name, self.classes = name, None
        if callable(batches):
            self._again = batches
        else:
            # An iterator can be gone through once, and everything here is gone through several times.
            kept = list(batches) if isinstance(batches, Iterator) else batches
            self._again = lambda: kept

    @cached_property
    def size(self) -> int:  # type: ignore[override]
        return sum(_length(batch) for batch in self._checked())

    @cached_property
    def sha256(self) -> str:
        digest = hashlib.sha256()
        for batch in self._checked():
            for key in sorted(batch):
                value = batch[key].detach().cpu().contiguous()
                digest.update(f"{key} {value.dtype} {tuple(value.shape)}\n".encode())
                digest.update(value.view(torch.uint8).numpy().tobytes() if value.dim() else str(value.item()).encode())
        return digest.hexdigest()

    def read(self, checkpoint: Checkpoint, wanted: Wanted) -> Iterator[Batch]:
        left = wanted.limit
        for batch in self._checked():
            count = _length(batch) if left is None else min(left, _length(batch))
            if count == 0:
                return
            left = None if left is None else left - count
            yield {k: v[:count].to(wanted.device) for k, v in batch.items() if wanted.labels or k != "labels"}

    def _checked(self) -> Iterator[Batch]:
        number = -1
        for number, batch in enumerate(self._again()):
            yield _plain(batch, number)
        if number < 0:
            raise RequestError(f"Reading {self.name}: there is not one batch. Pass at least one.")


def _plain(batch: Any, number: int) -> Batch:
    good = hasattr(batch, "items") and batch and all(isinstance(v, torch.Tensor) for v in dict(batch).values())
    if not good:
        raise RequestError(
            f"Reading batch {number}: a {type(batch).__name__} is not a mapping of names to tensors, as "
            "{'input_ids': …, 'attention_mask': …}. Pass the keyword arguments of the model's forward."
        )
    lengths = {len(value) for value in batch.values()}
    if len(lengths) != 1:
        raise RequestError(f"Reading batch {number}: its tensors hold {sorted(lengths)} examples. Make them agree.")
    return dict(batch)


def _length(batch: Batch) -> int:
    return len(next(iter(batch.values())))


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
            f"While opening data {path}: the 'datasets' package saved it and is needed to read it; "
            f"{why_not_imported('datasets', error)}."
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
