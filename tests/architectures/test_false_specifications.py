"""The sound test is sharp: specifications with one plausible mistake each fail it, clearly."""

from __future__ import annotations

from dataclasses import replace

import pytest

from architectures.row_models import (
    Case,
    build,
    difference,
    load,
    moved,
    moving,
    outputs,
    saved,
    state,
)
from architectures.rows import ROWS
from isomerge.architectures import FAMILIES, describe
from isomerge.checkpoint import open_checkpoint
from isomerge.symmetry.architecture import BranchScale, KeyBias, Norm, ValueBias, is_stream
from isomerge.symmetry.groups import (
    Invertible,
    Permutation,
    Rotary,
    Rotation,
    Scale,
    SignedPermutation,
    SignedScale,
    Trivial,
)
from isomerge.symmetry.transform import random_transform
from precision import float64_throughout

CLEAR = 1e-3


def spaces(spec, **changed):
    """The specification with other groups: `qk=…` for the space qk.{i}."""
    return replace(spec, spaces={k: changed.get(k.removesuffix(".{i}"), g) for k, g in spec.spaces.items()})


def patterns(spec, ending, change):
    """The specification with other patterns for the tensors of some ending."""
    found = [name for name in spec.tensors if name.removesuffix("?").endswith(ending)]
    assert found, ending
    return replace(spec, tensors=spec.tensors | {name: change(spec.tensors[name]) for name in found})


def nothing(spec):
    return spec


def forgotten_dual(spec):
    spec = patterns(spec, "key.weight", lambda p: p.replace("qk.{i}'", "qk.{i}"))
    return patterns(spec, "key.bias", lambda p: p.replace("qk.{i}'", "qk.{i}"))


def rotation_across_rope(spec):
    return spaces(spec, qk=Rotation(spec.spaces["qk.{i}"].size, spec.spaces["qk.{i}"].per))


def rotation_across_partial_rope(spec):
    return spaces(spec, rotary=Rotation(spec.spaces["rotary.{i}"].size, spec.spaces["rotary.{i}"].per))


def rotation_of_ffn_units(spec):
    return spaces(spec, ffn=Rotation(spec.spaces["ffn.{i}"].size))


def scaled_gate(spec):
    return patterns(spec, "gate_proj.weight", lambda p: p.replace("ffn.{i}", "(ffn.{i} up.{i})"))


def swapped_group_order(spec):
    spec = spaces(spec, query=Permutation(spec.spaces["query.{i}"].size))
    for ending in ("q_proj.weight", "o_proj.weight"):
        spec = patterns(spec, ending, lambda p: p.replace("kv.{i} query.{i}", "query.{i} kv.{i}"))
    return spec


def qkv_in_the_other_order(spec):
    def part(space):
        return "head.{i} " + space

    order = "[" + " | ".join(map(part, ("rotary.{i}", "qk.{i}", "rotary.{i}'", "qk.{i}'", "vo.{i}"))) + "]"
    spec = patterns(spec, "query_key_value.weight", lambda p: order + " residual'")
    return patterns(spec, "query_key_value.bias", lambda p: order)


def signed_permutation(spec):
    return spaces(spec, residual=SignedPermutation(spec.spaces["residual"].size))


def rotation_that_moves_ones(spec):
    return spaces(spec, residual=Rotation(spec.spaces["residual"].size))


def forgotten_norm_reader(spec):
    norms = [replace(n, readers=n.readers[:1]) if isinstance(n, Norm) and len(n.readers) > 1 else n for n in spec.norms]
    return replace(spec, norms=norms)


def centred_tied_table(spec):
    return replace(spec, writers=["transformer.wte.weight", *spec.writers])


def rotary_key_bias_dropped(spec):
    gauge = KeyBias("gpt_neox.layers.{i}.attention.query_key_value.bias", "rotary.{i}")
    return replace(spec, gauges=[*spec.gauges, gauge])


def forgotten_router(spec):
    return patterns(spec, "block_sparse_moe.gate.weight", lambda p: "_experts residual'")


def pairs_of_the_other_layout(spec):
    other = {"half": "interleaved", "interleaved": "half"}
    turning = {k: g for k, g in spec.spaces.items() if isinstance(g, Rotary)}
    assert turning
    return replace(spec, spaces={**spec.spaces, **{k: replace(g, layout=other[g.layout]) for k, g in turning.items()}})


def positions_forgotten_in_a_layer(spec):
    turning = spec.spaces["qk.{r}"]
    return replace(spec, spaces={**spec.spaces, "qk.{r}": Invertible(turning.size, turning.per)})


def gate_and_up_exchanged(spec):
    return patterns(spec, "gate_up_proj.weight", lambda p: "[ffn.{i} up.{i} | ffn.{i}] residual'")


def keys_and_values_exchanged(spec):
    def exchanged(pattern):
        return pattern.replace("qk.{i}' | vo.{i}", "vo.{i} | qk.{i}'")

    return patterns(patterns(spec, "query_key_value.weight", exchanged), "query_key_value.bias", exchanged)


def heads_with_slopes_reordered(spec):
    return spaces(spec, kv=Permutation(spec.spaces["kv.{i}"].size))


def rotary_part_of_phi_key_bias_dropped(spec):
    return replace(spec, gauges=[*spec.gauges, KeyBias("model.layers.{i}.self_attn.k_proj.bias", "rotary.{i}")])


def forgotten_router_of_some_layers(spec):
    return patterns(spec, "layers.{m}.mlp.gate.weight", lambda p: "_experts residual'")


def forgotten_gate_of_the_shared_expert(spec):
    norms = [replace(n, readers=tuple(r for r in n.readers if "shared_expert_gate" not in r)) for n in spec.norms]
    return replace(spec, norms=norms)


def gates_before_ups(spec):
    """As if all gates came first."""
    found = {"gate.{i}": Trivial(1), "up.{i}": Trivial(1)}
    spec = replace(spec, spaces={**spec.spaces, **found})
    spec = patterns(spec, "gate_up_proj", lambda p: "expert.{i} residual' [ffn.{i} gate.{i} | ffn.{i} up.{i}]")
    return patterns(spec, "gate_up_proj_bias", lambda p: "expert.{i} [ffn.{i} gate.{i} | ffn.{i} up.{i}]")


def forgotten_sinks(spec):
    return patterns(spec, "sinks", lambda p: "_stay")


def value_bias_moved_past_a_sink(spec):
    layer = "model.layers.{i}.self_attn."
    gauge = ValueBias(layer + "v_proj.bias", "vo.{i}", layer + "o_proj.weight")
    return replace(spec, gauges=[*spec.gauges, gauge])


def gate_scaled_with_the_values(spec):
    change = "(kv.{a} query.{a} [rotary.{a} | rest.{a} | vo.{a} size.{a}]) residual'"
    return patterns(spec, "self_attn.q_proj.weight", lambda p: change)


def gain_inside_heads_forgotten(spec):
    return replace(spec, norms=[n for n in spec.norms if not n.name.endswith("linear_attn.norm")])


def convolution_forgotten(spec):
    return patterns(spec, "conv1d.weight", lambda p: p.replace("'", ""))


def decay_left_in_place(spec):
    return patterns(spec, "A_log", lambda p: "_heads")


def states_reordered_in_the_projection_alone(spec):
    return patterns(spec, "A_log", lambda p: "channel.{i} _states")


def step_rotated_on_one_side(spec):
    return patterns(spec, "dt_proj.weight", lambda p: "channel.{i} _steps")


def a_number_for_every_head(spec):
    turning = spec.spaces["rotary.{i}"]
    found = {"rotary.{i}": replace(turning, per=("head.{i}",)), "same.{i}": Trivial(turning.size)}
    spec = replace(spec, spaces={**spec.spaces, **found})
    return patterns(spec, "kv_a_proj_with_mqa.weight", lambda p: "[latent.kv.{i} | same.{i}] residual'")


def experts_of_any_group(spec):
    count = spec.spaces["group.{m}"].size * spec.spaces["expert.{m}"].size
    trivial = Permutation(1)
    tensors = {name: p.replace("(group.{m} expert.{m})", "expert.{m}") for name, p in spec.tensors.items()}
    found = {name: replace(g, per=tuple(p for p in g.per if p != "group.{m}")) for name, g in spec.spaces.items()}
    return replace(
        spec,
        tensors=tensors,
        spaces={**found, "group.{m}": trivial, "expert.{m}": Permutation(count)},
        stack={"e": "expert.{m}"},
    )


def shared_expert_scaled_at_the_gate(spec):
    change = "(ffn.shared.{m} up.shared.{m}) residual'"
    return patterns(spec, "shared_experts.gate_proj.weight", lambda p: change)


def forgotten_projector(spec):
    return patterns(spec, "mm_input_projection_weight", lambda p: "_seen _stay")


def gains_less_one_scaled_as_stored(spec):
    return replace(spec, added={})


def forgotten_writer(spec):
    spec = replace(spec, writers=[w for w in spec.writers if not w.endswith("mlp.c_proj.bias")])
    return patterns(spec, "mlp.c_proj.bias", lambda p: "_stay")


def signs_on(spec, stream):
    return spaces(spec, **{stream: SignedPermutation(spec.spaces[stream].size)})


def signs_on_the_first_stream(spec):
    return signs_on(spec, next(s for s in spec.spaces if is_stream(s)))


def signs_on_images(spec):
    return signs_on(spec, "vision.residual")


def signs_on_the_encoder(spec):
    return signs_on(spec, "encoder.residual")


def branch_gain_left_in_place(spec):
    spec = replace(spec, gauges=[g for g in spec.gauges if not isinstance(g, BranchScale)])
    return patterns(spec, "lambda1", lambda p: "_stay")


def classifier_left_in_place(spec):
    spec = spaces(spec, residual=Permutation(spec.spaces["residual"].size))  # its gains would refuse to turn
    return patterns(spec, "classifier.weight", lambda p: "_labels _both")


def other_copies_of_the_stream(spec):
    return patterns(spec, "downsample.reduction.weight", lambda p: p.replace("_four stage0.residual'", "_all"))


def bias_table_left_in_place(spec):
    return patterns(spec, "relative_position_bias_table", lambda p: "_positions _heads")


def second_half_as_the_gate(spec):
    return patterns(
        spec, "mlp.Wi.weight", lambda p: p.replace("[ffn.{i} | ffn.{i} up.{i}]", "[ffn.{i} up.{i} | ffn.{i}]")
    )


def joint_space_moves(spec):
    spec = replace(spec, spaces={**spec.spaces, "joint": Permutation(7)})
    return patterns(spec, "text_projection.weight", lambda p: p.replace("_joint", "joint"))


def negative_scales(spec):
    wrong = {s: SignedScale(1, g.per) if isinstance(g, Scale) else g for s, g in spec.spaces.items()}
    return replace(spec, spaces=wrong)


def forgotten_statistics(spec):
    return patterns(spec, "running_mean", lambda p: "_stay")


def rotation_of_all_values(spec):
    return spaces(spec, qk=Rotation(spec.spaces["qk.{i}"].size, spec.spaces["qk.{i}"].per))


FALSE = [
    (second_half_as_the_gate, "modernbert-lm"),
    (rotation_of_all_values, "modernbert-lm"),
    (signs_on_the_first_stream, "modernbert-lm-untied"),
    (signs_on_the_first_stream, "electra-lm"),
    (signs_on_the_first_stream, "albert-lm"),
    (signs_on_the_first_stream, "bart-lm"),
    (signs_on_the_first_stream, "swin-image"),
    (signs_on_the_first_stream, "convnext-image"),
    (signs_on_images, "clip"),
    (signs_on_images, "siglip"),
    (signs_on_the_encoder, "whisper-lm"),
    (joint_space_moves, "clip"),
    (branch_gain_left_in_place, "dinov2-image"),
    (classifier_left_in_place, "dinov2-image"),
    (rotation_of_all_values, "dinov3-bare"),
    (other_copies_of_the_stream, "swin-image"),
    (bias_table_left_in_place, "swin-image"),
    (negative_scales, "resnet-image"),
    (forgotten_statistics, "resnet-image"),
    (forgotten_dual, "vit-image"),
    (forgotten_dual, "bert-token"),
    (rotation_across_rope, "llama-lm"),
    (rotation_across_partial_rope, "neox-lm"),
    (rotation_of_ffn_units, "gpt2-lm-untied"),
    (rotation_of_ffn_units, "vit-image"),
    (scaled_gate, "llama-lm"),
    (swapped_group_order, "llama-lm"),
    (qkv_in_the_other_order, "neox-lm"),
    (signed_permutation, "gpt2-lm"),
    (signed_permutation, "opt-lm"),
    (signed_permutation, "bert-token"),
    (rotation_that_moves_ones, "gpt2-lm-untied"),
    (forgotten_norm_reader, "vit-image"),
    (forgotten_norm_reader, "llama-lm"),
    (centred_tied_table, "gpt2-lm"),
    (rotary_key_bias_dropped, "neox-lm"),
    (forgotten_writer, "gpt2-lm-untied"),
    (forgotten_router, "mixtral-lm"),
    (rotation_across_partial_rope, "phi3-lm-part-rotary"),
    (gate_and_up_exchanged, "phi3-lm"),
    (pairs_of_the_other_layout, "glm-lm"),
    (pairs_of_the_other_layout, "cohere-lm"),
    (pairs_of_the_other_layout, "phi-lm"),
    (positions_forgotten_in_a_layer, "smollm3-lm"),
    (positions_forgotten_in_a_layer, "cohere2-lm"),
    (rotation_that_moves_ones, "cohere-lm"),
    (rotation_that_moves_ones, "starcoder2-lm"),
    (rotary_part_of_phi_key_bias_dropped, "phi-lm"),
    (keys_and_values_exchanged, "falcon-lm"),
    (heads_with_slopes_reordered, "falcon-lm-alibi"),
    (swapped_group_order, "granite-lm"),
    (forgotten_projector, "gemma3-images-lm"),
    (gates_before_ups, "gpt-oss-lm"),
    (forgotten_sinks, "gpt-oss-lm"),
    (value_bias_moved_past_a_sink, "gpt-oss-lm"),
    (gate_scaled_with_the_values, "qwen3.5-lm"),
    (gain_inside_heads_forgotten, "qwen3.5-lm"),
    (convolution_forgotten, "qwen3-next-lm"),
    (decay_left_in_place, "qwen3-next-lm"),
    (states_reordered_in_the_projection_alone, "mamba-lm"),
    (step_rotated_on_one_side, "mamba-lm"),
    (convolution_forgotten, "mamba-lm"),
    (a_number_for_every_head, "deepseek3-lm"),
    (pairs_of_the_other_layout, "deepseek3-lm"),
    (pairs_of_the_other_layout, "deepseek2-lm"),
    (experts_of_any_group, "deepseek3-lm"),
    (shared_expert_scaled_at_the_gate, "deepseek2-lm"),
    (forgotten_router_of_some_layers, "qwen3-moe-lm"),
    (forgotten_gate_of_the_shared_expert, "qwen2-moe-lm"),
    (gains_less_one_scaled_as_stored, "gemma3-lm"),
    (rotation_across_rope, "gemma3-lm"),
    (forgotten_norm_reader, "stablelm-lm"),
]


def error_of(change, row_id, monkeypatch) -> float:
    """How far a random element of the changed specification moves the outputs."""
    model_type = build(row_id).config.model_type
    family = FAMILIES[model_type]
    monkeypatch.setitem(FAMILIES, model_type, replace(family, function=lambda facts: change(family.function(facts))))
    model = describe(open_checkpoint(saved(row_id)))
    form = moving(model)
    case = Case(ROWS[row_id])
    with float64_throughout():
        # Several elements: one of few (two groups, say) may be the identity.
        before = outputs(build(row_id), case.row)
        elements = [random_transform(model.architecture.spaces, seed) for seed in range(3)]
        return max(difference(before, outputs(load(case, state(model, moved(form, g))), case.row)) for g in elements)


@pytest.mark.parametrize(("change", "row_id"), FALSE, ids=[f"{f.__name__}-{r}" for f, r in FALSE])
def test_a_false_specification_changes_the_outputs(change, row_id, monkeypatch):
    assert error_of(change, row_id, monkeypatch) > CLEAR


@pytest.mark.parametrize("row_id", sorted({r for _, r in FALSE}))
def test_the_true_specification_does_not(row_id, monkeypatch):
    assert error_of(nothing, row_id, monkeypatch) <= 1e-10
