"""An ensemble as one module: forward as its members have it, predictions for data, and a manifest to save.

>>> both = isomerge.make_ensemble(["model-a", "model-b"], "logit")
>>> both(**next(batches())).logits.shape
torch.Size([8, 5])
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from isomerge.data.base import Batch, Data, DataSource, draw
from isomerge.data.open import open_data
from isomerge.data.task_heads import label_names
from isomerge.ensembling.combinations import Combination, Shares
from isomerge.ensembling.members import differ, home_of
from isomerge.ensembling.outputs import joined, kind_of
from isomerge.errors import RequestError
from isomerge.evaluation.measure import usual_batch
from isomerge.evaluation.task_choice import choose_task, require_fitting
from isomerge.evaluation.tasks import Task, logits_of
from isomerge.results import Result
from isomerge.running.stock import StockModel

PREDICTED = ("image", "sequence", "regression")


@dataclass
class EnsemblePredictions(Result):
    """What an ensemble predicts for every example, in the order of the data."""

    labels: list[str]
    """The names of the outputs; none where a number is predicted."""
    probabilities: list[list[float]]
    """One row for each example. Where a number is predicted, that number alone."""
    predicted: list[Any]
    """The likeliest label; of labels that may all hold, those above one half; or the number."""
    notes: list[str]
    seconds: float


class Ensemble(nn.Module):
    """Several stock models that predict together.

    `forward` takes what the members' classes take, and gives the output class of the first with the combined `logits`
    (log-probabilities, so that a softmax gives the combined probabilities) and, with `labels`, the `loss`. No gradients
    are computed.
    """

    def __init__(self, stock: Sequence[StockModel], task: str, combination: Combination, shares: Shares) -> None:
        super().__init__()
        self.members = nn.ModuleList(one.module for one in stock)
        self.stock, self.task, self.combination, self.shares = tuple(stock), task, combination, shares
        self.config = stock[0].module.config
        self.kind = kind_of(task, stock[0].checkpoint.config)
        self.fitted_on: dict[str, Any] | None = None
        """The held-out data, as records describe data."""
        self.notes: list[str] = []
        """What was decided, and what a reader of its numbers should know."""

    @property
    def device(self) -> torch.device:
        return home_of(self.stock[0])

    @property
    def dtype(self) -> torch.dtype:
        found: torch.dtype = next(self.members[0].parameters()).dtype
        return found

    # --- one batch ----------------------------------------------------------------------------------------------------
    def forward(self, **batch: Any) -> Any:
        batch.pop("return_dict", None)
        self._require_one_reading()
        outputs = [one.run(self._at(batch, one)) for one in self.stock]
        logits = self.join([logits_of(output) for output in outputs], batch)
        return self._as_stock(outputs[0], logits, batch.get("labels"))

    def member_logits(self, batches: Sequence[Batch]) -> list[Tensor]:
        """The outputs of every member for its own batch."""
        return [logits_of(one.run(batch)) for one, batch in zip(self.stock, batches, strict=True)]

    def join(self, logits: Sequence[Tensor], batch: Batch) -> Tensor:
        """The members' outputs to one. `batch` is that of the first member."""
        return joined(logits, self.kind, self.combination, self.shares)

    def new_task(self) -> Task:
        """What scores predictions, with all counts at zero."""
        return choose_task(self.stock[0].checkpoint.config, self.task)()

    def _as_stock(self, output: Any, logits: Tensor, labels: Tensor | None, **more: Any) -> Any:
        loss = None
        if labels is not None:
            task = self.new_task()
            task.add(*task.predict({"logits": logits}, labels.to(logits.device)))
            loss = logits.new_tensor(task.result().loss)
        name = "logits" if "logits" in output else "prediction_logits"
        return type(output)(**{"loss": loss, name: logits, **more})

    @staticmethod
    def _at(batch: Batch, one: StockModel) -> Batch:
        return {name: value.to(home_of(one)) if isinstance(value, Tensor) else value for name, value in batch.items()}

    def _require_one_reading(self) -> None:
        """Images are the same numbers to all; tokens are, where all have the same."""
        if self.task not in ("sequence", "token", "regression", "masked-lm", "seq2seq"):
            return
        rows = {one.module.get_input_embeddings().weight.shape[0] for one in self.stock}
        if len(rows) > 1:
            raise RequestError(
                f"Running an ensemble on tokens: its members have tables of {sorted(rows)} tokens, so no one batch is "
                "for all of them. Use predict with texts, which each member reads with its own tokenizer."
            )

    # --- data ---------------------------------------------------------------------------------------------------------
    def read(
        self, data: Data, *, batch_size: int | None = None, limit: int | None = None, labels: bool = True, seed: int = 0
    ) -> Iterator[tuple[Batch, ...]]:
        """The same examples for every member side by side, each read with its own tokenizer or image settings."""
        for one in self.stock:
            require_fitting(data, self.task, one.checkpoint.name)
        # One size for all, the smallest that any of them wants: batches go through the models side by side.
        size = batch_size or min(usual_batch(one.checkpoint.config, self.task) for one in self.stock)
        own = [
            data.batches(
                one.checkpoint, batch_size=size, limit=limit, labels=labels, seed=seed, device=str(home_of(one)),
                task=self.task,
            )
            for one in self.readers()
        ]  # fmt: skip
        for side_by_side in zip_longest(*own):
            if None in side_by_side:  # one of them has more batches than another
                fewer, more = (
                    next(
                        one for one, batch in zip(self.stock, side_by_side, strict=False) if (batch is None) is missing
                    )
                    for missing in (True, False)
                )
                raise differ(more.checkpoint, fewer.checkpoint)
            yield self.of_readers(side_by_side)

    def readers(self) -> Sequence[StockModel]:
        """Those whose tokenizer or image settings read the data."""
        return self.stock

    def of_readers(self, batches: tuple[Batch, ...]) -> tuple[Batch, ...]:
        """One batch for every member."""
        return batches

    def predict(self, data: DataSource, *, tokenizer: Any = None, batch_size: int | None = None) -> EnsemblePredictions:
        """The combined probabilities of every example; labels are not needed.

        >>> found = isomerge.make_ensemble(["model-a", "model-b"]).predict("cifar10.tar.xz")
        >>> set(found.predicted) <= set(found.labels)
        True
        """
        start = time.perf_counter()
        if self.task not in PREDICTED:
            raise RequestError(
                f"Predicting by an ensemble for '{self.task}': predict gives one answer for each example. Use generate "
                "for texts, and forward for everything else."
            )
        opened = open_data(data, tokenizer=tokenizer, prefer="test")
        rows = []
        for batches in self.read(opened, batch_size=batch_size, labels=False):
            rows.append(self.join(self.member_logits(batches), batches[0]).cpu())
        logits = torch.cat(rows)
        if opened.kind != "batches":  # examples are read in an order of their own
            size = opened.size if opened.limit else len(logits)
            logits = logits[torch.from_numpy(np.argsort(draw(size, opened.limit, 0)))]
        names = [] if self.kind == "numbers" else label_names(self.stock[0].checkpoint.config)
        if self.kind == "numbers":
            chances, predicted = logits, logits.flatten().tolist()
        elif self.kind == "labels":
            chances = logits.sigmoid()
            predicted = [[name for name, p in zip(names, row, strict=True) if p > 0.5] for row in chances.tolist()]
        else:
            chances = logits.softmax(-1)
            predicted = [names[number] for number in logits.argmax(-1).tolist()]
        return EnsemblePredictions(
            names, chances.tolist(), predicted, [*self.notes, *opened.notes], time.perf_counter() - start
        )

    def save(self, path: str | os.PathLike[str], *, force: bool = False) -> Path:
        """Write the manifest `path`, or `ensemble.json` in the folder `path`; `isomerge.load_ensemble` reads it.

        Members stay where they are: the manifest names them, relative to itself, and has the hash of their weights.
        """
        from isomerge.ensembling.manifest import save_manifest

        return save_manifest(self, path, force=force)
