"""Gemma and Gemma-2: Llama's blocks with gains stored as 1 + w; Gemma-2 also has norms after each branch."""

from isomerge.architectures import architecture, parts
from isomerge.symmetry.architecture import Architecture, Facts
from isomerge.symmetry.groups import Rotation, SignedPermutation


def with_offset(facts: Facts, *, before_ffn: str, after: tuple[str, ...], rotates: bool) -> Architecture:
    """`before_ffn` is the norm in front of the feed-forward, `after` the norms on the branches' outputs."""
    width = facts["hidden_size"]
    return parts.rotary_decoder(
        facts,
        {
            "residual": Rotation(width) if rotates else SignedPermutation(width),
            **parts.attention_spaces(facts),
            **parts.gated_spaces(facts),
        },
        parts.attention_tensors() | parts.gated_tensors(),
        norms={"input_layernorm": parts.QKV, before_ffn: parts.GATE_AND_UP},
        after=after,
        offset=1.0,
    )


@architecture("gemma", summary="pre-RMSNorm with gains 1 + w, rotary, gated", tied_by_default=True)
def gemma(facts: Facts) -> Architecture:
    return with_offset(facts, before_ffn="post_attention_layernorm", after=(), rotates=not facts.tied)


@architecture(
    "gemma2", summary="RMSNorm before and after each branch, rotary, gated", tied_by_default=True, can_untie=False
)
def gemma2(facts: Facts) -> Architecture:
    after = ("post_attention_layernorm", "post_feedforward_layernorm")
    return with_offset(facts, before_ffn="pre_feedforward_layernorm", after=after, rotates=False)
