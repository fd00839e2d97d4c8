"""Which layers of a parent stand for which of the merged model, where their numbers differ.

Streams are compared by linear CKA, ‖XᵀY‖² / (‖XᵀX‖ ‖YᵀY‖) of centred X and Y, which asks for no common width or basis.
Among all ways to go through both models in order, the one with the most similar streams is taken, by dynamic
programming: a deeper parent has one or more layers for each, a shallower one has one or none.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from isomerge.architectures import describe
from isomerge.architectures.sizes import LAYERS, key_of
from isomerge.merging.layerwise.parent_views import NUMBER, State, is_gain
from isomerge.merging.layerwise.parents import in_memory
from isomerge.merging.layerwise.token_matching import OwnTokens
from isomerge.running.activation_watch import first_tensor
from isomerge.running.padding import PaddingMask
from isomerge.running.passes import DataPass
from isomerge.running.predictions import rows_of
from isomerge.running.stock import run_module
from isomerge.symmetry.architecture import RESIDUAL
from isomerge.symmetry.binding import BoundModel

ROWS, ROWS_OF_A_BATCH = 4096, 256  # tokens on which streams are compared


def depth_of(config: Mapping[str, Any]) -> int:
    return int(config.get(key_of(config, LAYERS) or "", 0))


def match_layers(first: Sequence[Tensor], other: Sequence[Tensor]) -> list[list[int]]:
    """For every layer of the first model, those of the other; given the streams after each layer (rows, width)."""
    similar = torch.tensor([[linear_cka(x, y) for y in other] for x in first], dtype=torch.float64)
    depth, own = similar.shape
    least, most = (1, own) if own >= depth else (0, 1)
    best = torch.full((depth + 1, own + 1), -math.inf, dtype=torch.float64)
    best[0, 0] = 0.0
    came = torch.zeros(depth + 1, own + 1, dtype=torch.int64)
    for i in range(1, depth + 1):
        for j in range(own + 1):
            # After i layers of the first, j of the other are done; before any, its stream is that of the tokens.
            steps = range(max(0, j - most), j - least + 1)
            if steps:
                before = max(steps, key=lambda k: float(best[i - 1, k]))
                best[i, j] = best[i - 1, before] + (similar[i - 1, j - 1] if j else 0.0)
                came[i, j] = before
    matched: list[list[int]] = []
    j = own
    for i in range(depth, 0, -1):
        before = int(came[i, j])
        matched.append(list(range(before, j)))
        j = before
    return matched[::-1]


def linear_cka(x: Tensor, y: Tensor) -> float:
    x, y = (rows - rows.mean(0) for rows in (x.double(), y.double()))
    size = torch.linalg.matrix_norm(x.T @ x) * torch.linalg.matrix_norm(y.T @ y)
    return float(torch.linalg.matrix_norm(x.T @ y) ** 2 / size.clamp_min(1e-30))


@torch.no_grad()
def streams(model: Any, blocks: Sequence[str], examples: DataPass, tokens: OwnTokens) -> list[Tensor]:
    """The stream after every block, on some tokens of every batch."""
    found: list[list[Tensor]] = [[] for _ in blocks]
    for batch in examples:
        outputs: list[Tensor] = []
        with contextlib.ExitStack() as hooks:
            for name in blocks:
                block = model.get_submodule(name)
                hooks.enter_context(block.register_forward_hook(lambda *of, o=outputs: o.append(first_tensor(of[-1]))))
            run_module(model, batch)
        padding = PaddingMask(batch, model)
        for own, hidden in zip(found, outputs, strict=True):
            hidden = tokens.placed(hidden, batch)
            rows = rows_of(hidden, padding.of_side(hidden[..., 0].numel(), encoder=False))
            own.append(rows[:: math.ceil(max(1, len(rows)) / ROWS_OF_A_BATCH)].float())
        if sum(len(rows) for rows in found[0]) >= ROWS:
            break
    return [torch.cat(own) for own in found]


def deepened(
    bound: BoundModel, state: State, config: Mapping[str, Any], matched: Sequence[Sequence[int]]
) -> tuple[BoundModel, State, dict[str, Any]]:
    """The same function with more layers: where none stands for one, a layer that adds nothing."""
    deeper: State = {}
    for file, tensor in state.items():
        found = NUMBER.search(file)
        if found is None:
            deeper[file] = tensor
            continue
        for layer, own in enumerate(matched):
            source = own[0] if own else 0  # any layer has tensors of the right shape
            if int(found.group()) == source:
                name = NUMBER.sub(str(layer), file, count=1)
                empty = not own and _adds(bound, file)
                deeper[name] = torch.zeros_like(tensor) if empty else tensor.clone()  # no two layers share memory
    sizes: dict[str, Any] = {key_of(config, LAYERS) or "": len(matched)}
    kinds = config.get("layer_types")
    if isinstance(kinds, list):
        sizes["layer_types"] = [kinds[own[0] if own else 0] for own in matched]
    config = {**config, **sizes}
    return describe(in_memory(deeper, config), untie=True), deeper, config


def _adds(bound: BoundModel, file: str) -> bool:
    """Whether a tensor writes to the stream."""
    name = next((name for name, files in bound.files.items() if file in files), file)
    layout = bound.layouts.get(name)
    return layout is not None and layout.axis_of(RESIDUAL, dual=False) is not None and not is_gain(layout)
