"""`isomerge moe` and `isomerge transplant` on tiny models: what they print, write and refuse."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from commands import said, verb
from merging.experts.counting import family, recipe, text_file
from models import pair_tokenizer, read_config, save_model


def test_the_table_says_where_each_text_was_sent(tmp_path: Path) -> None:
    models = family()
    (tmp_path / "recipe.yml").write_text(yaml.safe_dump(recipe(models)))
    files = [text_file(tmp_path, skill) for skill in (0, 1)]
    line = ("moe", tmp_path / "recipe.yml", "--data", files[0], "--data", files[1], "--kind", "lines")
    done = verb(*line, "-o", tmp_path / "out")
    assert done.exit_code == 0, done.output
    for words in ("sent to", "1: 0", "2: 1", "skill-0.txt", "skill-1.txt", "mixture", "%"):
        assert words in done.stdout, words
    for file in ("model.safetensors", "README.md", "isomerge.json", "isomerge.lock.json", "report.html"):
        assert (tmp_path / "out" / file).is_file()
    record = json.loads((tmp_path / "out" / "isomerge.json").read_text())
    assert record["method"] == "moe" and record["moe"]["class"] == "Mixtral"
    again = verb(*line, "-o", tmp_path / "out")
    assert again.exit_code == 2 and "--force" in again.stderr
    assert verb("verify", tmp_path / "out").exit_code == 0
    assert said("reproduce", tmp_path / "out")["verdict"] == "identical"


def test_the_recipe_is_planned_and_merged_like_any_other(tmp_path: Path) -> None:
    (tmp_path / "recipe.yml").write_text(yaml.safe_dump(recipe(family(), "cheap_embed")))
    assert said("plan", tmp_path / "recipe.yml")["tensors"] > 0
    record = said("merge", tmp_path / "recipe.yml", "-o", tmp_path / "out")
    assert record["moe"]["gate_mode"] == "cheap_embed" and record["verified"]


def test_flags_stand_above_the_recipe_and_lead_to_smaller_and_dense_models(tmp_path: Path) -> None:
    models, file = family(), text_file(tmp_path, 0)
    built = said("moe", models["0"], models["1"], "--base", models["base"], "--experts-per-token", "1", "--seed", "3",
                 "--gate-mode", "uniform_random", "-o", tmp_path / "built", "--no-report")  # fmt: skip
    assert built["moe"]["experts_per_token"] == 1 and built["donor"] == str(models["base"])
    assert json.loads((tmp_path / "built" / "isomerge.lock.json").read_text())["seed"] == 3
    copies = said("moe", models["0"], "--copies", "4", "-o", tmp_path / "four", "--no-copy-tokenizer")
    assert copies["moe"]["parameters"]["total"] > copies["moe"]["parameters"]["active"]
    assert not (tmp_path / "four" / "tokenizer.json").exists()
    smaller = said("moe", tmp_path / "built", "--keep", "1", "--data", file, "-o", tmp_path / "one")
    assert smaller["shrunk"]["experts"] == {"before": 2, "after": 1} and smaller["shrunk"]["loss"]["after"] > 0
    done = verb("moe", tmp_path / "built", "--to-dense", "by_use", "--data", file, "-o", tmp_path / "dense")
    assert done.exit_code == 0 and "nats per token" in done.stdout
    assert read_config(tmp_path / "dense")["architectures"] == ["MistralForCausalLM"]


def test_transplant_says_what_is_known_and_what_it_costs(tmp_path: Path) -> None:
    save_model(tmp_path / "model", pair_tokenizer("abcd", []), seed=1)
    save_model(tmp_path / "donor", pair_tokenizer("dcba", [("a", "b")]), seed=2)
    (tmp_path / "texts.txt").write_text("ab cd\nabab\n" * 4)
    line = ("transplant", tmp_path / "model", "--tokenizer", tmp_path / "donor", "--data", tmp_path / "texts.txt")
    done = verb(*line, "--kind", "lines", "-k", "2", "-o", tmp_path / "out")
    assert done.exit_code == 0, done.output
    assert all(words in done.stdout for words in ("known", "bits per byte", "before", "after"))
    record = said(*line, "--method", "subword", "-o", tmp_path / "other", "--no-report")
    assert record["transplant"]["known"] == 7 and record["transplant"]["new"] == 1
    assert said("reproduce", tmp_path / "out")["verdict"] == "identical"
