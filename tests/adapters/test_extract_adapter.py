"""An adapter extracted from a fine-tuned model gives the fine-tuned model back, as far as its rank allows."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import Tensor

from adapters.peft_adapters import load_adapted, load_base, logits, merged_by_peft, save_adapter
from isomerge.adapters import apply_adapter, is_adapter
from isomerge.adapters.extract import extract
from isomerge.adapters.lowrank import decompose
from isomerge.checkpoint import open_checkpoint, write_checkpoint
from isomerge.errors import RequestError
from models import save_base

TARGETS = {
    "llama": ["q_proj", "down_proj", "embed_tokens", "lm_head"],
    "gpt2": ["c_attn", "c_proj", "wte"],
    "bert": ["query", "dense", "word_embeddings"],
    "vit": ["q_proj", "fc1", "patch_embeddings.projection"],
}


def finetune(base: Path, out: Path, config: LoraConfig) -> Path:
    adapter = save_adapter(base, out.parent / f"{out.name}-adapter", config)
    merged_by_peft(base, adapter, out)
    return out


def perturb(base: Path, out: Path, scale: float = 0.1) -> Path:
    """Every tensor changed by full-rank noise."""
    original = open_checkpoint(base)
    generator = torch.Generator().manual_seed(5)
    changed = {
        name: original.read(name) + scale * torch.randn(info.shape, generator=generator)
        for name, info in original.tensors.items()
    }
    write_checkpoint(out, original.tensors, changed.items(), donor=original)
    return out


@pytest.mark.parametrize("kind", TARGETS)
def test_the_true_rank_gives_the_function_back(kind: str, tmp_path: Path) -> None:
    more = {"tie_word_embeddings": False} if kind in ("llama", "gpt2") else {}
    base = save_base(kind, tmp_path / "base", **more)
    tuned = finetune(base, tmp_path / "tuned", LoraConfig(r=3, target_modules=TARGETS[kind], bias="all"))
    record = extract(open_checkpoint(base), open_checkpoint(tuned), rank=3, out=tmp_path / "out")
    assert record["relative_error"] < 1e-5 and not record["left_out"]
    expected = logits(load_base(tuned))
    assert not torch.allclose(logits(load_base(base)), expected, atol=1e-2)
    assert torch.allclose(logits(load_adapted(base, tmp_path / "out")), expected, atol=2e-4, rtol=1e-4)
    view = apply_adapter(open_checkpoint(base), tmp_path / "out")
    truth = open_checkpoint(tuned)
    for name in truth.tensors:
        assert torch.allclose(view.read(name), truth.read(name), atol=1e-5), name


def test_a_tied_embedding_stays_tied(tmp_path: Path) -> None:
    base = save_base("llama", tmp_path / "base", tie_word_embeddings=True)
    config = LoraConfig(r=2, target_modules=["embed_tokens", "v_proj"], ensure_weight_tying=True)
    tuned = finetune(base, tmp_path / "tuned", config)
    extract(open_checkpoint(base), open_checkpoint(tuned), rank=2, out=tmp_path / "out")
    expected = logits(load_base(tuned))
    assert torch.allclose(logits(load_adapted(base, tmp_path / "out")), expected, atol=1e-4, rtol=1e-4)
    assert "lm_head.weight" not in apply_adapter(open_checkpoint(base), tmp_path / "out").tensors


@pytest.mark.parametrize("kind", TARGETS)
def test_the_reported_errors_are_the_measured_and_the_smallest_ones(kind: str, tmp_path: Path) -> None:
    base = save_base(kind, tmp_path / "base")
    tuned = perturb(base, tmp_path / "tuned")
    record = extract(open_checkpoint(base), open_checkpoint(tuned), rank=4, out=tmp_path / "out")
    before, after = open_checkpoint(base), open_checkpoint(tuned)
    view = apply_adapter(before, tmp_path / "out")
    missed: dict[str, Tensor] = {n: after.read(n).double() - view.read(n).double() for n in after.tensors}
    whole = {n: after.read(n).double() - before.read(n).double() for n in after.tensors}
    norms = [math.sqrt(sum(float(t.square().sum()) for t in some.values())) for some in (missed, whole)]
    assert record["relative_error"] == pytest.approx(norms[0] / norms[1], rel=1e-5)
    for row in record["targets"]:
        name = row["name"]
        values = torch.linalg.svdvals(whole[name].flatten(1))
        assert row["rank"] == min(4, len(values))
        assert row["error"] == pytest.approx(float(values[4:].norm() / values.norm()), rel=1e-4, abs=1e-5)
        assert row["error"] == pytest.approx(float(missed[name].norm() / whole[name].norm()), rel=1e-3, abs=1e-5)
    for row in record["left_out"]:
        assert row["norm"] == pytest.approx(float(whole[row["name"]].norm()), rel=1e-5)
        assert torch.equal(view.read(row["name"]), before.read(row["name"]))
    # Vectors of adapted layers and of norms are all there.
    assert {row["name"].rpartition(".")[2] for row in record["left_out"]} <= {"cls_token", "position_embeddings"}


def test_energy_chooses_the_rank_of_each_matrix(tmp_path: Path) -> None:
    base = save_base("llama", tmp_path / "base", tie_word_embeddings=False)
    tuned = perturb(base, tmp_path / "tuned")
    before, after = open_checkpoint(base), open_checkpoint(tuned)
    record = extract(before, after, energy=0.8, out=tmp_path / "out")
    ranks = set()
    for row in record["targets"]:
        values = torch.linalg.svdvals(after.read(row["name"]).double() - before.read(row["name"]).double()).square()
        kept = values.cumsum(0) / values.sum()
        assert kept[row["rank"] - 1] >= 0.8 and (row["rank"] == 1 or kept[row["rank"] - 2] < 0.8)
        assert row["error"] <= math.sqrt(0.2) + 1e-6
        ranks.add(row["rank"])
    assert len(ranks) > 1
    model = load_adapted(base, tmp_path / "out").merge_and_unload()
    view = apply_adapter(before, tmp_path / "out")
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.allclose(model.state_dict()[name], view.read(name), atol=1e-6)


def test_targets_limit_what_is_extracted(tmp_path: Path) -> None:
    base = save_base("bert", tmp_path / "base")
    tuned = perturb(base, tmp_path / "tuned")
    record = extract(
        open_checkpoint(base),
        open_checkpoint(tuned),
        rank=2,
        targets="query|0.attention.self.key",
        out=tmp_path / "out",
    )
    assert sorted({row["name"] for row in record["targets"]}) == [
        "bert.encoder.layer.0.attention.self.key.weight",
        "bert.encoder.layer.0.attention.self.query.weight",
        "bert.encoder.layer.1.attention.self.query.weight",
    ]
    assert any("not in the adapter" in note for note in record["notes"])
    assert is_adapter(tmp_path / "out") and not is_adapter(base)


def test_large_matrices_are_decomposed_as_well_by_the_leading_part_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    decay = torch.logspace(0, -4, 120)
    u, v = (torch.linalg.qr(torch.randn(n, 120, generator=generator))[0] for n in (200, 160))
    matrix = (u * decay) @ v.T
    exact = torch.linalg.svdvals(matrix.double())
    monkeypatch.setattr("isomerge.adapters.lowrank.EXACT_UP_TO", 50)
    state = torch.random.get_rng_state()
    left, values, right = decompose(matrix, 8, None)
    assert torch.equal(torch.random.get_rng_state(), state) and len(values) < 60
    assert torch.allclose(values[:8].double(), exact[:8], rtol=1e-4)
    assert torch.equal(values, decompose(matrix, 8, None)[1])
    _, values, _ = decompose(matrix, None, 0.999999)
    assert float(values.double().square().sum()) >= 0.999999 * float(exact.square().sum())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rank": "2"}, "rank must be a whole number"),
        ({"rank": 0}, "rank cannot be 0"),
        ({"energy": 1.5}, "energy cannot be 1.5"),
        ({"rank": 2, "targets": "("}, "no regular expression"),
        ({"rank": 2, "same": True}, "nothing that an adapter can hold differs"),
        ({"rank": 2, "other": "gpt2"}, "of type 'llama' and 'gpt2'"),
    ],
)
def test_bad_requests_are_refused(arguments: dict[str, Any], message: str, tmp_path: Path) -> None:
    base = save_base("llama", tmp_path / "base")
    tuned = base if arguments.pop("same", False) else perturb(base, tmp_path / "tuned")
    if other := arguments.pop("other", None):
        tuned = save_base(other, tmp_path / "other")
    with pytest.raises(RequestError, match=message):
        extract(open_checkpoint(base), open_checkpoint(tuned), out=tmp_path / "out", **arguments)
    assert not (tmp_path / "out").exists()
