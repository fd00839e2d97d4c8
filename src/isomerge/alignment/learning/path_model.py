"""The model between two others as a function of the transform that is being learned: weights in, predictions out.

(1 − t)·A + t·g(B) is put into the stock class under the names it has in memory. What transformers does to a tensor when
it loads one (renaming, stacking experts, cutting fused matrices) only moves numbers about, so loading a model whose
weights are their own places says where every number goes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from isomerge.data.base import Batch
from isomerge.errors import RequestError
from isomerge.running.predictions import scores_in
from isomerge.running.stock import inputs_of, load_stock, require_runnable
from isomerge.symmetry.binding import BoundModel

Weights = dict[str, Tensor]
Move = Callable[[str, Tensor], Tensor]
"""A tensor of the source, by its name in the specification, as it is moved now."""


class MemoryNames:
    """Where the numbers of a checkpoint's tensors go in the stock class."""

    def __init__(self, config: Mapping[str, Any], shapes: Mapping[str, torch.Size], device: str) -> None:
        places, start = {}, 0
        for name, shape in shapes.items():
            places[name] = torch.arange(start, start + shape.numel(), dtype=torch.float64).reshape(shape)
            start += shape.numel()
        self.module = load_stock(config, places, dtype=torch.float64)
        self._order = list(shapes)
        first = {int(place.flatten()[0]): name for name, place in places.items()}
        self._whole: dict[str, str] = {}
        self._gathered: dict[str, Tensor] = {}
        seen = set()
        for name, tensor in self.module.state_dict().items():
            if not tensor.is_floating_point() or tensor.data_ptr() in seen:
                continue  # tied tensors share one place
            seen.add(tensor.data_ptr())
            file = first.get(int(tensor.flatten()[0]))
            if file is not None and torch.equal(tensor, places[file]):
                self._whole[name] = file
            else:
                self._gathered[name] = tensor.long().to(device)
        self.module = self.module.float().to(device).requires_grad_(False)

    def weights(self, files: Mapping[str, Tensor]) -> Weights:
        """Tensors on disk as the class has them in memory."""
        found = {name: files[file] for name, file in self._whole.items()}
        if self._gathered:
            numbers = torch.cat([files[file].flatten() for file in self._order])
            found |= {name: numbers[places] for name, places in self._gathered.items()}
        return found


class PathModel:
    """The line from the anchor to the moved source. Both are given in one gauge, canonical and balanced."""

    def __init__(
        self, anchor: BoundModel, ends: tuple[Mapping[str, Tensor], Mapping[str, Tensor]], device: str
    ) -> None:
        require_runnable(anchor.checkpoint)
        self.anchor, self.device = anchor, device
        self.ends = [{n: t.to(device, torch.float32) for n, t in end.items()} for end in ends]
        different = [n for n in self.ends[0] if n not in ends[1] or ends[1][n].shape != ends[0][n].shape]
        if different or len(ends[0]) != len(ends[1]):
            raise RequestError(
                f"Learning an alignment to {anchor.name}: {(different or ['a tensor'])[0]} is not the same size in "
                "both models, so there is no model between them. Leave learn out."
            )
        self._extra = {name: anchor.checkpoint.read(name).to(device) for name in anchor.extra}
        config = {**anchor.checkpoint.config, **anchor.architecture.untied_config}
        shapes = {n: t.shape for n, t in self._files(self.ends[0]).items() if t.is_floating_point()}
        self.names = MemoryNames(config, shapes, device)
        self.module = self.names.module

    def _files(self, tensors: Mapping[str, Tensor]) -> Weights:
        files = dict(self._extra)
        for name, tensor in tensors.items():
            files |= self.anchor.split(name, tensor)
        return files

    def between(self, share: float, move: Move | None = None) -> Weights:
        """(1 − share)·A + share·g(B), as the stock class has it; without a move B stays as it was given."""
        mixed = {}
        for name, first in self.ends[0].items():
            second = self.ends[1][name] if move is None else move(name, self.ends[1][name])
            mixed[name] = torch.lerp(first, second, share)
        return self.names.weights(self._files(mixed))

    def end(self, number: int) -> Weights:
        return self.names.weights(self._files(self.ends[number]))

    def scores(self, weights: Weights, batch: Batch, *, quick: bool = False) -> dict[str, Tensor]:
        """All scores the model gives (some have two heads), or its last hidden state; `quick`: bfloat16 on a GPU."""
        return scores_in(self._run(weights, inputs_of(batch, self.module), quick))

    def loss(self, weights: Weights, batch: Batch, *, quick: bool = False) -> Tensor:
        """What the stock class makes of the labels."""
        loss: Tensor = self._run(weights, batch, quick).loss
        return loss.float()

    def _run(self, weights: Weights, given: Batch, quick: bool) -> Any:
        kind = torch.device(self.device).type
        with torch.autocast(kind, dtype=torch.bfloat16, enabled=quick and kind == "cuda"):
            return functional_call(self.module, weights, kwargs=given)
