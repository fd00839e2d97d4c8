"""The layers of stock models as plain numpy arrays by head, read from and written to their tensors.

Nothing here uses isomerge: what the tests compare with must not come from the code they test.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

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
