"""Qwen3-Next and Qwen3.5: gated attention in some layers (letter `a`), a gated delta rule in the others (`d`).

The delta rule normalises queries and keys of a head and passes them through a short convolution and SiLU, so inside a
head units only change places; a convolution's row and the row in front of it may share out a factor.
"""

from collections.abc import Mapping

from isomerge.architectures import architecture, parts
from isomerge.architectures import expert_parts as experts
from isomerge.errors import SpecificationError
from isomerge.symmetry.architecture import Architecture, Facts, Norm
from isomerge.symmetry.groups import Group, Permutation, Rotary, SignedScale, Signs

LAYER = "model.layers."
A, D = LAYER + "{a}.self_attn.", LAYER + "{d}.linear_attn."
SHARED_GATE = experts.MLP + "shared_expert_gate.weight"
QUERY, KEY = "dk.{d} query.scale.{d}", "dk.{d} key.scale.{d}"
VALUE, GATE = "value.head.{d} dv.{d} value.scale.{d}", "value.head.{d} dv.{d}"
HEADS = "(kv.head.{d} value.head.{d})"


@architecture(
    "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text",
    summary="pre-RMSNorm, gated delta rule and gated attention in turn, gated or experts",
)  # fmt: skip
def qwen3_next(facts: Facts) -> Architecture:
    first, depth = facts["model_type"] == "qwen3_next", facts["num_hidden_layers"]
    every = facts.get("full_attention_interval", 4)
    usual = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(depth)]
    kinds = parts.layer_list(facts, "layer_types", usual)
    dense = facts["model_type"] == "qwen3_5_text"
    sparse = [False] * depth if dense else experts.sparse_by_step(facts)
    spaces, tensors, readers = feed_forwards(facts, sparse)
    by_row = IN_ONE if first else APART
    delta = tuple(D + name + ".weight" for name in by_row)
    return parts.rotary_decoder(
        facts,
        {"residual": parts.stream(facts), **attention_spaces(facts), **delta_spaces(facts), **spaces},
        {
            **attention_tensors(facts),
            **{D + name + ".weight": pattern + " residual'" for name, pattern in by_row.items()},
            **DELTA,
            **tensors,
        },
        norms={
            LAYER + "{a}.input_layernorm": tuple(A + f"{x}_proj.weight" for x in "qkv"),
            LAYER + "{d}.input_layernorm": delta,
            **experts.norms_before(readers),
        },
        offset=1.0,
        added={A + "q_norm.weight": 1.0, A + "k_norm.weight": 1.0},
        inner_norms=[Norm(D + "norm", (D + "out_proj.weight",), kind="rms", space="dv.{d}")],
        gauges=[experts.ROUTER_SHIFT],
        values_into=None,  # the gate stands between the values and the output
        other_prefixes=("transformer.",),  # question answering
        stack={} if dense else experts.STACK,
        repeat={
            **experts.layers_of_either_kind(facts, sparse),
            "a": [i for i, kind in enumerate(kinds) if kind == "full_attention"],
            "d": [i for i, kind in enumerate(kinds) if kind == "linear_attention"],
        },
    )


def feed_forwards(facts: Facts, sparse: list[bool]) -> tuple[dict[str, Group], dict[str, str], tuple[str, ...]]:
    """Spaces, tensors, and what reads the norm in front of experts."""
    spaces = {} if all(sparse) else experts.dense_spaces(facts)
    if not any(sparse):
        return spaces, experts.dense_tensors(), ()
    shared = facts["shared_expert_intermediate_size"]
    spaces |= experts.expert_spaces(experts.expert_count(facts), facts["moe_intermediate_size"], shared)
    tensors = {**experts.expert_tensors(), **experts.shared_tensors("shared_expert"), SHARED_GATE: "_one residual'"}
    readers = (*experts.READERS, *experts.shared_readers("shared_expert"), SHARED_GATE)
    return spaces, tensors | experts.dense_tensors(), readers


def attention_spaces(facts: Facts) -> dict[str, Group]:
    """Values meet a gate unit by unit, so only their order and size are free; queries and keys have norms, which leave
    signs, and a gain that can move."""
    heads, inner = facts["num_attention_heads"], parts.head_width(facts)
    groups, turning = facts.get("num_key_value_heads", heads), parts.rotary_width(facts, inner, 0.25)
    per = ("kv.{a}",)
    found: dict[str, Group] = {
        "kv.{a}": Permutation(groups),
        "query.{a}": Permutation(heads // groups, per=per),
        "rotary.{a}": Rotary(turning, per=per, phase="sign", scale=False),
        "rest.{a}": Signs(inner - turning, per=per),
        "vo.{a}": Permutation(inner, per=per),
        "size.{a}": SignedScale(1, per=("kv.{a}", "vo.{a}")),
        "gain.{a}": Rotary(turning, phase="none"),
        "gain.rest.{a}": SignedScale(inner - turning),
    }
    return {name: group for name, group in found.items() if group.size}


def attention_tensors(facts: Facts) -> dict[str, str]:
    found = attention_spaces(facts)
    inner = [name for name in ("rotary.{a}", "rest.{a}") if name in found]
    gains = [name for name in ("gain.{a}", "gain.rest.{a}") if name in found]
    queries = "(kv.{a} query.{a} [" + " | ".join([*inner, "vo.{a}"]) + "])"
    keys = "(kv.{a} [" + " | ".join(name + "'" for name in inner) + "])"
    return {
        A + "q_proj.weight": queries + " residual'",
        A + "q_proj.bias?": queries,
        A + "k_proj.weight": keys + " residual'",
        A + "k_proj.bias?": keys,
        A + "v_proj.weight": "(kv.{a} vo.{a} size.{a}) residual'",
        A + "v_proj.bias?": "(kv.{a} vo.{a} size.{a})",
        A + "o_proj.weight": "residual (kv.{a} query.{a} vo.{a} size.{a}')",
        A + "o_proj.bias?": "residual",
        A + "q_norm.weight": "[" + " | ".join(gains) + "]",
        A + "k_norm.weight": "[" + " | ".join(name + "'" for name in gains) + "]",
    }


def delta_spaces(facts: Facts) -> dict[str, Group]:
    keys, values = facts["linear_num_key_heads"], facts["linear_num_value_heads"]
    if values % keys:
        raise SpecificationError(
            f"Reading config.json: {values} value heads do not divide among {keys} key heads. Copy the model's own "
            "config.json again."
        )
    head = ("kv.head.{d}",)
    both = (*head, "value.head.{d}")
    return {
        "kv.head.{d}": Permutation(keys),
        "value.head.{d}": Permutation(values // keys, per=head),
        "dk.{d}": Permutation(facts["linear_key_head_dim"], per=head),
        "dv.{d}": Permutation(facts["linear_value_head_dim"], per=both),
        "query.scale.{d}": SignedScale(1, per=(*head, "dk.{d}")),
        "key.scale.{d}": SignedScale(1, per=(*head, "dk.{d}")),
        "value.scale.{d}": SignedScale(1, per=(*both, "dv.{d}")),
    }


IN_ONE: Mapping[str, str] = {
    "in_proj_qkvz": f"(kv.head.{{d}} [{QUERY} | {KEY} | {VALUE} | {GATE}])",
    "in_proj_ba": "(kv.head.{d} [value.head.{d} | value.head.{d}])",
}
APART: Mapping[str, str] = {
    "in_proj_qkv": f"[kv.head.{{d}} {QUERY} | kv.head.{{d}} {KEY} | kv.head.{{d}} {VALUE}]",
    "in_proj_z": f"(kv.head.{{d}} {GATE})",
    "in_proj_b": HEADS,
    "in_proj_a": HEADS,
}
DELTA: Mapping[str, str] = {
    D + "conv1d.weight": f"[kv.head.{{d}} {QUERY}' | kv.head.{{d}} {KEY}' | kv.head.{{d}} {VALUE}'] _one _kernel",
    D + "A_log": HEADS,
    D + "dt_bias": HEADS,
    D + "norm.weight": "_units",
    D + "out_proj.weight": f"residual (kv.head.{{d}} {GATE})",
}
