"""`isomerge rebase` on tiny models: what it prints, writes and refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from commands import said, verb
from merging.rebasing.fine_tunes import disguised, fine_tune
from merging.rebasing.test_rebase_adapter import TARGETS, adapter
from models import difference, logits, model
from samples import digits

DATA = ("--data", digits(count=24), "--batch-size", "8")


def three() -> tuple[Path, Path, Path]:
    base = model("vit", 0, torch.float32)
    return fine_tune(base), base, model("vit", 1, torch.float32)


def test_the_table_has_all_models_and_the_folder_is_a_model(tmp_path: Path) -> None:
    tuned, base, onto = three()
    done = verb("rebase", tuned, "--from", base, "--onto", onto, *DATA, "-o", tmp_path / "out")
    assert done.exit_code == 0, done.output
    for words in (
        "fine-tune",
        "its base",
        "new base",
        "plain addition",
        "result",
        "distance",
        "accuracy",
        "config from",
    ):
        assert words in done.stdout
    for file in ("model.safetensors", "README.md", "isomerge.json", "isomerge.lock.json", "report.html"):
        assert (tmp_path / "out" / file).is_file()
    page = (tmp_path / "out" / "report.html").read_text()
    assert "Distance to the fine-tune&#39;s predictions" in page or "Distance to the fine-tune's predictions" in page
    assert "merge_method: rebase" in (tmp_path / "out" / "README.md").read_text()
    record = json.loads((tmp_path / "out" / "isomerge.json").read_text())
    assert record["method"] == "rebase" and record["donor"] == str(onto)
    assert record["rebased"]["correction"] == "features" and len(record["rebased"]["held_out"]) == 5
    again = verb("rebase", tuned, "--from", base, "--onto", onto, *DATA, "-o", tmp_path / "out")
    assert again.exit_code == 2 and "--force" in again.stderr
    assert verb("verify", tmp_path / "out").exit_code == 0
    assert said("reproduce", tmp_path / "out")["verdict"] == "identical"


def test_without_data_nothing_is_measured_and_it_says_so(tmp_path: Path) -> None:
    base = model("vit", 0, torch.float32)
    tuned, onto = fine_tune(base), disguised(base)
    record = said("rebase", tuned, "--from", base, "--onto", onto, "--scale", "1", "-o", tmp_path / "out")
    assert record["rebased"] == {"scale": 1.0, "correction": "none", "other_shape": False, "siblings": False}
    assert "nothing was measured" in record["notes"][0]
    assert "not measured" in (tmp_path / "out" / "report.html").read_text()
    assert difference(logits(tuned), logits(tmp_path / "out")) <= 1e-5


def test_flags_reach_the_method(tmp_path: Path) -> None:
    tuned, base, onto = three()
    flags = ("--scale", "0.5", "--correction", "features", "--ridge", "0.1", "--level", "permutation", "--limit", "16")
    record = said(
        "rebase", tuned, "--from", base, "--onto", onto, *DATA, *flags, "--out-dtype", "float16", "--no-report",
        "--no-verify", "-o", tmp_path / "out",
    )  # fmt: skip
    assert record["rebased"]["scale"] == 0.5 and record["alignment"]["level"] == "permutation"
    assert {layer["ridge"] for layer in record["layers"]} == {0.1} and record["data"][0]["examples"] == 16
    assert not (tmp_path / "out" / "report.html").exists() and "verified" not in record


def test_an_adapter_becomes_one_of_the_new_base(tmp_path: Path) -> None:
    base = model("llama", 0, torch.float32)
    old = adapter(base, tmp_path / "old", TARGETS["llama"])
    flags = ("--from", base, "--onto", disguised(base), "-o", tmp_path / "out")
    done = verb("rebase", old, *flags)
    assert done.exit_code == 0, done.output
    assert "q_proj" in done.stdout and (tmp_path / "out" / "report.html").is_file()
    record = said("rebase", old, *flags, "--force", "--no-report")
    assert record["relative_error"] < 1e-5 and (tmp_path / "out" / "adapter_config.json").is_file()
    refused = verb("rebase", old, *flags, "--force", "--data", "x.txt", "--correction", "signs")
    assert refused.exit_code == 2 and "--data, --correction is for models" in " ".join(refused.stderr.split())


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--onto", "new"), "Missing option '--from'"),
        (("--from", "old"), "Missing option '--onto'"),
        (("--from", "gone", "--onto", "gone-too"), "gone"),
        (("--from", "BASE", "--onto", "BASE"), "On the command line: --from BASE, --onto NEW_BASE"),
        (("--from", "BASE", "--onto", "ONTO", "--correction", "feature"), "Did you mean 'features'?"),
        (("--from", "BASE", "--onto", "ONTO", "--correction", "signs"), "On the command line: --data PATH"),
        (("--from", "BASE", "--onto", "ONTO", "--limit", "3"), "--limit has no effect without data"),
        (("--from", "BASE", "--onto", "ONTO", "--ridge", "0.1"), "--ridge SHARE"),
        (("--from", "BASE", "--onto", "ONTO", "--scale", "much"), "'much' is not a valid float"),
        (("--from", "BASE", "--onto", "ONTO", "--data", "nowhere.txt"), "no such file"),
    ],
)
def test_a_mistake_is_one_paragraph(tmp_path: Path, flags: tuple[str, ...], words: str) -> None:
    tuned, base, onto = three()
    places = {"BASE": str(base), "ONTO": str(onto)}
    done = verb("rebase", tuned, *(places.get(flag, flag) for flag in flags), "-o", tmp_path / "out")
    assert done.exit_code == 2 and words in " ".join(done.stderr.split()), done.stderr
    assert not (tmp_path / "out").exists()
