"""`isomerge extract`, as it will be registered: the record, the table, the exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import typer
from peft import LoraConfig
from typer.testing import CliRunner

from adapters.peft_adapters import load_adapted, load_base, logits, merged_by_peft, save_adapter
from isomerge.cli.extract import extract
from isomerge.errors import RequestError
from models import save_base


@pytest.fixture
def models(tmp_path: Path) -> tuple[Path, Path]:
    base = save_base("llama", tmp_path / "base")
    adapter = save_adapter(base, tmp_path / "adapter", LoraConfig(r=2, target_modules=["q_proj"]))
    merged_by_peft(base, adapter, tmp_path / "tuned")
    return base, tmp_path / "tuned"


def app() -> typer.Typer:
    found = typer.Typer()
    found.command()(extract)
    return found


def test_json_is_one_object_and_the_adapter_works(models: tuple[Path, Path], tmp_path: Path) -> None:
    base, tuned = models
    result = CliRunner().invoke(app(), [str(base), str(tuned), "-o", str(tmp_path / "out"), "--json"])
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    assert len(record["targets"]) == 2 and {row["rank"] for row in record["targets"]} == {2}
    assert record["relative_error"] < 1e-5 and record["out"] == str(tmp_path / "out")
    expected = logits(load_base(tuned))
    assert torch.allclose(logits(load_adapted(base, tmp_path / "out")), expected, atol=1e-4)


def test_the_table_names_layers_and_errors(models: tuple[Path, Path], tmp_path: Path) -> None:
    base, tuned = models
    out = tmp_path / "out"
    result = CliRunner().invoke(app(), [str(base), str(tuned), "-o", str(out), "--rank", "1", "--targets", "q_proj"])
    assert result.exit_code == 0, result.output
    assert "model.layers.0.self_attn.q_proj.weight" in result.stdout and "missed of the whole change" in result.stdout


def test_an_occupied_output_is_refused(models: tuple[Path, Path]) -> None:
    base, tuned = models
    result = CliRunner().invoke(app(), [str(base), str(tuned), "-o", str(tuned)])
    assert isinstance(result.exception, RequestError)
