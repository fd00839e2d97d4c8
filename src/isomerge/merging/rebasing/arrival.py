"""How much of a fine-tune has arrived: where all models stand on examples that nothing was fitted to.

    share = (L(new base) − L(result)) / (L(base) − L(fine-tune))

with the loss L on labels; without labels, the share of the distance to the fine-tune's predictions that is gone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from isomerge.checkpoint import Checkpoint
from isomerge.data.base import Batch, Batches
from isomerge.errors import RequestError
from isomerge.evaluation.task_choice import choose_task, task_name
from isomerge.evaluation.tasks import Task
from isomerge.merging.layerwise.goals import HELD_OUT, OwnedBatches
from isomerge.running.padding import PaddingMask
from isomerge.running.passes import DataPass, examples_in
from isomerge.running.predictions import distance, rows_of, scores_in
from isomerge.running.stock import StockModel, inputs_of

if TYPE_CHECKING:
    from isomerge.merging.recipe_data import DataSet

TUNED, BASE, ONTO, NAIVE, OUT = "fine-tune", "its base", "new base", "plain addition", "result"


@dataclass(frozen=True)
class Examples:
    """One data set: what the change is fitted on, and what it is measured on."""

    fitted: Batches
    measured: Batches
    is_new: bool
    """False where there are too few examples to keep some aside."""
    labelled: bool

    @classmethod
    def of(cls, data: DataSet, first: Checkpoint) -> Examples:
        """One example of eight is kept aside."""
        train, aside, new = OwnedBatches([data.passes(first)], [[0]]).divided()
        try:
            _, with_labels, _ = OwnedBatches([data.passes(first, labels=True)], [[0]]).divided()
            labelled = "labels" in next(with_labels(), {})
        except RequestError:  # no labels, or those of something else
            labelled = False
        measured = with_labels if labelled else aside
        return cls(train.passes[0], measured.passes[0], new, labelled)

    @property
    def note(self) -> list[str]:
        few = f"with fewer than {HELD_OUT} examples none are kept aside: the result is measured on those it has seen"
        return [] if self.is_new else [few]


class Arrival:
    """Rows of one number for each measure; the fine-tune comes first, as the others are compared with it."""

    def __init__(self, examples: Examples, tuned: Checkpoint, device: str) -> None:
        self._examples, self._device = examples, device
        self._tuned = StockModel.load(tuned, device)
        self._config, self._name = tuned.config, tuned.name
        self.rows: list[dict[str, Any]] = []
        self.add(TUNED, self._tuned)

    def add(self, name: str, model: Checkpoint | StockModel) -> None:
        stock = model if isinstance(model, StockModel) else StockModel.load(model, self._device)
        task, apart, seen = self._task(), 0.0, 0
        for batch in DataPass(self._examples.measured, device=self._device, hashed=False):
            own, wanted = scores_in(stock.run(batch)), scores_in(self._tuned.run(batch))
            apart += examples_in(batch) * sum(_apart(stock.module, field, own, wanted, batch) for field in own)
            seen += examples_in(batch)
            if task is not None:
                task.add(*task.predict(own, batch["labels"]))
        row: dict[str, Any] = {"model": name, "distance": apart / seen}
        if task is not None and task.count:
            score = task.result()
            row |= {"loss": score.loss, score.metric_name: score.metric}
        self.rows.append(row)

    def _task(self) -> Task | None:
        if not self._examples.labelled:
            return None
        try:
            return choose_task(self._config, task_name(self._config, None, self._name))()
        except RequestError:  # a body without a head
            return None

    def record(self) -> dict[str, Any]:
        """The rows and, where the fine-tune has gained something there, the share of it that is in the result."""
        return {"held_out": self.rows, "shares": shares(self.rows), "new_examples": self._examples.is_new}


def shares(rows: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """By measure, of the gain of the fine-tune over its base, what the result has gained over the new base.

    >>> row = lambda name, loss: {"model": name, "distance": 0.0, "loss": loss}
    >>> shares([row("fine-tune", 1.0), row("its base", 3.0), row("new base", 3.5), row("result", 2.0)])
    {'loss': 0.75}
    """
    by_name = {row["model"]: row for row in rows}
    tuned, base, onto, out = (by_name[name] for name in (TUNED, BASE, ONTO, OUT))
    measures = [key for key in tuned if key not in ("model", "distance")]
    if not measures:
        away = onto["distance"]
        return {"distance": 1 - out["distance"] / away if away > 0 else None}
    found: dict[str, float | None] = {}
    for key in measures:
        gain = tuned[key] - base[key] if key != "loss" else base[key] - tuned[key]
        arrived = out[key] - onto[key] if key != "loss" else onto[key] - out[key]
        found[key] = arrived / gain if gain > 0 else None
    return found


@torch.no_grad()
def _apart(model: Any, field: str, own: Mapping[str, Any], wanted: Mapping[str, Any], batch: Batch) -> float:
    values = own[field]
    padding = PaddingMask(inputs_of(batch, model), model)
    valid = padding.of_side(values[..., 0].numel(), encoder=False) if values.dim() > 2 else None
    return float(distance(model, field, rows_of(values, valid), [rows_of(wanted[field], valid)], [1.0]))
