"""Tags of words: whole entities must be right, in extent and kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from isomerge.evaluation.tasks.base import IGNORED, Task, as_log_probabilities, f1, logits_of

Span = tuple[str, int, int]


def entities(tags: Sequence[str]) -> set[Span]:
    """(kind, first word, last word) of each entity, as the CoNLL evaluation reads tags.

    An entity begins at B- or S-, or where the kind changes, or after O; so files in which entities begin with I-
    are read too. Tags without a dash but O are entities of one kind each.

    >>> sorted(entities(["B-PER", "I-PER", "O", "I-LOC", "B-LOC"]))
    [('LOC', 3, 3), ('LOC', 4, 4), ('PER', 0, 1)]
    """
    found: set[Span] = set()
    start, kind, before = -1, "", "O"
    for place, tag in enumerate([*tags, "O"]):
        mark, _, name = tag.partition("-")
        name = name or "_"
        begins = mark in ("B", "S", "U") or (mark != "O" and (before in ("O", "E", "S", "L", "U") or name != kind))
        if start >= 0 and (mark == "O" or begins):
            found.add((kind, start, place - 1))
            start = -1
        if begins:
            start = place
        kind, before = name, mark
    return found


class Tagging(Task):
    """Entity-level micro-F1; the loss is the mean cross-entropy over words (their first tokens)."""

    name = "token"
    metric_name = "f1"

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self._names = names
        self._hits = self._predicted = self._actual = self._right = 0

    def predict(self, outputs: Mapping[str, Any], labels: Tensor) -> tuple[Tensor, Tensor]:
        return as_log_probabilities(logits_of(outputs)), labels

    def add(self, predictions: Tensor, targets: Tensor) -> None:
        asked = targets != IGNORED
        self._add_cross_entropy(predictions[asked], targets[asked])
        said = predictions.argmax(-1)
        self._right += int((said[asked] == targets[asked]).sum())
        for row, right, there in zip(said.cpu(), targets.cpu(), asked.cpu(), strict=True):
            actual = entities([self._names[n] for n in right[there].tolist()])
            predicted = entities([self._names[n] for n in row[there].tolist()])
            self._hits += len(actual & predicted)
            self._predicted += len(predicted)
            self._actual += len(actual)

    def metrics(self) -> dict[str, float]:
        return {
            "f1": f1(self._hits, self._predicted, self._actual),
            "precision": self._hits / self._predicted if self._predicted else 0.0,
            "recall": self._hits / self._actual if self._actual else 0.0,
            "accuracy": self._right / self.count,
        }
