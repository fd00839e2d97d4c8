"""Which of several answers is best: every two are compared, and the one with most wins is returned.

Judges are language models, by how likely they find an answer; a model that scores answers (one output); or one that
compares two (two outputs: the first is better, the second is better). This is the ranking half of LLM-Blender
(https://arxiv.org/abs/2306.02561), without its fusing of the best answers into a new one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from isomerge.checkpoint import Checkpoint
from isomerge.data.encode import Encoder, collate
from isomerge.data.parallel import TokenReading
from isomerge.data.task_heads import label_names, task_of
from isomerge.ensembling.members import home_of, load_member
from isomerge.errors import RequestError
from isomerge.evaluation.tasks import logits_of
from isomerge.running.stock import StockModel

LIKELIHOOD = "likelihood"
"""The members themselves are the judges."""


@dataclass(frozen=True)
class Verdicts:
    """What judges make of the answers to one prompt."""

    wins: Tensor
    """(answers, answers): how surely the first is better than the second; one half where nobody can tell."""
    scores: Tensor | None
    """(answers,): the mean score, where answers have scores of their own."""

    @property
    def best(self) -> int:
        """The most wins; of equally many the higher score, then the first."""
        order = [
            (-round(float(won), 9), -score, place) for place, (won, score) in enumerate(zip(*self._sums(), strict=True))
        ]
        return min(order)[2]

    def _sums(self) -> tuple[Tensor, list[float]]:
        scores = [0.0] * len(self.wins) if self.scores is None else self.scores.tolist()
        return self.totals(), scores

    def totals(self) -> Tensor:
        """The wins of each answer over all others."""
        return self.wins.sum(1) - self.wins.diagonal()


def by_scores(scores: Tensor) -> Verdicts:
    """From (judges, answers): the share of judges that score one answer above another, ties counting one half.

    >>> by_scores(torch.tensor([[1.0, 2.0], [3.0, 3.0]])).wins[1].tolist()
    [0.75, 0.5]
    """
    higher = (scores[:, :, None] > scores[:, None, :]).double()
    equal = (scores[:, :, None] == scores[:, None, :]).double()
    return Verdicts((higher + equal / 2).mean(0), scores.mean(0))


class Ranker:
    """Compares answers by one or more models of one kind."""

    def __init__(self, judges: Sequence[StockModel], name: str) -> None:
        self.name = name
        self.judges = [(one, Encoder.of(one.checkpoint, None, None)) for one in judges]
        self.task = task_of(judges[0].checkpoint.config)
        names = label_names(judges[0].checkpoint.config)
        if self.task not in ("causal-lm", "regression") and not (self.task == "sequence" and len(names) == 2):
            raise RequestError(
                f"Ranking answers by {judges[0].checkpoint.name}: it is neither a language model nor a classifier of "
                "texts with one output (a score) or two (the first or the second is better). Name one of these.",
                keys=("rank",),
            )

    @classmethod
    def of(cls, model: Any, opened: Checkpoint, device: str | None) -> Ranker:
        """One model as the judge."""
        return cls([load_member(model, opened, device)], opened.name)

    def __call__(self, prompt: str, answers: Sequence[str]) -> Verdicts:
        if self.task == "causal-lm":
            return by_scores(torch.tensor([[self._likelihood(j, prompt, a) for a in answers] for j in self.judges]))
        judge, encoder = self.judges[0]
        if self.task == "regression":
            return by_scores(torch.tensor([[float(_head(judge, encoder, prompt, a)[0]) for a in answers]]))
        first = torch.full((len(answers), len(answers)), 0.5, dtype=torch.float64)
        for i, one in enumerate(answers):
            for j, other in enumerate(answers):
                if i != j:
                    chances = _head(judge, encoder, f"{prompt}\n{one}", f"{prompt}\n{other}").double().softmax(-1)
                    first[i, j] = chances[0]
        return Verdicts((first + 1 - first.T) / 2, None)  # both orders: a judge may favour what it reads first

    @staticmethod
    def _likelihood(judge: tuple[StockModel, Encoder], prompt: str, answer: str) -> float:
        """The mean log-probability of a byte of the answer after the prompt, so that tokenizers can be compared."""
        model, encoder = judge
        whole, size = prompt + answer, len(answer.encode())
        if not size:
            return -torch.inf
        reading = TokenReading.of(encoder, whole)
        ids = torch.tensor([reading.ids], device=home_of(model))
        said = logits_of(model.run({"input_ids": ids, "attention_mask": torch.ones_like(ids)}))[0, :-1]
        heard = said.double().log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0].cpu()
        start, end = len(prompt.encode()), len(whole.encode())
        answered = torch.tensor([start < at <= end for at in reading.ends[1:]])
        return float(heard[answered].sum()) / size


def _head(judge: StockModel, encoder: Encoder, text: str, pair: str) -> Tensor:
    batch = collate([encoder.text(text, pair)], encoder, "sequence")
    return logits_of(judge.run({name: value.to(home_of(judge)) for name, value in batch.items()}))[0].cpu()
