"""StarCoder2: LayerNorm in front, rotary positions, grouped queries, plain feed-forward."""

from isomerge.architectures import architecture, parts
from isomerge.symmetry.architecture import Architecture, Facts
from isomerge.symmetry.groups import Permutation


@architecture("starcoder2", summary="pre-LayerNorm, rotary, grouped queries", tied_by_default=True)
def starcoder2(facts: Facts) -> Architecture:
    relu = facts.get("hidden_act", "gelu_pytorch_tanh") == "relu"
    return parts.rotary_decoder(
        facts,
        {
            "residual": parts.stream(facts, layer_norm=True),
            **parts.attention_spaces(facts),
            "ffn.{i}": Permutation(facts["intermediate_size"]),
            **parts.relu_units(relu),
        },
        {
            **parts.attention_tensors(),
            **parts.feed_forward(parts.MLP + "c_fc", parts.MLP + "c_proj", relu, optional="?"),
        },
        norms={"input_layernorm": parts.QKV, "post_attention_layernorm": (parts.MLP + "c_fc.weight",)},
        kind="layer",
    )
