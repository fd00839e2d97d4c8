"""The data that a recipe names: opened once, and given to whoever runs a model on it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from isomerge.checkpoint import Checkpoint
from isomerge.data import Data, open_data
from isomerge.data.base import Batch, Batches
from isomerge.merging.recipe.settings import DataSettings

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class DescribedData:
    """What records and locks say of data that is not at hand."""

    name: str
    kind: str
    sha256: str
    size: int
    notes: list[str]


@dataclass
class DataSet:
    """Opened data with what the recipe says about its use."""

    settings: DataSettings
    data: Data
    how: dict[str, Any]
    """The arguments it was opened with; with the path, all it takes to open it again."""
    in_memory: bool = False
    _passes: dict[tuple[int, bool, str], Batches] = field(default_factory=dict)

    def __getstate__(self) -> dict[str, Any]:
        """In a pickle or a copy, data is described and not held: it may be anything, and was used already."""
        data = DescribedData(self.data.name, self.data.kind, self.data.sha256, self.data.size, list(self.data.notes))
        return {**self.__dict__, "data": data, "_passes": {}}

    def passes(self, checkpoint: Checkpoint, *, labels: bool = False, device: str = "cpu") -> Batches:
        """Batches for this model, a fresh iterator at every call; what fits in memory is prepared once for all."""
        key = (id(checkpoint), labels, device)
        if key not in self._passes:
            self._passes[key] = self.data.passes(
                checkpoint, batch_size=self.settings.batch_size, limit=self.settings.limit, labels=labels,
                seed=self.settings.seed, device=device,
            )  # fmt: skip
        return self._passes[key]

    @property
    def examples(self) -> int:
        """How many are used."""
        return self.data.size if self.settings.limit is None else min(self.settings.limit, self.data.size)

    def record(self) -> dict[str, Any]:
        """What cards, reports and locks say of it: no place on this machine."""
        about = {"name": self.data.name, "kind": self.data.kind, "sha256": self.data.sha256}
        return {**about, "size": self.data.size, "examples": self.examples}

    def locked(self) -> dict[str, Any]:
        """… and how to open it again; data that was given as an object has no path."""
        return {**self.record(), "path": None if self.in_memory else self.settings.path, "open": self.how}


@dataclass
class DataSets:
    """Opens each data set once."""

    given: dict[str, Any] = field(default_factory=dict)
    """Data that was given as an object, by the path that stands for it in the recipe."""
    opened: dict[tuple[Any, ...], DataSet] = field(default_factory=dict)

    def named(self, data: Any) -> Any:
        """Data as a recipe can write it; objects are kept aside under a name."""
        if isinstance(data, (list, tuple)) and not _are_batches(data):
            return [self.named(one) for one in data]
        if data is None or isinstance(data, (str, Mapping)):
            return data
        if isinstance(data, os.PathLike):
            return os.fspath(data)
        opened = open_data(data)
        name = opened.name
        while self.given.get(name, opened) is not opened:
            name += "'"
        self.given[name] = opened
        return name

    def open(self, settings: DataSettings, *, prefer: str = "train") -> DataSet:
        """`prefer` is the part to use where there are several and none is named."""
        key = (settings, prefer)
        if key not in self.opened:
            how = {**settings.opening(), "prefer": prefer}
            same = next(
                (one.data for one in self.opened.values() if (one.settings.path, one.how) == (settings.path, how)), None
            )
            given = self.given.get(settings.path)
            data = same or open_data(settings.path if given is None else given, **how)
            self.opened[key] = DataSet(settings, data, how, given is not None)
        return self.opened[key]

    @property
    def notes(self) -> list[str]:
        return list(dict.fromkeys(note for one in self.opened.values() for note in one.data.notes))


def _are_batches(data: Sequence[Any]) -> bool:
    """Tensors by name in every entry: one data set, and not one for each model."""
    return bool(data) and all(
        isinstance(one, Mapping) and bool(one) and all(isinstance(value, Tensor) for value in one.values())
        for one in data
    )


def told(batches: Batches, total: int, progress: Progress | None, what: str) -> Batches:
    """The same batches, each pass shown as a stage of its own."""
    if progress is None:
        return batches

    def one_pass() -> Iterator[Batch]:
        done = 0
        for batch in batches():
            yield batch
            done += len(next(iter(batch.values())))
            progress(done, max(done, total), what)

    return one_pass
