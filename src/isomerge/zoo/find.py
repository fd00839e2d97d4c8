"""`isomerge.find`: which of many models is likely to be useful on some data, without training any."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from isomerge.arguments import require_choice, require_shared_types, require_types
from isomerge.checkpoint.base import name_some
from isomerge.choices import FIND_BY
from isomerge.data.base import Data, DataSource
from isomerge.data.open import open_data
from isomerge.data.task_heads import label_names, task_of
from isomerge.errors import IsomergeError, RequestError
from isomerge.progress_bars import Shown, callback, shows_progress
from isomerge.results import Result
from isomerge.zoo.answers import Answers, answers_of
from isomerge.zoo.candidates import ZooModel, candidates_in
from isomerge.zoo.embedding import Embedding
from isomerge.zoo.features import FeatureMap, features_of
from isomerge.zoo.transferability import certainty, leep, logme

LIMIT = 1000
"""Examples of the query where nobody asks for another number."""
LOWER = ("distance",)
"""Lower is better; of all others, higher."""


@dataclass
class FoundModel(Result):
    """What is known of one model's use. None where it cannot be told."""

    name: str
    model: str | None
    """The weights, where they are at hand."""
    task: str | None
    distance: float | None
    """Between the data of the model and the query, as a share of the length of the query's mean."""
    covered: float | None
    """The share of the query's labels that the model has a name for."""
    leep: float | None
    logme: float | None
    certainty: float | None
    """The mean entropy of its predictions, negated."""


@dataclass
class Found(Result):
    """The models, the most useful first."""

    by: str
    """Which number they are ranked by."""
    models: list[FoundModel]
    data: dict[str, Any]
    examples: int
    labelled: bool
    notes: list[str]
    seconds: float

    def best(self, count: int) -> list[str]:
        """The first models whose weights are at hand, to be merged."""
        there = [one.model for one in self.models if one.model is not None]
        if not 1 <= count <= len(there):
            raise RequestError(
                f"Taking the best {count} of the models that were found: the weights of {len(there)} are at hand.",
                keys=("merge",),
            )
        return there[:count]


@shows_progress
def find(
    query: DataSource,
    models: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    by: str = "auto",
    batch_size: int | None = None,
    limit: int | None = None,
    seed: int = 0,
    device: str = "cpu",
    progress: Shown = None,
) -> Found:
    """Rank models by how useful they are likely to be on the query: data like that on which they would be used.

    `models` are folders of models, models, and descriptions (see `isomerge.describe`), which need not lie beside their
    models. `by` is "distance" (of descriptions), "leep" or "logme" (labelled query, classifiers at hand), "certainty"
    (classifiers at hand) or "auto": leep where the query has labels and all models are at hand, else distance where
    all have descriptions, else certainty. A model without that number comes last.

    >>> about = isomerge.describe("model-a", "cifar10.tar.xz", limit=200, score=False, out="about-a.json", force=True)
    >>> found = isomerge.find("cifar10.tar.xz", ["model-a", "model-b", about.file], by="leep", limit=100)
    >>> [one.leep is None for one in found.models]
    [False, False, True]
    """
    progress = callback(progress)
    start = time.perf_counter()
    require_types(by=(by, str))
    require_choice("by", by, FIND_BY)
    require_shared_types(batch_size=batch_size, limit=limit, seed=seed, device=device, progress=progress)
    if query is None:
        raise RequestError("Finding a model needs a query: data like that on which it would be used.", keys=("query",))
    candidates = candidates_in(models)
    opened = open_data(query, prefer="validation")
    measuring = _Query.of(opened, limit, seed)
    rows = []
    for number, candidate in enumerate(candidates, start=1):
        rows.append(measuring.row(candidate, by, device, batch_size))
        if progress:
            progress(number, len(candidates), "asking models")
    chosen = _chosen(by, rows)
    return Found(
        by=chosen, models=_ranked(rows, chosen), data=opened.describe(), examples=len(measuring.rows),
        labelled=measuring.labels is not None, notes=[*measuring.notes, *opened.notes, *_left_over(rows, chosen)],
        seconds=time.perf_counter() - start,
    )  # fmt: skip


@dataclass
class _Query:
    data: Data
    map: FeatureMap
    rows: np.ndarray
    names: list[str] | None
    """The label of each example."""
    labels: np.ndarray | None
    seed: int
    notes: list[str]

    @classmethod
    def of(cls, data: Data, limit: int | None, seed: int) -> _Query:
        chosen, rows, given = features_of(data, limit, seed, default=LIMIT)
        names = [name for name in given if name is not None]
        if len(names) < len(given) or len(set(names)) < 2:
            return cls(data, chosen, rows, None, None, seed, [])
        return cls(data, chosen, rows, names, np.unique(names, return_inverse=True)[1], seed, [])

    def row(self, candidate: ZooModel, by: str, device: str, batch_size: int | None) -> FoundModel:
        described = candidate.description
        own, task = (None, None) if described is None else (described.labels, described.task)
        row = FoundModel(candidate.name, candidate.model, task, None, None, None, None, None)
        if described is not None:
            row.distance = self._distance(candidate)
        if candidate.model is not None:
            own = self._ask(candidate, row, by, device, batch_size) or own
        if own is not None and self.names is not None:
            known = {_plain(label) for label in own}
            row.covered = sum(_plain(name) in known for name in self.names) / len(self.names)
        return row

    def _distance(self, candidate: ZooModel) -> float | None:
        assert candidate.description is not None
        if candidate.description.features != self.map.name:
            self.notes.append(f"{candidate.name} was described on data of another kind")
            return None
        whole = Embedding.of_examples(self.rows)
        apart = candidate.description.embedding.distance(whole, self.map.variance)
        return apart / float(np.sqrt(whole.product(whole, self.map.variance)))

    def _ask(
        self, candidate: ZooModel, row: FoundModel, by: str, device: str, batch_size: int | None
    ) -> list[str] | None:
        """Runs the model, if anything of that is wanted; its labels."""
        checkpoint = candidate.opened()
        assert checkpoint is not None
        row.task = task_of(checkpoint.config)
        if row.task != ("image" if self.data.kind == "images" else "sequence"):
            self.notes.append(f"{candidate.name} was not run: it is no classifier of {self.data.kind}")
            return None
        if by == "distance" or (by == "auto" and self.labels is None and row.distance is not None):
            return label_names(checkpoint.config)
        try:
            answers = answers_of(checkpoint, self.data, len(self.rows), self.seed, device, batch_size)
        except IsomergeError as error:
            self.notes.append(f"{candidate.name} was not run: {error}")
            return None
        self._told(row, answers)
        return label_names(checkpoint.config)

    def _told(self, row: FoundModel, answers: Answers) -> None:
        row.certainty = certainty(answers.probabilities)
        if self.labels is not None:
            row.leep = leep(answers.probabilities, self.labels)
            row.logme = None if answers.features is None else logme(answers.features, self.labels)


def _plain(label: str) -> str:
    return label.strip().casefold()


def _chosen(by: str, rows: list[FoundModel]) -> str:
    if by != "auto":
        if all(getattr(row, by) is None for row in rows):
            raise RequestError(
                f"Ranking models by {by}: no model has that number. distance needs descriptions, leep and logme labels "
                "in the query and classifiers at hand, certainty classifiers at hand.",
                keys=("by",),
            )
        return by
    there = {name: sum(getattr(row, name) is not None for row in rows) for name in ("leep", "distance", "certainty")}
    if not any(there.values()):
        raise RequestError(
            "Finding a model: nothing can be told of any. Describe the models with isomerge describe, or name "
            "classifiers that read this kind of data.",
            keys=("models",),
        )
    return max(there, key=lambda name: there[name])  # of equally many the first


def _ranked(rows: list[FoundModel], by: str) -> list[FoundModel]:
    sign = 1 if by in LOWER else -1
    known = [row for row in rows if getattr(row, by) is not None]
    return [*sorted(known, key=lambda row: sign * getattr(row, by)), *(row for row in rows if row not in known)]


def _left_over(rows: list[FoundModel], by: str) -> list[str]:
    without = [row.name for row in rows if getattr(row, by) is None]
    return [f"without {by}, and so last: {name_some(without)}"] if without else []
