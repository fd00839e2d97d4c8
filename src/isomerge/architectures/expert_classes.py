"""Which stock class with experts can hold models that were trained apart, by their family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class ExpertClass:
    """A stock class whose layers have experts, one of which a token is sent to."""

    name: str
    config: Mapping[str, object]
    """The entries of config.json that choose it."""
    router: str
    """In a layer, on disk."""
    expert: str
    """The place of an expert in a layer, on disk, with its number left open."""
    parts: Mapping[str, str]
    """The maps of an expert, by what they do."""
    experts_key: str
    chosen_key: str
    """What config.json calls the number of experts, and of those that a token is sent to."""
    without: tuple[str, ...]
    """Entries of a model's config.json that this class has no room for."""
    units_key: str = "intermediate_size"
    """What config.json calls the size of an expert."""
    dense_key: str | None = None
    """What config.json calls the list of layers without experts, where the heads of a layer have something in common,
    so that models stand in layers of their own, one after the other; None: they stand side by side in every layer."""
    norms: Mapping[str, str] = field(default_factory=dict)
    """What the heads of a layer have in common: norms in its attention, by the map they follow."""
    each_layer: Mapping[str, object] = field(default_factory=dict)
    """Entries of config.json with one value for every layer."""


MIXTRAL = ExpertClass(
    name="Mixtral",
    config={"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]},
    router="block_sparse_moe.gate.weight",
    expert="block_sparse_moe.experts.{}.",
    parts={"gate": "w1", "up": "w3", "down": "w2"},
    experts_key="num_local_experts",
    chosen_key="num_experts_per_tok",
    without=("attention_bias", "mlp_bias"),
)
QWEN3_MOE = ExpertClass(
    name="Qwen3-MoE",
    config={"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "norm_topk_prob": True},
    router="mlp.gate.weight",
    expert="mlp.experts.{}.",
    parts={"gate": "gate_proj", "up": "up_proj", "down": "down_proj"},
    experts_key="num_experts",
    chosen_key="num_experts_per_tok",
    without=("attention_bias", "use_sliding_window"),
    units_key="moe_intermediate_size",
    dense_key="mlp_only_layers",
    norms={"q": "q_norm.weight", "k": "k_norm.weight"},
    each_layer={"layer_types": "full_attention"},
)
EXPERT_CLASSES = {"llama": MIXTRAL, "mistral": MIXTRAL, "qwen3": QWEN3_MOE}
REFUSED = {
    "qwen2": "the biases of its values would be added to the text of other models, too",
}
"""Families that have a class with experts, and why these cannot be models trained apart."""
