"""llama.cpp loads what `convert` writes and goes on with the same tokens as transformers.

Needs an interpreter with llama-cpp-python, named by LLAMA_PYTHON. It is compiled when it is installed.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

import isomerge
from gguf_files import stock
from isomerge.checkpoint import open_checkpoint
from isomerge.running.stock import load_stock
from tokenizers_of_bytes import byte_level, pieces, with_tokenizer

pytestmark = [
    pytest.mark.peers,
    pytest.mark.skipif(not os.environ.get("LLAMA_PYTHON"), reason="LLAMA_PYTHON names no interpreter with llama_cpp"),
]
SPECIAL = {"vocab_size": 320, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
PROMPT, COUNT = [5, 40, 111, 17, 200, 63], 16
TEXT = "the merge of two models, and 1234 more words"
KINDS = {"llama": pieces, "mistral": pieces, "mixtral": pieces, "qwen2": byte_level, "qwen3": byte_level,
         "qwen2_moe": byte_level, "qwen3_moe": byte_level, "gemma2": pieces, "gemma3": pieces,
         "phi3": pieces}  # fmt: skip
SIDE = Path(__file__).with_name("llama_side.py")


def llama(path: Path) -> dict[str, Any]:
    question = {"path": str(path), "prompt": PROMPT, "count": COUNT, "text": TEXT}
    done = subprocess.run(
        [os.environ["LLAMA_PYTHON"], str(SIDE)], input=json.dumps([question]), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    answer: dict[str, Any] = json.loads(done.stdout)[0]
    return answer


def greedy(model: Any) -> tuple[list[int], torch.Tensor]:
    ids, first = list(PROMPT), None
    for _ in range(COUNT):
        with torch.no_grad():
            scores = model(torch.tensor([ids])).logits[0, -1]
        first = scores if first is None else first
        ids.append(int(scores.argmax()))
    assert first is not None
    return ids[len(PROMPT) :], first


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stored", ["f32", "f16", "q8_0"])
def test_it_goes_on_with_the_same_tokens(kind: str, stored: str, tmp_path: Path) -> None:
    folder = tmp_path / "a"
    stock(kind, seed=3, **SPECIAL).save_pretrained(folder)
    own = with_tokenizer(folder, KINDS[kind]())
    isomerge.convert(folder, tmp_path / "a.gguf", type=stored)
    checkpoint = open_checkpoint(tmp_path / "a.gguf")
    # What the file holds, rounding and all, in the class and with the config of the folder. Rows are one buffer.
    sizes = {name: info.shape[0] for name, info in checkpoint.tensors.items()}
    rows = {name: checkpoint.read_rows(name, 0, count).float().clone() for name, count in sizes.items()}
    tokens, logits = greedy(load_stock(json.loads((folder / "config.json").read_text()), rows))
    answer = llama(tmp_path / "a.gguf")
    error = float((torch.tensor(answer["logits"]) - logits).abs().max() / logits.abs().max())
    print(f"{kind} {stored}: logits differ by {error:.1e} of the largest")
    if stored == "q8_0":  # it rounds activations to 8 bits too, so tokens of random models that are close may change
        assert error < 4e-2
    else:
        assert error < 3e-3  # of its cache, which is F16
        assert answer["tokens"] == tokens
    assert answer["ids"] == own(TEXT, add_special_tokens=False).input_ids
