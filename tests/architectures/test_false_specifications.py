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
from isomerge.symmetry.architecture import BranchScale, KeyBias, Norm, is_stream
from isomerge.symmetry.groups import Permutation, Rotation, Scale, SignedPermutation, SignedScale
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
