"""Which rows of an activation are data, and which are padding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from isomerge.data.base import Batch
from isomerge.running.passes import examples_in


class PaddingMask:
    """Of one batch: (examples, positions), true where there is data.

    An encoder–decoder model has two masks. What only the encoder made (the keys and values of cross-attention read its
    output) has the positions of the encoder.
    """

    def __init__(self, batch: Batch, module: Any) -> None:
        self.size = examples_in(batch)
        self.two_sided = bool(getattr(module.config, "is_encoder_decoder", False))
        self.mask = _mask(batch, "attention_mask", "input_ids")
        self.decoder = _mask(batch, "decoder_attention_mask", "decoder_input_ids")
        if self.decoder is None and self.two_sided and "labels" in batch:
            self.decoder = batch["labels"] != -100
        self._given = [batch.get("attention_mask"), batch.get("decoder_attention_mask")]
        self.encoded: Tensor | None = None
        """The encoder's output of this forward pass."""

    def rows(self, values: Tensor, *, in_encoder: bool) -> Tensor | None:
        """(rows, width), or None where the values do not belong to the examples (a table of relative positions)."""
        lead, flat = tuple(values.shape[:-1]), values.reshape(-1, values.shape[-1])
        if self.mask is None:
            return flat if lead and lead[0] % self.size == 0 else None
        masks = [self.mask]
        if self.decoder is not None and not in_encoder:
            read_from_encoder = self.encoded is not None and values.data_ptr() == self.encoded.data_ptr()
            masks = [self.mask] if read_from_encoder else [self.decoder, self.mask]
        for mask in masks:
            if lead == tuple(mask.shape) or lead == (mask.numel(),):
                return flat[mask.reshape(-1)]
        return flat if lead == (self.size,) else None

    def of_side(self, rows: int, *, encoder: bool) -> Tensor | None:
        """For so many rows on one side of the model, one per position: which are data. None: all of them, as far as
        the batch has no mask that says otherwise (one of four dimensions is about pairs of positions)."""
        mask = self._given[self.two_sided and not encoder]
        return None if mask is None or mask.dim() > 3 or mask.numel() != rows else mask.reshape(-1).bool()

    def of_length(self, rows: int) -> Tensor | None:
        """The same for rows whose side is not known: the mask of that length. None: all of them."""
        for mask in (self.decoder, self.mask):
            if mask is not None and mask.numel() == rows:
                return mask.reshape(-1)
        return None


def _mask(batch: Batch, name: str, ids: str) -> Tensor | None:
    mask = batch[name].bool() if name in batch else torch.ones_like(batch[ids]).bool() if ids in batch else None
    return None if mask is None else mask.reshape(-1, mask.shape[-1])


def encoder_of(module: nn.Module) -> nn.Module | None:
    """The encoder of an encoder–decoder model."""
    if not getattr(getattr(module, "config", None), "is_encoder_decoder", False):
        return None
    return next((part for name, part in module.named_modules() if name.rpartition(".")[2] == "encoder"), None)
