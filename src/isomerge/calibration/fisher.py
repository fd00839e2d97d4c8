"""Diagonal Fisher information: the mean over examples of the squared gradient of the log-likelihood.

`true`: over labels of the model's own predictive distribution. An example with several predictions (a sentence, one
label per token) counts as a whole: its log-likelihood is the sum over its positions, and since labels are independent
given the input and each score has mean zero, the expected square of the sum is the sum of the expected squares.

    F = 1/N Σ_x Σ_positions Σ_c p(c|x) (∂ log p(c|x) / ∂θ)²

That is computed exactly up to 16 classes and EXACT_SCORES scores an example; above, labels are drawn, `samples` times,
with a seed that depends only on `seed`, the example's number and the draw.
`empirical`: the labels of the data instead. It is not the Fisher information and can be far from it where the model is
sure and wrong, but needs one backward pass.
A model with one output number is read as a normal distribution of variance 1 around it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from isomerge.arguments import require_choice
from isomerge.calibration.squared_gradients import SquaredGradients
from isomerge.checkpoint.base import Progress
from isomerge.checkpoint.memory import saved_state
from isomerge.choices import FISHER_KINDS
from isomerge.data.base import Batch, Batches
from isomerge.errors import IsomergeError, RequestError
from isomerge.running.padding import PaddingMask
from isomerge.running.passes import DataPass, examples_in
from isomerge.running.stock import StockModel

EXACT_CLASSES = 16
EXACT_SCORES = 512
"""Backward passes for one example."""
IGNORED = -100


def diagonal_fisher(
    stock: StockModel,
    batches: Batches,
    *,
    kind: str = "true",
    samples: int = 1,
    seed: int = 0,
    names: Collection[str] | None = None,
    limit: int | None = None,
    progress: Progress | None = None,
) -> tuple[dict[str, Tensor], dict[str, Any], DataPass]:
    """Fisher information under the checkpoint's names, how it was computed, and what was read. Uses up the module.

    `names` are those of the tensors to measure, if not all.
    """
    require_choice("fisher", kind, FISHER_KINDS)
    if samples < 1:
        raise RequestError(f"samples is {samples}, but each example needs at least one draw.", keys=("samples",))
    for parameter in _measured(stock, names):
        parameter.requires_grad_(True)
    exact = True

    def scores(batch: Batch, first: int) -> Iterator[Tensor]:
        nonlocal exact
        predicted = predictions(stock, batch)
        _require_finite(predicted, stock, first)
        if kind == "empirical":
            yield _chosen(predicted.scores, predicted.labels)
        else:
            few = _few(predicted, examples_in(batch))
            exact = exact and bool(few.all())
            yield from _expected(predicted, few)
            yield from _drawn_scores(predicted, ~few, samples, seed, first)

    squares = SquaredGradients(stock.module, scores)
    reading = DataPass(
        batches, device=stock.device, dtype=stock.dtype, limit=limit, progress=progress, what="Fisher information"
    )
    done = 0
    for batch in reading:
        if kind == "empirical" and "labels" not in batch:
            raise RequestError(
                "Measuring the empirical Fisher information: the data have no labels. Name the column or folder "
                "that holds them, or measure fisher='true', which needs none."
            )
        squares.add(batch, done)
        done += examples_in(batch)
    record = {"kind": kind, "examples": done, "exact": exact if kind == "true" else None, "samples": samples,
              "seed": seed, "unit": "example"}  # fmt: skip
    information = {id(p): total / done for p, total in zip(squares.parameters, squares.sums, strict=True)}
    return _on_disk(stock, information, names), record, reading


@dataclass(frozen=True)
class Predictions:
    """What a model predicts for a batch: one row per label that it has to give."""

    scores: Tensor
    """(predictions, classes), log-probabilities; one output number is kept as it is."""
    example: Tensor
    """(predictions,): whose they are, counted in the batch; those of an example stand together."""
    labels: Tensor | None
    """(predictions,), where the data have some."""


def predictions(stock: StockModel, batch: Batch) -> Predictions:
    """Run a model. Padding and positions without a label are left out; a causal language model predicts the next
    token."""
    model, logits = stock.module, stock.forward(batch).get("logits")
    if logits is None:
        raise RequestError(
            f"Measuring Fisher information of a {type(model).__name__}: it has no logits, so it says nothing about "
            "labels. Use the class with its task head."
        )
    if getattr(model.config, "problem_type", None) == "multi_label_classification":
        raise RequestError("Measuring Fisher information: a model with several labels at once is not supported.")
    labels = batch.get("labels")
    if logits.ndim == 2:
        scores = logits if logits.shape[1] == 1 else logits.log_softmax(-1)
        return Predictions(scores, torch.arange(len(scores), device=scores.device), labels)
    keep = _positions(model, batch, logits)
    if labels is not None:
        labels = labels.reshape(keep.shape)
    if type(model).__name__.endswith(("ForCausalLM", "LMHeadModel")):
        logits, keep = logits[:, :-1], keep[:, 1:]
        labels = None if labels is None else labels[:, 1:]
    if labels is not None:
        keep = keep & (labels != IGNORED)
        labels = labels[keep]
    return Predictions(logits[keep].log_softmax(-1), keep.nonzero()[:, 0], labels)


def _positions(model: Any, batch: Batch, logits: Tensor) -> Tensor:
    """Which positions are data: (examples, positions)."""
    shape = logits.shape[:2]
    mask = PaddingMask(batch, model).of_side(shape.numel(), encoder=False)
    return torch.ones(shape, dtype=torch.bool, device=logits.device) if mask is None else mask.reshape(shape)


def _chosen(scores: Tensor, labels: Tensor | None) -> Tensor:
    assert labels is not None
    if scores.shape[1] == 1:
        return -(scores[:, 0] - labels.reshape(-1).to(scores.dtype)).square().sum() / 2
    return scores.gather(1, labels.reshape(-1, 1).long()).sum()


def _few(predicted: Predictions, examples: int) -> Tensor:
    """(predictions,): whether an example's labels are few enough to go through all of them."""
    classes = predicted.scores.shape[1]
    mine = torch.bincount(predicted.example, minlength=examples)[predicted.example]
    return (mine * classes <= EXACT_SCORES) & (classes <= EXACT_CLASSES) | (classes == 1)


def _expected(predicted: Predictions, which: Tensor) -> Iterator[Tensor]:
    """The n-th prediction of all examples together, label by label, times √p: squared, each counts p times."""
    first = torch.searchsorted(predicted.example, predicted.example)  # the row where a prediction's example begins
    number = torch.arange(len(first), device=first.device) - first
    classes = predicted.scores.shape[1]
    for n in range(int(number[which].max()) + 1 if bool(which.any()) else 0):
        scores = predicted.scores[which & (number == n)]
        if classes > 1:
            scores = scores * (scores.detach() / 2).exp()
        yield from scores.sum(0)


def _drawn_scores(predicted: Predictions, which: Tensor, samples: int, seed: int, first: int) -> Iterator[Tensor]:
    """Labels drawn from the model's own predictions, one sum for all examples per draw."""
    for draw in range(samples if bool(which.any()) else 0):
        labels = torch.zeros_like(predicted.example)
        for example in torch.unique(predicted.example[which]).tolist():
            mine = predicted.example == example
            labels[mine] = _drawn(predicted.scores[mine], seed, first + example, draw)
        yield _chosen(predicted.scores[which], labels[which]) / samples**0.5


def _drawn(scores: Tensor, seed: int, example: int, draw: int) -> Tensor:
    number = hashlib.sha256(f"{seed}:{example}:{draw}".encode()).digest()[:8]
    generator = torch.Generator().manual_seed(int.from_bytes(number, "little") >> 1)
    chances = scores.detach().cpu().double().exp()
    return torch.multinomial(chances, 1, generator=generator)[:, 0].to(scores.device)


def _require_finite(predicted: Predictions, stock: StockModel, first: int) -> None:
    wrong = ~predicted.scores.detach().isfinite().all(1)
    if bool(wrong.any()):
        raise IsomergeError(
            f"Measuring Fisher information of {stock.checkpoint.name}: the predictions for example "
            f"{first + int(predicted.example[wrong][0])} are not finite. Look for NaN in the data, or for weights that "
            "overflow in float32."
        )


def _measured(stock: StockModel, names: Collection[str] | None) -> Iterator[Tensor]:
    """The parameters that these tensors are in memory; one that is stacked or cut there may be any of the rest."""
    if names is None or not all(name in stock.layout.in_memory for name in names):
        yield from stock.module.parameters()
        return
    wanted = {stock.layout.in_memory[name] for name in names}
    for name, parameter in stock.module.named_parameters(remove_duplicate=False):
        if name in wanted:
            yield parameter


def _on_disk(stock: StockModel, information: dict[int, Tensor], names: Collection[str] | None) -> dict[str, Tensor]:
    """Under the names and in the shapes of the checkpoint. What is no parameter counts nothing.

    Where a tensor is stacked or cut in memory, the values take the places of the weights, and transformers is asked how
    it would save them.
    """
    parameters = stock.module.named_parameters(remove_duplicate=False)
    values = {name: information[id(p)] for name, p in parameters if id(p) in information}
    wanted = [
        name for name, info in stock.checkpoint.tensors.items()
        if info.dtype.is_floating_point and (names is None or name in names)
    ]  # fmt: skip
    in_memory = {name: stock.layout.in_memory.get(name, name) for name in wanted}
    saved: dict[str, Tensor] = {}
    if any(name not in stock.layout.in_memory and memory not in values for name, memory in in_memory.items()):
        model = stock.module.double()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(information[id(parameter)])
        saved = saved_state(model, stock.checkpoint.name)
    result = {}
    for name, memory in in_memory.items():
        value = values.get(memory, saved.get(name) if name not in stock.layout.in_memory else None)
        shape = stock.checkpoint.tensors[name].shape
        # A copy: two names may be one tensor.
        result[name] = torch.zeros(shape, dtype=torch.float64) if value is None else value.detach().to("cpu", copy=True)
    return result
