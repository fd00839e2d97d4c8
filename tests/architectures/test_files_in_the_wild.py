"""Real files omit prefixes, keep old names and buffers, carry tensors nobody reads; broken ones say what is wrong."""

from dataclasses import replace

import pytest
import torch

from architectures.row_models import Case, build, difference, load, moved, moving, outputs, saved, state
from architectures.rows import ROWS
from isomerge.architectures import describe, describe_like
from isomerge.checkpoint import open_checkpoint
from isomerge.errors import SpecificationError
from isomerge.symmetry.groups import Permutation, Trivial
from isomerge.symmetry.moved import MovedModel
from isomerge.symmetry.transform import Transform, random_transform


def stored(row_id):
    """The tensors and the config of a saved model."""
    checkpoint = open_checkpoint(saved(row_id))
    return {name: checkpoint.read(name) for name in checkpoint.tensors}, dict(checkpoint.config)


def described(tensors, config, **options):
    return describe(open_checkpoint(tensors, config=config, name="a file in the wild"), **options)


def written_names(model):
    """What an unmoved model holds once it is written."""
    return MovedModel(model, Transform(model.architecture.spaces), moving(model, []), None).plan(None).keys()


def moved_outputs_agree(row_id, model, rename=lambda name: name) -> bool:
    """Move every space of a model, give its tensors today's names, and compare with the stock model."""
    form = moving(model)
    provider = moved(form, random_transform(model.architecture.spaces, 3))
    case = Case(ROWS[row_id])
    written = {rename(n): t for n, t in state(model, lambda name: form.in_gauge(name, provider)).items()}
    return difference(outputs(build(row_id), case.row), outputs(load(case, written), case.row)) <= 1e-6


@pytest.mark.parametrize(
    ("row_id", "prefix"),
    [("bert-token", "bert."), ("gpt2-lm", "transformer."), ("opt-lm", "model."), ("vit-image", "vit."),
     ("neox-token", "gpt_neox."), ("roberta-sequence", "roberta."), ("llama-lm", "model.")],
)  # fmt: skip
def test_a_file_without_the_base_prefix_is_described_like_one_with_it(row_id, prefix):
    tensors, config = stored(row_id)
    inner = {name for name in tensors if name.startswith(prefix)}
    model = described({n.removeprefix(prefix) if n in inner else n: t for n, t in tensors.items()}, config)
    assert not model.extra and not model.notes
    restore = {n.removeprefix(prefix): n for n in inner}
    assert moved_outputs_agree(row_id, model, lambda name: restore.get(name, name))


def test_gamma_and_beta_are_the_old_names_of_a_layer_norm():
    tensors, config = stored("bert-lm")
    old = {
        n.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): t
        for n, t in tensors.items()
    }
    assert old.keys() != tensors.keys()
    model = described(old, config)
    assert not model.extra
    assert "bert.embeddings.LayerNorm.gamma" in written_names(model), "it is written back under the name it had"
    new = {a: b for a, b in zip(old, tensors, strict=True)}
    assert moved_outputs_agree("bert-lm", model, lambda name: new.get(name, name))


@pytest.mark.parametrize(
    ("row_id", "buffers"),
    [
        ("gpt2-lm", ["transformer.h.0.attn.bias", "transformer.h.1.attn.masked_bias"]),
        ("bert-token", ["bert.embeddings.position_ids"]),
        ("neox-lm", ["gpt_neox.layers.0.attention.bias", "gpt_neox.layers.0.attention.masked_bias",
                     "gpt_neox.layers.1.attention.rotary_emb.inv_freq"]),
        ("llama-lm", ["model.layers.0.self_attn.rotary_emb.inv_freq"]),
    ],
)  # fmt: skip
def test_old_buffers_are_copied_and_hold_nothing_back(row_id, buffers):
    tensors, config = stored(row_id)
    values = {name: torch.arange(4.0) for name in buffers}
    model = described(tensors | values, config)
    assert set(model.extra) == set(buffers) and not model.notes
    assert not isinstance(model.architecture.spaces["residual"], Trivial)
    written = state(model, moving(model).tensor)
    assert all(torch.equal(written[name], value) for name, value in values.items())


@pytest.mark.parametrize("row_id", ["llama-lm", "bert-token"])
def test_whole_numbers_under_any_name_are_copied_and_hold_nothing_back(row_id):
    tensors, config = stored(row_id)
    values = {"routing.table": torch.arange(6), "routing.mask": torch.tensor([True, False])}
    model = described(tensors | values, config)
    assert set(model.extra) == set(values) and not model.notes
    assert not isinstance(model.architecture.spaces["residual"], Trivial)
    written = state(model, moving(model).tensor)
    assert all(torch.equal(written[name], value) for name, value in values.items())


@pytest.mark.parametrize("row_id", ["gpt2-lm", "opt-lm", "llama-lm-tied", "neox-lm-tied"])
def test_a_stale_copy_of_a_tied_table_is_left_out(row_id):
    tensors, config = stored(row_id)
    head, (table, _) = next(iter(described(tensors, config).architecture.tied.items()))
    model = described(tensors | {head: tensors[table].clone()}, config)
    assert model.stale == (head,) and head not in written_names(model)
    assert any("never reads" in note for note in model.notes)
    assert moved_outputs_agree(row_id, model)


def test_an_output_table_of_its_own_is_read_as_the_stock_class_reads_it():
    tensors, config = stored("gpt2-lm")
    tensors["lm_head.weight"] = torch.randn(tensors["transformer.wte.weight"].shape, dtype=torch.float64)
    model = described(tensors, config)
    form = moving(model)
    provider = moved(form, random_transform(model.architecture.spaces, 3))
    case = Case(ROWS["gpt2-lm"])
    before = outputs(load(case, tensors), case.row)
    after = outputs(load(case, state(model, provider)), case.row)
    assert difference(before, after) <= 1e-6 < difference(before, outputs(build("gpt2-lm"), case.row))


@pytest.mark.parametrize("row_id", ["vit-image", "bert-token", "llama-lm"])
def test_a_description_serves_a_second_model_of_the_same_kind(row_id):
    first, second = (open_checkpoint(saved(row_id, seed)) for seed in (0, 1))
    taken, fitted = describe_like(describe(first), second), describe(second)
    assert taken.checkpoint is second and str(taken.layouts) == str(fitted.layouts)
    assert replace(taken, layouts={}) == replace(fitted, layouts={})
    other = open_checkpoint({name: second.read(name)[:1] for name in second.tensors}, config=dict(second.config))
    assert describe_like(describe(first), other) is None


def test_whether_a_table_is_tied_is_looked_at_in_every_model():
    """One file has a table of its own where the other's is a copy, and nothing else tells them apart."""
    tensors, config = stored("gpt2-lm")
    copied = open_checkpoint(tensors | {"lm_head.weight": tensors["transformer.wte.weight"].clone()}, config=config)
    own = open_checkpoint(tensors | {"lm_head.weight": tensors["transformer.wte.weight"] + 1}, config=config)
    assert own.tensors == copied.tensors and own.config == copied.config
    for first, second in ((copied, own), (own, copied)):
        assert describe_like(describe(first), second) is None


def test_a_tensor_nobody_knows_holds_the_stream_and_says_so():
    tensors, config = stored("llama-lm")
    model = described(tensors | {"model.layers.0.adapter.weight": torch.ones(16, 16)}, config)
    assert model.extra == ("model.layers.0.adapter.weight",)
    assert isinstance(model.architecture.spaces["residual"], Trivial)
    assert isinstance(model.architecture.spaces["kv.0"], Permutation)
    assert any("residual stream held" in note and "adapter" in note for note in model.notes)


def test_an_unknown_head_class_holds_the_stream_and_says_so():
    tensors, config = stored("bert-token")
    model = described(tensors, config | {"architectures": ["BertForCounting"]})
    assert isinstance(model.architecture.spaces["residual"], Trivial)
    assert any("BertForCounting" in note for note in model.architecture.notes)


def test_a_missing_tensor_is_named():
    tensors, config = stored("vit-image")
    del tensors["vit.encoder.layer.1.attention.attention.key.weight"]
    with pytest.raises(SpecificationError, match=r"missing: vit\.encoder\.layer\.1\.attention\.attention\.key\.weight"):
        described(tensors, config)


def test_a_wrong_shape_names_the_tensor_the_axis_and_both_lengths():
    tensors, config = stored("opt-lm")
    name = "model.decoder.layers.0.fc1.weight"
    tensors[name] = tensors[name][:-2]
    with pytest.raises(SpecificationError, match=r"fc1\.weight of shape \(9, 16\).*axis 0 should have 11 .* has 9"):
        described(tensors, config)


def test_several_problems_are_listed_at_once():
    tensors, config = stored("gpt2-lm")
    del tensors["transformer.ln_f.weight"]
    tensors["transformer.h.0.mlp.c_fc.bias"] = torch.zeros(3)
    with pytest.raises(SpecificationError) as error:
        described(tensors, config)
    assert "ln_f.weight" in str(error.value) and "c_fc.bias" in str(error.value)


def test_what_holds_for_all_problems_is_said_once():
    tensors, config = stored("gpt2-lm")
    with pytest.raises(SpecificationError) as error:
        described(tensors, {**config, "n_inner": 3})
    told = str(error.value)
    assert told.count("Binding") == 1 and "compare them" not in told and told.count("config.json") == 2
    assert told.count("should have 3 entries") == 4 and "; and 2 more. The weights" in told


def test_positions_and_vocabulary_may_have_any_length():
    tensors, config = stored("gpt2-lm-untied")
    tensors["transformer.wpe.weight"] = torch.zeros(5, 16)
    for name in ("transformer.wte.weight", "lm_head.weight"):
        tensors[name] = torch.zeros(91, 16)
    assert described(tensors, config).layouts["transformer.wte.weight"].shape == (91, 16)
