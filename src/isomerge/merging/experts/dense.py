"""The feed-forwards of dense models, and which stock class can hold them as experts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from isomerge.architectures.expert_classes import FEED_FORWARD, HOLDERS, WITH_EXPERTS, ExpertClass
from isomerge.checkpoint import Checkpoint
from isomerge.checkpoint.base import name_some
from isomerge.errors import CheckpointError, RequestError

ACT = "Building a mixture of experts"
PARTS = ("gate", "up", "down")
_FEED_FORWARD = re.compile(
    r"(?P<prefix>(?:.*\.)?layers\.)(?P<layer>\d+)\."
    + re.escape(FEED_FORWARD).replace(r"\{\}", "(?P<part>gate|up|down)")
)


@dataclass(frozen=True)
class DenseModel:
    """A dense model's tensors, by what they are."""

    checkpoint: Checkpoint
    layers: tuple[dict[str, str], ...]
    """The names on disk of gate, up and down."""
    prefix: str
    """What stands before the number of a layer."""
    rest: tuple[str, ...]
    """All other tensors."""

    @property
    def units(self) -> int:
        return self.checkpoint.tensors[self.layers[0]["gate"]].shape[0]

    @property
    def width(self) -> int:
        return self.checkpoint.tensors[self.layers[0]["gate"]].shape[1]

    def shapes(self) -> list[dict[str, tuple[int, ...]]]:
        return [{part: self.checkpoint.tensors[name].shape for part, name in one.items()} for one in self.layers]


def read_dense(checkpoint: Checkpoint) -> DenseModel:
    """By headers; raise where a feed-forward is not complete."""
    layers: dict[int, dict[str, str]] = {}
    rest, prefixes = [], set()
    for name in checkpoint.tensors:
        found = _FEED_FORWARD.fullmatch(name)
        if found is None:
            rest.append(name)
            continue
        layers.setdefault(int(found["layer"]), {})[found["part"]] = name
        prefixes.add(found["prefix"])
    lacking = [layer for layer, own in layers.items() if set(own) != set(PARTS)]
    if not layers or lacking or sorted(layers) != list(range(len(layers))) or len(prefixes) != 1:
        where = f"layer {lacking[0]}" if lacking else f"{len(layers)} layers"
        raise CheckpointError(
            f"{ACT}: {checkpoint.name} has no complete feed-forwards (gate, up and down of every layer; see {where}). "
            "Get the whole model from where it came."
        )
    ordered = tuple(layers[layer] for layer in range(len(layers)))
    return DenseModel(checkpoint, ordered, prefixes.pop(), tuple(rest))


def holding_class(models: Sequence[Checkpoint], architecture: str | None, *, shared: bool) -> ExpertClass:
    """The class that can hold these models as experts; raise where there is none, or not the one that is wanted."""
    families = list(dict.fromkeys(str(model.config.get("model_type")) for model in models))
    if len(families) > 1:
        raise RequestError(
            f"{ACT}: the models are of the families {', '.join(families)}. Experts share the attention of one model, "
            "so use models of one family."
        )
    held = HOLDERS.get(families[0], ())
    if not held:
        already = "its layers have experts already; see keep" if families[0] in WITH_EXPERTS else "no stock class does"
        raise RequestError(
            f"{ACT}: no class holds models of the family '{families[0]}' as experts ({already}). Use models of "
            f"{', '.join(HOLDERS)}."
        )
    fitting = [one for one in held if one.shared or not shared]
    if not fitting:
        raise RequestError(
            f"{ACT}: shared_experts is given, and a {held[0].name} has none. Leave it out.", keys=("shared_experts",)
        )
    if architecture is not None:
        wanted = re.sub(r"[^a-z0-9]", "", architecture.lower())
        named = [one for one in fitting if re.sub(r"[^a-z0-9]", "", one.name.lower()).startswith(wanted)]
        # mergekit calls the first of the two classes "Qwen MoE".
        named = named or [one for one in fitting if re.sub(r"[0-9-]", "", one.name.lower()).startswith(wanted)]
        if not named:
            raise RequestError(
                f"{ACT}: architecture is '{architecture}', and models of '{families[0]}' fit into "
                f"{' or '.join(one.name for one in fitting)}. Name one of these, or leave it out.",
                keys=("architecture",),
            )
        fitting = named
    _require_room(models, fitting[0])
    return fitting[0]


def _require_room(models: Sequence[Checkpoint], held_by: ExpertClass) -> None:
    for model in models:
        biased = [key for key in held_by.without if model.config.get(key)]
        if biased:
            raise RequestError(
                f"{ACT}: {model.name} has {biased[0]}: true in config.json, and a {held_by.name} has no room for it. "
                "Use models without."
            )
        classes = model.config.get("architectures")
        if classes and not str(classes[0]).endswith("ForCausalLM"):
            raise RequestError(
                f"{ACT}: {model.name} is a {classes[0]}, and a mixture is a language model. Use models whose class "
                "ends in ForCausalLM."
            )


def require_alike(base: DenseModel, others: Sequence[DenseModel]) -> None:
    """All feed-forwards have the shapes of the base's."""
    own = base.shapes()
    unlike = [one.checkpoint.name for one in others if one.shapes() != own]
    if unlike:
        raise RequestError(
            f"{ACT}: the feed-forwards of {name_some(unlike)} have other shapes than those of "
            f"{base.checkpoint.name} ({len(own)} layers, width {base.width}, {base.units} units). Use fine-tunes of "
            "one base."
        )
