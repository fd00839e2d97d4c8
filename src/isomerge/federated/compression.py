"""Send an update as low-rank factors: what a client has to upload shrinks, and the server knows by how much it errs."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from isomerge.adapters.lowrank import choose_rank, decompose, halves
from isomerge.errors import RequestError
from isomerge.federated.clients import State, difference, moved_by

PARTS = LEFT, RIGHT, WHOLE = "left:", "right:", "whole:"


def compress(before: State, after: State, rank: int) -> tuple[dict[str, Tensor], float]:
    """The update after − before as the best factors of this rank, and the share of its norm that is lost.

    Matrices B A (and what is a matrix when flattened) are cut; vectors, and matrices that factors would not make
    smaller, go whole.

    >>> before, after = {"w": torch.zeros(8, 8)}, {"w": torch.ones(8, 8)}
    >>> sent, lost = compress(before, after, 1)
    >>> sorted((name, tuple(tensor.shape)) for name, tensor in sent.items()), round(lost, 6)
    ([('left:w', (8, 1)), ('right:w', (1, 8))], 0.0)
    """
    if rank < 1:
        raise RequestError(f"Compressing an update: rank is {rank}. Give a positive whole number.", keys=("rank",))
    sent: dict[str, Tensor] = {}
    total = lost = 0.0
    for name, tensor in difference(after, before).items():
        matrix = tensor.flatten(1) if tensor.dim() > 1 else tensor
        total += float(tensor.double().square().sum())
        if tensor.dim() < 2 or rank * sum(matrix.shape) >= matrix.numel():
            sent[WHOLE + name] = tensor.to(after[name].dtype)
            continue
        u, values, vt = decompose(matrix, rank, None)
        keep = choose_rank(values, 0.0, rank, None)
        left, right = halves(u, values, vt, keep)
        left, right = left.to(after[name].dtype), right.to(after[name].dtype)
        lost += float((matrix.double() - left.double() @ right.double()).square().sum())
        sent |= {LEFT + name: left, RIGHT + name: right}
    return sent, math.sqrt(lost / total) if total else 0.0


def expand(before: State, sent: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The model that a client meant: before + B A."""
    names = {key.partition(":")[2] for key in sent}
    unknown = sorted(names - before.keys())
    if unknown:
        raise RequestError(f"Expanding an update: the model has no '{unknown[0]}'. It was sent for another model.")
    step: dict[str, Tensor] = {}
    for name in sorted(names):
        whole, left, right = (sent.get(part + name) for part in (WHOLE, LEFT, RIGHT))
        if whole is None and (left is None or right is None):
            raise RequestError(f"Expanding an update: a factor of '{name}' is missing. Ask the client again.")
        if whole is None:
            assert left is not None and right is not None
            shape = before[name].flatten(1).shape if before[name].dim() > 1 else None
            # Before they are multiplied: two long vectors make a matrix that no memory holds.
            flat = (left.dim(), right.dim()) == (2, 2) and left.shape[1] == len(right)
            if not flat or (len(left), right.shape[1]) != shape:
                raise RequestError(
                    f"Expanding an update: the factors of '{name}' are {tuple(left.shape)} and {tuple(right.shape)}. "
                    "Ask the client again."
                )
            whole = left.float() @ right.float()
        if whole.numel() != before[name].numel():
            raise RequestError(
                f"Expanding an update: '{name}' has {whole.numel()} numbers instead of {before[name].numel()}. "
                "It was sent for another model."
            )
        step[name] = whole.reshape(before[name].shape).to(torch.promote_types(whole.dtype, torch.float32))
    return moved_by(before, step)
