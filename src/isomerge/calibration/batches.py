"""Batches of a model's own inputs, and which of their positions are data and which are padding."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from isomerge.checkpoint import Checkpoint
from isomerge.checkpoint.hashing import raw_bytes
from isomerge.data.tokenizer import POSITIONS
from isomerge.errors import RequestError

Batch = dict[str, Tensor]
"""Keyword arguments of the stock class's forward; "labels" too where they are asked for."""
Batches = Callable[[], Iterator[Batch]]
"""Gives a fresh iterator over the same batches each time it is called."""
Progress = Callable[[int, int, str], None]
BATCH_SIZE = 32


class Reading:
    """One pass over the batches: counted, hashed, on the right device, at most `limit` examples."""

    def __init__(
        self,
        batches: Batches,
        *,
        device: str,
        dtype: torch.dtype,
        limit: int | None = None,
        progress: Progress | None = None,
        what: str = "reading data",
    ) -> None:
        if limit is not None and limit < 1:
            raise RequestError(f"Reading data with a limit of {limit}: at least one example is needed.")
        self.examples = 0
        self._batches, self._device, self._dtype, self._limit = batches, device, dtype, limit
        self._progress, self._what = progress, what
        self._digest = hashlib.sha256()

    @property
    def sha256(self) -> str:
        """Of the names and bytes of everything that was read."""
        return self._digest.hexdigest()

    def __iter__(self) -> Iterator[Batch]:
        for batch in self._batches():
            size = examples_in(batch)
            if self._limit is not None and self.examples + size > self._limit:
                size = self._limit - self.examples
                batch = {name: tensor[:size] for name, tensor in batch.items()}
            if size == 0:
                return
            self.examples += size
            # By example, so that the same data in batches of another size have the same hash.
            for example in range(size):
                for name in sorted(batch):
                    self._digest.update(name.encode())
                    self._digest.update(raw_bytes(batch[name][example].cpu().contiguous()))
            yield {name: self._moved(tensor) for name, tensor in batch.items()}
            if self._progress:
                self._progress(self.examples, max(self.examples, self._limit or 0), self._what)
        if self.examples == 0:
            raise RequestError("Reading data: there is not one batch. Check the path, the split and the limit.")

    def _moved(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device, self._dtype) if tensor.is_floating_point() else tensor.to(self._device)


def as_batches(
    data: Any,
    checkpoint: Checkpoint,
    *,
    limit: int | None = None,
    labels: bool = False,
    seed: int = 0,
    device: str = "cpu",
    batch_size: int = BATCH_SIZE,
) -> Batches:
    """Batches of an opened data set (`isomerge.data.Data`) for a model; batches stay what they are."""
    if not hasattr(data, "passes"):
        return data  # type: ignore[no-any-return]
    return data.passes(  # type: ignore[no-any-return]
        checkpoint, batch_size=batch_size, limit=limit, labels=labels, seed=seed, device=device
    )


def examples_in(batch: Batch) -> int:
    sizes = {name: tensor.shape[0] for name, tensor in batch.items() if tensor.ndim}
    if not sizes or len(set(sizes.values())) > 1:
        raise RequestError(
            f"Reading data: a batch has the lengths {sizes or 'of nothing'}. Every tensor of a batch needs one row per "
            "example."
        )
    return next(iter(sizes.values()))


def inputs_of(batch: Batch, model: Any) -> Batch:
    """What the forward pass needs: no labels, unless a decoder's own inputs are made from them."""
    needs = bool(getattr(model.config, "is_encoder_decoder", False)) and "decoder_input_ids" not in batch
    return {name: tensor for name, tensor in batch.items() if name != "labels" or needs}


def forward(model: Any, batch: Batch, name: str) -> Any:
    """Run a model; `name` is for messages."""
    try:
        return model(**inputs_of(batch, model))
    except (IndexError, RuntimeError) as error:
        length = batch["input_ids"].shape[-1] if "input_ids" in batch else 0
        longest = next((int(n) for n in (getattr(model.config, key, None) for key in POSITIONS) if n), length)
        if length > longest:
            raise RequestError(
                f"Running {name}: a batch has texts of {length} tokens, and the model takes {longest}. Cut them, or "
                "pass the data set itself (isomerge.data.open_data), which does."
            ) from error
        raise


class Grid:
    """Which rows of an activation are data: (examples, positions) with padding left out.

    An encoder–decoder model has two grids. What only the encoder made (the keys and values of cross-attention read its
    output) lies on the encoder's.
    """

    def __init__(self, batch: Batch, model: Any) -> None:
        self.size = examples_in(batch)
        self.mask = _mask(batch, "attention_mask", "input_ids")
        self.decoder = _mask(batch, "decoder_attention_mask", "decoder_input_ids")
        if self.decoder is None and getattr(model.config, "is_encoder_decoder", False) and "labels" in batch:
            self.decoder = batch["labels"] != -100
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

    def keep(self, rows: int) -> Tensor | None:
        """For so many rows, one per position: which of them are data. None: all."""
        for mask in (self.decoder, self.mask):
            if mask is not None and mask.numel() == rows:
                return mask.reshape(-1)
        return None


def _mask(batch: Batch, mask: str, ids: str) -> Tensor | None:
    found = batch[mask].bool() if mask in batch else torch.ones_like(batch[ids]).bool() if ids in batch else None
    return None if found is None else found.reshape(-1, found.shape[-1])


def encoder_of(model: nn.Module) -> nn.Module | None:
    """The encoder of an encoder–decoder model."""
    config = getattr(model, "config", None)
    if not getattr(config, "is_encoder_decoder", False):
        return None
    return next((m for name, m in model.named_modules() if name.rpartition(".")[2] == "encoder"), None)
