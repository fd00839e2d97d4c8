"""Gemma and Gemma-2: Llama's blocks with gains stored as 1 + w; Gemma-2 also has norms after each branch."""

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
    gated_spaces,
    gated_tensors,
    sizes,
)
from isomerge.symmetry.architecture import Architecture, Facts, Norm, ValueBias
from isomerge.symmetry.groups import Rotation, SignedPermutation

GATED = (LAYER + "mlp.gate_proj.weight", LAYER + "mlp.up_proj.weight")


def with_offset(facts: Facts, *, before_ffn: str, after: tuple[str, ...], rotates: bool) -> Architecture:
    """`before_ffn` is the norm in front of the feed-forward, `after` the norms on the branches' outputs."""
    width, *_ = sizes(facts)
    return Architecture(
        prefix="model.",
        repeat={"i": facts["num_hidden_layers"]},
        spaces={
            "residual": Rotation(width) if rotates else SignedPermutation(width),
            **attention_spaces(facts),
            **gated_spaces(facts),
        },
        tensors={
            **attention_tensors(),
            **gated_tensors(),
            **ends(facts),
            **{LAYER + norm + ".weight": "|residual|" for norm in ("input_layernorm", before_ffn, *after)},
            "model.norm.weight": "|residual|",
        },
        norms=[
            Norm(LAYER + "input_layernorm", QKV, kind="rms", offset=1.0),
            Norm(LAYER + before_ffn, GATED, kind="rms", offset=1.0),
            Norm("model.norm", FINAL_READERS, kind="rms", offset=1.0),
        ],
        gauges=[ValueBias(ATTENTION + "v_proj.bias", "vo.{i}", ATTENTION + "o_proj.weight")],
        tied=TIES,
        untied_config={"tie_word_embeddings": False},
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
