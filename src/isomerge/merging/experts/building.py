"""The tensors of a mixture built of dense models: where each is read from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from isomerge.architectures.expert_classes import ExpertClass
from isomerge.checkpoint import TensorInfo
from isomerge.errors import RequestError
from isomerge.merging.experts.dense import DenseModel
from isomerge.merging.experts.gates import generator
from isomerge.merging.merge_inputs import ExpertRequest
from isomerge.merging.run.rows import InMemory, TensorSource
from isomerge.merging.run.sources import Computed, Stored

SILENT = 8
"""Units of a shared expert of zeros, where a class wants one and none is named: as wide as fast kernels like it."""


@dataclass(frozen=True)
class Expert:
    """A model's feed-forwards, and how they are changed on the way."""

    model: DenseModel
    request: ExpertRequest

    def source(self, layer: int, part: str, seed: int, name: str) -> TensorSource:
        """Its map, with noise added, and what it writes scaled, where the recipe says so."""
        stored = Stored(self.model.checkpoint, self.model.layers[layer][part])
        noise, scale = self.request.noise, self.request.scale if part == "down" else 1.0
        if noise == 0 and scale == 1:
            return stored

        def make() -> Tensor:
            tensor = stored.rows(0, stored.info.shape[0]).double()
            if noise:
                tensor = tensor + noise * torch.from_numpy(generator(seed, name).standard_normal(tensor.shape))
            return tensor * scale

        return Computed(stored.info, stored.label, make)


class MixtureTensors:
    """All tensors of the mixture, by name on disk. Nothing is read before it is written."""

    def __init__(
        self, base: DenseModel, experts: Sequence[Expert], shared: Expert | None, held_by: ExpertClass, seed: int
    ) -> None:
        self.sources: dict[str, TensorSource] = {}
        self.plan: dict[str, TensorInfo] = {}
        self._base, self._held_by, self._seed = base, held_by, seed
        for name in base.rest:
            self._add(name, Stored(base.checkpoint, name), base.checkpoint.tensors[name].dtype)
        self._biases()
        for layer in range(len(base.layers)):
            for number, expert in enumerate(experts):
                self._maps(layer, held_by.expert.format(number), expert)
            if shared is not None and held_by.shared:
                self._maps(layer, held_by.shared, shared)
            elif held_by.shared:
                self._silent(layer, held_by.shared)

    def route(self, rows: Tensor, shared_rows: Tensor | None) -> None:
        """The routers: (layers, experts, width), and (layers, 1, width) of the expert that all tokens are sent to."""
        for layer, own in enumerate(rows):
            name = self._name(layer, self._held_by.router)
            self._add(name, InMemory(own.contiguous(), f"tensor '{name}'"), self._dtype(layer))
            if not self._held_by.shared:
                continue
            gate = torch.zeros(1, own.shape[1], dtype=own.dtype) if shared_rows is None else shared_rows[layer]
            name = self._name(layer, self._held_by.shared_gate)
            self._add(name, InMemory(gate.contiguous(), f"tensor '{name}'"), self._dtype(layer))

    def _name(self, layer: int, rest: str) -> str:
        return f"{self._base.prefix}{layer}.{rest}"

    def _dtype(self, layer: int) -> torch.dtype:
        return self._base.checkpoint.tensors[self._base.layers[layer]["gate"]].dtype

    def _add(self, name: str, source: TensorSource, dtype: torch.dtype) -> None:
        self.sources[name], self.plan[name] = source, TensorInfo(source.info.shape, dtype)

    def _maps(self, layer: int, place: str, expert: Expert) -> None:
        for part, stored in self._held_by.parts.items():
            name = f"{self._name(layer, place)}{stored}.weight"
            self._add(name, expert.source(layer, part, self._seed, name), self._dtype(layer))

    def _silent(self, layer: int, place: str) -> None:
        """An expert that adds nothing."""
        for part, stored in self._held_by.parts.items():
            shape = (self._base.width, SILENT) if part == "down" else (SILENT, self._base.width)
            name = f"{self._name(layer, place)}{stored}.weight"
            self._add(name, InMemory(torch.zeros(shape), f"tensor '{name}'"), self._dtype(layer))

    def _biases(self) -> None:
        """Zeros where the class has biases and the dense model has none."""
        for layer in range(len(self._base.layers)):
            for part in self._held_by.biased:
                map_name = self._name(layer, f"self_attn.{part}_proj")
                if f"{map_name}.bias" in self._base.checkpoint.tensors:
                    continue
                weight = self._base.checkpoint.tensors.get(f"{map_name}.weight")
                if weight is None:
                    raise RequestError(
                        f"Building a mixture of experts: {self._base.checkpoint.name} has no {map_name}.weight. Get "
                        "the whole model from where it came."
                    )
                zeros = InMemory(torch.zeros(weight.shape[0]), f"tensor '{map_name}.bias'")
                self._add(f"{map_name}.bias", zeros, weight.dtype)
