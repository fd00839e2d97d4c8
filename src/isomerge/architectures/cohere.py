"""Cohere and Cohere-2 (Command-R): attention and feed-forward side by side behind one LayerNorm without a bias."""

from collections.abc import Mapping, Sequence

from isomerge.architectures import architecture, parts
from isomerge.symmetry.architecture import Architecture, Facts, Gauge
from isomerge.symmetry.groups import Group


def side_by_side(
    facts: Facts,
    spaces: dict[str, Group],
    tensors: Mapping[str, str],
    gauges: Sequence[Gauge],
    repeat: Mapping[str, int | Sequence[int]],
) -> Architecture:
    return parts.rotary_decoder(
        facts,
        {"residual": parts.stream(facts, layer_norm=True), **spaces, **parts.gated_spaces(facts)},
        {**parts.attention_tensors(), **parts.gated_tensors(), **tensors},
        norms={"input_layernorm": (*parts.QKV, *parts.GATE_AND_UP)},
        kind="layer",
        gauges=gauges,
        repeat=repeat,
    )


@architecture("cohere", summary="pre-LayerNorm, parallel branches, rotary by neighbours, gated", tied_by_default=True)
def cohere(facts: Facts) -> Architecture:
    spaces = parts.attention_spaces(facts, layout="interleaved")
    tensors: dict[str, str] = {}
    if facts.get("use_qk_norm", False):  # a LayerNorm on queries and keys, with gains for every head
        spaces["qk.{i}"] = spaces["qk.{i}"].restricted(None)
        tensors = {
            parts.ATTENTION + "q_norm.weight": "(kv.{i} query.{i}) _inner",
            parts.ATTENTION + "k_norm.weight": "kv.{i} _inner",
        }
    return side_by_side(facts, spaces, tensors, [], {"i": facts["num_hidden_layers"]})


@architecture("cohere2", summary="the same with rotary positions in sliding layers only", tied_by_default=True)
def cohere2(facts: Facts) -> Architecture:
    every = facts.get("sliding_window_pattern", 4)
    usual = ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(facts["num_hidden_layers"])]
    slides = facts.get("sliding_window", 4096) is not None
    turning = [slides and kind == "sliding_attention" for kind in parts.layer_list(facts, "layer_types", usual)]
    spaces, repeat = parts.some_turn(facts, turning, "interleaved")
    return side_by_side(facts, spaces, {}, [parts.UNTURNED_KEY_BIAS], repeat)
