"""The layers of a mixture on disk: routers, experts, and the expert that all tokens are sent to."""

from __future__ import annotations

import re
from dataclasses import dataclass

from torch import Tensor

from isomerge.architectures.expert_classes import FEED_FORWARD, WITH_EXPERTS, ExpertClass
from isomerge.checkpoint import Checkpoint
from isomerge.checkpoint.base import name_some
from isomerge.errors import CheckpointError, RequestError
from isomerge.merging.experts.dense import PARTS

Maps = dict[str, Tensor]
"""gate (units, width), up (units, width) and down (width, units)."""


@dataclass(frozen=True)
class ExpertLayers:
    """A mixture's tensors, by what they are."""

    checkpoint: Checkpoint
    held_by: ExpertClass
    prefix: str
    """What stands before the number of a layer."""
    layers: tuple[int, ...]
    """Those with experts."""
    experts: int
    chosen: int

    def router(self, layer: int) -> str:
        return f"{self.prefix}{layer}.{self.held_by.router}"

    def names(self, layer: int, expert: int) -> dict[str, str]:
        """The names on disk of gate, up and down."""
        place = f"{self.prefix}{layer}.{self.held_by.expert.format(expert)}"
        return {part: f"{place}{self.held_by.parts[part]}.weight" for part in PARTS}

    def shared_names(self, layer: int) -> dict[str, str]:
        """The same of the expert that all tokens are sent to."""
        place = f"{self.prefix}{layer}.{self.held_by.shared}"
        return {part: f"{place}{self.held_by.parts[part]}.weight" for part in PARTS}

    def dense_names(self, layer: int) -> dict[str, str]:
        """The same of a layer without experts."""
        return {part: f"{self.prefix}{layer}.{FEED_FORWARD.format(part)}" for part in PARTS}

    def read(self, names: dict[str, str]) -> Maps:
        return {part: self.checkpoint.read(name).double() for part, name in names.items()}

    @property
    def always_one(self) -> bool:
        """Whether the weights of the chosen experts sum to 1."""
        return self.held_by.sums_to_one is None or bool(self.checkpoint.config.get(self.held_by.sums_to_one))

    @property
    def own_tensors(self) -> set[str]:
        """Routers and experts, the shared one too."""
        held = self.held_by
        names = {self.router(layer) for layer in self.layers}
        for layer in self.layers:
            for expert in range(self.experts):
                names |= set(self.names(layer, expert).values())
            if held.shared:
                names |= {f"{self.prefix}{layer}.{held.shared_gate}", *self.shared_names(layer).values()}
        return names


def read_layers(checkpoint: Checkpoint, act: str) -> ExpertLayers:
    """By headers; raise where it is no mixture of a known class, or not all of it is there."""
    family = str(checkpoint.config.get("model_type"))
    held_by = WITH_EXPERTS.get(family)
    if held_by is None:
        raise RequestError(
            f"{act}: {checkpoint.name} is of the family '{family}', which is no known mixture of experts. Use a model "
            f"of {', '.join(WITH_EXPERTS)}."
        )
    pattern = re.compile(r"(?P<prefix>(?:.*\.)?layers\.)(?P<layer>\d+)\." + re.escape(held_by.router))
    found = [match for name in checkpoint.tensors if (match := pattern.fullmatch(name))]
    if not found:
        raise CheckpointError(
            f"{act}: {checkpoint.name} has no router ({held_by.router}) in its files. Load it with transformers and "
            "save it again (save_pretrained), which writes a tensor for every expert."
        )
    layers = tuple(sorted(int(match["layer"]) for match in found))
    counts = {checkpoint.tensors[match.string].shape[0] for match in found}
    chosen = checkpoint.config.get(held_by.chosen_key)
    if len(counts) != 1 or not isinstance(chosen, int):
        raise CheckpointError(
            f"{act}: config.json of {checkpoint.name} does not fit its routers ({held_by.chosen_key}: {chosen}, "
            f"{sorted(counts)} rows). Get weights and config.json of one and the same model."
        )
    known = ExpertLayers(checkpoint, held_by, found[0]["prefix"], layers, counts.pop(), chosen)
    missing = sorted(known.own_tensors - set(checkpoint.tensors))
    if missing:
        raise CheckpointError(
            f"{act}: {checkpoint.name} lacks {name_some(missing)}. If it stores experts stacked, load it with "
            "transformers and save it again (save_pretrained); else get the whole model from where it came."
        )
    return known
