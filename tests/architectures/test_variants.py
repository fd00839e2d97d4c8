"""What single families do that the table of models cannot show."""

import copy

import pytest
import torch
import transformers

import isomerge
from architectures.row_models import Case, bound, build, difference, load_folder, outputs, saved
from architectures.rows import DEBERTA_V3, LABELS, ROWS, T5, T5_1_1, TEXT
from isomerge.architectures import describe
from isomerge.checkpoint import open_checkpoint
from isomerge.symmetry.architecture import KeyBias
from isomerge.symmetry.groups import Rotation, SignedPermutation, Trivial
from precision import float64_throughout


def of(model, **config):
    kind = getattr(transformers, model)
    return open_checkpoint(kind(kind.config_class(**config)))


# --- relative positions ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("row", "dropped"),
    [
        ("deberta-v3-lm", set()),
        ("deberta-own-sequence", {"pos_key_proj"}),
        ("deberta-own-c2p-token", {"key_proj", "pos_key_proj"}),
        ("deberta-own-p2c-token", set()),
        ("deberta-shared-c2p-token", {"key_proj"}),
        ("deberta-absolute-token", {"key_proj"}),
    ],
)
def test_softmax_drops_a_key_bias_unless_position_queries_meet_it(row, dropped):
    model = bound(row)
    found = {g.bias for g in model.architecture.gauges if isinstance(g, KeyBias) and g.bias in model.layouts}
    assert {name.split(".")[-2] for name in found} == dropped


def test_a_grouped_convolution_holds_the_stream():
    model = describe(of("DebertaV2ForTokenClassification", **DEBERTA_V3, **LABELS, conv_kernel_size=3, conv_groups=2))
    assert isinstance(model.architecture.spaces["residual"], Trivial)
    assert any("convolution" in note for note in model.architecture.notes)


def test_tensors_left_over_from_pretraining_do_not_hold_the_stream():
    checkpoint = of("DebertaV2ForTokenClassification", **TEXT, **LABELS)
    tensors = {name: checkpoint.read(name) for name in checkpoint.tensors}
    left = {"mask_predictions.dense.weight": torch.zeros(16, 16), "mask_predictions.classifier.bias": torch.zeros(1)}
    model = describe(open_checkpoint(tensors | left, config=checkpoint.config))
    assert not isinstance(model.architecture.spaces["residual"], Trivial) and not model.extra


# --- output tables --------------------------------------------------------------------------------------------------
def with_own_head(checkpoint, **config):
    tensors = {name: checkpoint.read(name) for name in checkpoint.tensors}
    tensors["lm_head.weight"] = torch.randn_like(tensors["shared.weight"])
    return open_checkpoint(tensors, config={**checkpoint.config, **config})


def test_untying_the_first_t5_scales_the_head_and_switches_the_scaling_off():
    model = bound("t5-lm", 0, True)
    assert torch.allclose(model.raw("lm_head.weight"), model.raw("shared.weight") * 16**-0.5)
    assert model.architecture.untied_config == {"tie_word_embeddings": False, "scale_decoder_outputs": False}


def test_untying_t5_1_1_or_mt5_does_not_scale_the_head():
    for row in ("t5-1.1-lm", "mt5-lm"):
        model = bound(row, 0, True)
        assert torch.equal(model.raw("lm_head.weight"), model.raw("shared.weight"))


@pytest.mark.parametrize("config", [T5, T5_1_1])
@pytest.mark.parametrize("flag", [True, False])
def test_a_head_of_its_own_counts_whatever_the_config_says(config, flag):
    checkpoint = with_own_head(of("T5ForConditionalGeneration", **config), tie_word_embeddings=flag)
    model = describe(checkpoint)
    assert isinstance(model.architecture.spaces["residual"], Rotation)
    assert "lm_head.weight" in model.files and not model.stale


def test_a_stored_copy_of_a_tied_table_is_still_tied():
    checkpoint = of("T5ForConditionalGeneration", **T5)
    tensors = {name: checkpoint.read(name) for name in checkpoint.tensors}
    copies = ("lm_head.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
    tensors |= {name: tensors["shared.weight"].clone() for name in copies}
    model = describe(open_checkpoint(tensors, config=checkpoint.config))
    assert isinstance(model.architecture.spaces["residual"], SignedPermutation)
    assert set(model.stale) == set(copies) and not model.extra


def test_the_first_published_t5_files_have_a_table_nobody_reads():
    checkpoint = of("T5ForConditionalGeneration", **T5)
    tensors = {name: checkpoint.read(name) for name in checkpoint.tensors}
    tensors["decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"] = torch.zeros(8, 4)
    model = describe(open_checkpoint(tensors, config=checkpoint.config))
    assert not isinstance(model.architecture.spaces["residual"], Trivial) and not model.extra


# --- experts --------------------------------------------------------------------------------------------------------
def test_stacked_experts_split_back_into_their_files():
    model = bound("mixtral-lm")
    name = "model.layers.0.block_sparse_moe.experts.{e}.w2.weight"
    whole = model.raw(name)
    assert whole.shape == (16, 3 * 11)
    parts = model.split(name, whole)
    assert list(parts) == [name.replace("{e}", str(k)) for k in range(3)]
    assert all(torch.equal(part, model.checkpoint.read(file)) for file, part in parts.items())


def test_one_vector_on_all_router_rows_changes_nothing():
    model, tokens = copy.deepcopy(build("mixtral-lm")), torch.arange(3, 12)[None]
    with torch.no_grad(), float64_throughout():
        before = model(input_ids=tokens).logits
        model.model.layers[0].mlp.gate.weight += torch.randn(16, dtype=torch.float64)
        after = model(input_ids=tokens).logits
    assert (after - before).abs().max() <= 1e-10 * before.abs().max()


# --- norms inside a layer -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("level", ["permutation", "rotation"])
@pytest.mark.parametrize("row", ["deepseek3-lm", "qwen3.5-lm", "gpt-oss-lm", "mamba-lm"])
def test_levels_that_fold_no_gain_leave_the_outputs_unchanged(row, level, tmp_path):
    alignment = isomerge.align(str(saved(row, 1)), anchor=str(saved(row)), level=level, threads=1)
    alignment.save(tmp_path / "out", verify=False)
    case = Case(ROWS[row])
    assert alignment.transform.elements
    before = outputs(build(row, 1), case.row)
    assert difference(before, outputs(load_folder(case, tmp_path / "out"), case.row)) <= 1e-5
