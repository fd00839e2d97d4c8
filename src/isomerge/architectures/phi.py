"""Phi-1 and Phi-2: attention and feed-forward side by side behind one LayerNorm, part of each head rotary."""

from isomerge.architectures import architecture, parts
from isomerge.symmetry.architecture import Architecture, Facts, Shift
from isomerge.symmetry.groups import Permutation

ATTENTION, MLP = parts.ATTENTION, parts.MLP
INSIDE = ("rotary.{i}", "qk.{i}")


@architecture("phi", summary="pre-LayerNorm, parallel branches, partial rotary")
def phi(facts: Facts) -> Architecture:
    spaces = parts.attention_spaces(facts, rotary=parts.rotary_width(facts, parts.head_width(facts), 0.5))
    axes = parts.inner_axes(spaces)
    relu = facts.get("hidden_act", "gelu_new") == "relu"
    normed = facts.get("qk_layernorm", False)
    if normed:  # a LayerNorm on queries and keys leaves nothing inside a head
        spaces = {name: group.restricted(None) if name in INSIDE else group for name, group in spaces.items()}
    return parts.rotary_decoder(
        facts,
        {
            "residual": parts.stream(facts, layer_norm=True),
            **spaces,
            "ffn.{i}": Permutation(facts["intermediate_size"]),
            **parts.relu_units(relu),
        },
        {
            **parts.attention_tensors(*axes, output="dense"),
            **parts.feed_forward(MLP + "fc1", MLP + "fc2", relu),
            **{ATTENTION + f"{x}_layernorm.{part}?": "_inner" for x in "qk" for part in ("weight", "bias")},
            **({"lm_head.bias": "_vocab"} if facts.head == "lm" else {}),
        },
        norms={"input_layernorm": (*parts.QKV, MLP + "fc1.weight")},
        kind="layer",
        final="model.final_layernorm",
        values_into=ATTENTION + "dense.weight",
        gauges=[
            *([] if normed else parts.key_bias(spaces)),
            # Side by side, attention and feed-forward are added at once: a vector can move between their biases.
            Shift((ATTENTION + "dense.bias", MLP + "fc2.bias")),
        ],
    )
