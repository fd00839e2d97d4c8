"""What a classifier says of examples: its probabilities, and the features that its head reads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from isomerge.checkpoint import Checkpoint
from isomerge.data.base import Data
from isomerge.data.task_heads import label_names
from isomerge.evaluation.tasks import logits_of
from isomerge.running.passes import DataPass
from isomerge.running.stock import StockModel

BATCH = 64


@dataclass(frozen=True)
class Answers:
    """One row per example."""

    probabilities: np.ndarray
    features: np.ndarray | None
    """None where the head is no linear map of one vector per example."""


def answers_of(
    checkpoint: Checkpoint, data: Data, limit: int, seed: int, device: str, batch_size: int | None = None
) -> Answers:
    """In the order of `Data.contents`."""
    stock = StockModel.load(checkpoint, device)
    several = checkpoint.config.get("problem_type") == "multi_label_classification"
    probabilities, features = [], []
    batches = data.passes(checkpoint, batch_size=batch_size or BATCH, limit=limit, seed=seed, device=device)
    with _head_inputs(stock.module, len(label_names(checkpoint.config))) as seen:
        for batch in DataPass(batches, hashed=False):
            logits = logits_of(stock.run(batch)).double()
            probabilities.append(_shares(logits, several).cpu())
            features += [one.double().cpu() for one in seen[-1:] if one.ndim == 2 and len(one) == len(logits)]
            seen.clear()
    whole = len(features) == len(probabilities)
    return Answers(torch.cat(probabilities).numpy(), torch.cat(features).numpy() if whole else None)


def _shares(logits: Tensor, several: bool) -> Tensor:
    if not several:
        return logits.softmax(-1)
    chances = logits.sigmoid()
    return chances / chances.sum(-1, keepdim=True).clamp_min(1e-300)


@contextmanager
def _head_inputs(module: Any, outputs: int) -> Iterator[list[Tensor]]:
    """What linear maps to this many outputs read, outside of the body."""
    body = f"{getattr(module, 'base_model_prefix', '') or '?'}."
    heads = [
        one for name, one in module.named_modules()
        if isinstance(one, nn.Linear) and one.out_features == outputs and not name.startswith(body)
    ]  # fmt: skip
    seen: list[Tensor] = []
    hooks = [head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach())) for head in heads]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()
