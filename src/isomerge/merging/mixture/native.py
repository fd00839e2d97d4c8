"""The stock class that holds the experts: whose models fit, how large it is, and its config.json."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from isomerge.architectures.expert_classes import EXPERT_CLASSES, REFUSED, ExpertClass
from isomerge.checkpoint import Checkpoint
from isomerge.errors import RequestError

WIDTHS = 8
"""Widths are multiples of this, as fast kernels like it."""


@dataclass(frozen=True)
class MixtureShape:
    """How large the mixture is. The residual stream holds the models' streams one after the other, then what the router
    reads: the evidence of the token itself for each model, the mean evidence of all tokens so far, a constant, and what
    brings all tokens to one length."""

    models: int
    width: int
    """Of one model's residual stream."""
    heads: int
    groups: int
    head_width: int
    units: int
    """Of one model's feed-forward."""
    layers: int
    """Of one model."""
    in_turn: bool = False
    """Every layer is that of one model, one after the other; else all models stand side by side in it."""

    @property
    def streams(self) -> int:
        return self.models * self.width

    @property
    def hidden(self) -> int:
        return _rounded(self.streams + 2 * self.models + 2)

    @property
    def own_evidence(self) -> slice:
        return slice(self.streams, self.streams + self.models)

    @property
    def mean_evidence(self) -> slice:
        return slice(self.streams + self.models, self.constant)

    @property
    def constant(self) -> int:
        return self.streams + 2 * self.models

    @property
    def filler(self) -> int:
        return self.constant + 1

    @property
    def order(self) -> list[tuple[int, list[int]]]:
        """For every layer but the first: which layer of the models it is, and of which of them."""
        everyone = list(range(self.models))
        together = [[m] for m in everyone] if self.in_turn else [everyone]
        return [(layer, some) for layer in range(self.layers) for some in together]

    @property
    def queries(self) -> int:
        """Heads in a group."""
        return self.heads // self.groups

    @property
    def silent(self) -> int:
        """Groups of heads that only the first layer uses."""
        return 0 if self.in_turn else 1

    @property
    def all_groups(self) -> int:
        """In one layer."""
        return self.groups * (1 if self.in_turn else self.models) + self.silent

    @property
    def all_heads(self) -> int:
        return self.all_groups * self.queries

    @property
    def expert_units(self) -> int:
        """A unit for everything that the first layer takes out of the stream."""
        clearing = _rounded(self.streams - self.width + 1)
        return clearing if self.in_turn else max(self.units, clearing)


def _rounded(size: int) -> int:
    return math.ceil(size / WIDTHS) * WIDTHS


def read_shape(config: Any, models: int, held_by: ExpertClass) -> MixtureShape:
    """`config` is the loaded configuration of one model."""
    width, heads = int(config.hidden_size), int(config.num_attention_heads)
    shape = MixtureShape(
        models=models, width=width, heads=heads, groups=int(config.num_key_value_heads or heads),
        head_width=int(getattr(config, "head_dim", None) or width // heads), units=int(config.intermediate_size),
        layers=int(config.num_hidden_layers), in_turn=held_by.dense_key is not None,
    )  # fmt: skip
    if models > shape.head_width:
        raise RequestError(f"mixture: {models} models, and a head carries the evidence of {shape.head_width} at most.")
    return shape


def mixture_config(config: Any, shape: MixtureShape, held_by: ExpertClass) -> dict[str, Any]:
    """What config.json says of the mixture, beside what it says of the first model. `config` is that model's, loaded:
    defaults that differ between the classes are written out."""
    same = ("hidden_act", "max_position_embeddings", "rope_parameters")
    layers = len(shape.order) + 1
    return {
        **held_by.config, "tie_word_embeddings": False,
        "hidden_size": shape.hidden, "head_dim": shape.head_width, "num_hidden_layers": layers,
        "num_attention_heads": shape.all_heads, "num_key_value_heads": shape.all_groups,
        "intermediate_size": shape.units, held_by.units_key: shape.expert_units,
        **({held_by.dense_key: list(range(1, layers))} if held_by.dense_key else {}),
        **{key: [value] * layers for key, value in held_by.each_layer.items()},
        held_by.experts_key: shape.models, held_by.chosen_key: 1,
        # The mean square over a longer stream is smaller, and so is what is added to it.
        "rms_norm_eps": config.rms_norm_eps * shape.width / shape.hidden,
        "sliding_window": getattr(config, "sliding_window", None),
        **{key: getattr(config, key) for key in same},
    }  # fmt: skip


def expert_class(checkpoint: Checkpoint) -> ExpertClass:
    """The stock class that can hold such a model as an expert; raise where there is none."""
    config = checkpoint.config
    family, classes = str(config.get("model_type")), config.get("architectures")
    found = EXPERT_CLASSES.get(family)
    if found is None:
        why = REFUSED.get(family, "no stock class holds such models as experts")
        raise RequestError(
            f"mixture: {checkpoint.name} is of the family '{family}', and {why}. Use models of "
            f"{', '.join(EXPERT_CLASSES)}, or reconstruct for one dense model."
        )
    if classes and not str(classes[0]).endswith("ForCausalLM"):
        raise RequestError(
            f"mixture: {checkpoint.name} is a {classes[0]}, and experts are chosen by how likely a text is to each "
            "model. Use language models (…ForCausalLM)."
        )
    biased = [key for key in found.without if config.get(key)]
    if biased:
        raise RequestError(
            f"mixture: {checkpoint.name} has {biased[0]}: true in config.json, and a {found.name} has no biases. Use "
            "models without them, or reconstruct for one dense model."
        )
    return found
