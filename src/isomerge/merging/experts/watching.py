"""What routers read and choose while a mixture runs over data, and how well it predicts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from isomerge.architectures.expert_classes import ROUTER
from isomerge.data.base import Batch
from isomerge.running.padding import PaddingMask
from isomerge.running.predictions import rows_of
from isomerge.running.stock import inputs_of, run_module


@dataclass
class LayerWatch:
    """One layer's router over all tokens seen."""

    tokens: int = 0
    weights: Tensor | None = None
    """(experts,) how much each counted, summed over tokens."""
    sent: Tensor | None = None
    """(experts,) how many tokens were sent to each."""
    inputs: list[Tensor] = field(default_factory=list)
    """(rows, width) what it read, of the first tokens."""

    @property
    def rows(self) -> Tensor:
        return torch.cat(self.inputs)

    def add(self, inputs: Tensor, scores: Tensor, chosen: Tensor, experts: int, keep: int) -> None:
        each = torch.zeros(len(chosen), experts, dtype=torch.float64, device=chosen.device)
        each.scatter_(1, chosen, scores.double())
        sent = torch.zeros_like(each).scatter_(1, chosen, 1.0)
        self.weights = each.sum(0).cpu() + (0 if self.weights is None else self.weights)
        self.sent = sent.sum(0).cpu() + (0 if self.sent is None else self.sent)
        left = keep - min(self.tokens, keep)
        if left:
            self.inputs.append(inputs[:left].cpu())
        self.tokens += len(chosen)


@dataclass
class Watched:
    """A pass over data."""

    layers: dict[int, LayerWatch]
    nats: float
    predicted: int

    @property
    def loss(self) -> float | None:
        """Nats per token; None where no token follows another."""
        return self.nats / self.predicted if self.predicted else None

    def shares(self) -> list[list[float]]:
        """For every layer with experts: the share of choices that fell on each."""
        found = []
        for one in self.layers.values():
            assert one.sent is not None
            found.append((one.sent / one.sent.sum()).tolist())
        return found


@torch.no_grad()
def watch(model: Any, batches: Iterable[Batch], *, keep: int = 0) -> Watched:
    """Run a stock model once; `keep` rows of what each router reads stay in memory."""
    seen = Watched({}, 0.0, 0)
    for batch in batches:
        mask = PaddingMask(batch, model)
        with _listening(model, seen.layers, mask, keep):
            logits = run_module(model, inputs_of(batch, model)).logits
        nats, count = _nats(logits, batch["input_ids"], mask)
        seen.nats += nats
        seen.predicted += count
    return seen


@contextlib.contextmanager
def _listening(model: Any, layers: dict[int, LayerWatch], mask: PaddingMask, keep: int) -> Iterator[None]:
    hooks = []
    with contextlib.ExitStack() as stack:
        for number, router in routers(model):

            def hook(
                module: Any, given: tuple[Tensor, ...], made: tuple[Tensor, Tensor, Tensor], number: int = number
            ) -> None:
                inputs = given[0].reshape(-1, given[0].shape[-1])
                valid = mask.of_side(len(inputs), encoder=False)
                rows, scores, chosen = (rows_of(one, valid) for one in (inputs, made[1], made[2]))
                layers.setdefault(number, LayerWatch()).add(rows, scores, chosen, made[0].shape[-1], keep)

            hooks.append(stack.enter_context(router.register_forward_hook(hook)))
        yield


def routers(model: Any) -> Iterator[tuple[int, Any]]:
    """The routers of a stock model, by the number of their layer."""
    for name, module in model.named_modules():
        head, _, tail = name.rpartition("layers.")
        number, _, rest = tail.partition(".")
        if head and rest == ROUTER:
            yield int(number), module


def _nats(logits: Tensor, ids: Tensor, mask: PaddingMask) -> tuple[float, int]:
    """−log p of every token that follows another, summed, and how many there are."""
    valid = mask.of_side(ids.numel(), encoder=False)
    there = torch.ones_like(ids).bool() if valid is None else valid.reshape(ids.shape)
    follows = there[:, 1:] & there[:, :-1]
    total = 0.0
    for own, words, some in zip(logits, ids, follows, strict=True):  # scores of all examples at once are large
        nats = -own[:-1].double().log_softmax(-1).gather(1, words[1:, None])[:, 0]
        total += float(nats[some].sum())
    return total, int(follows.sum())


def mean_shares(layers: Sequence[Sequence[float]]) -> list[float]:
    """Of all layers."""
    count = max(1, len(layers))
    return [sum(column) / count for column in zip(*layers, strict=True)]
