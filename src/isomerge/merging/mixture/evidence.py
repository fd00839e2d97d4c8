"""How much each token of the vocabulary speaks for each model: what tells whose text this is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from isomerge.data.base import Batch
from isomerge.merging.layerwise.ridge import solve_positive
from isomerge.running.padding import PaddingMask
from isomerge.running.passes import DataPass
from isomerge.running.stock import run_module

MOST = 8.0
"""Nats that one token may speak for or against a model."""
GUESSED = 1.0
"""A token's evidence is guessed from its embeddings, and the guess counts as much as having seen it so often."""
RIDGE = 3e-2


@torch.no_grad()
def vocabulary_evidence(models: Sequence[Any], examples: DataPass) -> Tensor:
    """(tokens, models): the mean of log p_m(token | those before it), from the models' mean, over all times the token
    came; for tokens that hardly came, what their embeddings let expect."""
    tables = [model.get_input_embeddings().weight.double() for model in models]
    table = torch.cat(tables, 1)
    table = table / torch.linalg.vector_norm(table, dim=1, keepdim=True).clamp_min(1e-30)
    sums, counts = table.new_zeros(len(table), len(models)), table.new_zeros(len(table))
    for batch in examples:
        words, nats = _of_batch(models, batch)
        sums.index_add_(0, words, nats)
        counts.index_add_(0, words, torch.ones_like(nats[:, 0]))
    gram = table.T @ (table * counts[:, None])
    penalty = RIDGE * gram.diagonal() + 1e-6 * gram.diagonal().mean()
    guess = table @ solve_positive(gram + torch.diag(penalty), table.T @ sums)
    evidence: Tensor = (sums + GUESSED * guess) / (counts + GUESSED)[:, None]
    return evidence


def _of_batch(models: Sequence[Any], batch: Batch) -> tuple[Tensor, Tensor]:
    """The tokens that follow others (rows,), and their evidence (rows, models)."""
    ids = batch["input_ids"]
    valid = PaddingMask(batch, models[0]).of_side(ids.numel(), encoder=False)
    mask = torch.ones_like(ids).bool() if valid is None else valid.reshape(ids.shape)
    follows = mask[:, 1:] & mask[:, :-1]
    nats = torch.zeros(*follows.shape, len(models), dtype=torch.float64, device=ids.device)
    for m, model in enumerate(models):
        for example, (own, words) in enumerate(
            zip(run_module(model, batch).logits, ids, strict=True)
        ):  # scores are large
            nats[example, :, m] = own[:-1].float().log_softmax(-1).gather(1, words[1:, None])[:, 0].double()
    nats = (nats - nats.mean(-1, keepdim=True)).clamp(-MOST, MOST)
    return ids[:, 1:][follows], nats[follows]
