"""How a merged model is measured: on data by its task, or by a function of the module."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from isomerge.checkpoint import Checkpoint, open_checkpoint
from isomerge.connectivity.barrier import choose_measure
from isomerge.connectivity.measures import Measure, Numbers
from isomerge.data.base import Data
from isomerge.errors import RequestError
from isomerge.evaluation.tasks.custom import is_custom
from isomerge.merging.outcome.merged import Merged, MergedCheckpoint
from isomerge.sweeping.module import Placed

FACTS = ("metric_name", "higher_is_better", "examples")


@dataclass
class Ruler:
    """Data with how it is used. Batches are made once, unless the tokens of the merged model change."""

    data: Data | None
    loss: Callable[[Any], Any] | None
    task: str | None
    batch_size: int | None
    limit: int | None
    seed: int
    device: str
    facts: dict[str, Any] = field(default_factory=dict)
    """Known once something was measured."""
    _made: tuple[Any, Checkpoint, Measure] | None = None

    def at(self, merged: Merged, placed: Placed) -> Numbers:
        measure = self.fit(merged)
        numbers = measure.at(placed, [])
        self.facts = {key: measure.facts.get(key) for key in FACTS}
        return numbers

    def fit(self, merged: Merged) -> Measure:
        """The measure for models with these tokens and this donor; raises where the data is not for them."""
        if self._made is None or self._made[0] is not merged.vocabulary or self._made[1] is not merged.donor:
            reader = _reader(merged)
            measure, _ = choose_measure(
                [reader], self.loss, self.data, self.task, split=None, text=None, label=None, kind=None, length=None,
                tokenizer=None, batch_size=self.batch_size, limit=self.limit, seed=self.seed, device=self.device,
            )  # fmt: skip
            if self.data is not None and not is_custom(self.task):
                _require_labels(self.data, reader, measure.task)
            self._made = merged.vocabulary, merged.donor, measure
        return self._made[2]

    @property
    def notes(self) -> list[str]:
        return list(self.data.notes) if self.data is not None else []


def _reader(merged: Merged) -> Checkpoint:
    """Whose tokenizer or image settings make the batches: the merged model's own."""
    if merged.vocabulary is not None:
        return MergedCheckpoint(merged, "the merged model")
    return open_checkpoint(merged.donor, config=merged.config)


def _require_labels(data: Data, reader: Checkpoint, task: str) -> None:
    """Before anything is aligned or merged."""
    batch = next(iter(data.batches(reader, batch_size=1, limit=1, labels=True, task=task)))
    if "labels" not in batch:
        raise RequestError(
            f"Sweeping on {data.name}: it has no labels. Name their column with --label, or use labelled data."
        )
