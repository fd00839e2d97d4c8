"""OLMo-2 and OLMo-3: norms only after each branch, and on queries and keys across all heads."""

from isomerge.architectures import architecture, parts
from isomerge.symmetry.architecture import Architecture, Facts
from isomerge.symmetry.groups import Rotary, SignedPermutation


@architecture("olmo2", "olmo3", summary="RMSNorm after each branch and on q and k, rotary, gated", can_untie=False)
def olmo2(facts: Facts) -> Architecture:
    inner = parts.head_width(facts)
    spaces = parts.attention_spaces(facts) | parts.gated_spaces(facts)
    # The norm leaves a sign per rotary pair in front of it, and behind it a gain that can move between q and k.
    spaces["qk.{i}"] = Rotary(inner, per=("kv.{i}",), phase="sign", scale=False)
    spaces["gain.{i}"] = Rotary(inner, per=("kv.{i}",), phase="none")
    return parts.rotary_decoder(
        facts,
        {"residual": SignedPermutation(facts["hidden_size"]), **spaces},
        {
            **parts.attention_tensors(),
            parts.ATTENTION + "q_norm.weight": "(kv.{i} query.{i} gain.{i})",
            parts.ATTENTION + "k_norm.weight": "(kv.{i} gain.{i}')",
            **parts.gated_tensors(),
        },
        norms={},
        after=("post_attention_layernorm", "post_feedforward_layernorm"),
        tied=parts.TIED if facts.tied else {},
        untied_config={},
    )
