"""Mixtral: Llama's attention, and a router that sends every token to a few of the experts."""

from isomerge.architectures import architecture, parts
from isomerge.symmetry.architecture import Architecture, Facts, RowShift
from isomerge.symmetry.groups import Permutation, Rotation, SignedPermutation, SignedScale

MOE = parts.LAYER + "block_sparse_moe."
EXPERT = MOE + "experts.{e}."


@architecture("mixtral", summary="pre-RMSNorm, rotary, grouped queries, experts behind a router")
def mixtral(facts: Facts) -> Architecture:
    width = facts["hidden_size"]
    readers = (MOE + "gate.weight", EXPERT + "w1.weight", EXPERT + "w3.weight")
    return parts.rotary_decoder(
        facts,
        {
            "residual": SignedPermutation(width) if facts.tied else Rotation(width),
            **parts.attention_spaces(facts),
            "expert.{i}": Permutation(facts["num_local_experts"]),
            "ffn.{i}": Permutation(facts["intermediate_size"], per=("expert.{i}",)),
            "up.{i}": SignedScale(1, per=("expert.{i}", "ffn.{i}")),
        },
        {
            **parts.attention_tensors(),
            MOE + "gate.weight": "expert.{i} residual'",
            EXPERT + "w1.weight": "(expert.{i} ffn.{i}) residual'",
            EXPERT + "w3.weight": "(expert.{i} ffn.{i} up.{i}) residual'",
            EXPERT + "w2.weight": "residual (expert.{i} ffn.{i} up.{i}')",
        },
        norms={"input_layernorm": parts.QKV, "post_attention_layernorm": readers},
        gauges=[RowShift(MOE + "gate.weight")],
        stack={"e": "expert.{i}"},
    )
