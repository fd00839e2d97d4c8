"""Tiny models of five stock classes, saved by transformers itself, and locks for them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from blake3 import blake3
from safetensors.torch import load_file, save_file

from isomerge.checkpoint import open_checkpoint
from isomerge.checkpoint.hashing import hash_file
from isomerge.checkpoint.lock import LOCK, Lock, locked_input, locked_tensors
from models import stock

VOCABULARY = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{i}": i for i in range(3, 32)}}


SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
TOKENS = {"vocab_size": 32, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {**SIZES, **TOKENS, "tie_word_embeddings": False}),
    "llama-tied": ("LlamaForCausalLM", {**SIZES, **TOKENS, "tie_word_embeddings": True}),
    "gpt2": ("GPT2LMHeadModel", {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16, **TOKENS}),
    "bert": ("BertForMaskedLM", {**SIZES, "vocab_size": 32, "max_position_embeddings": 16}),
    "vit": ("ViTForImageClassification", {**SIZES, "image_size": 8, "patch_size": 4}),
}


def build(kind: str, seed: int = 0) -> Any:
    name, config = KINDS[kind]
    return stock(name, seed, **config)


def write_tokenizer(folder: Path) -> None:
    """A real tokenizer.json, written by the tokenizers library."""
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel(VOCABULARY, unk_token="<pad>")).save(str(folder / "tokenizer.json"))


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., Path]:
    """`save(kind, name, seed=…, shards=…)` writes a model as its own library does."""

    def save(kind: str, name: str = "out", *, seed: int = 0, sharded: bool = False) -> Path:
        folder = tmp_path / name
        build(kind, seed).save_pretrained(folder, max_shard_size="4KB" if sharded else "1GB")
        if kind != "vit":
            write_tokenizer(folder)
        return folder

    return save


def true_hashes(folder: Path, function: Any = blake3) -> dict[str, str]:
    """Through the safetensors library and numpy, which share no code with isomerge's reader."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            found[name] = function(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
    return found


def make_older(folder: Path) -> None:
    """Turn a lock into what isomerge 0.1 wrote: format 1, with the sha256 of every tensor."""
    record = json.loads((folder / LOCK).read_text())
    del record["tensor_hash"]
    record["format"] = 1
    for place, part in [(folder, record["output"]), *((Path(entry["source"]), entry) for entry in record["inputs"])]:
        hashes = true_hashes(place, hashlib.sha256)
        for name, tensor in part["tensors"].items():
            del tensor["hash"]
            tensor["sha256"] = hashes[name]
    lines = "".join(f"{name}  {entry['sha256']}\n" for name, entry in sorted(record["output"]["tensors"].items()))
    record["output"]["sha256"] = hashlib.sha256(lines.encode()).hexdigest()
    (folder / LOCK).write_text(json.dumps(record))


def lock_folder(folder: Path, inputs: tuple[Path, ...] = (), recipe: str = "merge_method: linear\n") -> Lock:
    """What the engine does after a merge."""
    checkpoint = open_checkpoint(folder)
    side = {p.name: hash_file(p) for p in folder.iterdir() if p.is_file() and ".safetensors" not in p.name}
    side.pop("isomerge.lock.json", None)
    lock = Lock(
        recipe=recipe,
        documents=({"merge_method": "linear"},),
        inputs=tuple(locked_input(str(path), open_checkpoint(path), true_hashes(path)) for path in inputs),
        tensors=locked_tensors(checkpoint.tensors, true_hashes(folder)),
        side_files=side,
        seed=3,
        options={"dtype": "float32", "device": "cpu", "block": 16},
    )
    (folder / LOCK).write_text(lock.to_json(), encoding="utf-8")
    return lock


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Load, change and save the one weight file of a folder, with the safetensors library."""
    path = folder / "model.safetensors"
    state = load_file(path)
    change(state)
    save_file(state, path, metadata={"format": "pt"})


@pytest.fixture
def tools() -> Any:
    """The helpers above: with import-mode importlib a conftest cannot be imported."""
    from types import SimpleNamespace

    return SimpleNamespace(
        true_hashes=true_hashes,
        make_older=make_older,
        lock=lock_folder,
        edit_config=edit_config,
        edit_weights=edit_weights,
        build=build,
    )
