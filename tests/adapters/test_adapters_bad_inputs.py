"""Broken or unfit adapters are refused with the reason, all reasons at once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from adapters.peft_adapters import load_base, save_adapter
from isomerge.adapters import apply_adapter, is_adapter, open_adapter
from isomerge.checkpoint import open_checkpoint
from isomerge.errors import CheckpointError, IsomergeError, RequestError
from models import save_base

Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return save_base("llama", tmp_path / "base", tie_word_embeddings=False)


@pytest.fixture
def adapter(base: Path, tmp_path: Path) -> Path:
    return save_adapter(base, tmp_path / "adapter", LoraConfig(r=3, target_modules=["q_proj", "k_proj"]))


def change_config(adapter: Path, **changes: Any) -> None:
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def change_tensors(adapter: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    path = adapter / "adapter_model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)


def assert_refused(base: Path, adapter: Path | str, kind: type[IsomergeError], match: str) -> None:
    with pytest.raises(kind, match=match) as caught:
        apply_adapter(open_checkpoint(base), adapter)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA'"),
        ({"r": 0}, "'r' is 0"),
        ({"r": None}, "'r' is None|'r' is missing"),
        ({"r": 5}, "has rank 3, and adapter_config.json says 5"),
        ({"lora_alpha": "x"}, "'lora_alpha' is 'x'"),
        ({"alora_invocation_tokens": [1]}, "some tokens only"),
        ({"layer_replication": [[0, 1], [0, 1]]}, "repeats layers"),
        ({"target_parameters": ["experts.w"]}, "stacked parameters"),
        ({"init_lora_weights": "pissa_niter_4"}, "path_initial_model_for_weight_conversion"),
        ({"use_dora": True}, "no lora_magnitude_vector"),
        ({"use_qalora": True, "layer_replication": [[0, 1]], "r": 0}, "3 problems"),
    ],
)
def test_configs_that_are_no_plain_update(base: Path, adapter: Path, changes: dict[str, Any], match: str) -> None:
    change_config(adapter, **changes)
    assert_refused(base, adapter, CheckpointError, match)


def test_other_kinds_of_adapter_as_peft_writes_them(base: Path, tmp_path: Path) -> None:
    model = get_peft_model(
        load_base(base),
        IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    )
    model.save_pretrained(tmp_path / "ia3")
    assert_refused(base, tmp_path / "ia3", CheckpointError, "peft_type is 'IA3', and only LORA")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda t: t.pop(Q.format("A")), "q_proj' has no A factor"),
        (lambda t: t.update({Q.format("A"): torch.zeros(4, 16)}), r"A \(4, 16\) and B \(16, 3\).* no rank in common"),
        (lambda t: t.update({Q.format("A"): torch.zeros(0, 16)}), "no rank in common"),
        (lambda t: t.update({Q.format("A"): torch.zeros(48)}), "no rank in common"),
        (lambda t: t.update({"base_model.model.x.lora_E": torch.zeros(3)}), "no meaning for .*lora_E"),
        (lambda t: t.clear() or t.update(x=torch.zeros(1)), "no meaning for 'x'"),
    ],
)
def test_files_that_are_no_adapter(base: Path, adapter: Path, change: Any, match: str) -> None:
    change_tensors(adapter, change)
    assert_refused(base, adapter, CheckpointError, match)


def test_nan_is_found_when_the_tensor_is_read(base: Path, adapter: Path) -> None:
    change_tensors(adapter, lambda t: t[Q.format("B")][0].fill_(float("nan")))
    view = apply_adapter(open_checkpoint(base), adapter)
    assert view.read("model.layers.1.self_attn.q_proj.weight").isfinite().all()
    for read in (view.read, lambda name: view.read_rows(name, 4, 6)):
        with pytest.raises(CheckpointError, match="lora_B.* 3 of (its )?48 values are NaN"):
            read("model.layers.0.self_attn.q_proj.weight")


def test_a_truncated_file(base: Path, adapter: Path) -> None:
    path = adapter / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    assert_refused(base, adapter, CheckpointError, "adapter_model.safetensors: it is truncated")


def test_missing_files_and_folders(base: Path, adapter: Path, tmp_path: Path) -> None:
    assert is_adapter(adapter)
    (adapter / "adapter_model.safetensors").rename(adapter / "elsewhere")
    assert_refused(base, adapter, CheckpointError, "no adapter_model.safetensors and no adapter_model.bin")
    (adapter / "adapter_config.json").write_text("{")
    assert_refused(base, adapter, CheckpointError, "not valid JSON")
    (adapter / "adapter_config.json").unlink()
    assert_refused(base, adapter, CheckpointError, "no adapter_config.json")
    assert_refused(base, tmp_path / "nowhere", CheckpointError, "no adapter_config.json")
    assert not is_adapter(adapter) and not is_adapter(base) and not is_adapter(tmp_path / "nowhere")


def test_another_base_is_refused_with_all_misfits_and_the_right_bases_name(adapter: Path, tmp_path: Path) -> None:
    wide = save_base("llama", tmp_path / "wide", head_dim=8)
    assert_refused(
        wide, adapter, RequestError, r"shape \(16, 16\), and '.*q_proj.weight' is \(32, 16\);.*;.*trained on \(.*base\)"
    )
    other = save_base("bert", tmp_path / "other")
    assert_refused(
        other, adapter, RequestError, "has no 'model.layers.0.self_attn.k_proj.weight'.*layers.1.self_attn.q_proj"
    )


def test_a_misspelt_layer_gets_a_suggestion(base: Path, adapter: Path) -> None:
    change_tensors(
        adapter, lambda t: [t.update({k.replace("q_proj", "q_porj"): t.pop(k)}) for k in list(t) if "layers.0" in k]
    )
    assert_refused(
        base, adapter, RequestError, r"q_porj.weight' \(Did you mean 'model.layers.0.self_attn.q_proj.weight'\?\)"
    )


def test_a_resized_vocabulary_is_explained(base: Path, tmp_path: Path) -> None:
    config = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["embed_tokens"])
    adapter = save_adapter(base, tmp_path / "a", config)
    key = "base_model.model.model.embed_tokens.weight"
    change_tensors(adapter, lambda t: t.update({key: torch.zeros(44, 16)}))
    assert_refused(base, adapter, RequestError, r"\(44, 16\).* is \(40, 16\) \(trained with a resized vocabulary\?")


COMMIT = "c" * 40


@pytest.fixture
def hub_adapter(adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The id of an adapter in the cache of a machine that is offline."""
    repo = tmp_path / "hub" / "models--someone--adapter"
    snapshot = repo / "snapshots" / COMMIT
    snapshot.parent.mkdir(parents=True)
    adapter.rename(snapshot)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(COMMIT)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return "someone/adapter"


def test_a_hub_adapter_comes_from_the_cache_when_offline(hub_adapter: str) -> None:
    opened = open_adapter(hub_adapter)
    assert opened.checkpoint.revision == COMMIT and len(opened.targets) == 4
    with pytest.raises(CheckpointError, match="hf download someone/other"):
        open_adapter("someone/other")


def test_a_merge_with_a_hub_adapter_is_reproduced_at_its_commit(hub_adapter: str, base: Path, tmp_path: Path) -> None:
    from isomerge.cli.app import app

    run, out = CliRunner(), tmp_path / "out"
    merged = run.invoke(app, ["merge", str(base), f"{base}+{hub_adapter}", "-o", str(out)])
    assert merged.exit_code == 0, merged.stderr
    (tmp_path / "hub" / "models--someone--adapter" / "refs" / "main").write_text("d" * 40)  # the branch has moved on
    again = run.invoke(app, ["reproduce", str(out), "--json"])
    assert again.exit_code == 0 and json.loads(again.stdout)["verdict"] == "identical", again.stderr
