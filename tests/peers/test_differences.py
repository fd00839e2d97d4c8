"""Where the two differ, named in docs/peers.md: each test shows what mergekit does and what isomerge does instead."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import typer
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from isomerge.cli.app import app
from models import tensors, vocabulary_of, words, write_family, write_tokenizer
from peers.recipes import METHODS, recipe, weighted
from peers.side_by_side import PeerError, isomerge, mergekit_yaml, refused, write_recipe

pytestmark = pytest.mark.peers


def change_config(folder: Path, **values: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))


def replace_tensor(folder: Path, name: str, tensor: torch.Tensor | None) -> None:
    state = load_file(folder / "model.safetensors")
    del state[name]
    save_file(state | ({} if tensor is None else {name: tensor}), folder / "model.safetensors", {"format": "pt"})


@pytest.fixture
def copies(family: Any, tmp_path: Path) -> Path:
    """Models that may be changed."""
    return Path(shutil.copytree(family("llama"), tmp_path / "models"))


def test_the_donor_without_a_base_is_the_first_model_and_not_any(mergekit: Any, copies: Path, tmp_path: Path) -> None:
    change_config(copies / "a", max_position_embeddings=61)
    change_config(copies / "b", max_position_embeddings=62)
    theirs, ours = set(), set()
    for attempt in range(16):
        models = shutil.copytree(copies, tmp_path / f"models{attempt}")
        file = write_recipe(recipe("linear", weighted(0.5, 0.5)), models, tmp_path / f"{attempt}.yml")
        out = mergekit.merge(file, tmp_path / f"theirs{attempt}")
        theirs.add(json.loads((out / "config.json").read_text())["max_position_embeddings"])
        if attempt < 3:
            out = isomerge(file, tmp_path / f"ours{attempt}")
            ours.add(json.loads((out / "config.json").read_text())["max_position_embeddings"])
        shutil.rmtree(models)
    assert ours == {61}
    assert theirs == {61, 62}


def test_an_unknown_key_is_refused_and_not_dropped(mergekit: Any, family: Any, tmp_path: Path) -> None:
    text = recipe("ties", weighted(0.5, 0.5, densty=0.1), base="base", parameters={"normalise": False})
    file = write_recipe(text, family("llama"), tmp_path / "recipe.yml")
    assert tensors(mergekit.merge(file, tmp_path / "theirs"))
    said = refused(file, tmp_path / "ours")
    assert "densty" in said and "density" in said and "normalise" in said and "normalize" in said


def test_a_model_without_a_table_is_merged(mergekit: Any, tmp_path: Path) -> None:
    """Its table for this class asks for a pooler that the stock class does not have."""
    kind, options = transformers.BertForMaskedLM, {"vocab_size": 41, "hidden_size": 24, "num_hidden_layers": 2,
                                                    "num_attention_heads": 3, "intermediate_size": 40}  # fmt: skip
    for seed, name in enumerate("ab"):
        torch.manual_seed(seed)
        kind(kind.config_class(**options)).save_pretrained(tmp_path / "models" / name)
    file = write_recipe(recipe("linear", weighted(0.5, 0.5)), tmp_path / "models", tmp_path / "recipe.yml")
    with pytest.raises(PeerError, match="pooler"):
        mergekit.merge(file, tmp_path / "theirs")
    merged = tensors(isomerge(file, tmp_path / "ours"))
    a, b = (tensors(tmp_path / "models" / name) for name in "ab")
    assert merged.keys() == a.keys()
    assert all(torch.allclose(merged[name], (a[name] + b[name]) / 2, atol=1e-7) for name in a)


def test_a_tensor_its_table_does_not_list_is_merged_and_not_lost(mergekit: Any, copies: Path, tmp_path: Path) -> None:
    extra = "model.layers.0.mlp.extra_scale"
    for member, value in (("a", 1.0), ("b", 3.0)):
        state = load_file(copies / member / "model.safetensors")
        save_file(state | {extra: torch.full((4,), value)}, copies / member / "model.safetensors", {"format": "pt"})
    file = write_recipe(recipe("linear", weighted(0.5, 0.5)), copies, tmp_path / "recipe.yml")
    assert extra not in tensors(mergekit.merge(file, tmp_path / "theirs"))
    assert tensors(isomerge(file, tmp_path / "ours"))[extra].eq(2.0).all()


def test_a_folder_with_a_plus_in_its_name_is_a_folder(mergekit: Any, copies: Path, tmp_path: Path) -> None:
    (copies / "b").rename(copies / "b+c")
    text = recipe("linear", {"a": {"weight": 0.5}, "there": {"weight": 0.5}})
    file = write_recipe(text, copies, tmp_path / "recipe.yml", there=copies / "b+c")
    with pytest.raises(PeerError):
        mergekit.merge(file, tmp_path / "theirs", "--lora-merge-cache", str(tmp_path / "cache"))
    a, b = (tensors(copies / name) for name in ("a", "b+c"))
    merged = tensors(isomerge(file, tmp_path / "ours"))
    assert all(torch.allclose(merged[name], (a[name] + b[name]) / 2, atol=1e-7) for name in a)


def test_a_folder_with_a_space_can_hold_what_lies_between_documents(mergekit: Any, family: Any, tmp_path: Path) -> None:
    from peers.examples import MANY

    file = write_recipe(MANY["mega"], family("llama"), tmp_path / "recipe.yml")
    with pytest.raises(PeerError, match="Circular reference"):
        mergekit.merge(file, tmp_path / "theirs", intermediate=tmp_path / "in between")
    assert tensors(isomerge(file, tmp_path / "my out"))


def test_new_tokens_have_the_same_numbers_in_every_run(mergekit: Any, copies: Path, tmp_path: Path) -> None:
    write_family("llama", tmp_path / "larger", vocabulary=60)
    shutil.rmtree(copies / "b")
    (tmp_path / "larger" / "b").rename(copies / "b")
    write_tokenizer(copies / "b", words(60, start=10))
    text = recipe("linear", weighted(0.5, 0.5), base="a", tokenizer_source="union")
    file = write_recipe(text, copies, tmp_path / "recipe.yml")
    theirs = [vocabulary_of(mergekit.merge(file, tmp_path / f"theirs{i}")) for i in range(2)]
    ours = [vocabulary_of(isomerge(file, tmp_path / f"ours{i}")) for i in range(2)]
    assert theirs[0] != theirs[1]
    assert ours[0] == ours[1]
    # in the order of the vocabulary they come from, after those of the base
    assert [ours[0][f"w{i}"] for i in range(38, 67)] == list(range(41, 70))


def test_random_masks_are_the_same_in_every_run(mergekit: Any, family: Any, tmp_path: Path) -> None:
    text = recipe("dare_ties", weighted(0.5, 0.5, density=0.5), base="base")
    file = write_recipe(text, family("llama"), tmp_path / "recipe.yml")
    name = "model.layers.1.mlp.up_proj.weight"
    theirs = [tensors(mergekit.merge(file, tmp_path / f"theirs{i}"))[name] for i in range(2)]
    ours = [tensors(isomerge(file, tmp_path / f"ours{i}"))[name] for i in range(2)]
    other = tensors(isomerge(file, tmp_path / "seeded", "--seed", "1"))[name]
    assert not torch.equal(*theirs)
    assert torch.equal(*ours) and not torch.equal(ours[0], other)


def test_breadcrumbs_keep_something_of_a_tiny_tensor(mergekit: Any, copies: Path, tmp_path: Path) -> None:
    """One element and a density of 0.9: int(0.9) elements are kept there, that is none."""
    extra = "model.norm.weight"
    for member in ("base", "a"):
        change_config(copies / member, hidden_size=1, head_dim=8, num_attention_heads=1, num_key_value_heads=1)
        state = {n: t[..., :1].contiguous() for n, t in load_file(copies / member / "model.safetensors").items()}
        save_file(state, copies / member / "model.safetensors", {"format": "pt"})
    file = write_recipe(
        recipe("breadcrumbs", {"a": {"weight": 1.0, "density": 0.9}}, base="base"), copies, tmp_path / "recipe.yml"
    )
    theirs, ours = tensors(mergekit.merge(file, tmp_path / "theirs")), tensors(isomerge(file, tmp_path / "ours"))
    base, tuned = (tensors(copies / member)[extra] for member in ("base", "a"))
    assert torch.equal(theirs[extra], base)
    assert torch.allclose(ours[extra], tuned, atol=1e-7)


def test_weights_need_not_be_written(mergekit: Any, family: Any, tmp_path: Path) -> None:
    file = write_recipe(recipe("linear", {"a": {}, "b": {}}), family("llama"), tmp_path / "recipe.yml")
    with pytest.raises(PeerError, match="weight"):
        mergekit.merge(file, tmp_path / "theirs")
    a, b, merged = (tensors(f) for f in (family("llama") / "a", family("llama") / "b", isomerge(file, tmp_path / "o")))
    assert all(torch.allclose(merged[name], (a[name] + b[name]) / 2, atol=1e-7) for name in a)


def test_every_side_file_is_copied(mergekit: Any, copies: Path, tmp_path: Path) -> None:
    """mergekit copies the files it knows."""
    (copies / "a" / "licence.txt").write_text("free")
    file = write_recipe(recipe("linear", weighted(0.5, 0.5), base="a"), copies, tmp_path / "recipe.yml")
    assert not (mergekit.merge(file, tmp_path / "theirs") / "licence.txt").exists()
    assert (isomerge(file, tmp_path / "ours") / "licence.txt").read_text() == "free"


def test_a_missing_tensor_is_told_before_anything_is_written(mergekit: Any, copies: Path, tmp_path: Path) -> None:
    replace_tensor(copies / "b", "model.layers.1.mlp.up_proj.weight", None)
    file = write_recipe(recipe("linear", weighted(0.5, 0.5)), copies, tmp_path / "recipe.yml")
    with pytest.raises(PeerError, match="up_proj"):
        mergekit.merge(file, tmp_path / "theirs")
    assert "model.layers.1.mlp.up_proj.weight" in refused(file, tmp_path / "ours")


def test_tensors_of_another_shape_are_all_told_at_once(mergekit: Any, copies: Path, tmp_path: Path) -> None:
    names = [f"model.layers.{i}.mlp.up_proj.weight" for i in (0, 2)]
    for name in names:
        replace_tensor(copies / "b", name, torch.zeros(47, 32))
    file = write_recipe(recipe("linear", weighted(0.5, 0.5)), copies, tmp_path / "recipe.yml")
    with pytest.raises(PeerError, match="size mismatch") as failure:
        mergekit.merge(file, tmp_path / "theirs")
    assert not all(name in str(failure.value) for name in names)
    said = refused(file, tmp_path / "ours")
    assert all(name in said for name in names)


def test_a_slice_without_layers_is_refused(mergekit: Any, family: Any, tmp_path: Path) -> None:
    text = """
slices:
  - sources: [{model: $a, layer_range: [0, 2]}]
  - sources: [{model: $a, layer_range: [2, 2]}]
merge_method: passthrough
"""
    file = write_recipe(text, family("llama"), tmp_path / "recipe.yml")
    assert tensors(mergekit.merge(file, tmp_path / "theirs"))
    assert "layer_range" in refused(file, tmp_path / "ours")


def test_changes_of_one_magnitude_are_kept_or_dropped_together(mergekit: Any, copies: Path, tmp_path: Path) -> None:
    """mergekit keeps as many as the density says, whichever its sorting puts first."""
    name = "model.layers.1.mlp.up_proj.weight"
    replace_tensor(copies / "base", name, torch.zeros(48, 32))
    replace_tensor(copies / "a", name, torch.full((48, 32), 0.5))
    text = recipe("ties", {"a": {"weight": 1.0, "density": 0.25}}, base="base")
    file = write_recipe(text, copies, tmp_path / "recipe.yml")
    kept = [
        tensors(out)[name].ne(0).double().mean().item()
        for out in (mergekit.merge(file, tmp_path / "theirs"), isomerge(file, tmp_path / "ours"))
    ]
    assert kept == [0.25, 1.0]


@pytest.mark.parametrize("method", ["arcee_fusion", "ramplus_tl"])
def test_models_in_16_bits_stay_in_16_bits(mergekit: Any, family: Any, tmp_path: Path, method: str) -> None:
    file = write_recipe(METHODS[method], family("llama", torch.bfloat16), tmp_path / "recipe.yml")
    theirs, ours = mergekit.merge(file, tmp_path / "theirs"), isomerge(file, tmp_path / "ours")
    written = [{tensor.dtype for tensor in tensors(out).values()} for out in (theirs, ours)]
    assert written == [{torch.float32}, {torch.bfloat16}]


@pytest.mark.parametrize(
    "program", ["mergekit-yaml", "mergekit-multi", "mergekit-moe", "mergekit-tokensurgeon", "mergekit-extract-lora"]
)
def test_every_flag_of_mergekits_programs_is_taken(mergekit: Any, program: str) -> None:
    verbs: Any = typer.main.get_command(app)
    ours = {flag for one in verbs.commands[program].params for flag in (*one.opts, *one.secondary_opts)}
    theirs = mergekit.flags(program)
    assert "--lazy-unpickle" in theirs and set(theirs) <= ours


def test_what_is_in_the_folder_is_replaced_only_with_force(mergekit: Any, family: Any, tmp_path: Path) -> None:
    first = write_recipe(recipe("linear", weighted(1.0, 0.0)), family("llama"), tmp_path / "first.yml")
    second = write_recipe(recipe("linear", weighted(0.0, 1.0)), family("llama"), tmp_path / "second.yml")
    for file in (first, second):
        mergekit.merge(file, tmp_path / "theirs")
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(tensors(tmp_path / "theirs")[name], tensors(family("llama") / "b")[name])
    out = mergekit_yaml(first, tmp_path / "ours")
    done = CliRunner().invoke(app, ["mergekit-yaml", str(second), str(out)])
    assert done.exit_code == 2 and "--force" in done.stderr
    assert torch.equal(tensors(out)[name], tensors(family("llama") / "a")[name])


def test_an_extracted_adapter_adds_what_mergekits_adds(mergekit: Any, family: Any, tmp_path: Path) -> None:
    """Each the best of its rank: the factors may differ, their product does not."""
    base, tuned = family("llama") / "base", family("llama") / "a"
    line = ["--model", str(tuned), "--base-model", str(base), "--max-rank", "4", "--include-regex", "layers.*proj"]
    mergekit.run("mergekit-extract-lora", [*line, "--out-path", str(tmp_path / "theirs")])
    done = CliRunner().invoke(app, ["mergekit-extract-lora", *line, "--out-path", str(tmp_path / "ours"), "--quiet"])
    assert done.exit_code == 0, done.output
    ours, theirs = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("ours", "theirs"))
    layers = {name.partition(".lora_A")[0] for name in ours if ".lora_A" in name}
    assert len(layers) == 21
    for layer in layers:
        mine, other = (one[f"{layer}.lora_B.weight"] @ one[f"{layer}.lora_A.weight"] for one in (ours, theirs))
        assert torch.allclose(mine, other, atol=1e-5), layer
    assert any("embed_tokens" in name for name in theirs) and not any("embed_tokens" in name for name in ours)
