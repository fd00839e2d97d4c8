"""GLM and GLM-4: Llama's blocks with neighbouring rotary pairs on half of each head; GLM-4 has norms after a branch."""

from isomerge.architectures import architecture, parts
from isomerge.symmetry.architecture import Architecture, Facts
from isomerge.symmetry.groups import Group, SignedPermutation


def with_partial_rotary(facts: Facts, residual: Group, after: tuple[str, ...]) -> Architecture:
    rotary = parts.rotary_width(facts, parts.head_width(facts), 0.5)
    spaces = parts.attention_spaces(facts, rotary=rotary, layout="interleaved")
    return parts.rotary_decoder(
        facts,
        {"residual": residual, **spaces, **parts.gated_spaces(facts)},
        parts.attention_tensors(*parts.inner_axes(spaces)) | parts.gated_in_one(),
        norms={"input_layernorm": parts.QKV, "post_attention_layernorm": (parts.MLP + "gate_up_proj.weight",)},
        after=after,
        gauges=parts.key_bias(spaces),
    )


@architecture("glm", summary="pre-RMSNorm, partial rotary by neighbours, grouped queries, gated")
def glm(facts: Facts) -> Architecture:
    return with_partial_rotary(facts, parts.stream(facts), after=())


@architecture("glm4", summary="RMSNorm before and after each branch, partial rotary, gated", can_untie=False)
def glm4(facts: Facts) -> Architecture:
    after = ("post_self_attn_layernorm", "post_mlp_layernorm")
    return with_partial_rotary(facts, SignedPermutation(facts["hidden_size"]), after)
