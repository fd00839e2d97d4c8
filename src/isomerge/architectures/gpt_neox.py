"""GPT-NeoX and Pythia: LayerNorm in front, rotary positions on part of each head, q, k and v interleaved by head."""

from isomerge.architectures import architecture, parts
from isomerge.symmetry.architecture import Architecture, Facts, KeyBias, Norm, Shift, ValueBias
from isomerge.symmetry.groups import Invertible, Permutation, RotationFixingOnes

MODEL = "gpt_neox."
LAYER = MODEL + "layers.{i}."
ATTENTION, MLP = LAYER + "attention.", LAYER + "mlp."
HEADS = ("score", "classifier", "qa_outputs")
OUTPUT, TABLE = "embed_out.weight", MODEL + "embed_in.weight"


@architecture("gpt_neox", summary="pre-LayerNorm decoder, partial rotary positions")
def gpt_neox(facts: Facts) -> Architecture:
    width, heads = facts["hidden_size"], facts["num_attention_heads"]
    size = width // heads
    inner = parts.inside_head(size, parts.rotary_width(facts, size, 0.25), per="head.{i}")
    qkv = "(head.{i} [" + " | ".join([*parts.inner_axes(inner), "vo.{i}"]) + "])"
    relu = facts.get("hidden_act", "gelu") == "relu"
    return Architecture(
        prefix=MODEL,
        repeat={"i": facts["num_hidden_layers"]},
        spaces={
            "residual": Permutation(width) if facts.tied else RotationFixingOnes(width),
            "head.{i}": Permutation(heads),
            **inner,
            "vo.{i}": Invertible(size, per=("head.{i}",)),
            "ffn.{i}": Permutation(facts["intermediate_size"]),
            **parts.relu_units(relu),
        },
        tensors={
            TABLE: "_vocab residual",
            ATTENTION + "query_key_value.weight": qkv + " residual'",
            ATTENTION + "query_key_value.bias?": qkv,
            ATTENTION + "dense.weight": "residual (head.{i} vo.{i}')",
            ATTENTION + "dense.bias?": "residual",
            **parts.feed_forward(MLP + "dense_h_to_4h", MLP + "dense_4h_to_h", relu),
            **parts.layer_norms(LAYER + "input_layernorm", LAYER + "post_attention_layernorm"),
            **parts.layer_norms(MODEL + "final_layer_norm"),
            **({} if facts.tied or facts.head != "lm" else {OUTPUT: "_vocab residual'"}),
            **{head + ".weight?": "_labels residual'" for head in HEADS},
            **{head + ".bias?": "_labels" for head in HEADS},
        },
        norms=[
            Norm(LAYER + "input_layernorm", (ATTENTION + "query_key_value.weight",)),
            Norm(LAYER + "post_attention_layernorm", (MLP + "dense_h_to_4h.weight",)),
            Norm(MODEL + "final_layer_norm", (OUTPUT, *(head + ".weight" for head in HEADS))),
        ],
        gauges=[
            KeyBias(ATTENTION + "query_key_value.bias", "qk.{i}"),  # a rotary key bias turns with the position
            ValueBias(ATTENTION + "query_key_value.bias", "vo.{i}", ATTENTION + "dense.weight"),
            # Side by side, attention and feed-forward are added at once: a vector can move between their biases.
            *([Shift((ATTENTION + "dense.bias", MLP + "dense_4h_to_h.bias"))] if parallel(facts) else []),
        ],
        writers=[
            *([] if facts.tied else [TABLE]),
            ATTENTION + "dense.weight", ATTENTION + "dense.bias",
            MLP + "dense_4h_to_h.weight", MLP + "dense_4h_to_h.bias",
        ],
        tied={OUTPUT: (TABLE, 1.0)},
        untied_config=parts.UNTIED,
    )  # fmt: skip


def parallel(facts: Facts) -> bool:
    return bool(facts.get("use_parallel_residual", True))
