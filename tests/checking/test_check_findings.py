"""Each finding of `check` against numbers taken from the tensors by hand, and each recipe against `plan`."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import save_file

import isomerge
from alignment.layers import read_llama, torch_state, write_llama
from commands import said, verb
from isomerge.checking.comparison import MOST_OF_ONE, spans
from models import arrays, model, noisy, save_model, tensors, variant, word_tokenizer
from samples import digits

WIDE = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}


def llama(seed: int = 0, inner: int = 64) -> Path:
    return model("llama", seed, torch.float32, **WIDE, intermediate_size=inner)


def reordered(like: Path, name: str) -> Path:
    """The same function, with the feed-forward units of every layer in another order."""
    found = arrays(like)
    random = np.random.default_rng(5)
    for layer in range(2):
        parts = read_llama(found, layer, groups=2, inner=8)
        order = random.permutation(len(parts["gate"]))
        parts |= {"gate": parts["gate"][order], "up": parts["up"][order], "down": parts["down"][:, order]}
        write_llama(found, layer, parts)
    stored = {n: t.to(torch.float32) for n, t in torch_state(found).items()}
    return variant(like, stored, name)


@pytest.mark.parametrize("inner", [64, 1100])  # solved as a whole; judged by a sample of its units
def test_a_model_with_its_units_in_another_order_is_found_out(inner: int) -> None:
    base = llama(inner=inner)
    found = isomerge.check(base, reordered(base, f"reordered-{inner}"))
    assert found["verdict"] == "strangers" and "another order" in found["summary"]
    assert found["alignment"]["gain"]["permutation"] > 0.95 and found["alignment"]["level"] == "permutation"
    moved = {s["name"]: s["moved"] for s in found["spaces"]}
    assert moved["ffn.0" if "ffn.0" in moved else "ffn.1"] > 0.9 and moved["residual"] == 0
    if inner > 1024:
        chances = [s["by_chance"] for s in found["spaces"] if "by_chance" in s]
        assert chances and max(chances) < 0.6


def rotation_gain(a: np.ndarray, b: np.ndarray) -> float:
    """The share of ‖A − B‖² that the best rotation takes away, by the singular values of AᵀB."""
    here, best = (a * b).sum(), np.linalg.svd(a.T @ b, compute_uv=False).sum()
    return float(2 * (best - here) / ((a - b) ** 2).sum())


def test_the_noise_of_a_fine_tuning_is_no_gain() -> None:
    """A rotation fits noise too: beside the gain stands what it is where the difference is nothing but noise."""
    base = llama()
    tuned = noisy(base, 0.05)
    found = isomerge.check(base, tuned)
    stream = next(s for s in found["spaces"] if s["name"] == "residual")
    names = ["model.embed_tokens.weight", "lm_head.weight"]
    a, b = (np.concatenate([arrays(folder)[n] for n in names]) for folder in (base, tuned))
    assert found["verdict"] == "siblings" and stream["gain"] == pytest.approx(rotation_gain(a, b), rel=1e-3)
    random = np.random.default_rng(0)
    noises = [b + random.normal(size=b.shape) * (a - b).std() for _ in range(20)]
    chance = np.mean([rotation_gain(one, b) for one in noises])
    assert stream["gain"] > 0.1 and stream["by_chance"] == pytest.approx(chance, rel=0.1)
    shown = verb("check", base, tuned, "--explain").stdout
    row = next(line for line in shown.splitlines() if line.startswith("residual"))
    assert float(row.split()[-1]) == pytest.approx(stream["by_chance"], rel=1e-3)


# Wide enough for one draw to be near the average.
MODERATE = {
    "gpt2": {"n_embd": 48, "n_head": 4, "n_inner": 64},
    "vit": {"hidden_size": 48, "num_attention_heads": 4, "intermediate_size": 64},
}


@pytest.mark.parametrize("family", MODERATE)
def test_a_gain_in_attention_has_its_chance_beside_it(family: str) -> None:
    """Between unrelated weights, in every space: there is nothing to find, and the two are much the same."""
    found = isomerge.check(*(model(family, seed, torch.float32, **MODERATE[family]) for seed in (0, 1)))
    gains = {s["name"]: (s["gain"], s["by_chance"]) for s in found["spaces"]}
    assert len(gains) == 3 and all(0.5 * chance < gain < 2 * chance for gain, chance in gains.values())
    alignment = found["alignment"]
    assert alignment["gain"]["full"] < 1.5 * alignment["by_chance"]
    assert any("by chance, so align on data" in reason for reason in found["reasons"])


def test_an_adapter_merged_into_a_model_is_recognised_by_the_rank_of_its_difference() -> None:
    base = model("llama", 0, torch.bfloat16, **WIDE, intermediate_size=64)
    random = torch.Generator().manual_seed(3)
    changed = {}
    for name, tensor in tensors(base).items():
        if "q_proj" in name or "v_proj" in name:
            left, right = (
                torch.randn(tensor.shape[0], 3, generator=random),
                torch.randn(3, tensor.shape[1], generator=random),
            )
            changed[name] = (tensor.float() + 0.05 * left @ right).bfloat16()
    found = isomerge.check(base, variant(base, changed, "lora"))
    assert found["verdict"] == "siblings" and found["low_rank"]["rank"] == 3
    assert found["weights"]["identical_tensors"] == len(tensors(base)) - len(changed)
    assert isomerge.check(base, noisy(base, 0.05))["low_rank"] is None


def test_with_a_base_the_changes_are_compared_too() -> None:
    base = llama()
    first, second = noisy(base, 0.05, seed=1), noisy(base, 0.05, seed=2)
    origin, a, b = (arrays(folder) for folder in (base, first, second))
    one, two = (np.concatenate([(x[n] - origin[n]).ravel() for n in origin]) for x in (a, b))
    both = (one != 0) & (two != 0)
    found = isomerge.check(first, second, base=base)
    cosine = float(one @ two / np.linalg.norm(one) / np.linalg.norm(two))
    conflict = float((one * two < 0).sum() / both.sum())
    told = " ".join(found["reasons"])
    assert f"cosine {cosine:.2g}; of the weights both changed, {100 * conflict:.0f} % went opposite" in told
    assert [row["verdict"] for row in found["from_base"]] == ["siblings", "siblings"]
    layer = next(row for row in found["layers"] if row["name"] == "model.layers.1")
    names = [n for n in origin if n.startswith("model.layers.1.") and origin[n].ndim > 1]
    apart = sum(((a[n] - b[n]) ** 2).sum() for n in names)
    size = sum((a[n] ** 2).sum() for n in names)
    assert layer["distance"] == pytest.approx((apart / size) ** 0.5, rel=1e-4)


def test_the_base_among_the_models_is_pointed_at() -> None:
    base = llama()
    found = isomerge.check(noisy(base, 0.05, seed=1), base, noisy(base, 0.05, seed=2))
    assert any(reason.startswith(f"{base} lies where the base") for reason in found["reasons"])


def test_the_base_given_as_a_model_too_counts_once() -> None:
    base = llama()
    first, second = noisy(base, 0.05, seed=1), noisy(base, 0.05, seed=2)
    for spelled in (base, f"{base}/"):
        found = isomerge.check(base, first, second, base=spelled)
        assert sum(f"{base} is the base itself" in reason for reason in found["reasons"]) == 1
        recipe = yaml.safe_load(found["recipe"])
        assert recipe["base_model"] == str(base)
        assert [entry["model"] for entry in recipe["models"]] == [str(first), str(second)]
    alone = yaml.safe_load(isomerge.check(base, first, base=base)["recipe"])
    assert alone["merge_method"] == "linear" and "base_model" not in alone and len(alone["models"]) == 2


def test_the_base_that_all_cards_name_is_pointed_at(tmp_path: Path) -> None:
    models = []
    for seed in (1, 2):
        models.append(tmp_path / str(seed))
        shutil.copytree(noisy(llama(), 0.05, seed=seed), models[-1])
        (models[-1] / "README.md").write_text("---\nbase_model: org/base\n---\n# A model\n")
    assert any("org/base" in reason and "`base`" in reason for reason in isomerge.check(*models)["reasons"])


def test_large_tensors_are_sampled_and_the_estimate_is_near(monkeypatch: pytest.MonkeyPatch) -> None:
    from isomerge.checking import comparison

    base = llama(inner=1100)
    other = noisy(base, 0.1)
    whole = isomerge.check(base, other)
    monkeypatch.setattr(comparison, "MOST_OF_ONE", 2048)
    monkeypatch.setattr(comparison, "LEAST_OF_ONE", 1024)
    sampled = isomerge.check(base, other)
    assert sampled["weights"]["sampled"] < 0.2 * whole["weights"]["sampled"] == 0.2 * whole["weights"]["parameters"]
    assert sampled["weights"]["parameters"] == whole["weights"]["parameters"]
    assert sampled["distance"] == pytest.approx(whole["distance"], rel=0.03)
    assert sampled["cosine"] == pytest.approx(whole["cosine"], abs=0.002)


def test_the_places_looked_at_reach_from_end_to_end() -> None:
    places = spans(10_000_000, MOST_OF_ONE)
    assert places[0][0] == 0 and places[-1][1] == 10_000_000
    assert sum(stop - start for start, stop in places) == MOST_OF_ONE


def test_nan_is_named_and_no_recipe_is_offered() -> None:
    base = llama()
    name = "model.layers.0.mlp.up_proj.weight"
    broken = tensors(base)[name].clone()
    broken[3, 2] = float("nan")
    found = isomerge.check(base, variant(base, {name: broken}, "nan"))
    assert found["recipe"] is None and found["weights"]["not_finite"]
    assert any("NaN" in reason and name in reason for reason in found["reasons"])
    assert (
        "cannot be merged as they are" in found["summary"] and f"NaN or infinite values in '{name}'" in found["summary"]
    )
    assert found["low_rank"] is None and not any("adapter" in reason for reason in found["reasons"])


def test_a_base_that_is_none_of_theirs_is_left_out_and_said() -> None:
    base, wide = llama(), llama(inner=96)
    models = noisy(base, 0.05, seed=1), noisy(base, 0.05, seed=2)
    found = isomerge.check(*models, base=wide)
    assert found["verdict"] == "siblings" and found["base"] is None
    (told,) = [reason for reason in found["reasons"] if "cannot be their base" in reason]
    assert str(wide) in told and "leave `base` out" in told
    assert "base_model" not in yaml.safe_load(found["recipe"]) or str(wide) not in found["recipe"]
    assert isomerge.check(models[0], wide, base=base)["verdict"] == "incompatible"


def test_dtypes_and_ties_that_differ_are_said_and_the_recipe_settles_the_dtype() -> None:
    base = llama()
    half = {name: tensor.bfloat16() for name, tensor in tensors(base).items()}
    found = isomerge.check(base, variant(base, half, "half", tie_word_embeddings=True))
    told = " ".join(found["reasons"])
    assert "float32" in told and "bfloat16" in told and "tied in some and not in others" in told
    assert found["verdict"] == "siblings" and yaml.safe_load(found["recipe"])["dtype"] == "float32"


# --- words ------------------------------------------------------------------------------------------------------------
def chat_models(tmp: Path, strange: bool = False) -> list[Path]:
    """The second has one more token, and is a fine-tune of the first or a stranger to it."""
    words = ["<unk>", "<s>", "</s>", *(f"w{i}" for i in range(40))]
    first = save_model(tmp / "a", word_tokenizer(words))
    second = save_model(tmp / "b", word_tokenizer(words, ["<|chat|>"]))
    assert first.folder and second.folder
    if not strange:
        found = {name: t.clone() for name, t in tensors(second.folder).items()}
        for name, tensor in tensors(first.folder).items():
            found[name][: len(tensor)] = tensor + 0.0005
        save_file(found, second.folder / "model.safetensors", metadata={"format": "pt"})
    (second.folder / "chat_template.jinja").write_text("{{ messages }}")
    return [first.folder, second.folder]


def word_models(tmp: Path) -> list[Path]:
    """Half of the tokens are shared, at other ids."""
    words = [f"w{i}" for i in range(20)]
    first = save_model(tmp / "c", word_tokenizer(["<unk>", "<s>", "</s>", *words]), seed=1)
    second = save_model(tmp / "d", word_tokenizer(["<unk>", "<s>", "</s>", *words[10:], "x"]), seed=2)
    assert first.folder and second.folder
    return [first.folder, second.folder]


def test_tokens_only_one_model_has_are_named_and_the_recipe_joins_them(tmp_path: Path) -> None:
    models = chat_models(tmp_path)
    found = isomerge.check(*models)
    assert found["tokenizer"]["same"] is False and found["tokenizer"]["vocabulary"] is False
    assert any("<|chat|>" in one for one in found["tokenizer"]["differences"])
    assert any("chat templates differ" in one for one in found["tokenizer"]["differences"])
    recipe = yaml.safe_load(found["recipe"])
    assert recipe["tokenizer"] == {"source": "union"} and recipe["chat_template"] == "auto"
    same = isomerge.check(models[0], models[0])
    assert same["tokenizer"]["same"] is True and same["tokenizer"]["differences"] == []


def test_special_tokens_that_differ_are_named(tmp_path: Path) -> None:
    models = [save_model(tmp_path / n, word_tokenizer(["<unk>", "<s>", "</s>", "w"])).folder for n in "ab"]
    path = models[1] / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token": "<s>"}))
    words = isomerge.check(*models)["tokenizer"]
    assert words["vocabulary"] is True and words["special_tokens"] is False
    assert f"eos_token is </s> in {models[0]} and <s> in {models[1]}" in words["differences"]


# --- recipes ----------------------------------------------------------------------------------------------------------
def case(kind: str, tmp: Path) -> tuple[list[Any], str]:
    """Arguments of `check`, and the method its recipe should have."""
    base = llama()
    near = [noisy(base, 0.02, seed=seed) for seed in (1, 2, 3)]
    alike = variant(base, {n: t * 1.02 for n, t in tensors(base).items()}, "alike")
    return {
        "near": (near[:2], "linear"),
        "far": ([noisy(base, 0.15, seed=1), noisy(base, 0.15, seed=2)], "slerp"),
        "three": (near, "linear"),
        "base": ([*near[:2], "--base", base], "ties"),
        "agreeing": ([alike, variant(base, {n: t * 1.03 for n, t in tensors(base).items()}, "more"), "--base", base],
                     "task_arithmetic"),
        "words": (chat_models(tmp), "linear"),
        "other words": (word_models(tmp), "linear"),
        "words of strangers": (chat_models(tmp, strange=True), "linear"),
        "strangers": ([llama(0), llama(1)], "linear"),
        "on data": ([*(model("vit", seed, torch.float32) for seed in (0, 1)), "--data", digits()], "reconstruct"),
    }[kind]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    ["near", "far", "three", "base", "agreeing", "words", "other words", "words of strangers", "strangers", "on data"],
)
def test_the_suggestion_runs_as_it_is(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recipe, and the command where flags can say the same: both write the same model."""
    monkeypatch.chdir(tmp_path)
    arguments, method = case(kind, tmp_path)
    found = said("check", *arguments, "--recipe", "recipe.yml")
    assert found["recipe_file"] == "recipe.yml"
    by_recipe = said("merge", "recipe.yml", "-o", "by-recipe")
    assert by_recipe["method"] == method and by_recipe["verified"] is True
    program, *command = shlex.split(found["suggestion"])
    assert program == "isomerge"
    if command[0] == "merge":
        assert said(*command)["sha256"] == by_recipe["sha256"]
    else:
        assert kind.startswith("words") and "recipe.yml" in command  # no flag sets a chat template


def test_without_data_strangers_are_told_what_it_would_add() -> None:
    found = isomerge.check(llama(0), llama(1))
    recipe = yaml.safe_load(found["recipe"])
    assert recipe["merge_method"] == "linear" and recipe["align"] is True and "data" not in recipe
    assert all("`data`" in found[key] and "reconstruct" in found[key] for key in ("why", "recipe"))
    with_data = isomerge.check(llama(0), llama(1), data=digits())
    assert "`data`" not in with_data["why"] and "reconstruct" in with_data["suggestion"]


def test_a_recipe_that_merge_would_refuse_is_not_suggested() -> None:
    base = llama()
    short = variant(base, {}, "short", drop=("model.layers.1.mlp.up_proj.weight",))
    found = isomerge.check(base, short)
    assert found["recipe"] is None and "cannot be merged as they are" in found["summary"]
    assert any(
        reason.startswith(f"in the way of a merge: {short} lacks") and "up_proj" in reason
        for reason in found["reasons"]
    )
    assert not any("While" in reason for reason in found["reasons"])


# --- the verb ---------------------------------------------------------------------------------------------------------
def test_the_verb_says_the_verdict_first_and_explains_when_asked(tmp_path: Path) -> None:
    base = llama()
    arguments = ("check", base, noisy(base, 0.02))
    short, long = verb(*arguments).stdout, verb(*arguments, "--explain").stdout
    assert "are siblings" in short.splitlines()[0] and short.splitlines()[0] in long
    assert "model.layers.1" not in short and "model.layers.1" in long and "merge_method: linear" in long


def test_a_recipe_is_replaced_only_with_force(tmp_path: Path) -> None:
    base, file = llama(), tmp_path / "r.yml"
    file.write_text("mine")
    refused = verb("check", base, noisy(base, 0.02), "--recipe", file)
    assert refused.exit_code == 2 and "--force" in refused.stderr and file.read_text() == "mine"
    assert verb("check", base, noisy(base, 0.02), "--recipe", file, "--force").exit_code == 0
    assert yaml.safe_load(file.read_text())["merge_method"] == "linear"


def test_the_record_of_incompatible_models_has_the_same_keys() -> None:
    good = isomerge.check(llama(0), llama(1))
    bad = isomerge.check(llama(0), model("bert", 0))
    assert set(good) == set(bad) and bad["verdict"] == "incompatible" and bad["recipe"] is None
    assert bad["summary"].endswith(".") and bad["summary"].count(". ") == 0
