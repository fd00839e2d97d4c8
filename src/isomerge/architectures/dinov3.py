"""DINOv3: rotary positions on two axes, each frequency of each axis a pair of its own.

No stock class has a head: the hidden states are the output, so the stream stays, and with it all its gains.
"""

from isomerge.architectures import architecture, parts
from isomerge.symmetry.architecture import Architecture, Facts, ValueBias
from isomerge.symmetry.groups import Group, Permutation, Rotary, SignedScale, Trivial

LAYER = "layer.{i}."
ATTENTION, MLP = LAYER + "attention.", LAYER + "mlp."


@architecture("dinov3_vit", summary="pre-LayerNorm encoder, rotary positions on two axes")
def dinov3(facts: Facts) -> Architecture:
    width, heads = facts["hidden_size"], facts["num_attention_heads"]
    gated = facts.get("use_gated_mlp", False)
    relu = not gated and facts.get("hidden_act", "gelu") == "relu"
    spaces: dict[str, Group] = {
        "residual": Trivial(width),
        **parts.head_spaces(heads, width // heads),
        "qk.{i}": Rotary(width // heads, per=("head.{i}",)),
        "ffn.{i}": Permutation(facts["intermediate_size"]),
        **({"up.{i}": SignedScale(1, per=("ffn.{i}",))} if gated else parts.relu_units(relu)),
    }
    return Architecture(
        repeat={"i": facts["num_hidden_layers"]},
        spaces=spaces,
        tensors={
            **{f"embeddings.{token}?": "_ _ residual" for token in ("cls_token", "mask_token", "register_tokens")},
            "embeddings.patch_embeddings.weight": "residual _channels _height _width",
            "embeddings.patch_embeddings.bias": "residual",
            **parts.query_key(ATTENTION + "q_proj", ATTENTION + "k_proj", bias="?"),
            **parts.value_output(ATTENTION + "v_proj", ATTENTION + "o_proj", bias="?"),
            ATTENTION + "o_proj.bias?": "residual",
            **feed_forward(gated, relu),
            **parts.layer_norms(LAYER + "norm1", LAYER + "norm2", "norm"),
            **{LAYER + f"layer_scale{k}.lambda1": "|residual|" for k in (1, 2)},
        },
        gauges=[ValueBias(ATTENTION + "v_proj.bias", "vo.{i}", ATTENTION + "o_proj.weight")],
    )


def feed_forward(gated: bool, relu: bool) -> dict[str, str]:
    if not gated:
        return parts.feed_forward(MLP + "up_proj", MLP + "down_proj", relu, optional="?")
    return {
        MLP + "gate_proj.weight": "ffn.{i} residual'",
        MLP + "gate_proj.bias?": "ffn.{i}",
        MLP + "up_proj.weight": "(ffn.{i} up.{i}) residual'",
        MLP + "up_proj.bias?": "(ffn.{i} up.{i})",
        MLP + "down_proj.weight": "residual (ffn.{i} up.{i}')",
        MLP + "down_proj.bias?": "residual",
    }
