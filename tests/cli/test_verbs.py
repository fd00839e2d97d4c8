"""Each verb asks the API for what its flags say and shows the record that comes back."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

ALIGNED = {
    "verdict": "aligned",
    "distance": {"before": 1.41, "after": 0.52},
    "spaces": [
        {"name": "residual", "group": "Rotation", "moved": True, "gain": 0.25},
        {"name": "ffn.0", "group": "Permutation", "moved": 0.5, "gain": 0.1},
        {"name": "ffn.1", "group": "Permutation", "moved": 1.0, "gain": 0.3},
    ],
    "max_output_difference": 2.5e-7,
    "seconds": 3.25,
    "notes": ["head untied because [residual] rotated"],
}


def test_align_passes_its_defaults_to_the_api(run: Any, api: Any) -> None:
    api.record = ALIGNED
    assert run("align b a -o out").exit_code == 0
    args, options = api.calls["align"]
    assert args == ("b", "a")
    assert options["level"] == "full" and options["scale"] is None
    assert options["sweeps"] == 15 and options["device"] == "cpu"
    assert api.calls["save"] == (
        (Path("out"),),
        {"shard_size": "5GB", "out_dtype": None, "force": False, "anchor_out": None, "report": True, "finish": False},
    )


def test_align_passes_every_flag_to_the_api(run: Any, api: Any) -> None:
    api.record = ALIGNED
    line = "align b a c -o out --level rotation --no-scale --layers 0-4,7 --only ffn --sweeps 3 --many cycle"
    line += " --solver annealing"
    line += " --anchor-out anchor --shard-size 500MB --out-dtype bf16 --device cuda"
    line += " --threads 2 --max-memory 8GB --seed 7 --force"
    result = run(line)
    assert result.exit_code == 0, result.output
    args, options = api.calls["align_family"]
    assert args == (["b", "a", "c"],)
    expected = {
        "anchor": None,
        "level": "rotation",
        "scale": False,
        "layers": "0-4,7",
        "only": "ffn",
        "sweeps": 3,
        "many": "cycle",
        "solver": "annealing",
        "device": "cuda",
        "threads": 2,
        "max_memory": "8GB",
    }
    assert {key: options[key] for key in expected} == expected
    saved = {"shard_size": "500MB", "out_dtype": "bf16", "force": True, "anchor_out": Path("anchor"), "report": True}
    assert api.calls["save"][1] == {**saved, "finish": False}


def test_align_stores_the_transform_of_two_models_and_refuses_to_for_more(run: Any, api: Any) -> None:
    api.record = ALIGNED
    assert run("align b a -o out --save-transform t.safetensors").exit_code == 0
    assert api.calls["save_transform"][0] == (Path("t.safetensors"),)
    refused = run("align b a c -o out --save-transform u.safetensors")
    assert refused.exit_code == 2 and "Align two at a time" in refused.stderr
    Path("t.safetensors").touch()
    refused = run("align b -o out --transform t.safetensors --anchor-out anchor")
    assert refused.exit_code == 2 and "needs an ANCHOR" in refused.stderr
    refused = run("align b a -o out --transform t.safetensors --nearest")
    assert refused.exit_code == 2 and "Leave out one of the two" in refused.stderr
    assert run("align b a -o out --transform t.safetensors --many universe").exit_code == 0
    assert api.calls["align"][1]["transform"] == Path("t.safetensors")


def test_align_table_says_distance_moves_difference_and_notes(run: Any, api: Any) -> None:
    api.record = ALIGNED
    shown = run("align b a -o out").stdout
    for part in ("1.41 → 0.52", "2.5e-07", "ffn.*", "75.0 %", "20.0 %", "1 of 1", "3 tensors, 1.2 MB"):
        assert part in shown, shown
    assert "• head untied because [residual] rotated" in shown  # brackets are not markup


def test_the_time_shown_is_that_of_the_command_and_not_the_part_in_the_record(run: Any, api: Any) -> None:
    api.record = {**ALIGNED, "seconds": 4000.0}
    assert re.search(r"^time +\d+\.\d s$", run("align b a -o out").stdout, re.MULTILINE)
    assert json.loads(run("align b a -o out --force --json").stdout)["seconds"] == 4000.0


def test_align_table_says_why_the_difference_was_not_measured(run: Any, api: Any) -> None:
    reason = "transformers is not installed"
    api.record = {**ALIGNED, "max_output_difference": None, "max_output_difference_reason": reason}
    assert f"not measured: {reason}" in run("align b a -o out").stdout


def test_nearest_leaves_the_choice_of_anchor_to_the_api(run: Any, api: Any) -> None:
    api.record = ALIGNED
    assert run("align b a c -o out --nearest").exit_code == 0
    assert api.calls["align_family"][0] == (["b", "a", "c"],)
    assert api.calls["align_family"][1]["anchor"] is None


def test_further_models_are_moved_to_the_anchor_too(run: Any, api: Any) -> None:
    api.record = ALIGNED
    assert run("align b a c -o out").exit_code == 0
    assert api.calls["align_family"][0] == (["b", "c"],)
    assert api.calls["align_family"][1]["anchor"] == "a"


def test_a_stored_transform_needs_no_anchor(run: Any, api: Any, tmp_path: Path) -> None:
    api.record = ALIGNED
    (tmp_path / "t.safetensors").touch()
    assert run("align b -o out --transform t.safetensors").exit_code == 0
    assert api.calls["align"][0] == ("b", None)
    assert api.calls["align"][1]["transform"] == Path("t.safetensors")


def test_check_shows_verdict_reasons_and_suggestion(run: Any, api: Any) -> None:
    api.record = {"summary": "a, b and c are strangers.", "reasons": ["no [ancestor]"], "suggestion": "merge --align",
                  "why": "with data (`data`: texts)"}  # fmt: skip
    shown = run("check a b c --base x --data texts").stdout
    models, options = api.calls["check"]
    assert models == ("a", "b", "c") and options["base"] == "x" and options["data"] == "texts"
    assert shown.splitlines()[0] == "a, b and c are strangers."
    assert all(part in shown for part in ("• no [ancestor]", "try: merge --align", "with data (--data: texts)"))


@pytest.mark.parametrize(("unchanged", "code", "word"), [(True, 0, "unchanged"), (False, 1, "CHANGED")])
def test_selftest_fails_when_the_function_changed(run: Any, api: Any, unchanged: bool, code: int, word: str) -> None:
    api.record = {"unchanged": unchanged, "max_output_difference": 1e-7, "recovered_distance": 3e-8}
    result = run("selftest a --seed 3 --level rotation")
    assert result.exit_code == code and word in result.stdout
    assert api.calls["selftest"] == (("a",), {"seed": 3, "level": "rotation"})


def test_merge_makes_a_recipe_of_its_flags(run: Any, api: Any) -> None:
    api.record = {"method": "ties", "aligned": True, "seconds": 1.0}
    flags = "--weights 0.25,0.75 --density 0.5,0.7 --lambda 2 --no-normalize --align --level rotation --base x --seed 3"
    result = run(f"merge a b --method ties {flags} -o out")
    assert result.exit_code == 0, result.output
    (documents,), options = api.calls["merge_recipe"]
    assert options["seed"] == 3
    (recipe,) = documents
    assert recipe.merge_method == "ties" and str(recipe.base_model) == "x" and recipe.align.level == "rotation"
    assert [entry.parameters for entry in recipe.models] == [
        {"weight": 0.25, "density": 0.5},
        {"weight": 0.75, "density": 0.7},
    ]
    assert recipe.parameters == {"lambda": 2.0, "normalize": False}
    assert api.calls["save"][1]["lock"] is True and api.calls["save"][1]["report"] is True


def test_merge_reads_a_recipe(run: Any, api: Any, tmp_path: Path) -> None:
    (tmp_path / "r.yml").write_text("merge_method: linear\nmodels:\n- model: a\n- model: b\n")
    assert run("merge r.yml -o out --no-lock --no-report --no-verify").exit_code == 0
    (documents,), _ = api.calls["merge_recipe"]
    assert [str(entry.model) for entry in documents[0].models] == ["a", "b"]
    assert api.calls["save"][1]["lock"] is False and api.calls["save"][1]["report"] is False
    assert "verify" not in api.calls
    told = run("merge r.yml -o out2 --density 0.5").stderr
    assert "--density belongs in the recipe" in told


def test_list_prints_one_line_per_entry(run: Any, api: Any) -> None:
    shown = run("list methods").stdout
    assert "linear" in shown and "weighted mean" in shown
    assert json.loads(run("list methods --json").stdout)["methods"][1]["name"] == "slerp"


def test_demo_prints_pairs_and_their_mean(run: Any, api: Any) -> None:
    pairs = [
        {"seed": 0, "parents": [0.9, 1.0], "none": 0.2, "full": 0.9},
        {"seed": 1, "parents": [0.8, 0.9], "none": 0.4, "full": 0.7},
    ]
    api.record = {"pairs": pairs, "out": "demo-out", "seconds": 9.0}
    shown = run("demo --seeds 2").stdout
    assert api.calls["demo"][0] == (Path("demo-out"),) and api.calls["demo"][1]["seeds"] == 2
    assert all(part in shown for part in ("90.0 / 100.0 %", "85.0 / 95.0 %", "30.0 %", "80.0 %"))


def test_steps_of_learning_are_a_number(run: Any, api: Any) -> None:
    result = run("align b a -o out --learn x")
    assert result.exit_code == 2 and "--learn" in result.stderr
    assert "align" not in api.calls


def test_no_arguments_prints_the_help(run: Any) -> None:
    result = run("")
    assert result.exit_code == 0 and "Commands:" in result.stdout


def test_a_text_for_all_models_keeps_its_commas() -> None:
    from isomerge.cli.request import typed_options

    assert typed_options("reconstruct", {"width": "units=2,heads=1.5"}) == {"width": "units=2,heads=1.5"}
    assert typed_options("regmean", {"statistics": "a,b"}) == {"statistics": ["a", "b"]}
