"""Tiny stock models on disk, how to run them, and their layers as plain numpy arrays by head.

Nothing here uses isomerge: what the tests compare with must not come from the code they test.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from precision import float64_throughout

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

VOCABULARY = 29
BASE = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 7}
TEXT = {**BASE, "vocab_size": VOCABULARY, "pad_token_id": 0, "max_position_embeddings": 19}
LLAMA = {**TEXT, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "tie_word_embeddings": False}
GPT2 = {"n_embd": 12, "n_layer": 2, "n_head": 3, "n_inner": 7, "n_positions": 19, "vocab_size": VOCABULARY,
        "pad_token_id": 0, "tie_word_embeddings": False}  # fmt: skip

# name -> (class, configuration); sizes differ so that no two axes can be confused unnoticed
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertForTokenClassification", {**TEXT, "num_labels": 5}),
    "roberta": ("RobertaForTokenClassification", {**TEXT, "num_labels": 5}),
    "vit": ("ViTForImageClassification", {**BASE, "image_size": 8, "patch_size": 4, "num_labels": 5}),
    "gpt2": ("GPT2LMHeadModel", GPT2),
    "llama": ("LlamaForCausalLM", LLAMA),
    "qwen3": ("Qwen3ForCausalLM", LLAMA),
    "qwen2": ("Qwen2ForCausalLM", LLAMA),
    "gemma2": ("Gemma2ForCausalLM", {**LLAMA, "tie_word_embeddings": True}),
    "olmo2": ("Olmo2ForCausalLM", LLAMA),
    "mixtral": ("MixtralForCausalLM", {**LLAMA, "num_local_experts": 3}),
    "neox": ("GPTNeoXForCausalLM", {**TEXT, "num_attention_heads": 2,
             "rope_parameters": {"rope_theta": 100.0, "partial_rotary_factor": 0.5}}),
    "opt": ("OPTForCausalLM", {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3, "ffn_dim": 7,
            "vocab_size": VOCABULARY, "pad_token_id": 0, "max_position_embeddings": 19, "word_embed_proj_dim": 12,
            "tie_word_embeddings": False}),
    "distilbert": ("DistilBertForMaskedLM", {"dim": 12, "n_layers": 2, "n_heads": 3, "hidden_dim": 7, "pad_token_id": 0,
                   "vocab_size": VOCABULARY, "max_position_embeddings": 19}),
    "deberta": ("DebertaV2ForTokenClassification", {**TEXT, "num_labels": 5, "relative_attention": True,
                "pos_att_type": ["p2c", "c2p"], "share_att_key": True, "norm_rel_ebd": "layer_norm",
                "position_buckets": 4, "position_biased_input": False, "type_vocab_size": 0}),
    "t5": ("T5ForConditionalGeneration", {"d_model": 12, "d_kv": 4, "d_ff": 7, "num_layers": 2, "num_heads": 3,
           "pad_token_id": 0, "eos_token_id": 1, "vocab_size": VOCABULARY, "decoder_start_token_id": 0,
           "relative_attention_num_buckets": 8, "relative_attention_max_distance": 12,
           "tie_word_embeddings": False, "feed_forward_proj": "gated-gelu"}),
}  # fmt: skip

# Wide enough for statements about noise, which holds on average over many parameters.
_WIDE = {"hidden_size": 48, "num_attention_heads": 4, "intermediate_size": 64}
WIDE: dict[str, dict[str, Any]] = {
    **{name: _WIDE for name in MODELS},
    **{name: {**_WIDE, "head_dim": 12} for name in ("llama", "qwen2", "qwen3", "gemma2", "olmo2", "mixtral")},
    "gpt2": {"n_embd": 48, "n_head": 4, "n_inner": 64},
    "opt": {"hidden_size": 48, "num_attention_heads": 4, "ffn_dim": 64, "word_embed_proj_dim": 48},
    "distilbert": {"dim": 48, "n_heads": 4, "hidden_dim": 64},
    "t5": {"d_model": 48, "d_kv": 12, "d_ff": 64, "num_heads": 4},
}


# --- models on disk ---------------------------------------------------------------------------------------------------
@lru_cache(maxsize=1)
def scratch() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="isomerge-align-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def model(name: str, seed: int = 0, dtype: torch.dtype = torch.float64, **changes: Any) -> Path:
    """A folder with a random stock model; gains, biases and weights all away from their special values."""
    return _model(name, seed, dtype, json.dumps(changes, sort_keys=True))


@cache
def _model(name: str, seed: int, dtype: torch.dtype, changes: str) -> Path:
    class_name, config = MODELS[name]
    stock = getattr(transformers, class_name)
    torch.manual_seed(seed)
    made = stock._from_config(stock.config_class(**{**config, **json.loads(changes)}), dtype=torch.float64).eval()
    generator = torch.Generator().manual_seed(1000 + seed)
    with torch.no_grad():
        for parameter in made.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter += noise / parameter.shape[-1] ** 0.5 if parameter.ndim > 1 else 0.5 * noise.tanh()
    folder = scratch() / hashlib.sha256(f"{name} {seed} {dtype} {changes}".encode()).hexdigest()[:16]
    made.to(dtype).save_pretrained(folder)
    return folder


def tensors(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def arrays(folder: Path | Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    found = tensors(folder) if isinstance(folder, Path) else folder
    return {name: tensor.to(torch.float64).numpy() for name, tensor in found.items()}


def variant(like: Path, changed: Mapping[str, Tensor], name: str, drop: tuple[str, ...] = (), **config: Any) -> Path:
    """A copy of a model's folder with some tensors replaced."""
    folder = scratch() / f"{like.name}-{name}"
    shutil.copytree(like, folder, dirs_exist_ok=True)
    found = {n: t for n, t in {**tensors(like), **changed}.items() if n not in drop}
    save_file({n: t.contiguous() for n, t in found.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    if config:
        (folder / "config.json").write_text(json.dumps({**read_config(folder), **config}))
    return folder


def noisy(like: Path, share: float = 0.01, seed: int = 7) -> Path:
    """The model with noise on every tensor, `share` of the tensor's own size."""
    generator = torch.Generator().manual_seed(seed)
    changed = {}
    for name, tensor in sorted(tensors(like).items()):
        noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        changed[name] = (tensor + share * noise * tensor.double().square().mean().sqrt()).to(tensor.dtype)
    return variant(like, changed, f"noisy-{share}-{seed}")


def in_two_documents(first: Path, second: Path, third: Path) -> str:
    """A recipe: the mean of two models, and then the mean of that and another one."""
    return f"""
name: inner
merge_method: linear
models: [{{model: {first}}}, {{model: {second}}}]
---
merge_method: linear
models: [{{model: inner}}, {{model: {third}}}]
"""


def read_config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def fingerprint(folder: Path) -> dict[str, str]:
    """A hash of every file below a folder."""
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def same_bytes(first: Tensor, second: Tensor) -> bool:
    """Equal bit for bit (−0 is not 0 here)."""
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    return bool(torch.equal(first.contiguous().view(torch.uint8), second.contiguous().view(torch.uint8)))


def mean(first: Mapping[str, Tensor], second: Mapping[str, Tensor], share: float = 0.5) -> dict[str, Tensor]:
    assert first.keys() == second.keys(), set(first) ^ set(second)
    return {n: (1 - share) * first[n] + share * second[n] for n in first}


# --- what a model computes --------------------------------------------------------------------------------------------
def inputs(config: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    if hasattr(config, "image_size"):
        shape = (3, config.num_channels, config.image_size, config.image_size)
        return {"pixel_values": torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)}
    length = 9
    tokens = torch.randint(3, config.vocab_size, (3, length), generator=generator)
    mask = torch.ones_like(tokens)
    tokens[-1, -2:], mask[-1, -2:] = 0, 0
    found = {"input_ids": tokens, "attention_mask": mask}
    if config.is_encoder_decoder:
        found["decoder_input_ids"] = torch.randint(3, config.vocab_size, (3, length - 2), generator=generator)
    return found


def logits(
    like: Path, weights: Mapping[str, Tensor] | None = None, *, dtype: torch.dtype = torch.float64, **config: Any
) -> Tensor:
    """Outputs of the stock class for a folder, or for other weights under that folder's config.

    No key may be missing, unexpected or of another shape.
    """
    settings = {**read_config(like), **config}
    stock = getattr(transformers, settings["architectures"][0])
    extra = {"experts_implementation": "eager"} if "num_local_experts" in settings else {}
    made = stock.config_class.from_dict(settings)
    source = (like, {}) if weights is None and not config else (None, {"state_dict": dict(weights or tensors(like))})
    loaded, info = stock.from_pretrained(
        source[0], config=made, dtype=dtype, output_loading_info=True, local_files_only=True, **source[1], **extra
    )
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    with torch.no_grad(), float64_throughout():
        return loaded.eval()(**inputs(made, dtype)).logits.double()


def difference(first: Tensor, second: Tensor) -> float:
    """The largest difference, relative to the largest value."""
    return float((first - second).abs().max() / first.abs().max())


# --- layers by head ---------------------------------------------------------------------------------------------------
BERT_PARTS = {
    "q": "attention.self.query", "k": "attention.self.key", "v": "attention.self.value",
    "o": "attention.output.dense", "i": "intermediate.dense", "j": "output.dense",
}  # fmt: skip
LAYERS = {
    "bert": ("bert.encoder.layer.{}.", BERT_PARTS),
    "roberta": ("roberta.encoder.layer.{}.", BERT_PARTS),
    "vit": ("vit.encoder.layer.{}.", {
        **BERT_PARTS, "q": "attention.attention.query", "k": "attention.attention.key",
        "v": "attention.attention.value",
    }),
}  # fmt: skip
Layer = dict[str, np.ndarray]


def read_layer(family: str, found: Mapping[str, np.ndarray], layer: int, heads: int = 3) -> Layer:
    """Q, K, V (head, e, d), their biases (head, e), O (head, d, e); Wi (n, d), bi, Wo (d, n) of the feed-forward."""
    if family == "gpt2":
        at = f"transformer.h.{layer}."
        width = found[at + "attn.c_proj.weight"].shape[1]
        qkv = found[at + "attn.c_attn.weight"].T.reshape(3, heads, -1, width)
        biases = found[at + "attn.c_attn.bias"].reshape(3, heads, -1)
        out = found[at + "attn.c_proj.weight"].T
        rest = {"bo": found[at + "attn.c_proj.bias"], "Wi": found[at + "mlp.c_fc.weight"].T,
                "bi": found[at + "mlp.c_fc.bias"], "Wo": found[at + "mlp.c_proj.weight"].T}  # fmt: skip
    else:
        prefix, parts = LAYERS[family]
        w, b = (
            {k: found[prefix.format(layer) + part + kind] for k, part in parts.items()} for kind in (".weight", ".bias")
        )
        width = w["o"].shape[0]
        qkv = np.stack([w[x].reshape(heads, -1, width) for x in "qkv"])
        biases = np.stack([b[x].reshape(heads, -1) for x in "qkv"])
        out = w["o"]
        rest = {"bo": b["o"], "Wi": w["i"], "bi": b["i"], "Wo": w["j"]}
    made = {"Q": qkv[0], "K": qkv[1], "V": qkv[2], "bq": biases[0], "bk": biases[1], "bv": biases[2], **rest}
    return {n: a.copy() for n, a in {**made, "O": out.reshape(width, heads, -1).transpose(1, 0, 2)}.items()}


def write_layer(family: str, found: dict[str, np.ndarray], layer: int, parts: Layer) -> None:
    """The inverse of `read_layer`, into `found`."""
    width = parts["Q"].shape[2]
    out = parts["O"].transpose(1, 0, 2).reshape(width, -1)
    if family == "gpt2":
        at = f"transformer.h.{layer}."
        found[at + "attn.c_attn.weight"] = np.concatenate([parts[x].reshape(-1, width) for x in "QKV"]).T
        found[at + "attn.c_attn.bias"] = np.concatenate([parts["b" + x].ravel() for x in "qkv"])
        found |= {at + "attn.c_proj.weight": out.T, at + "attn.c_proj.bias": parts["bo"],
                  at + "mlp.c_fc.weight": parts["Wi"].T, at + "mlp.c_fc.bias": parts["bi"],
                  at + "mlp.c_proj.weight": parts["Wo"].T}  # fmt: skip
        return
    prefix, names = LAYERS[family]
    at = prefix.format(layer)
    for x in "qkv":
        found[at + names[x] + ".weight"] = parts[x.upper()].reshape(-1, width)
        found[at + names[x] + ".bias"] = parts["b" + x].ravel()
    found |= {at + names["o"] + ".weight": out, at + names["o"] + ".bias": parts["bo"],
              at + names["i"] + ".weight": parts["Wi"], at + names["i"] + ".bias": parts["bi"],
              at + names["j"] + ".weight": parts["Wo"]}  # fmt: skip


def read_llama(found: Mapping[str, np.ndarray], layer: int, groups: int = 2, inner: int = 4) -> Layer:
    """Q (group, query, e, d), K and V (group, e, d), O (group, query, d, e); gate and up (n, d), down (d, n)."""
    at = f"model.layers.{layer}."
    q, k, v, o = (found[f"{at}self_attn.{x}_proj.weight"] for x in "qkvo")
    width = k.shape[1]
    made = {
        "Q": q.reshape(groups, -1, inner, width), "K": k.reshape(groups, inner, width),
        "V": v.reshape(groups, inner, width), "O": o.reshape(width, groups, -1, inner).transpose(1, 2, 0, 3),
        "gate": found[at + "mlp.gate_proj.weight"], "up": found[at + "mlp.up_proj.weight"],
        "down": found[at + "mlp.down_proj.weight"],
    }  # fmt: skip
    return {n: a.copy() for n, a in made.items()}


def write_llama(found: dict[str, np.ndarray], layer: int, parts: Layer) -> None:
    at = f"model.layers.{layer}."
    width = parts["K"].shape[2]
    for x in "QKV":
        found[f"{at}self_attn.{x.lower()}_proj.weight"] = parts[x].reshape(-1, width)
    found[at + "self_attn.o_proj.weight"] = parts["O"].transpose(2, 0, 1, 3).reshape(width, -1)
    found |= {f"{at}mlp.{x}_proj.weight": parts[x] for x in ("gate", "up", "down")}


def torch_state(found: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    return {n: torch.tensor(np.ascontiguousarray(a)) for n, a in found.items()}
