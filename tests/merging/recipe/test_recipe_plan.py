"""Layers, parts and tied tables are found from names; the plan says where every value came from."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from isomerge.checkpoint import open_checkpoint
from isomerge.errors import RequestError
from isomerge.merging.plan.model_parts import read_build
from isomerge.merging.plan.tensor_plan import TensorInput, explain
from isomerge.merging.recipe import ModelReference
from merging.recipe.skeletons import checkpoint, decoder, decoder_shapes, plan, state

A, B = ModelReference("a"), ModelReference("b")
LINEAR = "merge_method: linear\nmodels: [{model: a}, {model: b}]\n"


def stack(prefix: str, count: int, *rests: str) -> dict[str, tuple[int, ...]]:
    return {f"{prefix}.{i}.{rest}": (4, 4) for i in range(count) for rest in rests}


def test_stacked_layers_are_renamed_and_the_config_follows() -> None:
    text = """
merge_method: passthrough
slices:
  - sources: [{model: a, layer_range: [0, 4]}]
  - sources: [{model: b, layer_range: [2, 5]}]
"""
    kinds = ["full", "sliding", "full", "sliding", "full"]
    found = plan(
        text, {"a": decoder(layer_types=kinds, dense_layers=[0], max_window_layers=5), "b": decoder(layer_types=kinds)}
    )
    assert found.tensors["model.layers.5.mlp.up_proj.weight"].inputs == (
        TensorInput(B, "model.layers.3.mlp.up_proj.weight"),
    )
    assert found.tensors["model.embed_tokens.weight"].inputs == (TensorInput(A, "model.embed_tokens.weight"),)
    assert found.tensors["lm_head.weight"].inputs == (TensorInput(B, "lm_head.weight"),)
    assert found.config_changes == {"num_hidden_layers": 7, "layer_types": [*kinds[:4], *kinds[2:5]]}
    assert any("max_window_layers: 5" in note for note in found.notes)
    layers = [name for name in found.tensors if name.endswith("q_proj.weight")]
    assert layers == [f"model.layers.{i}.self_attn.q_proj.weight" for i in range(7)]


def test_natural_order() -> None:
    found = plan(LINEAR, {"a": decoder(depth=12), "b": decoder(depth=12)})
    layers = list(dict.fromkeys(name.split(".")[2] for name in found.tensors if ".layers." in name))
    assert layers == [str(i) for i in range(12)]


def test_every_value_says_where_it_came_from() -> None:
    text = """
merge_method: ties
base_model: c
models:
  - model: a
    parameters:
      weight:
        - filter: mlp
          value: [0, 1]
        - value: 0.3
  - model: b
parameters:
  weight: 0.5
"""
    found = plan(text)
    told = explain(found, "model.layers.2.mlp.up_proj.weight")
    assert told["options"]["weight"] == {
        "value": [0.5, 0.5],
        "origin": {
            "a": "line 8: parameters of a, filter mlp, gradient at 0.5",
            "b": "line 13: parameters of the recipe",
        },
    }
    assert told["options"]["density"] == {"value": [1.0, 1.0], "origin": "default"}
    assert told["base"] == {"model": "c", "tensor": "model.layers.2.mlp.up_proj.weight"}
    assert explain(found, "model.norm.weight")["options"]["weight"]["value"] == [0.3, 0.5]
    with pytest.raises(RequestError, match="Did you mean 'model.norm.weight'"):
        explain(found, "model.norm.wieght")


def test_a_filter_that_is_never_used_is_noted() -> None:
    text = LINEAR + "parameters:\n  weight:\n  - value: 1\n  - {filter: mlp, value: 2}\n"
    found = plan(text)
    assert found.notes == ["line 6: the filter 'mlp' of 'weight' is never used"]


def test_the_base_of_a_method_without_one_is_a_model_only_if_the_recipe_gives_it_a_weight() -> None:
    donor_only = plan("merge_method: linear\nbase_model: c\nmodels: [{model: a}, {model: b}]\n")
    assert [str(i.model) for i in donor_only.tensors["model.norm.weight"].inputs] == ["a", "b"]
    assert donor_only.donor == ModelReference("c") and "only its config" in donor_only.notes[0]
    averaged = plan("merge_method: linear\nbase_model: c\nmodels: [{model: a}, {model: b}]\nparameters: {weight: 1}\n")
    assert [str(i.model) for i in averaged.tensors["model.norm.weight"].inputs] == ["a", "b", "c"]


@pytest.mark.slow
def test_the_donor_is_the_first_model_whatever_the_hash_seed() -> None:
    code = (
        "from isomerge.merging.recipe import load_recipe;"
        "r, = load_recipe('merge_method: linear\\nmodels: [{model: z}, {model: y}, {model: x}]\\n');"
        "print(*r.referenced_models())"
    )
    for seed in ("0", "1", "7"):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                              env={**os.environ, "PYTHONHASHSEED": seed})  # fmt: skip
        assert done.stdout.split() == ["z", "y", "x"]


# --- tensors that are not in every model ------------------------------------------------------------------------------
def test_a_tied_head_is_read_at_the_input_table() -> None:
    models = {"a": decoder(head=False), "b": decoder(tie_word_embeddings=False)}
    found = plan(LINEAR, models)
    assert found.tensors["lm_head.weight"].inputs == (
        TensorInput(A, "model.embed_tokens.weight"),
        TensorInput(B, "lm_head.weight"),
    )
    assert found.config_changes == {"tie_word_embeddings": False}
    assert any("one of its own" in note for note in found.notes)


def test_a_head_that_all_models_tie_is_not_stored_again() -> None:
    found = plan(LINEAR, {"a": decoder(head=False), "b": decoder(tie_word_embeddings=True)})
    assert "lm_head.weight" not in found.tensors and found.config_changes == {}
    assert any("not stored again" in note for note in found.notes)


def test_a_head_that_is_missing_and_not_tied_is_an_error() -> None:
    with pytest.raises(
        RequestError, match="a lacks a tensor that others have: 'lm_head.weight'.*get it again.*save them without"
    ):
        plan(LINEAR, {"a": decoder(head=False, tie_word_embeddings=False), "b": decoder()})


def test_old_buffers_neither_stop_a_merge_nor_are_merged() -> None:
    extra = {**decoder_shapes(), "model.layers.0.self_attn.rotary_emb.inv_freq": (4,)}
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    config = {"num_hidden_layers": 5, "vocab_size": 16}
    first = plan(LINEAR, {"a": checkpoint(extra, **config), "b": decoder()})
    assert first.tensors[name].method == "passthrough" and first.tensors[name].inputs == (TensorInput(A, name),)
    assert name not in plan(LINEAR, {"a": decoder(), "b": checkpoint(extra, **config)}).tensors


def test_whole_numbers_are_copied_from_the_donor_and_noted() -> None:
    tensors = {**state(decoder_shapes(depth=1)), "codes": torch.arange(3)}
    one = open_checkpoint(tensors, config={"num_hidden_layers": 1}, name="tiny")
    found = plan("merge_method: linear\nbase_model: b\nmodels: [{model: a}, {model: b}]\n", {"a": one, "b": one})
    assert found.tensors["codes"].method == "passthrough" and found.tensors["codes"].inputs == (
        TensorInput(B, "codes"),
    )
    assert any("'codes': whole numbers" in note for note in found.notes)


def test_with_a_tokenizer_vocabularies_may_differ() -> None:
    found = plan(LINEAR + "tokenizer: {source: union}\n", {"a": decoder(), "b": decoder(words=20)})
    marked = {name for name, tensor in found.tensors.items() if tensor.vocabulary}
    assert marked == {"model.embed_tokens.weight", "lm_head.weight"}


@pytest.mark.parametrize(
    ("tables", "others"),
    [
        (["transformer.wte.weight", "lm_head.weight"], ["transformer.wpe.weight", "transformer.ln_f.weight"]),
        (["bert.embeddings.word_embeddings.weight", "cls.predictions.bias", "cls.predictions.decoder.weight"],
         ["bert.embeddings.position_embeddings.weight", "cls.predictions.transform.dense.weight"]),
        (["embed_in.weight", "embed_out.weight"], ["final_layer_norm.weight"]),
    ],
)  # fmt: skip
def test_tables_with_one_row_per_token_are_told_from_others_of_the_same_size(
    tables: list[str], others: list[str]
) -> None:
    build = read_build(checkpoint({name: (9, 9) for name in [*tables, *others]}, vocab_size=9))
    assert [name for name in [*tables, *others] if build.is_vocabulary(name)] == tables


# --- names ------------------------------------------------------------------------------------------------------------
def test_experts_are_no_layers() -> None:
    shapes = {
        **stack("model.layers", 3, "mlp.experts.0.w1.weight", "mlp.experts.1.w1.weight"),
        "model.embed.weight": (9, 4),
    }
    (part,) = read_build(checkpoint(shapes, num_hidden_layers=3, num_experts=2)).parts.values()
    assert (part.name, part.prefix, part.depth) == ("default", "model.layers", 3)
    assert part.layers[0] == ["mlp.experts.0.w1.weight", "mlp.experts.1.w1.weight"]


def test_a_numbered_head_is_no_layer() -> None:
    shapes = {
        **stack("encoder.layer", 2, "dense.weight"),
        **stack("classifier", 3, "weight"),
        "embeddings.weight": (9, 4),
    }
    (part,) = read_build(checkpoint(shapes, num_hidden_layers=2)).parts.values()
    assert (part.prefix, part.depth) == ("encoder.layer", 2)
    assert part.before == ["embeddings.weight"] and len(part.after) == 3


def test_both_sides_of_an_encoder_decoder_are_modules_with_gradients_of_their_own() -> None:
    shapes = {
        **stack("encoder.block", 3, "layer.0.wo.weight", "layer.1.wo.weight"), **stack("decoder.block", 2, "wo.weight"),
        "shared.weight": (9, 4), "lm_head.weight": (9, 4), "encoder.final_layer_norm.weight": (4,),
        "decoder.final_layer_norm.weight": (4,),
    }  # fmt: skip
    model = checkpoint(shapes, num_layers=3, num_decoder_layers=2, vocab_size=9)
    depths = {name: part.depth for name, part in read_build(model).parts.items()}
    assert depths == {"encoder": 3, "decoder": 2, "shared": 0}
    found = plan(LINEAR + "parameters: {weight: [1, 2]}\n", {"a": model, "b": model})
    assert found.tensors["encoder.block.1.layer.0.wo.weight"].options["weight"] == [1.5, 1.5]
    assert found.tensors["decoder.block.1.wo.weight"].options["weight"] == [2.0, 2.0]
    slices = "slices: [{sources: [{model: a, layer_range: [0, 1]}]}]"
    text = f"merge_method: linear\nmodules:\n  decoder:\n    {slices}\n  encoder: {{models: [{{model: a}}]}}\n"
    smaller = plan(text, {"a": model})
    assert smaller.config_changes == {"num_decoder_layers": 1}
    assert smaller.tensors["lm_head.weight"].method == "passthrough"
    assert any("shared is not among the modules" in note for note in smaller.notes)
    with pytest.raises(RequestError, match=r"has layers in decoder and encoder: use 'modules'"):
        plan(f"merge_method: linear\n{slices}\n", {"a": model})


@pytest.mark.parametrize("text_prefix", ["model.language_model", "language_model.model"])
def test_text_and_image_parts_are_modules(text_prefix: str) -> None:
    shapes = {
        **stack(f"{text_prefix}.layers", 3, "mlp.weight"), f"{text_prefix}.embed_tokens.weight": (9, 4),
        **stack("model.visual.blocks", 2, "mlp.weight"), "model.visual.patch_embed.proj.weight": (4, 3),
        "model.visual.merger.mlp.0.weight": (4, 4), "model.visual.merger.mlp.2.weight": (4, 4),
        "lm_head.weight": (9, 4),
    }  # fmt: skip
    config = {"text_config": {"num_hidden_layers": 3, "vocab_size": 9}, "vision_config": {"depth": 2}}
    model = checkpoint(shapes, **config)
    parts = read_build(model).parts
    assert {name: part.depth for name, part in parts.items()} == {
        "text_decoder": 3, "vision_tower": 2, "multi_modal_projector": 0,
    }  # fmt: skip
    assert "lm_head.weight" in parts["text_decoder"].after
    text = """
merge_method: linear
modules:
  text_decoder:
    slices:
      - sources: [{model: a, layer_range: [0, 2]}]
      - sources: [{model: a, layer_range: [1, 3]}]
  vision_model:
    models: [{model: a}, {model: b}]
    parameters: {weight: 3}
"""
    found = plan(text, {"a": model, "b": model})
    assert found.config_changes == {"text_config": {"num_hidden_layers": 4, "vocab_size": 9}}
    assert found.tensors["model.visual.blocks.1.mlp.weight"].options["weight"] == [3.0, 3.0]
    assert found.tensors["model.visual.merger.mlp.0.weight"].method == "passthrough"
    prefix = "merge_method: linear\nmodules:\n  model.visual:\n    models: [{model: a}, {model: b}]\n"
    by_prefix = plan(prefix, {"a": model, "b": model})
    assert len(by_prefix.tensors["model.visual.merger.mlp.0.weight"].inputs) == 2
    assert len(by_prefix.tensors["lm_head.weight"].inputs) == 1


def test_layers_that_predict_further_tokens_are_not_counted() -> None:
    shapes = {**stack("model.layers", 4, "mlp.weight"), "model.embed_tokens.weight": (9, 4)}
    model = checkpoint(shapes, num_hidden_layers=3, num_nextn_predict_layers=1)
    assert read_build(model).parts["default"].depth == 3
    assert len(plan(LINEAR, {"a": model, "b": model}).tensors) == 5
    with pytest.raises(RequestError, match="cannot be stacked anew"):
        plan("merge_method: passthrough\nslices: [{sources: [{model: a, layer_range: [0, 2]}]}]\n", {"a": model})


@pytest.mark.parametrize(
    ("names", "key"),
    [("transformer.h", "n_layer"), ("gpt.layers", "num_hidden_layers"), ("bert.encoder.layer", "num_hidden_layers")],
)
def test_the_key_that_counts_layers_is_found(names: str, key: str) -> None:
    model = checkpoint({**stack(names, 3, "mlp.weight"), "wte.weight": (9, 4)}, **{key: 3, "vocab_size": 9})
    found = plan("merge_method: passthrough\nslices: [{sources: [{model: a, layer_range: [0, 2]}]}]\n", {"a": model})
    assert found.config_changes == {key: 2}
