"""Clients that send LoRA factors only: their updates are averaged, and not their factors."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from isomerge.adapters.adapter import EMBEDDING, FACTOR, PREFIX, WEIGHTS, scale_of
from isomerge.checkpoint.open import open_checkpoint
from isomerge.errors import RequestError
from isomerge.federated.aggregation import Aggregated
from isomerge.federated.clients import ClientUpdate, accepted, shares
from isomerge.merging.adapters import merge_adapters


def aggregate_adapters(
    model: Mapping[str, Any],
    clients: Sequence[ClientUpdate],
    adapter_config: Mapping[str, Any],
    *,
    method: str = "linear",
    options: Mapping[str, Any] | None = None,
) -> Aggregated:
    """The next global adapter from the clients' adapters, all with the names of PEFT's files and one adapter_config.

    Each layer's ΔW = s · B A is merged by `method`, FedAvg by default, and cut to the rank of the adapters by its SVD:
    the mean of the products, which the product of the means is not. A note has what the cut lost. The factors are given
    back for the scale of `adapter_config`, so that clients can go on from them.
    """
    # PEFT's own to_dict has sets, and its file lists.
    in_file = {key: sorted(v) if isinstance(v, (set, frozenset)) else v for key, v in adapter_config.items()}
    good, refused = accepted(clients, dict(model))
    opened = [open_checkpoint(dict(c.state), config=in_file, name=f"client {c.name}") for c in good]
    settings = dict(options or {})
    if method == "linear":
        settings.setdefault("weight", shares(good))
    with tempfile.TemporaryDirectory(prefix="isomerge-") as scratch:
        written = merge_adapters(opened, out=Path(scratch) / "merged", method=method, options=settings)
        found = load_file(written.out / WEIGHTS[0])
    state = {name: _as_sent(name, tensor, found, adapter_config) for name, tensor in model.items()}
    notes = [*map(str, refused), *written.notes]
    notes.append(f"cutting the merged update to the adapters' rank lost {written.relative_error:.2%} of it")
    return Aggregated(state, None, [client.name for client in good], refused, 1.0, notes)


def _as_sent(name: str, like: Tensor, found: Mapping[str, Tensor], config: Mapping[str, Any]) -> Tensor:
    """A factor in the shape and for the scale that clients have: padded with zeros where the rank is lower."""
    short = name.removeprefix(PREFIX)
    tensor = found.get(PREFIX + short)
    if tensor is None:
        raise RequestError(
            f"Aggregating adapters: '{name}' has no place in the merged adapter. Send plain LoRA factors, as PEFT's "
            "get_peft_model_state_dict names them."
        )
    factor, table = FACTOR.fullmatch(short), EMBEDDING.fullmatch(short)
    match = factor or table
    if match is None or (factor is not None and factor["what"] != "weight"):
        return tensor.to(like.dtype)
    if match["part"] == "B":
        tensor = tensor / scale_of(config, match["module"], like.shape[1])
    room = like.new_zeros(like.shape, dtype=tensor.dtype)
    room[tuple(slice(n) for n in tensor.shape)] = tensor
    return room.to(like.dtype)
