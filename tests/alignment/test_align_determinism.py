"""Same inputs, same bytes, whatever the threads, the hash seed or the kind of input; subsets move only their own."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

import isomerge
from models import fingerprint, model, mostly_slow, same_bytes, tensors

SCRIPT = """
import sys, isomerge, hashlib, json
found = isomerge.align(sys.argv[1], anchor=sys.argv[2], threads=2).state_dict()
print(json.dumps({n: hashlib.sha256(t.contiguous().numpy().tobytes()).hexdigest() for n, t in sorted(found.items())}))
"""


@pytest.mark.parametrize("level", ["permutation", "rotation", "full"])
@pytest.mark.parametrize("family", mostly_slow(["bert", "vit", "llama"], "llama"))
def test_bytes_do_not_depend_on_the_number_of_threads(family: str, level: str) -> None:
    anchor, source = model(family, 0, torch.float32), model(family, 1, torch.float32)
    one, *others = (isomerge.align(source, anchor=anchor, level=level, threads=t).state_dict() for t in (1, 2, 4))
    for other in others:
        assert list(one) == list(other) and all(same_bytes(one[n], other[n]) for n in one)


def test_written_files_do_not_depend_on_the_number_of_threads(tmp_path: Path) -> None:
    anchor, source = model("llama", 0, torch.float32), model("llama", 1, torch.float32)
    for threads in (1, 4):
        isomerge.align(source, anchor=anchor, threads=threads).save(tmp_path / str(threads), verify=False)
    assert fingerprint(tmp_path / "1") == fingerprint(tmp_path / "4")


@pytest.mark.slow
def test_bytes_do_not_depend_on_the_hash_seed() -> None:
    anchor, source = model("llama", 0, torch.float32), model("llama", 1, torch.float32)
    commands = []
    for seed in ("0", "1234"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-c", SCRIPT, str(source), str(anchor)]
        commands.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    runs = [json.loads(command.communicate()[0]) for command in commands]
    here = isomerge.align(source, anchor=anchor, threads=1).state_dict()
    assert (
        runs[0] == runs[1] == {n: hashlib.sha256(t.contiguous().numpy().tobytes()).hexdigest() for n, t in here.items()}
    )


def test_a_module_gives_what_its_folder_gives() -> None:
    anchor, source = model("vit", 0, torch.float32), model("vit", 1, torch.float32)
    load = transformers.ViTForImageClassification.from_pretrained
    of_modules = isomerge.align(load(source), anchor=load(anchor)).state_dict()
    of_folders = isomerge.align(source, anchor=anchor).state_dict()
    assert of_modules.keys() == of_folders.keys()
    assert all(same_bytes(of_modules[n], of_folders[n]) for n in of_folders)


def test_memory_that_cannot_hold_the_models_changes_nothing() -> None:
    anchor, source = model("llama", 0), model("llama", 1)
    roomy, narrow = (isomerge.align(source, anchor=anchor, max_memory=m).state_dict() for m in (None, 1000))
    assert all(same_bytes(roomy[n], narrow[n]) for n in roomy)


# --- subsets ----------------------------------------------------------------------------------------------------------
def moved(family: str, **options: str) -> tuple[set[str], set[str]]:
    """Spaces that moved, and tensors that changed by a bit."""
    source = model(family, 1)
    alignment = isomerge.align(source, anchor=model(family, 0), **options)
    before, after = tensors(source), alignment.state_dict()
    return set(alignment.transform.elements), {n for n in before if not same_bytes(before[n], after[n])}


@pytest.mark.parametrize(("layers", "kept"), [("0", {0}), ("1", {1}), ("first 1", {0}), ("last 1", {1}),
                                              ("0-1", {0, 1}), ("0,1", {0, 1}), ("first 9", {0, 1})])  # fmt: skip
@pytest.mark.parametrize(
    ("family", "level"), [("bert", "permutation"), ("gpt2", "rotation"), ("bert", "full"), ("gpt2", "full")]
)
def test_layers_move_only_what_they_name(family: str, level: str, layers: str, kept: set[int]) -> None:
    spaces, names = moved(family, level=level, layers=layers)
    assert {int(s.rsplit(".", 1)[1]) for s in spaces} == kept
    at = ".layer." if family == "bert" else ".h."
    assert names and all(at in n and int(n.split(at)[1].split(".")[0]) in kept for n in names)


ATTENTION = ("attention.self", "attention.output.dense", ".attn.", "self_attn", "attention.attention")


@pytest.mark.parametrize("level", ["permutation", "rotation", "full"])
@pytest.mark.parametrize("family", ["bert", "vit", "gpt2", "llama"])
def test_only_attention_moves_only_attention(family: str, level: str) -> None:
    spaces, names = moved(family, level=level, only="attention")
    assert spaces and all(s.split(".")[0] in ("head", "kv", "query", "qk", "vo") for s in spaces)
    assert names and all(any(x in n for x in ATTENTION) for n in names)


@pytest.mark.parametrize("level", ["permutation", "rotation", "full"])
@pytest.mark.parametrize("family", ["bert", "vit", "gpt2", "llama"])
def test_only_ffn_moves_only_the_feed_forward(family: str, level: str) -> None:
    spaces, names = moved(family, level=level, only="ffn")
    assert spaces and all(s.split(".")[0] in ("ffn", "up") for s in spaces)
    assert names and not any(any(x in n for x in (*ATTENTION, "norm", "embed", ".ln_", "wte", "head")) for n in names)


@pytest.mark.parametrize("level", ["permutation", "full"])
@pytest.mark.parametrize("family", ["bert", "vit", "llama"])
def test_only_residual_moves_only_the_stream(family: str, level: str) -> None:
    spaces, _ = moved(family, level=level, only="residual")
    assert spaces == {"residual"}


def test_rotation_has_no_residual_part() -> None:
    assert moved("bert", level="rotation", only="residual") == (set(), set())


def test_layers_and_parts_combine() -> None:
    spaces, names = moved("bert", layers="1", only="ffn")
    assert spaces == {"ffn.1"}
    assert names == {f"bert.encoder.layer.1.{x}" for x in ("intermediate.dense.weight", "intermediate.dense.bias",
                                                          "output.dense.weight")}  # fmt: skip
