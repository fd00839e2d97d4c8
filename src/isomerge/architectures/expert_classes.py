"""The stock classes with experts: how they store them, and which dense families they can hold."""

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
    everywhere: Mapping[str, object] = field(default_factory=dict)
    """Entries of config.json that give every layer experts, whose weights sum to 1."""
    dense: Mapping[str, object] = field(default_factory=dict)
    """The entries of config.json that choose the class without experts."""
    sums_to_one: str | None = None
    """What config.json calls the switch by which the weights of the chosen experts sum to 1; None: they always do."""
    shared: str | None = None
    """The place in a layer, on disk, of the expert that every token is sent to; None: there is none."""
    shared_gate: str = ""
    """Whose sigmoid is how much that expert counts."""
    shared_key: str = ""
    """What config.json calls its size."""
    biased: tuple[str, ...] = ()
    """Maps of its attention that have a bias, where those of some dense families have none."""


MIXTRAL = ExpertClass(
    name="Mixtral",
    config={"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]},
    router="block_sparse_moe.gate.weight",
    expert="block_sparse_moe.experts.{}.",
    parts={"gate": "w1", "up": "w3", "down": "w2"},
    experts_key="num_local_experts",
    chosen_key="num_experts_per_tok",
    without=("attention_bias", "mlp_bias"),
    dense={"model_type": "mistral", "architectures": ["MistralForCausalLM"]},
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
    everywhere={"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
    dense={"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]},
    sums_to_one="norm_topk_prob",
)
QWEN2_MOE = ExpertClass(
    name="Qwen2-MoE",
    config={"model_type": "qwen2_moe", "architectures": ["Qwen2MoeForCausalLM"], "norm_topk_prob": True},
    router="mlp.gate.weight",
    expert="mlp.experts.{}.",
    parts=QWEN3_MOE.parts,
    experts_key="num_experts",
    chosen_key="num_experts_per_tok",
    without=("attention_bias", "mlp_bias", "use_sliding_window"),
    units_key="moe_intermediate_size",
    dense_key="mlp_only_layers",
    each_layer={"layer_types": "full_attention"},
    everywhere={**QWEN3_MOE.everywhere, "qkv_bias": True},
    dense={"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]},
    sums_to_one="norm_topk_prob",
    shared="mlp.shared_expert.",
    shared_gate="mlp.shared_expert_gate.weight",
    shared_key="shared_expert_intermediate_size",
    biased=("q", "k", "v"),
)
EXPERT_CLASSES = {"llama": MIXTRAL, "mistral": MIXTRAL, "qwen3": QWEN3_MOE}
REFUSED = {
    "qwen2": "the biases of its values would be added to the text of other models, too",
}
"""Families that have a class with experts, and why these cannot be models trained apart."""

HOLDERS = {"llama": (MIXTRAL, QWEN2_MOE), "mistral": (MIXTRAL, QWEN2_MOE), "qwen2": (QWEN2_MOE,), "qwen3": (QWEN3_MOE,)}
"""The classes that can hold the feed-forwards of a dense family, the usual one first."""
WITH_EXPERTS = {str(one.config["model_type"]): one for one in (MIXTRAL, QWEN2_MOE, QWEN3_MOE)}
"""By what config.json calls their family."""
FEED_FORWARD = "mlp.{}_proj.weight"
"""The maps of a dense feed-forward in a layer, on disk: gate, up and down."""
BLOCK = "mlp"
"""Where all these classes have the experts and their router in a layer, in memory."""
ROUTER = "mlp.gate"
