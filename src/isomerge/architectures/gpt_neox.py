"""GPT-NeoX and Pythia: LayerNorm in front, rotary positions on part of each head, q, k and v interleaved by head."""

from isomerge.architectures import architecture, parts
from isomerge.checkpoint.config_meaning import rope_parameters
from isomerge.errors import SpecificationError
from isomerge.symmetry.architecture import Architecture, Facts, KeyBias, Norm, Shift, ValueBias
from isomerge.symmetry.groups import Group, Invertible, Permutation, Rotary, RotationFixingOnes

MODEL = "gpt_neox."
LAYER = MODEL + "layers.{i}."
ATTENTION, MLP = LAYER + "attention.", LAYER + "mlp."
HEADS = ("score", "classifier", "qa_outputs")
OUTPUT, TABLE = "embed_out.weight", MODEL + "embed_in.weight"


def rotary_width(facts: Facts, inner: int) -> int:
    """How many coordinates of a head turn with the position; whole pairs."""
    share = rope_parameters(facts.config).get("partial_rotary_factor", 0.25)
    if not isinstance(share, (int, float)) or not 0 <= share <= 1:
        raise SpecificationError(f"Reading config.json: the rotary part of a head is {str(share)[:60]}, not 0 to 1.")
    return (int(inner * share) + 1) // 2 * 2


def inner_spaces(inner: int, rotary: int) -> dict[str, Group]:
    """Inside a head: complex numbers on the rotary part, anything invertible on the rest."""
    parts = {
        "rotary.{i}": Rotary(rotary, per=("head.{i}",)),
        "qk.{i}": Invertible(inner - rotary, per=("head.{i}",)),
        "vo.{i}": Invertible(inner, per=("head.{i}",)),
    }
    return {name: group for name, group in parts.items() if group.size}


@architecture("gpt_neox", summary="pre-LayerNorm decoder, partial rotary positions")
def gpt_neox(facts: Facts) -> Architecture:
    width, heads = facts["hidden_size"], facts["num_attention_heads"]
    inner = inner_spaces(width // heads, rotary_width(facts, width // heads))
    query = [name for name in inner if name != "vo.{i}"]
    qkv = "(head.{i} [" + " | ".join([*query, *(name + "'" for name in query), "vo.{i}"]) + "])"
    relu = facts.get("hidden_act", "gelu") == "relu"
    return Architecture(
        prefix=MODEL,
        repeat={"i": facts["num_hidden_layers"]},
        spaces={
            "residual": Permutation(width) if facts.tied else RotationFixingOnes(width),
            "head.{i}": Permutation(heads),
            **inner,
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
