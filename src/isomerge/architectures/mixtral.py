"""Mixtral: Llama's attention, and a router that sends every token to a few of the experts."""

from isomerge.architectures import architecture
from isomerge.architectures.llama import (
    ATTENTION,
    FINAL_READERS,
    LAYER,
    QKV,
    TIES,
    attention_spaces,
    attention_tensors,
    ends,
    sizes,
)
from isomerge.symmetry.architecture import Architecture, Facts, Norm, RowShift, ValueBias
from isomerge.symmetry.groups import Permutation, Rotation, SignedPermutation, SignedScale

MOE = LAYER + "block_sparse_moe."
EXPERT = MOE + "experts.{e}."


@architecture("mixtral", summary="pre-RMSNorm, rotary, grouped queries, experts behind a router")
def mixtral(facts: Facts) -> Architecture:
    width, *_ = sizes(facts)
    return Architecture(
        prefix="model.",
        repeat={"i": facts["num_hidden_layers"]},
        stack={"e": "expert.{i}"},
        spaces={
            "residual": SignedPermutation(width) if facts.tied else Rotation(width),
            **attention_spaces(facts),
            "expert.{i}": Permutation(facts["num_local_experts"]),
            "ffn.{i}": Permutation(facts["intermediate_size"], per=("expert.{i}",)),
            "up.{i}": SignedScale(1, per=("expert.{i}", "ffn.{i}")),
        },
        tensors={
            **attention_tensors(),
            MOE + "gate.weight": "expert.{i} residual'",
            EXPERT + "w1.weight": "(expert.{i} ffn.{i}) residual'",
            EXPERT + "w3.weight": "(expert.{i} ffn.{i} up.{i}) residual'",
            EXPERT + "w2.weight": "residual (expert.{i} ffn.{i} up.{i}')",
            **ends(facts),
            LAYER + "input_layernorm.weight": "|residual|",
            LAYER + "post_attention_layernorm.weight": "|residual|",
            "model.norm.weight": "|residual|",
        },
        norms=[
            Norm(LAYER + "input_layernorm", QKV, kind="rms"),
            Norm(LAYER + "post_attention_layernorm", (MOE + "gate.weight", EXPERT + "w1.weight", EXPERT + "w3.weight"),
                 kind="rms"),
            Norm("model.norm", FINAL_READERS, kind="rms"),
        ],
        gauges=[
            ValueBias(ATTENTION + "v_proj.bias", "vo.{i}", ATTENTION + "o_proj.weight"),
            RowShift(MOE + "gate.weight"),
        ],
        tied=TIES,
        untied_config={"tie_word_embeddings": False},
    )  # fmt: skip
