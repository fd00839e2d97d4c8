"""gpt-oss: attention with sinks, and experts whose gate and up units alternate in one stacked tensor."""

from isomerge.architectures import architecture, parts
from isomerge.symmetry.architecture import Architecture, Facts, RowShift
from isomerge.symmetry.groups import Permutation, Trivial

MLP = parts.MLP
EXPERTS = MLP + "experts."
UNITS = "(ffn.{i} pair.{i})"


@architecture("gpt_oss", summary="pre-RMSNorm, rotary, grouped queries with sinks, experts behind a router")
def gpt_oss(facts: Facts) -> Architecture:
    nested = ("expert.{i}", "ffn.{i}")
    return parts.rotary_decoder(
        facts,
        {
            "residual": parts.stream(facts),
            **parts.attention_spaces(facts),
            "expert.{i}": Permutation(facts["num_local_experts"]),
            "ffn.{i}": Permutation(facts["intermediate_size"], per=("expert.{i}",)),
            "pair.{i}": Trivial(2, per=nested),  # gate and up, both clamped: neither a sign nor a scale is free
        },
        {
            **parts.attention_tensors(),
            parts.ATTENTION + "sinks": "(kv.{i} query.{i})",
            MLP + "router.weight": "expert.{i} residual'",
            MLP + "router.bias": "expert.{i}",
            EXPERTS + "gate_up_proj": f"expert.{{i}} residual' {UNITS}",
            EXPERTS + "gate_up_proj_bias": f"expert.{{i}} {UNITS}",
            EXPERTS + "down_proj": "expert.{i} ffn.{i} residual",
            EXPERTS + "down_proj_bias": "expert.{i} residual",
        },
        norms={
            "input_layernorm": parts.QKV,
            "post_attention_layernorm": (MLP + "router.weight", EXPERTS + "gate_up_proj"),
        },
        gauges=[RowShift(MLP + "router.weight"), RowShift(MLP + "router.bias")],
        values_into=None,  # a sink takes part of the attention away from the values
    )
