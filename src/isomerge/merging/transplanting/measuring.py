"""How well a model predicts texts, per byte: the only unit that models with different tokenizers share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from isomerge.checkpoint import Checkpoint
from isomerge.data.base import draw
from isomerge.data.encode import Encoder
from isomerge.data.parallel import TokenReading
from isomerge.running.stock import StockModel

if TYPE_CHECKING:
    from isomerge.merging.recipe_data import DataSet


def drawn_texts(data: DataSet, checkpoint: Checkpoint) -> tuple[Encoder, list[str]]:
    """The texts of a data set as its settings draw them, and the model's tokenizer."""
    encoder, texts = data.data.as_texts(checkpoint)
    chosen = draw(len(texts), data.settings.limit, data.settings.seed)
    return encoder, [texts[int(n)] for n in sorted(chosen)]


@torch.no_grad()
def bits_per_byte(checkpoint: Checkpoint, encoder: Encoder, texts: Sequence[str], device: str) -> dict[str, float]:
    """−log₂ p of all tokens but the first of each text, over the bytes that they write."""
    model = StockModel.load(checkpoint, device).module
    nats, bytes_read, tokens = 0.0, 0, 0
    for text in texts:
        reading = TokenReading.of(encoder, text)
        if len(reading.ids) < 2:
            continue
        ids = torch.tensor([reading.ids], device=device)
        logits = model(input_ids=ids).logits[0, :-1].double()
        losses = -logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        written = torch.tensor(reading.ends[1:]) <= len(text.encode())  # not the token that ends a text
        nats += float(losses.cpu()[written].sum())
        bytes_read += reading.read(text) - reading.ends[0]
        tokens += int(written.sum())
    return {
        "bits_per_byte": nats / math.log(2) / bytes_read if bytes_read else math.nan,
        "nats_per_token": nats / tokens if tokens else math.nan, "tokens": tokens, "bytes": bytes_read,
    }  # fmt: skip
