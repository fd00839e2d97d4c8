"""What a careful user found: each of these went wrong once, most of them silently."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer

import isomerge
from commands import verb
from isomerge.errors import CheckpointError, IsomergeError, RequestError
from models import EMBEDDING, difference, logits, model, save_model, tensors, variant, word_tokenizer


@pytest.mark.parametrize("level", ["permutation", "rotation", "full"])
def test_an_untied_model_beside_a_tied_anchor_keeps_its_function(level: str) -> None:
    tied, untied = model("llama", 0, tie_word_embeddings=True), model("llama", 1)
    found = isomerge.merge([tied, untied], weights=[0, 1], align={"level": level})
    assert difference(logits(untied), logits(untied, found.state_dict())) <= 1e-10


def test_the_tokenizer_of_an_inner_document_goes_with_its_rows(tmp_path: Path) -> None:
    words = {"a": ["<unk>", "<s>", "</s>", "sun", "moon"], "b": ["<unk>", "<s>", "</s>", "moon", "tree", "sun"]}
    for seed, (name, some) in enumerate(words.items()):
        save_model(tmp_path / name, word_tokenizer(some), seed=seed)
    recipe = f"""
name: inner
merge_method: linear
models: [{{model: {tmp_path}/a}}, {{model: {tmp_path}/b}}]
tokenizer: {{source: {tmp_path}/b}}
chat_template: chatml
---
merge_method: passthrough
models: [{{model: inner}}]
"""
    isomerge.merge_recipe(recipe).save(tmp_path / "out")
    ids = AutoTokenizer.from_pretrained(tmp_path / "out").get_vocab()
    assert ids == {word: id for id, word in enumerate(words["b"])}
    assert (tmp_path / "out" / "chat_template.jinja").exists()
    a, b, out = (tensors(tmp_path / name)[EMBEDDING] for name in ("a", "b", "out"))
    for word in ("sun", "moon"):
        expected = (a[words["a"].index(word)] + b[words["b"].index(word)]) / 2
        assert torch.allclose(out[ids[word]], expected, atol=1e-6), word


def test_values_the_dtype_cannot_hold_stop_the_merge(tmp_path: Path) -> None:
    big = {"classifier.bias": torch.full((5,), 1e5, dtype=torch.float32)}
    models = [variant(model("bert", seed, torch.float32), big, f"big-{seed}") for seed in (0, 1)]
    with pytest.raises(CheckpointError, match=r"classifier\.bias.*5 of 5 values are too large for float16"):
        isomerge.merge(models).save(tmp_path / "out", out_dtype="float16")
    with pytest.raises(CheckpointError, match="too large for float32"):
        isomerge.merge(models, weight=[3e38, 3e38], normalize=False).save(tmp_path / "out")
    with pytest.raises(IsomergeError, match="too large"):
        isomerge.merge(models[1:], base=models[0], method="task_arithmetic", **{"lambda": 1e39}).save(tmp_path / "out")
    with pytest.raises(CheckpointError, match="too large for float32"):
        isomerge.merge(models, weight=[3e38, 3e38], normalize=False).state_dict()
    with pytest.raises(CheckpointError, match="too large for float16"):
        isomerge.merge_state_dicts([{"w": torch.full((2,), 6e4, dtype=torch.float16)}] * 2, normalize=False)
    assert not (tmp_path / "out").exists()


def changed_config(source: Path, folder: Path, **changes: Any) -> Path:
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


def test_settings_that_give_weights_another_meaning_are_refused_or_told(tmp_path: Path) -> None:
    first = model("llama", 0)
    heads = changed_config(model("llama", 1), tmp_path / "heads", num_attention_heads=8, head_dim=2)
    with pytest.raises(RequestError, match="num_attention_heads is 4 and 8"):
        isomerge.merge([first, heads])
    act = changed_config(model("llama", 1), tmp_path / "act", hidden_act="gelu")
    assert any("hidden_act is silu and gelu" in note for note in isomerge.merge([first, act]).report()["notes"])
    with pytest.raises(RequestError, match="of type 'llama' and .* of type 'bert'"):
        isomerge.merge([first, model("bert", 0)])


def test_tokens_with_other_ids_are_told(tmp_path: Path) -> None:
    save_model(tmp_path / "a", word_tokenizer(["<unk>", "<s>", "</s>", "sun", "moon"]))
    save_model(tmp_path / "b", word_tokenizer(["<unk>", "<s>", "</s>", "moon", "sun"]), seed=1)
    recipe = {"merge_method": "linear", "models": [{"model": str(tmp_path / name)} for name in "ab"]}
    recipe["parameters"] = {"weight": 1}
    notes = isomerge.merge_recipe(recipe).report()["notes"]
    assert any("2 tokens have other ids" in note and "`tokenizer`" in note for note in notes)


def test_a_deeper_aligned_stack_keeps_its_dtype(tmp_path: Path) -> None:
    a, b = model("llama", 0, torch.bfloat16), model("llama", 1, torch.bfloat16)
    part = f"- sources: [{{model: {a}, layer_range: [0, 2]}}, {{model: {b}, layer_range: [0, 2]}}]"
    recipe = f"merge_method: linear\nslices:\n{part}\n{part}\nalign: true\n"
    found = isomerge.merge_recipe(recipe).state_dict()
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}
    assert sum(name.endswith("up_proj.weight") for name in found) == 4


def test_the_seed_of_an_inner_document_counts() -> None:
    base, tuned = model("bert", 0), model("bert", 1)

    def merged(seed: int, outer: int | None = None) -> torch.Tensor:
        recipe = f"""
name: inner
seed: {seed}
merge_method: dare_linear
base_model: {base}
models: [{{model: {tuned}, parameters: {{density: 0.5}}}}]
---
merge_method: passthrough
models: [{{model: inner}}]
"""
        return isomerge.merge_recipe(recipe, seed=outer).state_dict()["classifier.weight"]

    assert not torch.equal(merged(1), merged(7)) and torch.equal(merged(1), merged(1))
    assert torch.equal(merged(1, outer=3), merged(7, outer=3))


def test_force_leaves_nothing_of_the_model_that_was_there(tmp_path: Path) -> None:
    save_model(tmp_path / "a", word_tokenizer(["<unk>", "<s>", "</s>", "sun"]))
    save_model(tmp_path / "b", word_tokenizer(["<unk>", "<s>", "</s>", "sun"]), seed=1)
    out = tmp_path / "out"
    isomerge.merge([tmp_path / "a", tmp_path / "b"]).save(out)
    assert (out / "tokenizer.json").exists() and (out / "README.md").exists()
    (out / "notes.txt").write_text("mine")
    isomerge.merge([model("vit", 0), model("vit", 1)]).save(out, force=True, lock=False, report=False)
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "model.safetensors", "notes.txt"]


def test_options_without_effect_or_out_of_range_are_refused() -> None:
    models = [model("bert", 0), model("bert", 1)]
    with pytest.raises(RequestError, match="have no effect without align=True"):
        isomerge.merge(models, level="permutation")
    with pytest.raises(RequestError, match="'density' is a share between 0 and 1, and is 1.7"):
        isomerge.merge(models, method="ties", base=models[0], density=1.7)
    with pytest.raises(RequestError, match="does not name"):
        isomerge.merge_recipe({"merge_method": "linear", "models": [{"model": str(models[0])}]}, models={"typo": {}})
    assert isomerge.merge(models, align={"sweeps": 3}, level="permutation").recipe.align.level == "permutation"  # type: ignore[union-attr]
    told = verb("merge", *models, "-o", "unused", "--level", "full")
    assert told.exit_code == 2 and "--level has no effect without --align" in told.stderr
    told = verb("merge", *models, "-o", "unused", "--rank", "4")
    assert told.exit_code == 2 and "--rank applies to adapters" in told.stderr


def test_the_number_of_models_is_checked_for_state_dicts_too() -> None:
    state = {"w": torch.ones(2, 2)}
    for method, count in (("slerp", 2), ("nuslerp", 1), ("passthrough", 2), ("model_stock", 1)):
        with pytest.raises(RequestError, match=f"{method} merges"):
            isomerge.merge_state_dicts([state] * count, method=method, base=state)


def test_a_switch_takes_a_value(tmp_path: Path) -> None:
    a, b = model("bert", 0, torch.float32), model("bert", 1, torch.float32)
    done = verb("merge", a, b, "--normalize", "false", "-o", tmp_path / "out", "-q")
    assert done.exit_code == 0, done.stderr
    found = tensors(tmp_path / "out")["classifier.weight"]
    assert torch.allclose(found, tensors(a)["classifier.weight"] + tensors(b)["classifier.weight"], atol=1e-6)


def test_config_says_the_dtype_that_is_written(tmp_path: Path) -> None:
    models = [model("bert", seed, torch.bfloat16) for seed in (0, 1)]
    isomerge.merge(models, base=model("bert", 2, torch.float32)).save(tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_counter_is_copied(tmp_path: Path) -> None:
    for seed in (0, 1):
        (tmp_path / str(seed)).mkdir()
        state = {"w": torch.full((2, 2), float(seed)), "steps.count": torch.tensor(seed + 5)}
        save_file(state, tmp_path / str(seed) / "model.safetensors")
    found = isomerge.merge([tmp_path / "0", tmp_path / "1"]).state_dict()
    assert int(found["steps.count"]) == 5 and torch.equal(found["w"], torch.full((2, 2), 0.5))


def test_a_device_that_is_not_there_is_a_wrong_request(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="device 'cuda:77'"):
        isomerge.merge([model("bert", 0), model("bert", 1)], device="cuda:77").save(tmp_path / "out")


def test_an_aligned_encoder_decoder_is_verified(tmp_path: Path) -> None:
    done = verb(
        "merge", model("t5", 0, torch.float32), model("t5", 1, torch.float32), "--align", "-o", tmp_path / "out"
    )
    assert done.exit_code == 0, done.stderr


@pytest.mark.slow
def test_memory_is_kept_within_the_limit_or_refused(tmp_path: Path) -> None:
    """Measured from outside: the largest resident size of the whole command."""
    for seed in (0, 1):
        (tmp_path / str(seed)).mkdir()
        generator = torch.Generator().manual_seed(seed)
        state = {f"layers.{i}.w": torch.randn(2048, 4096, generator=generator).bfloat16() for i in range(6)}
        save_file(state, tmp_path / str(seed) / "model.safetensors")
    code = (
        "import os, subprocess, sys\n"
        "p = subprocess.Popen([sys.executable, '-m', 'isomerge', *sys.argv[1:]], stderr=subprocess.PIPE)\n"
        "told = p.stderr.read(); _, status, used = os.wait4(p.pid, 0)\n"
        "print(used.ru_maxrss * 1024, os.waitstatus_to_exitcode(status)); sys.stderr.buffer.write(told)"
    )
    arguments = ["merge", str(tmp_path / "1"), "--base", str(tmp_path / "0"), "--method", "ties", "--density", "0.5"]
    arguments += ["--no-verify", "-q"]

    def measured(limit: str) -> tuple[int, int, str]:
        command = [sys.executable, "-c", code, *arguments, "-o", str(tmp_path / limit), "--max-memory", limit]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        peak, status = map(int, done.stdout.split())
        return peak, status, done.stderr

    peak, status, told = measured("400MB")
    assert status == 0 and peak <= 400e6, (peak, told)
    _, status, told = measured("100MB")
    assert status == 2 and "Allow at least" in told
