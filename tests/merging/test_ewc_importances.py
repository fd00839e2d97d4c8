"""Options that name files of tensors: the importances of elastic consolidation, against numpy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import isomerge
from isomerge.errors import RequestError
from models import model, tensors


@pytest.fixture
def importances(tmp_path: Path) -> list[Path]:
    found = []
    for seed in (0, 1):
        generator = torch.Generator().manual_seed(seed)
        drawn = {n: torch.rand(t.shape, generator=generator) for n, t in tensors(model("bert", seed)).items()}
        save_file(drawn, tmp_path / f"fisher-{seed}.safetensors")
        found.append(tmp_path / f"fisher-{seed}.safetensors")
    return found


def test_ewc_is_the_mean_weighted_by_the_importances_of_the_files(importances: list[Path], tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    models = [model("bert", 0), model("bert", 1)]
    merged = isomerge.merge(models, method="ewc", importance=[str(p) for p in importances])
    merged.write_report(merged.save(tmp_path / "out"))
    found, (a, b), (f, g) = tensors(tmp_path / "out"), map(tensors, models), map(load_file, importances)
    for name, tensor in found.items():
        x, y = a[name].double().numpy(), b[name].double().numpy()
        expected = (f[name] * x + g[name] * y) / (f[name] + g[name])
        assert np.allclose(tensor.double().numpy(), expected, rtol=1e-6, atol=1e-7), name
    assert str(importances[0]) in (tmp_path / "out" / "isomerge.lock.json").read_text()
    assert merged.report()["models"] == [str(folder) for folder in models], "what an option names is no model"
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"| `{importances[0]}` | file | local |" in card and f"| `{models[0]}` | model | local |" in card
    assert "Made from 2 models with" in card
    page = (tmp_path / "out" / "report.html").read_text()
    assert f"{models[0].name} and {models[1].name}" in page, "its first sentence names the models alone"


def test_importances_that_do_not_fit_are_refused_before_anything_is_written(
    importances: list[Path], tmp_path: Path
) -> None:
    models = [model("bert", 0), model("bert", 1)]
    save_file({"x": torch.ones(1)}, tmp_path / "wrong.safetensors")
    with pytest.raises(RequestError, match=r"wrong\.safetensors: tensor .* is not there"):
        isomerge.merge(models, method="ewc", importance=[str(importances[0]), str(tmp_path / "wrong.safetensors")])
    with pytest.raises(RequestError, match="measure again"):
        isomerge.merge(models, method="ewc", importance=[str(p) for p in importances], align=True)
    with pytest.raises(RequestError, match="weighs by importances"):
        isomerge.merge(models, method="ewc").state_dict()
