"""Rows of routers: which direction of the stream speaks for which expert.

- hidden, hidden_last, hidden_avg: what the base makes of an expert's prompts, before every layer: at the last token of
  each (hidden and hidden_last mean the same, as in mergekit), or the mean over its tokens; the mean over prompts, less
  that of the negative prompts, brought to length 1;
- cheap_embed: the same of the embeddings of all tokens, for every layer alike: no model is run;
- random and uniform_random: normal numbers, or those that a fresh linear map has.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from isomerge.checkpoint import Checkpoint
from isomerge.data.tokenizer import tokenizer_for
from isomerge.errors import RequestError
from isomerge.merging.merge_inputs import ExpertRequest
from isomerge.running.stock import StockModel

Reader = Callable[[Sequence[list[int]]], Tensor]
"""Prompts as tokens, to (layers, width)."""
LEAST = 1e-8
DEGENERATE = 5.0
"""The condition number of a router from which its rows are called alike, as in mergekit."""


def prompted_rows(
    base: Checkpoint, experts: Sequence[ExpertRequest], mode: str, layers: int, *, table: str, device: str
) -> Tensor:
    """(layers, experts, width). `table` is the name of the embeddings on disk."""
    tokenizer = tokenizer_for(base)
    read = _embeddings(base, table, layers) if mode == "cheap_embed" else _states(base, mode, device)
    rows = []
    for place, one in enumerate(experts, start=1):
        row = read(_tokens(tokenizer, one.positive, f"positive_prompts of expert {place}"))
        if one.negative:
            row = row - read(_tokens(tokenizer, one.negative, f"negative_prompts of expert {place}"))
        rows.append(row / torch.linalg.vector_norm(row, dim=-1, keepdim=True).clamp_min(LEAST))
    return torch.stack(rows, 1)


def _tokens(tokenizer: Any, prompts: Sequence[str], what: str) -> list[list[int]]:
    """Each with the token that begins a text in front, where the tokenizer has one."""
    start = tokenizer.bos_token or ""
    ids = [list(tokenizer(start + prompt, add_special_tokens=False)["input_ids"]) for prompt in prompts]
    if not all(ids):
        raise RequestError(
            f"Building a mixture of experts: {what} has a text without a token. Write words there.", keys=("experts",)
        )
    return ids


def _states(base: Checkpoint, mode: str, device: str) -> Reader:
    model = StockModel.load(base, device)

    @torch.no_grad()
    def read(prompts: Sequence[list[int]]) -> Tensor:
        rows = []
        for ids in prompts:
            batch = {"input_ids": torch.tensor([ids], device=device)}
            states = torch.stack(model.module(**batch, output_hidden_states=True).hidden_states[:-1])[:, 0].double()
            rows.append(states.mean(1) if mode == "hidden_avg" else states[:, -1])
        found: Tensor = torch.stack(rows).mean(0).cpu()
        return found

    return read


def _embeddings(base: Checkpoint, table: str, layers: int) -> Reader:
    def read(prompts: Sequence[list[int]]) -> Tensor:
        ids = sorted({token for prompt in prompts for token in prompt})
        rows = {token: base.read_rows(table, token, token + 1)[0].double().clone() for token in ids}
        total = torch.stack([rows[token] for prompt in prompts for token in prompt]).sum(0)
        row: Tensor = total / torch.linalg.vector_norm(total).clamp_min(LEAST)
        return row.expand(layers, -1)

    return read


def random_rows(mode: str, seed: int, layers: int, experts: int, width: int) -> Tensor:
    """(layers, experts, width): standard normal, or uniform between ±1/√width."""
    draw = generator(seed, "routers")
    shape = (layers, experts, width)
    if mode == "random":
        return torch.from_numpy(draw.standard_normal(shape))
    return torch.from_numpy(draw.uniform(-1, 1, shape) / math.sqrt(width))


def generator(seed: int, name: str) -> np.random.Generator:
    """Random numbers that a seed and a name decide, on every machine."""
    key = hashlib.sha256(f"{seed}\0{name}".encode()).digest()[:16]
    return np.random.Generator(np.random.Philox(key=np.frombuffer(key, dtype=np.uint64)))


def alike(rows: Tensor) -> list[int]:
    """The layers whose rows are nearly the same for some experts, so that these are hardly told apart."""
    if rows.shape[1] < 2:
        return []
    return [layer for layer, own in enumerate(rows) if float(torch.linalg.cond(own)) > DEGENERATE]
