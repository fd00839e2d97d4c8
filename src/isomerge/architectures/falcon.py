"""Falcon: LayerNorm in front, q, k and v in one projection by groups; rotary positions or a slope for every head."""

from isomerge.architectures import architecture, parts
from isomerge.symmetry.architecture import Architecture, Facts, KeyBias, Norm, Shift, ValueBias
from isomerge.symmetry.groups import Group, Invertible, Permutation, Rotary

MODEL = "transformer."
LAYER = MODEL + "h.{i}."
ATTENTION, MLP = LAYER + "self_attention.", LAYER + "mlp."
QKV, UP = ATTENTION + "query_key_value", MLP + "dense_h_to_4h"
TABLE, OUTPUT = MODEL + "word_embeddings.weight", "lm_head.weight"
HEADS = ("score", "classifier", "qa_outputs")
GROUP = "(kv.{i} [query.{i} qk.{i} | qk.{i}' | vo.{i}])"


@architecture("falcon", summary="pre-LayerNorm, rotary or alibi, grouped or shared keys", tied_by_default=True)
def falcon(facts: Facts) -> Architecture:
    width, heads = facts["hidden_size"], facts["num_attention_heads"]
    new, alibi = facts.get("new_decoder_architecture", False), facts.get("alibi", False)
    parallel = facts.get("parallel_attn", True)
    groups = facts.get("num_kv_heads", heads) if new or not facts.get("multi_query", True) else 1
    inner, per = width // heads, ("kv.{i}",)
    relu = facts.get("activation", "gelu") == "relu"
    places: dict[str, Group] = {"kv.{i}": Permutation(groups), "query.{i}": Permutation(heads // groups, per=per)}
    if alibi:  # every head has its own slope
        places = {name: group.restricted(None) for name, group in places.items()}
    norms = norms_of_a_layer(facts, parallel, new)
    return Architecture(
        prefix=MODEL,
        repeat={"i": facts["num_hidden_layers"]},
        spaces={
            "residual": parts.stream(facts, layer_norm=True),
            **places,
            "qk.{i}": Invertible(inner, per=per) if alibi else Rotary(inner, per=per),
            "vo.{i}": Invertible(inner, per=per),
            "ffn.{i}": Permutation(facts.get("ffn_hidden_size", 4 * width)),
            **parts.relu_units(relu),
        },
        tensors={
            TABLE: "_vocab residual",
            QKV + ".weight": GROUP + " residual'",
            QKV + ".bias?": GROUP,
            ATTENTION + "dense.weight": "residual (kv.{i} query.{i} vo.{i}')",
            ATTENTION + "dense.bias?": "residual",
            **parts.feed_forward(UP, MLP + "dense_4h_to_h", relu, optional="?"),
            **parts.layer_norms(*(norm.name for norm in norms), MODEL + "ln_f"),
            **({} if facts.tied or facts.head != "lm" else {OUTPUT: "_vocab residual'"}),
            **{name: pattern for head in HEADS for name, pattern in parts.labels(head).items()},
        },
        norms=[*norms, Norm(MODEL + "ln_f", (OUTPUT, *(head + ".weight" for head in HEADS)))],
        gauges=[
            *([KeyBias(QKV + ".bias", "qk.{i}")] if alibi else []),
            ValueBias(QKV + ".bias", "vo.{i}", ATTENTION + "dense.weight"),
            *([Shift((ATTENTION + "dense.bias", MLP + "dense_4h_to_h.bias"))] if parallel else []),
        ],
        writers=[
            *([] if facts.tied else [TABLE]),
            *(name + kind for name in (ATTENTION + "dense", MLP + "dense_4h_to_h") for kind in (".weight", ".bias")),
        ],
        tied={OUTPUT: (TABLE, 1.0)},
        untied_config=parts.UNTIED,
    )


def norms_of_a_layer(facts: Facts, parallel: bool, new: bool) -> list[Norm]:
    attention, ffn = (QKV + ".weight",), (UP + ".weight",)
    if not parallel:
        return [Norm(LAYER + "input_layernorm", attention), Norm(LAYER + "post_attention_layernorm", ffn)]
    if facts.get("num_ln_in_parallel_attn", 2 if new else 1) == 2:
        return [Norm(LAYER + "ln_attn", attention), Norm(LAYER + "ln_mlp", ffn)]
    return [Norm(LAYER + "input_layernorm", (*attention, *ffn))]
