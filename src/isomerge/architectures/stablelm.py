"""StableLM: LayerNorm in front, part of each head rotary, gated feed-forward; branches in turn or side by side."""

from isomerge.architectures import architecture, parts
from isomerge.symmetry.architecture import Architecture, Facts


@architecture("stablelm", summary="pre-LayerNorm, partial rotary, grouped queries, gated")
def stablelm(facts: Facts) -> Architecture:
    spaces = parts.attention_spaces(facts, rotary=parts.rotary_width(facts, parts.head_width(facts), 0.25))
    axes = parts.inner_axes(spaces)
    heads: dict[str, str] = {}
    if facts.get("qk_layernorm", False):  # every head has a LayerNorm of its own, on disk under its number
        spaces = {name: group if name == "vo.{i}" else group.restricted(None) for name, group in spaces.items()}
        heads = {parts.ATTENTION + f"{x}_layernorm.norms.{{{x}}}.weight": "_inner" for x in "qk"}
    if facts.get("use_parallel_residual", False):
        norms = {"input_layernorm": (*parts.QKV, *parts.GATE_AND_UP)}
    else:
        norms = {"input_layernorm": parts.QKV, "post_attention_layernorm": parts.GATE_AND_UP}
    count = facts["num_attention_heads"]
    return parts.rotary_decoder(
        facts,
        {"residual": parts.stream(facts, layer_norm=True), **spaces, **parts.gated_spaces(facts)},
        {**parts.attention_tensors(*axes), **parts.gated_tensors(), **heads},
        norms=norms,
        kind="layer",
        gauges=parts.key_bias(spaces),
        repeat={"i": facts["num_hidden_layers"], "q": count, "k": facts.get("num_key_value_heads", count)},
    )
