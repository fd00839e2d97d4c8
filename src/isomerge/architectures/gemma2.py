"""Gemma, Gemma-2 and Gemma-3: Llama's blocks with gains stored less one; from Gemma-2 on norms after each branch, too,
and in Gemma-3 norms on queries and keys."""

from isomerge.architectures import architecture, parts
from isomerge.symmetry.architecture import Architecture, Facts
from isomerge.symmetry.groups import Rotation, SignedPermutation

AFTER = ("post_attention_layernorm", "post_feedforward_layernorm")


def with_offset(
    facts: Facts, *, before_ffn: str, after: tuple[str, ...], rotates: bool, normed: bool = False
) -> Architecture:
    """`before_ffn` is the norm in front of the feed-forward, `after` the norms on the branches' outputs, `normed` says
    whether queries and keys have norms."""
    width = facts["hidden_size"]
    spaces = parts.attention_spaces(facts) | parts.gated_spaces(facts)
    tensors = parts.attention_tensors() | parts.gated_tensors()
    if normed:
        spaces |= parts.normed_spaces(facts)
        tensors |= parts.NORMED
    return parts.rotary_decoder(
        facts,
        {"residual": Rotation(width) if rotates else SignedPermutation(width), **spaces},
        tensors,
        norms={"input_layernorm": parts.QKV, before_ffn: parts.GATE_AND_UP},
        after=after,
        offset=1.0,
        added=dict.fromkeys(parts.NORMED, 1.0) if normed else {},
    )


@architecture("gemma", summary="pre-RMSNorm with gains 1 + w, rotary, gated", tied_by_default=True)
def gemma(facts: Facts) -> Architecture:
    return with_offset(facts, before_ffn="post_attention_layernorm", after=(), rotates=not facts.tied)


@architecture(
    "gemma2", summary="RMSNorm before and after each branch, rotary, gated", tied_by_default=True, can_untie=False
)
def gemma2(facts: Facts) -> Architecture:
    return with_offset(facts, before_ffn="pre_feedforward_layernorm", after=AFTER, rotates=False)


@architecture(
    "gemma3_text",
    summary="RMSNorm before and after each branch and on q and k, rotary, gated",
    tied_by_default=True,
    can_untie=False,
)
def gemma3(facts: Facts) -> Architecture:
    return with_offset(facts, before_ffn="pre_feedforward_layernorm", after=AFTER, rotates=False, normed=True)
