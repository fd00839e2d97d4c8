"""adapter_config.json: which scale each layer's update has, and what is not a plain low-rank update."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

# Each of these makes the adapted layer something else than W + scale · B A, or W itself something else than the base.
NOT_EXACT = {
    "layer_replication": "it repeats layers of the base, so it has no place in the base's own tensors",
    "alora_invocation_tokens": "it acts on some tokens only, which no change of the weights can do",
    "use_qalora": "its factors belong to a quantised base",
    "use_bdlora": "its factors are block diagonal",
    "arrow_config": "it chooses between adapters for each token, which no change of the weights can do",
    "monteclora_config": "its factors are random",
    "kasa_config": "it changes the base's weights when it is loaded",
    "target_parameters": "it adapts stacked parameters and not layers",
    "trainable_token_indices": "it stores single rows of an embedding",
}
# Initialisations that subtract the first factors from the base. Others only choose where training starts.
CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")

BIAS = ("none", "lora_only", "all")
"""Which biases an adapter holds, from the fewest to the most."""


def not_exact(config: Mapping[str, Any]) -> list[str]:
    """Why this adapter is no plain low-rank update; empty when it is one."""
    kind = config.get("peft_type")
    if kind != "LORA":
        return [f"its peft_type is {kind!r}, and only LORA is a change of the weights that can be added and merged"]
    problems = [f"{key} is set: {why}" for key, why in NOT_EXACT.items() if config.get(key)]
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(CHANGES_BASE):
        problems.append(
            f"init_lora_weights is '{start}', so it belongs to a changed base: save it again with peft's "
            "save_pretrained(…, path_initial_model_for_weight_conversion=…), which makes it a plain LoRA"
        )
    rank = config.get("r")
    if not isinstance(rank, int) or rank < 1:
        problems.append(f"its rank r is {rank!r}, and it must be a positive whole number")
    if not isinstance(config.get("lora_alpha", 8), (int, float)):
        problems.append(f"its lora_alpha is {config['lora_alpha']!r}, and it must be a number")
    return problems


def scale_of(config: Mapping[str, Any], module: str, rank: int) -> float:
    """α / r, or α / √r for rank-stabilised LoRA.

    >>> scale_of({"lora_alpha": 16, "alpha_pattern": {"q_proj": 4}}, "layers.0.q_proj", 8)
    0.5
    """
    alpha = float(by_pattern(config.get("alpha_pattern"), module, config.get("lora_alpha", 8)))
    return alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank


def by_pattern(patterns: Mapping[str, Any] | None, module: str, otherwise: Any) -> Any:
    """The value of the first pattern that the end of a module's name matches, as PEFT looks them up.

    >>> by_pattern({"layers.0.q_proj": 2, r"v_proj": 3}, "model.layers.0.q_proj", 8)
    2
    """
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return otherwise
