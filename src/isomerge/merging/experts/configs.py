"""config.json of a mixture made of a dense model, and the other way round."""

from __future__ import annotations

from typing import Any

from isomerge.architectures.expert_classes import ExpertClass
from isomerge.checkpoint import Checkpoint
from isomerge.checkpoint.stock_classes import class_config
from isomerge.running.stock import require_runnable, stock_class

SAME = ("hidden_act", "max_position_embeddings", "rope_parameters", "rms_norm_eps", "tie_word_embeddings",
        "num_key_value_heads", "sliding_window")  # fmt: skip
"""Entries whose defaults differ between classes: they are written out."""


def loaded_config(checkpoint: Checkpoint) -> Any:
    """As the stock class reads it, with all defaults."""
    require_runnable(checkpoint)
    return class_config(stock_class(checkpoint.config, checkpoint.folder), checkpoint.config)


def mixture_entries(
    checkpoint: Checkpoint, held_by: ExpertClass, *, experts: int, chosen: int, units: int, shared_units: int
) -> dict[str, Any]:
    """What config.json says of a mixture beside what it says of the dense model."""
    config = loaded_config(checkpoint)
    width, heads = int(config.hidden_size), int(config.num_attention_heads)
    head = int(getattr(config, "head_dim", None) or width // heads)
    layers = int(config.num_hidden_layers)
    kinds = getattr(config, "layer_types", None)
    return {
        **held_by.config, **held_by.everywhere, **{key: getattr(config, key, None) for key in SAME},
        "head_dim": head,
        **{key: kinds or [value] * layers for key, value in held_by.each_layer.items()},
        held_by.experts_key: experts, held_by.chosen_key: chosen, held_by.units_key: units,
        **({held_by.shared_key: shared_units} if held_by.shared else {}),
    }  # fmt: skip


def dense_entries(checkpoint: Checkpoint, held_by: ExpertClass, *, units: int) -> dict[str, Any]:
    """What config.json says of a dense model beside what it says of the mixture."""
    config = loaded_config(checkpoint)
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kinds = getattr(config, "layer_types", None)
    more = {"layer_types": kinds} if kinds else {}
    same = {key: getattr(config, key, None) for key in SAME}
    return {**held_by.dense, **same, **more, "head_dim": int(head), "intermediate_size": units}
