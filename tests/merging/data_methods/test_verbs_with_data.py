"""The command line end to end: flags and recipe are one thing, plan and list know it, errors say what to write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import isomerge
from commands import said, verb
from isomerge.checkpoint import open_checkpoint
from isomerge.data import open_data
from isomerge.merging.data_methods import ALL_METHODS, DATA_METHODS
from models import bert, model, tensors
from models import image_pair as pair
from samples import SENTENCES, digits


def test_flags_and_recipe_write_the_same_model(tmp_path: Path) -> None:
    a, b = pair()
    recipe = tmp_path / "recipe.yml"
    recipe.write_text(
        f"merge_method: reconstruct\nmodels:\n- {{model: {a}, parameters: {{weight: 0.3}}}}\n"
        f"- {{model: {b}, parameters: {{weight: 0.7}}}}\nparameters: {{ridge: 0.1}}\n"
        f"data: {{path: {digits()}, limit: 60}}\nalign: {{level: full}}\nrepair: true\n"
    )
    flags = ["--method", "reconstruct", "--data", digits(), "--limit", 60, "--ridge", "0.1", "--weights", "0.3,0.7"]
    by_flags = said("merge", a, b, *flags, "--align", "--repair", "-o", tmp_path / "flags")
    by_recipe = said("merge", recipe, "-o", tmp_path / "recipe")
    assert by_flags["sha256"] == by_recipe["sha256"] and by_flags["verified"]
    assert by_flags["aligned"] and by_flags["data"][0]["examples"] == 60 and by_flags["layers"]


def test_text_models_are_merged_by_features_with_their_tokenizer(tmp_path: Path) -> None:
    models = [bert(tmp_path / name, "sequence", ("no", "yes"), seed=seed) for seed, name in enumerate("ab")]
    table = tmp_path / "reviews.csv"
    rows = [f"{text},{'yes' if place % 2 else 'no'}" for place, text in enumerate(SENTENCES * 3)]
    table.write_text("\n".join(["text,label", *rows]))
    names = [str(tmp_path / name) for name in "ab"]
    record = said("merge", *names, "--method", "reconstruct", "--data", table, "--text", "text", "-o", tmp_path / "out")
    assert record["examples"] == 36 and (tmp_path / "out" / "tokenizer.json").is_file()
    batches = open_data(table, text="text").passes(open_checkpoint(tmp_path / "a"))
    expected = isomerge.merge(names, method="reconstruct", data=batches).state_dict()
    found = tensors(tmp_path / "out")
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items()) and models
    soup = said(
        "merge", *names, "--method", "greedy_soup", "--data", table, "--label", "label", "-o", tmp_path / "soup"
    )
    assert soup["metric"] == "accuracy" and soup["chosen"]
    assert [row["model"] for row in soup["scores"]] == names and all(0 <= row["score"] <= 1 for row in soup["scores"])
    unlabelled = tmp_path / "plain.csv"
    unlabelled.write_text("\n".join(["text", *SENTENCES]))
    for flags in (["--method", "greedy_soup"], ["--method", "fisher", "--fisher", "empirical"]):
        told = verb("plan", *names, *flags, "--data", unlabelled)
        assert told.exit_code == 2 and "it has no labels. Name their column" in told.stderr
    assert verb("plan", *names, "--method", "fisher", "--data", unlabelled).exit_code == 0


def test_coefficients_are_learned_from_the_command_line(tmp_path: Path) -> None:
    """Flags, a recipe and Python are one merge; the coefficients stand in the record and on the page."""
    base, first = pair()
    second = str(model("vit", 2, torch.float32))
    halves = [digits(0, 40), digits(40, 40)]
    flags = ["--base", base, "--method", "adamerging", "--objective", "predictions", "--steps", 3, "--by", "model"]
    data = ["--data", halves[0], "--data", halves[1]]
    record = said("merge", first, second, *flags, *data, "-o", tmp_path / "flags")
    (row,) = record["coefficients"]
    assert row["group"] == "all tensors" and list(row["models"]) == [first, second]
    assert record["objective"]["after"] < record["objective"]["before"]
    assert "Learned coefficients" in (tmp_path / "flags" / "report.html").read_text()
    entries = "".join(f"- {{model: {m}, data: '{d}'}}\n" for m, d in zip([first, second], halves, strict=True))
    recipe = tmp_path / "recipe.yml"
    recipe.write_text(
        f"merge_method: adamerging\nbase_model: {base}\nmodels:\n{entries}"
        "parameters: {objective: predictions, steps: 3, by: model}\n"
    )
    again = said("merge", recipe, "-o", tmp_path / "recipe")
    assert again["sha256"] == record["sha256"] and again["coefficients"] == record["coefficients"]
    weights = list(row["models"].values())
    states = [tensors(Path(folder)) for folder in (base, first, second)]
    found = tensors(tmp_path / "flags")
    for name, tensor in found.items():
        expected = states[0][name] + sum(
            w * (s[name] - states[0][name]) for w, s in zip(weights, states[1:], strict=True)
        )
        torch.testing.assert_close(tensor, expected, atol=1e-5, rtol=1e-5)


def test_the_plan_names_the_data_and_the_passes(tmp_path: Path) -> None:
    flags = ["--data", digits(), "--limit", 50, "--repair", "--align"]
    record = said("plan", *pair(), "--method", "reconstruct", *flags)
    assert [use["purpose"] for use in record["data"]] == ["align", "reconstruct", "repair"]
    assert all(use["examples"] == 50 and use["size"] == 90 and use["passes"] for use in record["data"])
    assert any("running models over data" in note for note in record["notes"])
    shown = verb("plan", *pair(), "--method", "fisher", "--data", digits())
    assert shown.exit_code == 0 and "data for fisher" in shown.stdout and "with gradients" in shown.stdout
    tensor = next(name for name in tensors(Path(pair()[0])) if name.endswith("output.dense.weight"))
    explained = said(
        "plan", *pair(), "--method", "reconstruct", "--data", digits(), "--ridge", "0.5", "--explain", tensor
    )
    assert explained["method"] == "reconstruct" and explained["options"]["ridge"]["value"] == 0.5


def test_the_list_of_methods_says_which_need_data() -> None:
    rows = {row["name"]: row for row in said("list", "methods")["methods"]}
    assert rows.keys() == ALL_METHODS.keys()
    assert {name for name, row in rows.items() if row["data"] == "required"} == set(DATA_METHODS)
    assert rows["fisher"]["data"] == "optional" and rows["linear"]["data"] == "ignored"
    assert rows["regmean++"]["options"] == ["weight", "goals", "temperature", "alpha", "floor", "cache"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--method", "reconstruct"], "On the command line, data is --data PATH"),
        (["--method", "reconstruct", "--data", "DATA", "--density", "0.5"], "reconstruct has no option --density"),
        (["--method", "reconstruct", "--data", "DATA", "--base", "A"], "has no base"),
        (["--data", "DATA"], "nothing uses it"),
        (["--limit", "5"], "no effect without data. Add --data"),
        (["--method", "regmean++", "--data", "DATA"], "each model's own data"),
        (["--method", "regmean++", "--data", "DATA", "--data", "DATA", "--data", "DATA"], "3 data sets for 2 models"),
        (["--evidence", "mix", "--data", "DATA"], "--evidence has no effect without --align"),
        (["--repair"], "'repair' measures the units"),
        (["--method", "recnstruct"], "Did you mean 'reconstruct'?"),
    ],
)
def test_wrong_requests_say_what_to_write(flags: list[str], words: str, tmp_path: Path) -> None:
    named: dict[str, Any] = {"DATA": digits(), "A": pair()[0]}
    told = verb("merge", *pair(), *(named.get(flag, flag) for flag in flags), "-o", tmp_path / "out")
    assert told.exit_code == 2 and words in told.stderr, told.stderr
    assert not (tmp_path / "out").exists()


def test_flags_of_data_belong_into_the_recipe_where_there_is_one(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yml"
    recipe.write_text(f"merge_method: linear\nmodels: [{{model: {pair()[0]}}}, {{model: {pair()[1]}}}]\n")
    told = verb("merge", recipe, "--data", digits(), "--repair", "-o", tmp_path / "out")
    assert told.exit_code == 2 and "--data, --repair belongs in the recipe" in told.stderr


def test_python_takes_what_the_command_line_takes(tmp_path: Path) -> None:
    halves = [str(digits(0, 40)), str(digits(40, 40))]
    merged = isomerge.merge(pair(), method="regmean++", data=halves, align=True)
    written = merged.save(tmp_path / "python")
    record = said("merge", *pair(), "--method", "regmean++", "--data", halves[0], "--data", halves[1], "--align",
                  "-o", tmp_path / "verb")  # fmt: skip
    assert record["sha256"] == written.sha256


def test_the_earlier_name_of_an_option_is_still_a_flag(tmp_path: Path) -> None:
    halves = ["--data", digits(0, 40), "--data", digits(40, 40)]
    one, other = (
        said("merge", *pair(), "--method", "regmean++", *halves, flag, "0.5", "-o", tmp_path / flag.strip("-"))
        for flag in ("--alpha", "--off-diagonal")
    )
    assert one["sha256"] == other["sha256"]
