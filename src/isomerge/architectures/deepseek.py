"""DeepSeek-V2 and DeepSeek-V3: latent attention, and experts behind a router that may choose them by groups.

Queries, keys and values are made from narrow latent spaces, each behind a norm of its own, so each may rotate. The
rotary part of the key is one for all heads, so one complex number per frequency serves all of them.
"""

from isomerge.architectures import architecture, parts
from isomerge.architectures import expert_parts as experts
from isomerge.symmetry.architecture import Architecture, Facts, Norm
from isomerge.symmetry.groups import Group, Invertible, Permutation, Rotary, Rotation

A = parts.ATTENTION
KEYS_VALUES = A + "kv_a_proj_with_mqa"
QUERY = "(head.{i} [qk.{i} | rotary.{i}])"
BIAS = experts.ROUTER.removesuffix("weight") + "e_score_correction_bias"
CHOSEN_BY_GROUPS = "group_limited_greedy"


@architecture("deepseek_v2", "deepseek_v3", summary="pre-RMSNorm, latent attention, experts behind a router")
def deepseek(facts: Facts) -> Architecture:
    third = facts["model_type"] == "deepseek_v3"
    narrow = facts.config.get("q_lora_rank") is not None
    router = {BIAS + "?": "expert.{m}"} if third else {}
    tensors = {**experts.expert_tensors(), **router}
    shared = facts["moe_intermediate_size"] * facts.get("n_shared_experts", 1)
    spaces = experts.expert_spaces(facts["n_routed_experts"], facts["moe_intermediate_size"], shared)
    stack = experts.STACK
    if groups := groups_of_experts(facts, third):
        spaces = experts.grouped_spaces(spaces, groups)
        tensors = {name: experts.grouped(pattern) for name, pattern in tensors.items()}
        stack = experts.BY_GROUPS
    usual = 3 if third else 0
    dense = facts.get("first_k_dense_replace", 0) if "first_k_dense_replace" in facts.config else usual
    sparse = [i >= dense for i in range(facts["num_hidden_layers"])]
    readers = (*experts.READERS, *experts.shared_readers("shared_experts"))
    latent = [Norm(A + "kv_a_layernorm", (A + "kv_b_proj.weight",), kind="rms", space="latent.kv.{i}")]
    if narrow:
        latent.append(Norm(A + "q_a_layernorm", (A + "q_b_proj.weight",), kind="rms", space="latent.query.{i}"))
    first = A + ("q_a_proj.weight" if narrow else "q_proj.weight")
    return parts.rotary_decoder(
        facts,
        {"residual": parts.stream(facts), **attention_spaces(facts, third), **spaces, **experts.dense_spaces(facts)},
        {
            **attention_tensors(narrow),
            **tensors,
            **experts.shared_tensors("shared_experts"),
            **experts.dense_tensors(),
        },
        norms={"input_layernorm": (first, KEYS_VALUES + ".weight"), **experts.norms_before(readers)},
        gauges=[] if third else [experts.ROUTER_SHIFT],  # a sigmoid knows no common score
        inner_norms=latent,
        stack=stack,
        repeat=experts.layers_of_either_kind(facts, sparse),
    )


def groups_of_experts(facts: Facts, third: bool) -> int:
    """How many groups the router chooses from; none where it chooses from all experts at once."""
    by_groups = third or facts.get("topk_method", "greedy") == CHOSEN_BY_GROUPS
    count = facts.get("n_group", 8 if third else 1) if by_groups else 1
    return count if count > 1 else 0


def attention_spaces(facts: Facts, third: bool) -> dict[str, Group]:
    heads, neighbours = ("head.{i}",), not third or facts.get("rope_interleave", True)
    narrow = facts.config.get("q_lora_rank") is not None
    return {
        "head.{i}": Permutation(facts["num_attention_heads"]),
        "qk.{i}": Invertible(facts["qk_nope_head_dim"], per=heads),
        "vo.{i}": Invertible(facts["v_head_dim"], per=heads),
        "rotary.{i}": Rotary(facts["qk_rope_head_dim"], layout="interleaved" if neighbours else "half"),
        "latent.kv.{i}": Rotation(facts["kv_lora_rank"]),
        **({"latent.query.{i}": Rotation(facts["q_lora_rank"])} if narrow else {}),
    }


def attention_tensors(narrow: bool) -> dict[str, str]:
    query = {
        A + "q_a_proj.weight": "latent.query.{i} residual'",
        A + "q_a_proj.bias?": "latent.query.{i}",
        A + "q_a_layernorm.weight": "|latent.query.{i}|",
        A + "q_b_proj.weight": QUERY + " latent.query.{i}'",
    }
    return {
        **(query if narrow else {A + "q_proj.weight": QUERY + " residual'"}),
        KEYS_VALUES + ".weight": "[latent.kv.{i} | rotary.{i}'] residual'",
        KEYS_VALUES + ".bias?": "[latent.kv.{i} | rotary.{i}']",
        A + "kv_a_layernorm.weight": "|latent.kv.{i}|",
        A + "kv_b_proj.weight": "(head.{i} [qk.{i}' | vo.{i}]) latent.kv.{i}'",
        A + "o_proj.weight": "residual (head.{i} vo.{i}')",
        A + "o_proj.bias?": "residual",
    }
