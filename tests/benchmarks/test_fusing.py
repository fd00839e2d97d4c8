"""The loop, the arithmetic and the record that the fusion benchmarks share."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
import fusing

VALUES = [1.0, 2.0, 4.5]


def test_the_standard_error_is_that_of_numpy() -> None:
    mean, error = np.mean(VALUES), np.std(VALUES, ddof=1) / np.sqrt(len(VALUES))
    assert fusing.mean_and_error(VALUES, 4, " %") == f"{mean:.4f} ± {error:.4f} %"


def test_one_value_has_no_error_and_no_value_is_a_dash() -> None:
    assert fusing.mean_and_error([2.0], 1) == "2.0"
    assert fusing.mean_and_error([None, None]) == "–"
    assert fusing.mean_and_error([None, 3.0], 2) == "3.00"


def test_groups_are_all_pairs_and_then_all_models() -> None:
    assert fusing.groups(3, None) == [(0, 1), (0, 2), (1, 2), (0, 1, 2)]
    assert fusing.groups(2, None) == [(0, 1)]
    assert fusing.groups(4, "0-1,2-3") == [(0, 1), (2, 3)]
    with pytest.raises(SystemExit, match="0 to 1"):
        fusing.groups(2, "0-2")


def standard() -> list[fusing.Row]:
    return fusing.standard_rows("images", stream=8, counts=(5, 20), all_at_once=20, start={"level": "full"})


def test_rows_are_chosen_by_a_part_of_their_name() -> None:
    names = [row.name for row in fusing.chosen_rows(standard(), ["plain", "20 images, aligned"])]
    assert names == ["plain average", "RegMean, 20 images, aligned", "reconstruct, 20 images, aligned"]
    with pytest.raises(SystemExit, match="plane.*plain average"):
        fusing.chosen_rows(standard(), ["plane"])


def test_rows_have_names_of_their_own_and_say_whether_they_align() -> None:
    rows = standard()
    assert len({row.name for row in rows}) == len(rows)
    for row in rows:
        if ", not aligned" in row.name:
            assert row.align is None
        elif ", aligned" in row.name:
            assert row.align == {"level": "full"}
    assert [row.name for row in rows if row.all_at_once] == [
        "reconstruct, 20 images, not aligned",
        "reconstruct, 20 images, aligned",
        "joint features, 20 images",
        "joint features, 20 images, refined",
    ]


def a_record(*rows: dict[str, Any]) -> dict[str, Any]:
    about = {"device": "an abacus", "torch": "2", "commit": "abc", "date": "today"}
    return {**about, "parents": [{"loss": 1.0}, {"loss": 2.0}, {"loss": 3.0}], "rows": list(rows)}


def test_the_table_has_pairs_first_and_counts_failures() -> None:
    rows: list[dict[str, Any]] = [
        {"models": [0, 1, 2], "row": "plain", "loss": 9.0},
        {"models": [0, 1], "row": "plain", "loss": 1.0},
        {"models": [0, 2], "row": "plain", "loss": 2.0},
        {"models": [0, 1], "row": "broken", "error": "ValueError: no"},
    ]
    lines = fusing.table(a_record(*rows), [fusing.Column("loss", lambda row: row["loss"], 2)]).splitlines()
    assert lines[:2] == ["parents: loss 1, 2, 3", "pairs: 2; an abacus, torch 2, commit abc, today"]
    assert lines[3:] == [
        "| merged model | loss |",
        "|---|---|",
        "| plain | 1.50 ± 0.50 |",
        "| broken (1 of 1 failed) | – |",
        "| plain, 3 models | 9.00 |",
    ]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    shape: dict[str, Any] = {
        "image_size": 8, "patch_size": 4, "num_channels": 1, "num_labels": 3, "hidden_size": 16,
        "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24,
    }  # fmt: skip
    found = []
    for seed in range(2):
        torch.manual_seed(seed)
        found.append(tmp_path_factory.mktemp("models") / str(seed))
        transformers.ViTForImageClassification(transformers.ViTConfig(**shape)).save_pretrained(found[-1])
    return found


def largest(states: Sequence[fusing.State]) -> dict[str, float]:
    """A judge that only looks at one tensor, so that the truth is easy to have."""
    return {"loss": float(np.mean([state["classifier.weight"].double().sum().item() for state in states]))}


def no_data(count: int) -> Any:
    def batches() -> Iterator[dict[str, torch.Tensor]]:
        yield {"pixel_values": torch.randn(count, 1, 8, 8, generator=torch.Generator().manual_seed(0))}

    return batches


def options(tmp_path: Path) -> argparse.Namespace:
    asked = ["--work", str(tmp_path), "--json", str(tmp_path / "record.json")]
    return fusing.shared_arguments("a test").parse_args(asked)


COLUMNS = [fusing.Column("loss", lambda row: row["loss"], 3), fusing.BARRIER, *fusing.SECONDS]


def test_a_run_measures_every_row_and_records_it(folders: list[Path], tmp_path: Path) -> None:
    rows = [
        fusing.Row("plain average", fusing.average),
        fusing.Row("reconstruct, aligned", fusing.reconstructed(4), {"level": "full", "count": 4}),
    ]
    record = fusing.run(folders, rows, largest, no_data, COLUMNS, options(tmp_path), {"benchmark": "test"})
    sums = [load_file(folder / "model.safetensors")["classifier.weight"].double().sum().item() for folder in folders]
    ensemble, plain, aligned = record["rows"]
    assert [ensemble["row"], plain["row"], aligned["row"]] == ["ensemble", "plain average", "reconstruct, aligned"]
    assert plain["loss"] == pytest.approx(np.mean(sums), abs=1e-6)
    assert plain["barrier"] == pytest.approx(0, abs=1e-6)
    assert plain["align_seconds"] is None and plain["merge_seconds"] > 0
    assert aligned["align_seconds"] > 0 and aligned["merge_seconds"] > 0
    assert json.loads((tmp_path / "record.json").read_text()) == record
    assert {"date", "commit", "device", "torch", "benchmark"} <= record.keys()


def test_a_record_is_continued_and_failed_rows_are_tried_again(folders: list[Path], tmp_path: Path) -> None:
    calls: list[str] = []

    def broken(models: list[Path], batches: fusing.Batches, device: str) -> fusing.State:
        calls.append("broken")
        raise ValueError("not today")

    def counted(models: list[Path], batches: fusing.Batches, device: str) -> fusing.State:
        calls.append("counted")
        return fusing.average(models, batches, device)

    rows = [fusing.Row("counted", counted), fusing.Row("broken", broken)]
    for _ in range(2):
        with pytest.raises(SystemExit, match=r"1 rows failed: broken of \[0, 1\]"):
            fusing.run(folders, rows, largest, no_data, COLUMNS, options(tmp_path), {})
    assert calls == ["counted", "broken", "broken"]


def test_a_record_of_other_models_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    path.write_text(json.dumps(a_record()))
    with pytest.raises(SystemExit, match="other models"):
        fusing.open_record(path, {}, [{"loss": 1.0}, {"loss": 2.0}, {"loss": 3.5}])
