"""Whose word counts: how much each parent is believed on each example.

- mean: every parent everywhere, by its share;
- own: on the data of a model, that model alone; on data that several name, these by their shares;
- expert: by the posterior of the parents, w_j ∝ share_j · exp(evidence_j / temperature). The evidence of a language
  model is the log-likelihood of the text itself, that of a classifier the entropy of its answer, negated. Neither needs
  labels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from isomerge.data.base import Batch, Batches
from isomerge.running.padding import PaddingMask
from isomerge.running.passes import DataPass, examples_in

GOALS = ("auto", "mean", "own", "expert")
SURE = 0.1
"""Nats of entropy that make a classifier e times less believed, at a temperature of 1."""
APART = 0.25
"""Parents whose evidence differs by more nats, per token or answer and in the mean over the examples, know different
things. Seeds of one training differ by hundredths, models of other texts by several."""
HELD_OUT = 8
"""One example of so many is kept aside where something has to be chosen."""
T = TypeVar("T")


@dataclass(frozen=True)
class Beliefs:
    """For every batch, in the order of the passes: (parents, examples), where every example sums to 1."""

    batches: Sequence[Tensor]

    def rows(self, number: int, count: int, valid: Tensor | None = None) -> Tensor:
        """(parents, rows) for `count` rows of batch `number`, which come example by example, without padding."""
        own = self.batches[number]
        each = own.repeat_interleave(count // own.shape[1], 1)
        return each if valid is None else each[:, valid]

    def totals(self) -> list[float]:
        """How many examples follow each parent."""
        return torch.stack([batch.sum(1) for batch in self.batches]).sum(0).tolist()


@dataclass(frozen=True)
class GoalData:
    """Examples, and who is believed on them; None: each parent by its share."""

    examples: DataPass
    beliefs: Beliefs | None

    def believed(self, number: int, count: int, valid: Tensor | None = None) -> Tensor | None:
        """As `Beliefs.rows`."""
        return None if self.beliefs is None else self.beliefs.rows(number, count, valid)


# --- whose data -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class OwnedBatches:
    """Data sets in turn, a batch of each, with the places of the models that name them."""

    passes: Sequence[Batches]
    owners: Sequence[Sequence[int]]

    @property
    def apart(self) -> bool:
        """Some data belongs to some of the models only."""
        return len(self.passes) > 1 and len({tuple(own) for own in self.owners}) > 1

    def __call__(self) -> Iterator[Batch]:
        return in_turn([one() for one in self.passes])

    def shares(self, shares: Sequence[float]) -> Iterator[list[float]]:
        """For every batch, how much each model counts on it."""
        return in_turn([self._shares(one(), own, shares) for one, own in zip(self.passes, self.owners, strict=True)])

    def part(self, keep: Callable[[int], bool]) -> OwnedBatches:
        """Only the examples of each data set whose number `keep` agrees to."""
        return OwnedBatches([_part(one, keep) for one in self.passes], self.owners)

    @staticmethod
    def _shares(batches: Iterable[Batch], owners: Sequence[int], shares: Sequence[float]) -> Iterator[list[float]]:
        total = sum(shares[m] for m in owners)
        own = [share / total if m in owners else 0.0 for m, share in enumerate(shares)]
        return (own for _ in batches)


def in_turn(iterables: Sequence[Iterable[T]]) -> Iterator[T]:
    """One of each, as long as there are any, so that none comes last as a whole.

    >>> list(in_turn(["abc", "x"]))
    ['a', 'x', 'b', 'c']
    """
    left = [iter(one) for one in iterables]
    while left:
        rest = []
        for one in left:
            for item in one:
                yield item
                rest.append(one)
                break
        left = rest


def _part(batches: Batches, keep: Callable[[int], bool]) -> Batches:
    def some() -> Iterator[Batch]:
        number = 0
        for batch in batches():
            size = examples_in(batch)
            chosen = torch.tensor([at for at in range(size) if keep(number + at)], dtype=torch.int64)
            number += size
            if len(chosen):
                yield {name: tensor[chosen.to(tensor.device)] for name, tensor in batch.items()}

    return some


# --- who is believed --------------------------------------------------------------------------------------------------
def own_beliefs(data: OwnedBatches, examples: DataPass, shares: Sequence[float]) -> Beliefs:
    pairs = zip(examples, data.shares(shares), strict=True)
    return Beliefs([_column(own, examples_in(batch), next(iter(batch.values())).device) for batch, own in pairs])


def _column(shares: Sequence[float], examples: int, device: torch.device) -> Tensor:
    return torch.tensor(shares, dtype=torch.float32, device=device)[:, None].expand(-1, examples)


@torch.no_grad()
def expert_beliefs(
    examples: DataPass, models: Sequence[Any], shares: Sequence[float], temperature: float
) -> tuple[Beliefs, float]:
    """The posterior of every parent on every example, and how far apart the parents' evidence is (see `APART`)."""
    prior = torch.tensor([math.log(max(share, 1e-30)) for share in shares], dtype=torch.float64)
    batches, gaps = [], []
    for batch in examples:
        given = [_evidence(model, batch) for model in models]
        nats = torch.stack([evidence for evidence, _ in given])
        per_answer = nats / given[0][1]
        gaps.append(per_answer.amax(0) - per_answer.amin(0))
        batches.append((nats / temperature + prior.to(nats)[:, None]).softmax(0).float())
    return Beliefs(batches), float(torch.cat(gaps).mean())


def _evidence(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """(examples,) in nats, and the number of answers it is a sum of."""
    scores = model(**batch).logits.double().log_softmax(-1)
    ids, mask = batch.get("input_ids"), PaddingMask(batch, model).mask
    if ids is not None and scores.shape[:2] == ids.shape and scores.shape[-1] >= model.config.vocab_size:
        told = scores.gather(2, ids[..., None])[..., 0]  # a masked model: how likely it finds what is there
        mask = torch.ones_like(ids).bool() if mask is None else mask
        if model.can_generate():
            told, mask = scores[:, :-1].gather(2, ids[:, 1:, None])[..., 0], mask[:, 1:]
        return (told * mask).sum(1), mask.sum(1).clamp_min(1)
    sure = (scores.exp() * scores).sum(-1) / SURE
    sure = sure.reshape(len(sure), -1).mean(1)
    return sure, torch.full_like(sure, 1 / SURE)
