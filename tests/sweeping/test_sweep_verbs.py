"""`isomerge sweep` and `isomerge ensemble` on the command line: what they print, refuse and leave."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from typer.testing import CliRunner, Result

import isomerge
from isomerge.cli.app import app
from isomerge.errors import RequestError
from models import bert, gpt2, gpt2_classifier, llama, vit
from samples import SENTENCES

LABELS = ["bad", "good"]
ROWS = [(text, "good" if "good" in text else "bad") for text in SENTENCES]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verbs")
    for seed, name in enumerate("ab"):
        bert(folder / name, "sequence", LABELS, seed=seed)
    rows = [{"text": text, "label": label} for text, label in ROWS]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "fewer.jsonl").write_text("\n".join(map(json.dumps, rows[:6])))
    (folder / "bare.jsonl").write_text("\n".join(json.dumps({"text": text}) for text, _ in ROWS))
    (folder / "recipe.yml").write_text(
        "merge_method: slerp\nbase_model: a\nmodels: [{model: b}]\nparameters: {t: 0.5}\n"
    )
    (folder / "two.yml").write_text("name: x\nmerge_method: linear\nmodels: [{model: a}, {model: b}]\n---\n"
                                    "merge_method: linear\nmodels: [{model: x}, {model: a}]\n")  # fmt: skip
    return folder


@pytest.fixture
def run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(folder)
    return lambda line: CliRunner().invoke(app, line.split())


def losses(folder: Path, name: str) -> torch.Tensor:
    """The probability of every class for every sentence, without isomerge."""
    model = AutoModelForSequenceClassification.from_pretrained(folder / name).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder / name)
    with torch.no_grad():
        rows = [model(**tokenizer(text, return_tensors="pt")).logits.softmax(-1) for text, _ in ROWS]
    return torch.cat(rows)


def right() -> torch.Tensor:
    return torch.tensor([LABELS.index(label) for _, label in ROWS])


# --- sweep ------------------------------------------------------------------------------------------------------------
def test_json_has_points_best_and_data(run: Any, folder: Path, tmp_path: Path) -> None:
    done: Result = run(f"sweep recipe.yml --over t=0:1:0.5 --data rows.jsonl -o {tmp_path / 'out'} --json")
    assert done.exit_code == 0, done.stderr
    record = json.loads(done.stdout)
    assert [point["parameters"] for point in record["points"]] == [{"t": 0.0}, {"t": 0.5}, {"t": 1.0}]
    ends = [float(F.nll_loss(losses(folder, name).log(), right())) for name in "ab"]
    assert [record["points"][n]["loss"] for n in (0, 2)] == pytest.approx(ends, rel=1e-4)
    assert record["best"] == min(record["points"], key=lambda point: point["loss"])
    assert record["data"]["sha256"] and record["examples"] == len(ROWS) and record["seconds"] > 0
    assert all(point["seconds"] >= 0 for point in record["points"])
    assert done.stderr == ""


def test_the_table_marks_the_best_and_says_how_many_points(run: Any) -> None:
    done = run("sweep a b --over t=0:1:0.5 --data rows.jsonl --test fewer.jsonl")
    assert done.exit_code == 0, done.stderr
    assert done.stdout.count("best") >= 2 and "fewer.jsonl" in done.stdout
    assert "3 points of t" in done.stderr


def test_a_search_says_that_other_data_is_needed(run: Any) -> None:
    done = run("sweep a b --over t=0:1 --search 5 --data rows.jsonl")
    assert done.exit_code == 0, done.stderr
    assert "measure on other data" in " ".join(done.stdout.split()) and "unchanged recipe" in done.stdout
    assert "5 evaluations at most of t" in done.stderr


def test_flags_of_the_method_go_with_models(run: Any) -> None:
    lines = [f"sweep b --base a --method ties {flags} --over weight=1 --data rows.jsonl --json"
             for flags in ("--density 0.5", "--density 1.0")]  # fmt: skip
    first, second = (json.loads(run(line).stdout)["best"]["loss"] for line in lines)
    assert first != second


@pytest.mark.slow
def test_many_points_are_shown_as_the_best(run: Any) -> None:
    done = run("sweep a b --over t=0:1:0.0196 --data fewer.jsonl")
    assert "the 20 best of 52 points" in done.stdout


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("sweep recipe.yml --data rows.jsonl", "nothing to vary"),
        ("sweep recipe.yml --over t=0:1:0.5", "--data PATH"),
        ("sweep recipe.yml --over tt=0,1 --data rows.jsonl", "slerp has no such option"),
        ("sweep recipe.yml --over merge_methd=linear --data rows.jsonl", "Did you mean 'merge_method'"),
        ("sweep recipe.yml --over t=0:1:0 --data rows.jsonl", "the step is 0"),
        ("sweep recipe.yml --over t=0:1 --data rows.jsonl", "no step"),
        ("sweep recipe.yml --over t=0:1:0.00001 --data rows.jsonl", "100001 values"),
        ("sweep recipe.yml --over t=x --data rows.jsonl", "must be a number"),
        ("sweep two.yml --over t=0,1 --data rows.jsonl", "2 documents"),
        ("sweep recipe.yml --over t=0,1 --data bare.jsonl", "no labels"),
        ("sweep recipe.yml --over t=0,1 --data nowhere.jsonl", "nowhere.jsonl"),
        ("sweep recipe.yml --over t=0,1 --data rows.jsonl --task image", "'image'"),
        ("sweep recipe.yml --over t=0,1 --data rows.jsonl --task lm-eval:x", "lm-eval"),
        ("sweep recipe.yml --over t=0,1 --data rows.jsonl --by acuracy", "--by cannot be 'acuracy'"),
        ("sweep recipe.yml --over t=0,1 --data rows.jsonl --mode sideways", "--mode cannot be"),
        ("sweep recipe.yml --over t=0,1 --data rows.jsonl --plot x.gif", ".svg or .png"),
        ("sweep recipe.yml --over t=0,1 --data rows.jsonl --plot no/x.svg", "no folder no"),
        ("sweep recipe.yml --over t=0,1 --data rows.jsonl -o a", "holds other things"),
        ("sweep recipe.yml --over t=0,1 --data rows.jsonl -o rows.jsonl", "it is a file"),
        ("sweep recipe.yml --over t=0,1 --data rows.jsonl --test rows.jsonl", "the same data"),
        ("sweep recipe.yml --over t=0,1 --data rows.jsonl --test-split test", "--test PATH"),
        ("sweep recipe.yml --over t=0,1 --data rows.jsonl --method linear", "belongs in the recipe"),
        ("sweep nowhere.yml --over t=0,1 --data rows.jsonl", "no such file"),
        ("sweep a b --over t=0,1 --densty 1 --data rows.jsonl", "Did you mean '--density'"),
        (
            "sweep a b --method regmean --over weight=1 --data rows.jsonl",
            "name the data for merging in a recipe",
        ),
        (
            "sweep a b --align --over align.evidence=mix --data rows.jsonl",
            "name the data for merging in a rec",
        ),
        (
            "sweep a b --over t=0,1 --data rows.jsonl --text data",
            "It has 'label', 'text'. Known values: label, text. On the command line: --text COL.\n",
        ),
        ("sweep recipe.yml t=0:1:0.5 --data rows.jsonl", "write --over t=0:1:0.5, once for each name"),
        ("sweep a b --over t=0:1:0.5 seed=1,2 --data rows.jsonl", "'seed=1,2' is not a model. To vary it write --over"),
        ("sweep a b --over t=0..1 --data rows.jsonl", "a range is written with colons. Write t=0:1:STEP"),
        ("sweep a b --over t=half --data rows.jsonl", "share of the second model, a number. Write t=0:1:0.1 or"),
        (
            "sweep a b --over t=0,1 --data rows.jsonl -o rows.jsonl/x",
            "rows.jsonl is a file. Name another folder. On the command line: -o DIR",
        ),
        ("ensemble a --data rows.jsonl", "at least two models"),
        ("ensemble a b", "--data PATH"),
        ("ensemble a b --data bare.jsonl", "no labels"),
        ("ensemble a b --data rows.jsonl --task math:sqrt", "one model at a time"),
    ],
)
def test_mistakes_are_told_in_a_paragraph(run: Any, line: str, words: str) -> None:
    done = run(line)
    assert done.exit_code == 2 and words in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and done.stdout == ""
    # The number of points is said when all is in order, and a mistake is all that is said.
    assert done.stderr.startswith("isomerge: ") and len(done.stderr.strip().splitlines()) == 1


def test_an_interruption_says_what_is_kept(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from isomerge.sweeping.measuring import Bench

    original, calls = Bench._put, []

    def place(self: Any, merged: Any) -> Any:
        calls.append(merged)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return original(self, merged)

    monkeypatch.setattr(Bench, "_put", place)
    line = f"sweep a b --over t=0:1:0.25 --data rows.jsonl -o {tmp_path / 'out'}"
    done = run(line)
    assert done.exit_code == 130 and "2 measured points are kept" in done.stderr and line in done.stderr
    again = run(f"{line} --json")
    assert json.loads(again.stdout)["kept"] == 2 and len(calls) == 6
    calls.clear()
    assert "with -o DIR they are kept" in run("sweep a b --over t=0:1:0.25 --data rows.jsonl").stderr


# --- ensemble ---------------------------------------------------------------------------------------------------------
def test_an_ensemble_is_the_mean_probability(run: Any, folder: Path) -> None:
    done = run("ensemble a b --data rows.jsonl --batch-size 5 --json")
    assert done.exit_code == 0, done.stderr
    record = json.loads(done.stdout)
    each = [losses(folder, name) for name in "ab"]
    for row, said in zip([*record["models"], record["ensemble"]], [*each, (each[0] + each[1]) / 2], strict=True):
        assert row["loss"] == pytest.approx(float(F.nll_loss(said.log(), right())), rel=1e-4)
        assert row["metric"] == pytest.approx(float((said.argmax(-1) == right()).double().mean()))
    assert record["metric_name"] == "accuracy" and record["examples"] == len(ROWS)
    assert "ensemble" in run("ensemble a b --data rows.jsonl").stdout


def test_models_of_different_kinds_read_the_data_each_in_their_way(folder: Path) -> None:
    gpt2_classifier(folder / "g", LABELS)
    got = isomerge.ensemble([folder / "a", folder / "g"], folder / "rows.jsonl", batch_size=1)
    both = (losses(folder, "a") + losses(folder, "g")) / 2
    assert got["ensemble"]["loss"] == pytest.approx(float(F.nll_loss(both.log(), right())), rel=1e-4)
    assert got["ensemble"]["loss"] <= max(row["loss"] for row in got["models"])


def test_models_that_do_not_fit_together_are_refused(folder: Path, tmp_path: Path) -> None:
    bert(tmp_path / "other", "sequence", LABELS[::-1], seed=3)
    with pytest.raises(RequestError, match="in another order"):
        isomerge.ensemble([folder / "a", tmp_path / "other"], folder / "rows.jsonl")
    vit(tmp_path / "images", LABELS)
    with pytest.raises(RequestError, match="reads images"):
        isomerge.ensemble([folder / "a", tmp_path / "images"], folder / "rows.jsonl")
    llama(tmp_path / "llama")
    gpt2(tmp_path / "gpt2")
    (tmp_path / "book.txt").write_text("\n".join(SENTENCES))
    with pytest.raises(RequestError, match="tokenizers cut"):
        isomerge.ensemble([tmp_path / "llama", tmp_path / "gpt2"], tmp_path / "book.txt")
    with pytest.raises(RequestError, match="one is for 'sequence'"):
        bert(tmp_path / "masked", "masked")
        isomerge.ensemble([folder / "a", tmp_path / "masked"], folder / "rows.jsonl")


def test_labels_in_another_order_are_found_though_the_data_does_not_show_it(folder: Path, tmp_path: Path) -> None:
    """Examples of the one class that stands in the same place in both."""
    for seed, names in enumerate((["bad", "good", "so so"], ["bad", "so so", "good"])):
        bert(tmp_path / str(seed), "sequence", names, seed=seed)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": "a bad film", "label": "bad"}))
    with pytest.raises(RequestError, match="in another order"):
        isomerge.ensemble([tmp_path / "0", tmp_path / "1"], tmp_path / "rows.jsonl")


def test_trouble_with_the_data_of_an_ensemble_is_not_called_a_difference_of_the_models(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from isomerge.data.texts import TextData

    def broken(*args: Any) -> Any:
        raise ValueError("unreadable")
        yield

    monkeypatch.setattr(TextData, "read", broken)
    with pytest.raises(ValueError, match="unreadable"):
        isomerge.ensemble([folder / "a", folder / "b"], folder / "rows.jsonl")


def test_numbers_to_predict_are_averaged(tmp_path: Path) -> None:
    for seed, name in enumerate("ab"):
        bert(tmp_path / name, "sequence", ["score"], seed=seed)
    rows = [{"text": text, "label": float(len(text))} for text in SENTENCES]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    got = isomerge.ensemble([tmp_path / "a", tmp_path / "b"], tmp_path / "rows.jsonl")
    said = torch.zeros(len(rows), dtype=torch.float64)
    for name in "ab":
        model = AutoModelForSequenceClassification.from_pretrained(tmp_path / name).eval()
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / name)
        with torch.no_grad():
            said += torch.stack([model(**tokenizer(t, return_tensors="pt")).logits[0, 0] for t in SENTENCES]) / 2
    goal = torch.tensor([row["label"] for row in rows], dtype=torch.float64)
    assert got["ensemble"]["loss"] == pytest.approx(float((said - goal).square().mean()), rel=1e-4)
