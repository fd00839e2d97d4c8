"""Merges made in memory and measured on data, within a minute: what does each lose on examples it has not seen?

No labels are needed. The loss of a language model is that of the text itself. Other models are compared with the
predictions of their parents: of the one whose data it is or, on data that all share, of those that `reconstruct` would
believe there.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from isomerge.checking.advice import Advice
from isomerge.checking.mergeability import MeasuredMerges, TriedMerge
from isomerge.checkpoint import Checkpoint
from isomerge.checkpoint.base import Progress
from isomerge.data.base import Batch, Data
from isomerge.data.task_heads import task_of
from isomerge.errors import IsomergeError
from isomerge.merging.api import merge
from isomerge.merging.layerwise.goals import APART, Beliefs, OwnedBatches, expert_beliefs, has_evidence
from isomerge.running.passes import DataPass, examples_in
from isomerge.running.stock import load_stock, read_weights, require_runnable, run_module

SECONDS = 60.0
EXAMPLES = 320
TOKENS = 8_000  # of each data set; one example of eight is held out
BATCH = 8
LARGEST = 4_000_000_000  # parameters of all models together: more would not be done in a minute
AS_GOOD = 0.02  # nats between merges that mean nothing on so few examples
SMALL = 50_000_000  # parameters: threads of models this small wait for each other more than they compute
LONGER = 6  # times as long as the quick reconstruction: what choosing a lean takes


class _OutOfTime(Exception):
    pass


@dataclass(frozen=True)
class Candidate:
    """A merge to try, by the name it gets in the record."""

    name: str
    advice: Advice
    cost: float = 1.0
    """Times as long as the candidate before it; it is left out where that is too long."""


@dataclass
class HeldOut:
    """Examples of one data set that no merge sees, and what is said of them."""

    batches: list[Batch]
    beliefs: list[Tensor]
    """(parents, examples) for every batch."""
    goals: str
    targets: list[Tensor] | None = None
    """The believed predictions, for models that are compared with these."""


class Trial:
    """Models of one architecture and vocabulary, in memory."""

    def __init__(
        self,
        models: Sequence[Checkpoint],
        base: Checkpoint | None,
        data: Sequence[Data],
        progress: Progress | None = None,
    ) -> None:
        """`data`: one for all models, or one for each."""
        self.started = time.perf_counter()
        self.models, self.base, self.data, self.progress = models, base, data, progress
        for model in models:
            require_runnable(model)
        self.causal = task_of(models[0].config) == "causal-lm"
        self.notes: list[str] = []
        self.parents = [self._module(model.config, read_weights(model)) for model in models]
        self.sources: list[list[Batch]] = []
        self.held: list[HeldOut] = []
        for place, one in enumerate(data):
            seen, held = self._divided(one)
            self.sources.append(seen)
            self.held.append(self._believed(held, place))

    @staticmethod
    def fits(models: Sequence[Checkpoint]) -> bool:
        return sum(math.prod(info.shape) for model in models for info in model.tensors.values()) <= LARGEST

    # --- data ---------------------------------------------------------------------------------------------------------
    def _divided(self, data: Data) -> tuple[list[Batch], list[Batch]]:
        """What merges may see, and one example of eight that they do not."""
        drawn, tokens = [], 0
        for batch in data.batches(self.models[0], batch_size=BATCH, limit=EXAMPLES):
            drawn.append({name: tensor for name, tensor in batch.items() if name != "labels"})
            tokens += batch["input_ids"].numel() if "input_ids" in batch else 0
            if tokens >= TOKENS:
                break
        train, held, new = OwnedBatches([lambda: iter(drawn)], [[0]]).divided()
        if not new:
            self.notes.append(f"{data.name} has too few examples: merges were measured on those they have seen")
        return list(train()), list(held())

    def _believed(self, held: list[Batch], place: int) -> HeldOut:
        count = len(self.models)
        if len(self.data) > 1:
            alone = torch.eye(count)[place][:, None]
            return HeldOut(held, [alone.expand(-1, examples_in(batch)) for batch in held], "own")
        examples = DataPass(lambda: iter(held), labels=False, hashed=False)
        shares = [1 / count] * count
        if has_evidence(self.parents[0], examples):
            beliefs, apart = expert_beliefs(examples, self.parents, shares, 1.0)
            if apart > APART:
                return HeldOut(held, list(beliefs.batches), "expert")
        even = Beliefs([torch.full((count, examples_in(batch)), 1 / count) for batch in held])
        return HeldOut(held, list(even.batches), "mean")

    def _merge_data(self) -> Any:
        passes: list[Callable[[], Iterable[Batch]]] = [lambda seen=seen: iter(seen) for seen in self.sources]  # type: ignore[misc]
        return passes if len(passes) > 1 else passes[0]

    # --- measuring ----------------------------------------------------------------------------------------------------
    def run(self, candidates: Sequence[Candidate]) -> MeasuredMerges:
        """Every candidate in turn, as long as there is time."""
        if not self.causal:
            for held in self.held:
                held.targets = self._targets(held)
        parents = [[self._loss(model, held)[0] for held in self.held] for model in self.parents]
        believed = [self._believed_loss(held) if self.causal else 0.0 for held in self.held]
        result = MeasuredMerges(
            unit="nats per token" if self.causal else "nats from the parents' predictions",
            data=[one.name for one in self.data],
            examples=[sum(examples_in(batch) for batch in held.batches) for held in self.held],
            goals=self.held[0].goals,
            parents=parents,
            believed=believed,
            notes=self.notes,
        )
        last = 0.0
        for number, candidate in enumerate(candidates):
            self._report(number, len(candidates), candidate.name)
            expected, left = last * candidate.cost, self._left()
            if number and expected > left:
                self.notes.append(
                    f"{candidate.name} was left out: it would take about {max(1.0, expected):.0f} s, and "
                    f"{max(0.0, left):.0f} s of {SECONDS:.0f} are left"
                )
                continue
            tried = self._tried(candidate, believed)
            if tried is not None:
                last = tried.seconds
                result.merges.append(tried)
        self._report(len(candidates), len(candidates), "done")
        result.best = _best(result.merges)
        return result

    def _tried(self, candidate: Candidate, believed: Sequence[float]) -> TriedMerge | None:
        start = time.perf_counter()
        try:
            model = self._merged(candidate.advice)
        except _OutOfTime:
            self.notes.append(f"{candidate.name} was left out: it was not done in time")
            return None
        except IsomergeError as error:
            self.notes.append(f"{candidate.name} was left out: {error}")
            return None
        scores = [self._loss(model, held) for held in self.held]
        losses = [loss for loss, _ in scores]
        lost = [loss - base for loss, base in zip(losses, believed, strict=True)]
        same = [share for _, share in scores if share is not None]
        return TriedMerge(
            candidate.name, candidate.advice.method, losses, sum(lost) / len(lost),
            sum(same) / len(same) if same else None, time.perf_counter() - start,
        )  # fmt: skip

    def _merged(self, advice: Advice) -> Any:
        needs = {"data": self._merge_data()} if advice.method == "reconstruct" else {}
        origin = next((m for m in (self.base, *self.models) if m is not None and m.name == advice.base), None)
        made = merge(
            [model for model in self.models if model is not origin], method=advice.method, base=origin,
            align=advice.align, progress=self._watch, **needs, **(advice.options or {}),
        )  # fmt: skip
        return self._module({**self.models[0].config, **made.config_changes}, made.state_dict())

    def _module(self, config: dict[str, Any], state: dict[str, Tensor]) -> Any:
        return load_stock({**config, "use_cache": False}, state).requires_grad_(False)

    def _watch(self, done: int, total: int, stage: str) -> None:
        if self._left() < 0:
            raise _OutOfTime

    def _left(self) -> float:
        return SECONDS - (time.perf_counter() - self.started)

    def _report(self, done: int, total: int, name: str) -> None:
        if self.progress is not None:
            self.progress(done, total, f"trying merges: {name}")

    # --- losses -------------------------------------------------------------------------------------------------------
    @torch.no_grad()
    def _targets(self, held: HeldOut) -> list[Tensor]:
        targets = []
        for batch, weights in zip(held.batches, held.beliefs, strict=True):
            each = [run_module(model, batch).logits.float().softmax(-1) for model in self.parents]
            targets.append(torch.stack([p * _like(w, p) for p, w in zip(each, weights, strict=True)]).sum(0))
        return targets

    def _loss(self, model: Any, held: HeldOut) -> tuple[float, float | None]:
        """Per token or answer; and how often the answer is that of the parents, where these are the goal."""
        if held.targets is not None:
            return _from_predictions(model, held.batches, held.targets)
        sums, counts = self._text_losses(model, held)
        return float(torch.cat(sums).sum() / torch.cat(counts).sum()), None

    def _believed_loss(self, held: HeldOut) -> float:
        """Of the parents, each as far as it is believed."""
        total = count = 0.0
        losses = [self._text_losses(model, held) for model in self.parents]
        for number, weights in enumerate(held.beliefs):
            each = torch.stack([sums[number] for sums, _ in losses])
            total += float((each * weights.to(each)).sum())
            count += float(losses[0][1][number].sum())
        return total / count

    @torch.no_grad()
    def _text_losses(self, model: Any, held: HeldOut) -> tuple[list[Tensor], list[Tensor]]:
        """Nats and tokens of every example, batch by batch."""
        sums, counts = [], []
        for batch in held.batches:
            ids = batch["input_ids"]
            mask = batch.get("attention_mask", torch.ones_like(ids))[:, 1:].double()
            scores = run_module(model, batch).logits[:, :-1].float().log_softmax(-1)
            told = scores.gather(2, ids[:, 1:, None])[..., 0].double()
            sums.append(-(told * mask).sum(1))
            counts.append(mask.sum(1))
        return sums, counts


@torch.no_grad()
def _from_predictions(model: Any, batches: Sequence[Batch], targets: Sequence[Tensor]) -> tuple[float, float]:
    """The mean divergence from predictions, and how often the likeliest answer is the same; padding is left out."""
    nats = same = count = 0.0
    for batch, target in zip(batches, targets, strict=True):
        scores = run_module(model, batch).logits.float().log_softmax(-1)
        mask = batch.get("attention_mask")
        keep = torch.ones(target.shape[:-1]) if mask is None or target.dim() < 3 else mask
        if keep.shape != target.shape[:-1]:
            keep = torch.ones(target.shape[:-1])
        apart = (target * (target.clamp_min(1e-12).log() - scores)).sum(-1)
        nats += float((apart * keep).sum())
        same += float(((scores.argmax(-1) == target.argmax(-1)) * keep).sum())
        count += float(keep.sum())
    return nats / count, same / count


def _like(weights: Tensor, predictions: Tensor) -> Tensor:
    """(examples,), to be multiplied with (examples, …)."""
    return weights.reshape(-1, *[1] * (predictions.dim() - 1)).to(predictions)


def _best(merges: Sequence[TriedMerge]) -> str | None:
    """The first, and so the simplest, of those about as good as the best."""
    known = [one for one in merges if math.isfinite(one.lost)]
    least = min((one.lost for one in known), default=0.0)
    return next((one.name for one in known if one.lost <= least + AS_GOOD), None)
