"""`isomerge ensemble` on the command line: what it measures, saves, writes and refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import isomerge
from isomerge.cli.app import app
from models import llama, model
from samples import digits


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    for seed, name in enumerate("ab"):
        shutil.copytree(model("vit", seed, torch.float32), tmp_path / name)
        shutil.copytree(tmp_path / name, tmp_path / "run" / f"checkpoint-{seed + 1}")
        llama(tmp_path / f"writer-{name}", seed=seed)
    for part, first in (("validation", 100), ("test", 200)):
        shutil.copytree(digits(first, 40), tmp_path / "images" / part)
    (tmp_path / "prompts.txt").write_text("the cat sat\n\na dog\n")
    (tmp_path / "empty.txt").write_text("\n")
    monkeypatch.chdir(tmp_path)
    return lambda line: CliRunner().invoke(app, line.split())


def test_measuring_saving_and_measuring_what_was_saved(run: Any) -> None:
    done = run("ensemble a b --data images --combination stacked --ridge 0.1 --save ens.json --json")
    assert done.exit_code == 0, done.stderr
    record = json.loads(done.stdout)
    expected = isomerge.ensemble(
        ["a", "b"], {"path": "images", "split": "test"}, combination="stacked", ridge=0.1,
        held_out={"path": "images", "split": "validation"},
    )  # fmt: skip
    assert record["ensemble"] == expected.ensemble and record["combination"] == "stacked"
    assert record["saved"] == "ens.json"
    again = json.loads(run("ensemble ens.json --data images --json").stdout)
    assert again["ensemble"] == record["ensemble"] and "saved" not in again
    held_out = run("ensemble a b --data images/test --combination stacked --ridge 0.1 --held-out images --json")
    assert json.loads(held_out.stdout)["ensemble"] == record["ensemble"]


def test_tables_show_weights_where_they_differ(run: Any) -> None:
    shown = run("ensemble a b --data images --combination logit --weights 3,1").stdout
    assert "ensemble (logit)" in shown and "0.7500" in shown
    assert "weight" not in run("ensemble a b --data images").stdout


def test_saving_without_data(run: Any) -> None:
    done = run("ensemble run --snapshots 2 --weights 1,3 --save kept --json")
    assert done.exit_code == 0, done.stderr
    record = json.loads(done.stdout)
    assert record["saved"] == str(Path("kept", "ensemble.json")) and record["weights"] == [0.25, 0.75]
    assert [Path(one["model"]).name for one in record["models"]] == ["checkpoint-1", "checkpoint-2"]
    refused = run("ensemble run --save kept")
    assert refused.exit_code == 2 and "exists" in refused.stderr and "--force" in refused.stderr
    assert "saved: " in run("ensemble run --save kept --force").stdout


def test_texts_are_written_together_or_ranked(run: Any) -> None:
    done = run("ensemble writer-a writer-b --generate prompts.txt --tokens 3 --json")
    assert done.exit_code == 0, done.stderr
    outputs = json.loads(done.stdout)["outputs"]
    expected = isomerge.generate(["writer-a", "writer-b"], ["the cat sat", "a dog"], tokens=3)
    assert outputs == expected.outputs
    ranked = json.loads(
        run("ensemble writer-a writer-b --generate prompts.txt --tokens 3 --rank likelihood --json").stdout
    )
    assert ranked["rank"] == "likelihood" and {row["model"] for row in ranked["outputs"]} <= {"writer-a", "writer-b"}
    shown = run("ensemble writer-a writer-b --generate prompts.txt --tokens 3 --rank writer-a").stdout
    assert "wins" in shown and "the cat sat" in shown


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("ensemble a b --rank likelihood", ("--rank", "Add --generate FILE")),
        ("ensemble a b --generate prompts.txt --data images", ("Leave --data and --save out",)),
        ("ensemble writer-a --generate empty.txt", ("no text in it", "one prompt per line")),
        ("ensemble a b --data images --combination mean", ("--combination cannot be 'mean'", "Known values")),
        ("ensemble a b --data images --combination posterior", ("text before each token", "Use weighted")),
        ("ensemble a b --data images/test --combination weighted", ("no part called validation", "--held-out PATH")),
        ("ensemble a b --combination stacked --save x.json", ("held_out", "--held-out PATH")),
        ("ensemble a b --data images --weights 1,2,3", ("each needs one number", "--weights LIST")),
        ("ensemble a b --data images --weights 1,x", ("--weights cannot be '1,x'",)),
        ("ensemble a b --data images --combination vote --weights 1,2", ("has no weights", "--weights LIST")),
        ("ensemble a b --generate prompts.txt", ("causal language models",)),
    ],
)
def test_what_cannot_be_done_is_refused(run: Any, line: str, said: tuple[str, ...]) -> None:
    done = run(line)
    assert done.exit_code == 2
    assert [part for part in said if part not in done.stderr] == [], done.stderr
