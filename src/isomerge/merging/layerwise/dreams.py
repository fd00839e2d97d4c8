"""Texts that the parents write themselves: a language model is its own source of examples.

A few tokens of data begin each text, and the model goes on as it would: every token is drawn from its own
probabilities. On such texts it is the expert, so they teach a merge what the model knows where real text is scarce.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from isomerge.data.base import Batch, Batches
from isomerge.errors import RequestError
from isomerge.merging.layerwise.goals import OwnedBatches
from isomerge.merging.merge_inputs import MergeInputs
from isomerge.running.stock import load_stock, read_weights

BEGINNING = 4
"""Tokens of the data that a text begins with."""
AT_ONCE = 256
"""Texts that are written together."""


def with_dreams(data: OwnedBatches, inputs: MergeInputs, count: int) -> OwnedBatches:
    """The data, and `count` texts of every model, which are that model's own."""
    passes, owners = list(data.passes), [list(own) for own in data.owners]
    for m in range(len(inputs.models)):
        own = [one for one, who in zip(data.passes, data.owners, strict=True) if m in who]
        known = inputs.kept.load(f"dreams-{m}") if inputs.kept is not None else None
        rows = known[0]["rows"] if known else _written(inputs, m, own or list(data.passes), count)
        if known is None and inputs.kept is not None:
            inputs.kept.store(f"dreams-{m}", {"rows": rows})
        passes.append(_batches(rows, max(1, _first(data.passes[0])["input_ids"].shape[0])))
        owners.append([m])
        inputs.report(m + 1, len(inputs.models), "writing texts")
    return OwnedBatches(passes, owners)


def _written(inputs: MergeInputs, number: int, own: Sequence[Batches], count: int) -> Tensor:
    """(count, length) tokens that a model writes, always the same."""
    checkpoint = inputs.models[number]
    model: Any = load_stock({**checkpoint.config, "use_cache": True}, read_weights(checkpoint)).to(inputs.device)
    words = {name for batches in own for name in _first(batches)}
    if not model.can_generate() or getattr(model.config, "is_encoder_decoder", False) or "input_ids" not in words:
        raise RequestError(
            f"reconstruct: dream lets models write texts, and {checkpoint.name} is no language model that reads from "
            "left to right. Leave dream out.",
            keys=("dream",),
        )
    generator = torch.Generator().manual_seed(number)
    starts = _beginnings(own, count, generator)
    length = max(_first(batches)["input_ids"].shape[1] for batches in own)
    devices = [torch.device(inputs.device)] if torch.device(inputs.device).type == "cuda" else []
    written = []
    with torch.random.fork_rng(devices=devices), torch.no_grad():
        torch.manual_seed(number)
        for some in starts.to(inputs.device).split(AT_ONCE):
            written.append(
                model.generate(
                    some, attention_mask=torch.ones_like(some), max_new_tokens=length - some.shape[1], do_sample=True,
                    top_k=0, top_p=1.0, temperature=1.0, pad_token_id=0, eos_token_id=None, use_cache=True,
                ).cpu()
            )  # fmt: skip
    return torch.cat(written)


def _beginnings(own: Sequence[Batches], count: int, generator: torch.Generator) -> Tensor:
    """(count, BEGINNING): runs of tokens from anywhere in the data, without padding."""
    texts = []
    for batches in own:
        for batch in batches():
            mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
            texts += [ids[kept] for ids, kept in zip(batch["input_ids"].cpu(), mask.cpu(), strict=True)]
    texts = [ids for ids in texts if len(ids) >= BEGINNING]
    if not texts:
        raise RequestError(
            f"reconstruct: dream begins texts with {BEGINNING} tokens of the data, and no text is so long.",
            keys=("dream", "data"),
        )
    starts = []
    for which in torch.randint(len(texts), (count,), generator=generator).tolist():
        at = int(torch.randint(len(texts[which]) - BEGINNING + 1, (), generator=generator))
        starts.append(texts[which][at : at + BEGINNING])
    return torch.stack(starts)


def _first(batches: Batches) -> Batch:
    return next(iter(batches()))


def _batches(rows: Tensor, size: int) -> Batches:
    def pass_over() -> Iterator[Batch]:
        return ({"input_ids": part} for part in rows.split(size))

    return pass_over
