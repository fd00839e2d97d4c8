"""OLMo-2: norms only after each branch, and on queries and keys across all heads."""

from isomerge.architectures import architecture
from isomerge.architectures.llama import (
    ATTENTION,
    FINAL_READERS,
    LAYER,
    TIES,
    attention_spaces,
    attention_tensors,
    ends,
    gated_spaces,
    gated_tensors,
    sizes,
)
from isomerge.symmetry.architecture import Architecture, Facts, Norm, ValueBias
from isomerge.symmetry.groups import Rotary, SignedPermutation


@architecture("olmo2", summary="RMSNorm after each branch and on q and k, rotary, gated", can_untie=False)
def olmo2(facts: Facts) -> Architecture:
    width, _, _, inner = sizes(facts)
    spaces = attention_spaces(facts) | gated_spaces(facts)
    # The norm leaves a sign per rotary pair in front of it, and behind it a gain that can move between q and k.
    spaces["qk.{i}"] = Rotary(inner, per=("kv.{i}",), phase="sign", scale=False)
    spaces["gain.{i}"] = Rotary(inner, per=("kv.{i}",), phase="none")
    return Architecture(
        prefix="model.",
        repeat={"i": facts["num_hidden_layers"]},
        spaces={"residual": SignedPermutation(width), **spaces},
        tensors={
            **attention_tensors(),
            ATTENTION + "q_norm.weight": "(kv.{i} query.{i} gain.{i})",
            ATTENTION + "k_norm.weight": "(kv.{i} gain.{i}')",
            **gated_tensors(),
            **ends(facts),
            LAYER + "post_attention_layernorm.weight": "|residual|",
            LAYER + "post_feedforward_layernorm.weight": "|residual|",
            "model.norm.weight": "|residual|",
        },
        norms=[Norm("model.norm", FINAL_READERS, kind="rms")],
        gauges=[ValueBias(ATTENTION + "v_proj.bias", "vo.{i}", ATTENTION + "o_proj.weight")],
        tied=TIES if facts.tied else {},
    )
