"""Whose word counts: how much each parent is believed on each example.

- mean: every parent everywhere, by its share;
- own: on the data of a model, that model alone; on data that several name, these by their shares;
- expert: by the posterior of the parents, w_j ∝ share_j · exp(evidence_j / temperature). The evidence of a language
  model is the log-likelihood of the text itself, all of it or as far as a token has seen it, that of a classifier the
  entropy of its answer, negated. Neither needs labels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from isomerge.data.base import Batch, Batches
from isomerge.data.parallel import BYTES, part, read_by
from isomerge.errors import RequestError
from isomerge.running.padding import PaddingMask
from isomerge.running.passes import DataPass, examples_in
from isomerge.running.stock import run_module

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
    tokens: Sequence[Tensor] | None = None
    """The same for every token (parents, examples · tokens), where that changes within an example."""

    def rows(self, number: int, count: int, valid: Tensor | None = None) -> Tensor:
        """(parents, rows) for `count` rows of batch `number`, which come example by example, without padding."""
        own = self.batches[number]
        if self.tokens is not None and self.tokens[number].shape[1] == count:
            own = self.tokens[number]
        if count % own.shape[1]:  # not rows of examples, such as a table of positions
            own = own.mean(1, keepdim=True)
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

    def heard(self, number: int, parents: int) -> list[int]:
        """The parents that count on some example of batch `number`."""
        if self.beliefs is None:
            return list(range(parents))
        return [m for m, own in enumerate(self.beliefs.batches[number]) if bool((own > 0).any())]


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
        return iter(in_one(self.passes)())

    def shares(self, shares: Sequence[float]) -> Iterator[list[float]]:
        """For every batch, how much each model counts on it."""
        return in_turn([self._shares(one(), own, shares) for one, own in zip(self.passes, self.owners, strict=True)])

    def divided(self) -> tuple[OwnedBatches, OwnedBatches, bool]:
        """Most examples of each data set, one of HELD_OUT, and whether the second are new to who saw the first: a data
        set that is too small for that is whole in both."""
        pairs = [
            (_part(one, lambda n: n % HELD_OUT != HELD_OUT - 1), _part(one, lambda n: n % HELD_OUT == HELD_OUT - 1))
            for one in self.passes
        ]
        enough = [all(next(iter(part()), None) is not None for part in pair) for pair in pairs]
        parts = [pair if new else (one, one) for pair, new, one in zip(pairs, enough, self.passes, strict=True)]
        train, held_out = (OwnedBatches([pair[k] for pair in parts], self.owners) for k in (0, 1))
        return train, held_out, all(enough)

    @staticmethod
    def _shares(batches: Iterable[Batch], owners: Sequence[int], shares: Sequence[float]) -> Iterator[list[float]]:
        total = sum(shares[m] for m in owners)
        even = 1 / len(owners)
        own = [(share / total if total else even) if m in owners else 0.0 for m, share in enumerate(shares)]
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


def in_one(passes: Sequence[Batches]) -> Batches:
    """Several data sets as one, a batch of each in turn."""
    return passes[0] if len(passes) == 1 else lambda: in_turn([one() for one in passes])


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
    examples: DataPass, models: Sequence[Any], shares: Sequence[float], temperature: float, first: int = 0
) -> tuple[Beliefs, float]:
    """The posterior of every parent on every example, and how far apart the parents' evidence is (see `APART`). `first`
    is the number under which batches hold what the first of the models reads in its own way."""
    prior = torch.tensor([math.log(max(share, 1e-30)) for share in shares], dtype=torch.float64)
    batches, gaps = [], []
    for batch in examples:
        given = [_evidence(model, read_by(batch, m)) for m, model in enumerate(models, first)]
        nats = torch.stack([evidence * _as_much(batch, m) for m, (evidence, _) in enumerate(given, first)])
        per_answer = nats / given[0][1]
        gaps.append(per_answer.amax(0) - per_answer.amin(0))
        batches.append((nats / temperature + prior.to(nats)[:, None]).softmax(0).float())
    return Beliefs(batches), float(torch.cat(gaps).mean())


@torch.no_grad()
def token_beliefs(
    examples: DataPass, models: Sequence[Any], shares: Sequence[float], temperature: float
) -> Beliefs | None:
    """The posterior of every parent at every token, from the text up to there; None where models do not predict the
    text from left to right."""
    prior = torch.tensor([math.log(max(share, 1e-30)) for share in shares], dtype=torch.float64)
    batches, tokens = [], []
    for batch in examples:
        told = [_of_tokens(model, batch, model(**batch).logits) for model in models if model.can_generate()]
        known = [nats for nats, _ in filter(None, told)]
        if len(known) < len(models) or getattr(models[0].config, "is_encoder_decoder", False):
            return None
        seen = torch.nn.functional.pad(torch.stack(known), (1, 0)).cumsum(2)  # the first token says nothing yet
        posterior = (seen / temperature + prior.to(seen)[:, None, None]).softmax(0).float()
        tokens.append(posterior.flatten(1))
        batches.append(posterior.mean(2))
    return Beliefs(batches, tokens)


def _as_much(batch: Batch, who: int) -> Tensor | float:
    """What the evidence of a model is multiplied by, to be that on as many bytes of each text as the first predicts."""
    if part(BYTES, who) not in batch:
        return 1.0
    return batch[part(BYTES, 0)] / batch[part(BYTES, who)].clamp_min(1)


def has_evidence(model: Any, examples: DataPass) -> bool:
    """Whether a model scores classes or tokens of which one holds."""
    with torch.no_grad():
        scores = getattr(run_module(model, read_by(examples.first(), 0)), "logits", None)
    several = getattr(model.config, "problem_type", None) in ("regression", "multi_label_classification")
    return scores is not None and scores.shape[-1] > 1 and not several


def require_evidence(model: Any, examples: DataPass, what: str, instead: str, key: str = "goals") -> None:
    if not has_evidence(model, examples):
        raise RequestError(
            f"{what}: goals expert needs models that score classes or tokens, of which one holds. Use {instead}.",
            keys=(key,),
        )


def _evidence(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """(examples,) in nats, and the number of answers it is a sum of."""
    scores = model(**batch).logits
    return _of_text(model, batch, scores) or _of_confidence(model, batch, scores)


@torch.no_grad()
def text_above(model: Any, parents: Sequence[Any], shares: Sequence[float] | Tensor, batch: Batch) -> float | None:
    """The loss of a batch's own text above that of its parents, each as far as it is believed (one share, or one for
    each example), in nats per token; None for models that predict no text."""
    scores = getattr(model(**batch), "logits", None) if model.can_generate() else None
    if scores is None or (own := _of_text(model, batch, scores)) is None:
        return None
    given = [nats / count for nats, count in (_evidence(parent, batch) for parent in parents)]
    likely = sum((one * share for one, share in zip(given, shares, strict=True)), torch.zeros_like(own[0]))
    return float((likely - own[0] / own[1]).mean())


def _of_text(model: Any, batch: Batch, scores: Tensor) -> tuple[Tensor, Tensor] | None:
    """The log-likelihood of the text; None where the scores are of something else."""
    found = _of_tokens(model, batch, scores)
    return None if found is None else (found[0].sum(1), found[1].sum(1).clamp_min(1))


def _of_tokens(model: Any, batch: Batch, scores: Tensor) -> tuple[Tensor, Tensor] | None:
    """The log-likelihood of every token (examples, tokens), 0 where it is padding, and whether it counts."""
    two_sided = getattr(model.config, "is_encoder_decoder", False)
    ids = batch.get("decoder_input_ids" if two_sided else "input_ids")
    words = getattr(model.config.get_text_config(), "vocab_size", None)
    if ids is None or not words or scores.shape[:2] != ids.shape or scores.shape[-1] < words:
        return None
    valid = PaddingMask(batch, model).of_side(ids.numel(), encoder=False)
    mask = torch.ones_like(ids).bool() if valid is None else valid.reshape(ids.shape)
    shift = int(model.can_generate())  # others are masked models: how likely they find what is there
    mask, told = mask[:, shift:], ids[:, shift:]
    nats = [
        own[: own.shape[0] - shift].float().log_softmax(-1).gather(1, word[:, None])[:, 0].double() * kept
        for own, word, kept in zip(scores, told, mask, strict=True)
    ]  # example by example: scores of a whole batch are large enough once
    return torch.stack(nats), mask


def _of_confidence(model: Any, batch: Batch, scores: Tensor) -> tuple[Tensor, Tensor]:
    """The entropy of the answer, negated."""
    padding = PaddingMask(batch, model)
    scores = scores.double().log_softmax(-1)
    sure = (scores.exp() * scores).sum(-1) / SURE
    valid = padding.of_side(sure.numel(), encoder=False) if sure.dim() > 1 else None
    kept = torch.ones_like(sure) if valid is None else valid.reshape(sure.shape).to(sure)
    sure = (sure * kept).reshape(len(sure), -1).sum(1) / kept.reshape(len(kept), -1).sum(1).clamp_min(1)
    return sure, torch.full_like(sure, 1 / SURE)
