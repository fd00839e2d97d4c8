"""SmolLM3: Llama's blocks, of which some layers have no positions at all."""

from isomerge.architectures import architecture, parts
from isomerge.symmetry.architecture import Architecture, Facts


@architecture("smollm3", summary="pre-RMSNorm, rotary in some layers, grouped queries, gated", tied_by_default=True)
def smollm3(facts: Facts) -> Architecture:
    every = facts.get("no_rope_layer_interval", 4)
    usual = [int((i + 1) % every != 0) for i in range(facts["num_hidden_layers"])]
    turning = [bool(flag) for flag in parts.layer_list(facts, "no_rope_layers", usual)]  # 1 has rotary positions
    spaces, repeat = parts.some_turn(facts, turning)
    return parts.rotary_decoder(
        facts,
        {"residual": parts.stream(facts), **spaces, **parts.gated_spaces(facts)},
        parts.attention_tensors() | parts.gated_tensors(),
        norms={"input_layernorm": parts.QKV, "post_attention_layernorm": parts.GATE_AND_UP},
        gauges=[parts.UNTURNED_KEY_BIAS],
        other_prefixes=("transformer.",),  # question answering
        repeat=repeat,
    )
