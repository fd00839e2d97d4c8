"""Llama, Mistral, Qwen2 and Qwen3: RMSNorm in front, rotary positions, grouped queries, gated feed-forward."""

from isomerge.architectures import architecture
from isomerge.symmetry.architecture import Architecture, Facts, Norm, ValueBias
from isomerge.symmetry.groups import Group, Invertible, Permutation, Rotary, Rotation, SignedPermutation, SignedScale

LAYER = "model.layers.{i}."
ATTENTION = LAYER + "self_attn."


def sizes(facts: Facts) -> tuple[int, int, int, int]:
    """Width, key/value groups, query heads per group, head width."""
    width, heads = facts["hidden_size"], facts["num_attention_heads"]
    groups = facts.get("num_key_value_heads", heads)
    return width, groups, heads // groups, facts.get("head_dim", width // heads)


def attention_spaces(facts: Facts) -> dict[str, Group]:
    _, groups, queries, inner = sizes(facts)
    return {
        "kv.{i}": Permutation(groups),
        "query.{i}": Permutation(queries, per=("kv.{i}",)),
        "qk.{i}": Rotary(inner, per=("kv.{i}",)),
        "vo.{i}": Invertible(inner, per=("kv.{i}",)),
    }


def attention_tensors(inner: str = "qk.{i}") -> dict[str, str]:
    return {
        ATTENTION + "q_proj.weight": "(kv.{i} query.{i} " + inner + ") residual'",
        ATTENTION + "q_proj.bias?": "(kv.{i} query.{i} " + inner + ")",
        ATTENTION + "k_proj.weight": "(kv.{i} " + inner + "') residual'",
        ATTENTION + "k_proj.bias?": "(kv.{i} " + inner + "')",
        ATTENTION + "v_proj.weight": "(kv.{i} vo.{i}) residual'",
        ATTENTION + "v_proj.bias?": "(kv.{i} vo.{i})",
        ATTENTION + "o_proj.weight": "residual (kv.{i} query.{i} vo.{i}')",
        ATTENTION + "o_proj.bias?": "residual",
    }


def gated_spaces(facts: Facts) -> dict[str, Group]:
    return {"ffn.{i}": Permutation(facts["intermediate_size"]), "up.{i}": SignedScale(1, per=("ffn.{i}",))}


def gated_tensors() -> dict[str, str]:
    return {
        LAYER + "mlp.gate_proj.weight": "ffn.{i} residual'",
        LAYER + "mlp.gate_proj.bias?": "ffn.{i}",
        LAYER + "mlp.up_proj.weight": "(ffn.{i} up.{i}) residual'",
        LAYER + "mlp.up_proj.bias?": "(ffn.{i} up.{i})",
        LAYER + "mlp.down_proj.weight": "residual (ffn.{i} up.{i}')",
        LAYER + "mlp.down_proj.bias?": "residual",
    }


def ends(facts: Facts) -> dict[str, str]:
    """Input table and the task heads; a tied output table is not a tensor of its own."""
    output = {} if facts.tied or facts.head != "lm" else {"lm_head.weight": "_vocab residual'"}
    return {
        "model.embed_tokens.weight": "_vocab residual",
        "score.weight?": "_labels residual'",
        "score.bias?": "_labels",
        "qa_outputs.weight?": "_labels residual'",
        "qa_outputs.bias?": "_labels",
        **output,
    }


FINAL_READERS = ("lm_head.weight", "score.weight", "qa_outputs.weight")
QKV = tuple(ATTENTION + f"{x}_proj.weight" for x in "qkv")
TIES = {"lm_head.weight": ("model.embed_tokens.weight", 1.0)}


@architecture("llama", "mistral", "qwen2", "qwen3", summary="pre-RMSNorm, rotary, grouped queries, gated")
def llama(facts: Facts) -> Architecture:
    width, groups, _, inner = sizes(facts)
    spaces = attention_spaces(facts) | gated_spaces(facts)
    tensors = attention_tensors() | gated_tensors()
    if facts["model_type"] == "qwen3":  # norms on q and k leave a sign per rotary pair, and a gain that can move
        spaces["qk.{i}"] = Rotary(inner, per=("kv.{i}",), phase="sign", scale=False)
        spaces["gain.{i}"] = Rotary(inner, phase="none")
        tensors[ATTENTION + "q_norm.weight"] = "gain.{i}"
        tensors[ATTENTION + "k_norm.weight"] = "gain.{i}'"
    return Architecture(
        prefix="model.",
        other_prefixes=("transformer.",),  # question answering
        repeat={"i": facts["num_hidden_layers"]},
        spaces={"residual": SignedPermutation(width) if facts.tied else Rotation(width), **spaces},
        tensors={
            **tensors,
            **ends(facts),
            LAYER + "input_layernorm.weight": "|residual|",
            LAYER + "post_attention_layernorm.weight": "|residual|",
            "model.norm.weight": "|residual|",
        },
        norms=[
            Norm(LAYER + "input_layernorm", QKV, kind="rms"),
            Norm(LAYER + "post_attention_layernorm", (LAYER + "mlp.gate_proj.weight", LAYER + "mlp.up_proj.weight"),
                 kind="rms"),
            Norm("model.norm", FINAL_READERS, kind="rms"),
        ],
        gauges=[ValueBias(ATTENTION + "v_proj.bias", "vo.{i}", ATTENTION + "o_proj.weight")],
        tied=TIES,
        untied_config={"tie_word_embeddings": False},
    )  # fmt: skip
