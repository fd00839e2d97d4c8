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
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from isomerge.calibrate.batches import Batch, Batches, Progress, Reading, examples_in, inputs_of
from isomerge.calibrate.maps import Stock
from isomerge.checkpoint.module import saved_state
from isomerge.errors import IsomergeError, RequestError, did_you_mean

KINDS = ("true", "empirical")
EXACT_CLASSES = 16
EXACT_SCORES = 512
"""Backward passes for one example."""
IGNORED = -100


def diagonal_fisher(
    stock: Stock,
    batches: Batches,
    *,
    kind: str = "true",
    samples: int = 1,
    seed: int = 0,
    limit: int | None = None,
    progress: Progress | None = None,
) -> tuple[dict[str, Tensor], dict[str, Any], Reading]:
    """Fisher information under the checkpoint's names, how it was computed, and what was read. Uses up the module."""
    if kind not in KINDS:
        raise RequestError(f"Measuring Fisher information: '{kind}' is not a kind of it. {did_you_mean(kind, KINDS)}")
    if samples < 1:
        raise RequestError(f"Measuring Fisher information with {samples} draws per example: at least one is needed.")
    model = stock.model.requires_grad_(True)
    parameters = list(model.parameters())
    sums = [torch.zeros_like(p, dtype=torch.float64) for p in parameters]
    reading = Reading(
        batches, device=stock.device, dtype=stock.dtype, limit=limit, progress=progress, what="Fisher information"
    )
    exact = True
    done = 0

    def add(score: Tensor, weight: float, *, last: bool = False) -> None:
        grads = torch.autograd.grad(score, parameters, retain_graph=not last, allow_unused=True)
        for total, grad in zip(sums, grads, strict=True):
            if grad is not None:
                total.addcmul_(grad.double(), grad.double(), value=weight)

    for batch in reading:
        if kind == "empirical" and "labels" not in batch:
            raise RequestError(
                "Measuring the empirical Fisher information: the data have no labels. Name the column or folder "
                "that holds them, or measure fisher='true', which needs none."
            )
        for example in range(examples_in(batch)):
            one = {name: tensor[example : example + 1] for name, tensor in batch.items()}
            scores, labels = predictions(model, one)
            _require_finite(scores, stock, done)
            if kind == "empirical":
                add(_chosen(scores, labels), 1.0, last=True)
            elif scores.shape[1] == 1:
                for place in range(len(scores)):
                    add(scores[place, 0], 1.0, last=place == len(scores) - 1)
            elif scores.shape[1] <= EXACT_CLASSES and scores.numel() <= EXACT_SCORES:
                _expected(scores, add)
            else:
                exact = False
                for draw in range(samples):
                    labels = _drawn(scores, seed, done, draw)
                    add(_chosen(scores, labels), 1 / samples, last=draw == samples - 1)
            done += 1
    record = {"kind": kind, "examples": done, "exact": exact if kind == "true" else None, "samples": samples,
              "seed": seed, "unit": "example"}  # fmt: skip
    return _on_disk(stock, {id(p): s / done for p, s in zip(parameters, sums, strict=True)}), record, reading


def predictions(model: Any, one: Batch) -> tuple[Tensor, Tensor | None]:
    """(predictions, classes) log-probabilities of one example, and its labels where the data have some.

    One output number is handed back as it is. Padding and positions without a label are left out; a causal language
    model predicts the next token.
    """
    made = model(**inputs_of(one, model))
    logits = made.get("logits")
    if logits is None:
        raise RequestError(
            f"Measuring Fisher information of a {type(model).__name__}: it has no logits, so it says nothing about "
            "labels. Use the class with its task head."
        )
    if getattr(model.config, "problem_type", None) == "multi_label_classification":
        raise RequestError("Measuring Fisher information: a model with several labels at once is not supported.")
    labels = one.get("labels")
    if logits.ndim == 2:
        scores = logits if logits.shape[1] == 1 else logits.log_softmax(-1)
        return scores, labels
    keep = _positions(model, one, logits)
    if labels is not None:
        labels = labels.reshape(keep.shape)
    if type(model).__name__.endswith(("ForCausalLM", "LMHeadModel")):
        logits, keep = logits[:, :-1], keep[:, 1:]
        labels = None if labels is None else labels[:, 1:]
    if labels is not None:
        keep = keep & (labels != IGNORED)
        labels = labels[keep]
    return logits[keep].log_softmax(-1), labels


def _positions(model: Any, one: Batch, logits: Tensor) -> Tensor:
    """Which positions are data: (1, positions)."""
    decoder = bool(getattr(model.config, "is_encoder_decoder", False))
    mask = one.get("decoder_attention_mask" if decoder else "attention_mask")
    if mask is not None and tuple(mask.shape) == tuple(logits.shape[:2]):
        return mask.bool()
    return torch.ones(logits.shape[:2], dtype=torch.bool, device=logits.device)


def _chosen(scores: Tensor, labels: Tensor | None) -> Tensor:
    assert labels is not None
    if scores.shape[1] == 1:
        return -(scores[:, 0] - labels.reshape(-1).to(scores.dtype)).square().sum() / 2
    return scores.gather(1, labels.reshape(-1, 1).long()).sum()


def _expected(scores: Tensor, add: Callable[..., None]) -> None:
    chances = scores.detach().double().exp()
    last = scores.numel() - 1
    for number, (place, label) in enumerate((p, c) for p in range(len(scores)) for c in range(scores.shape[1])):
        add(scores[place, label], float(chances[place, label]), last=number == last)


def _drawn(scores: Tensor, seed: int, example: int, draw: int) -> Tensor:
    number = hashlib.sha256(f"{seed}:{example}:{draw}".encode()).digest()[:8]
    generator = torch.Generator().manual_seed(int.from_bytes(number, "little") >> 1)
    chances = scores.detach().cpu().double().exp()
    return torch.multinomial(chances, 1, generator=generator)[:, 0].to(scores.device)


def _require_finite(scores: Tensor, stock: Stock, example: int) -> None:
    if not bool(scores.isfinite().all()):
        raise IsomergeError(
            f"Measuring Fisher information of {stock.checkpoint.name}: the predictions for example {example} are not "
            "finite. Look for NaN in the data, or for weights that overflow in float32."
        )


def _on_disk(stock: Stock, found: dict[int, Tensor]) -> dict[str, Tensor]:
    """Under the names and in the shapes of the checkpoint: the values take the places of the weights, and transformers
    is asked how it would save them. What is no parameter counts nothing."""
    in_memory = {n: found[id(p)] for n, p in stock.model.named_parameters(remove_duplicate=False)}
    model = stock.model.double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(found[id(parameter)])
    saved = saved_state(model, stock.checkpoint.name)
    result = {}
    for name, info in stock.checkpoint.tensors.items():
        memory = stock.layout.in_memory.get(name, name)
        value = in_memory.get(memory, saved.get(name) if name not in stock.layout.in_memory else None)
        if info.dtype.is_floating_point:
            result[name] = torch.zeros(info.shape, dtype=torch.float64) if value is None else value.cpu().clone()
    return result
