"""An independent canonical form (MATH.md §4) in numpy, on stock tensor names.

Every step leaves the function of the model unchanged; `test_align_gauge.py` checks that with the stock classes.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import scipy.linalg

from alignment.layers import Layer, read_layer, read_llama, write_layer, write_llama

Arrays = dict[str, np.ndarray]


def geometric_balance(X: np.ndarray, Y: np.ndarray) -> np.ndarray:
    """The one symmetric positive S with (SX)(SX)ᵀ = (S⁻¹Y)(S⁻¹Y)ᵀ: S² is the geometric mean of (XXᵀ)⁻¹ and YYᵀ."""
    P, Q = np.linalg.inv(X @ X.T), Y @ Y.T
    root = np.real(scipy.linalg.sqrtm(P))
    inverse = np.linalg.inv(root)
    square = root @ np.real(scipy.linalg.sqrtm(inverse @ Q @ inverse)) @ root
    return np.real(scipy.linalg.sqrtm((square + square.T) / 2))


def pair_scale(x: np.ndarray, y: np.ndarray) -> float:
    """s with ‖s x‖ = ‖y / s‖."""
    return float((np.linalg.norm(y) / np.linalg.norm(x)) ** 0.5)


# --- the stream: fold and centre --------------------------------------------------------------------------------------
def fold(found: Arrays, norm: str, readers: list[str], *, transposed: bool = False) -> None:
    """A LayerNorm into readers that all have a bias; the readers are centred on the side they read with."""
    gain, shift = found[norm + ".weight"], found[norm + ".bias"]
    for reader in readers:
        W = found[reader + ".weight"].T if transposed else found[reader + ".weight"]
        found[reader + ".bias"] = found[reader + ".bias"] + W @ shift
        W = W * gain
        W = W - W.mean(1, keepdims=True)
        found[reader + ".weight"] = W.T if transposed else W
    found[norm + ".weight"], found[norm + ".bias"] = np.ones_like(gain), np.zeros_like(shift)


def centre(found: Arrays, name: str, axis: int) -> None:
    found[name] = found[name] - found[name].mean(axis, keepdims=True)


def stream_vit(found: Arrays) -> None:
    for i in range(2):
        at = f"vit.encoder.layer.{i}."
        fold(found, at + "layernorm_before", [f"{at}attention.attention.{x}" for x in ("query", "key", "value")])
        fold(found, at + "layernorm_after", [at + "intermediate.dense"])
        for writer in ("attention.output.dense", "output.dense"):
            centre(found, f"{at}{writer}.weight", 0)
            centre(found, f"{at}{writer}.bias", 0)
    fold(found, "vit.layernorm", ["classifier"])
    at = "vit.embeddings."
    for name, axis in (("cls_token", 2), ("position_embeddings", 2), ("patch_embeddings.projection.weight", 0),
                       ("patch_embeddings.projection.bias", 0)):  # fmt: skip
        centre(found, at + name, axis)


def stream_gpt2(found: Arrays) -> None:
    for i in range(2):
        at = f"transformer.h.{i}."
        fold(found, at + "ln_1", [at + "attn.c_attn"], transposed=True)
        fold(found, at + "ln_2", [at + "mlp.c_fc"], transposed=True)
        for writer in ("attn.c_proj", "mlp.c_proj"):
            centre(found, f"{at}{writer}.weight", 1)
            centre(found, f"{at}{writer}.bias", 0)
    gain = found["transformer.ln_f.weight"]  # the head has no bias: β/γ stays in the norm
    found["lm_head.weight"] = found["lm_head.weight"] * gain
    found["transformer.ln_f.bias"] = found["transformer.ln_f.bias"] / gain
    found["transformer.ln_f.weight"] = np.ones_like(gain)
    centre(found, "transformer.wte.weight", 1)
    centre(found, "transformer.wpe.weight", 1)


def stream_llama(found: Arrays) -> None:
    folds = [("model.norm", ["lm_head"])]
    for i in range(2):
        at = f"model.layers.{i}."
        folds.append((at + "input_layernorm", [f"{at}self_attn.{x}_proj" for x in "qkv"]))
        folds.append((at + "post_attention_layernorm", [f"{at}mlp.{x}_proj" for x in ("gate", "up")]))
    for norm, readers in folds:
        gain = found[norm + ".weight"]
        for reader in readers:
            found[reader + ".weight"] = found[reader + ".weight"] * gain
        found[norm + ".weight"] = np.ones_like(gain)


def stream_bert(found: Arrays) -> None:
    """Norms *on* the stream keep their gains and biases; what they drop is the mean of every writer."""
    at = "bert.embeddings."
    for table in ("word", "position", "token_type"):
        centre(found, f"{at}{table}_embeddings.weight", 1)
    for i in range(2):
        for writer in ("attention.output.dense", "output.dense"):
            centre(found, f"bert.encoder.layer.{i}.{writer}.weight", 0)
            centre(found, f"bert.encoder.layer.{i}.{writer}.bias", 0)


STREAMS = {"vit": stream_vit, "gpt2": stream_gpt2, "llama": stream_llama, "bert": stream_bert}


# --- attention and feed-forward: biases and balance -------------------------------------------------------------------
def without_bias_gauges(parts: Layer) -> Layer:
    """b_v into b_o; b_k dropped, as softmax does."""
    parts = dict(parts)
    parts["bo"] = parts["bo"] + sum(out @ b for out, b in zip(parts["O"], parts["bv"], strict=True))
    parts["bv"], parts["bk"] = np.zeros_like(parts["bv"]), np.zeros_like(parts["bk"])
    return parts


def head_balances(parts: Layer) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The balancing S of every head, for QK (query bias included) and for VO, of a layer without bias gauges."""
    qk = [
        geometric_balance(np.column_stack([q, b]), k)
        for q, b, k in zip(parts["Q"], parts["bq"], parts["K"], strict=True)
    ]
    vo = [geometric_balance(v, o.T) for v, o in zip(parts["V"], parts["O"], strict=True)]
    return qk, vo


def balanced(parts: Layer, balances: tuple[list[np.ndarray], list[np.ndarray]] | None = None) -> Layer:
    """Heads moved by S (their own, or another model's)."""
    qk, vo = balances or head_balances(parts)
    inverse = np.linalg.inv
    return {
        **parts,
        "Q": np.stack([S @ x for S, x in zip(qk, parts["Q"], strict=True)]),
        "bq": np.stack([S @ x for S, x in zip(qk, parts["bq"], strict=True)]),
        "K": np.stack([inverse(S).T @ x for S, x in zip(qk, parts["K"], strict=True)]),
        "V": np.stack([S @ x for S, x in zip(vo, parts["V"], strict=True)]),
        "O": np.stack([x @ inverse(S) for S, x in zip(vo, parts["O"], strict=True)]),
    }


def llama_balances(parts: Layer) -> dict[str, np.ndarray]:
    """Per group and rotary pair a scale, per group the balance of values and outputs, per unit a scale of up."""
    groups, queries, e, _ = parts["Q"].shape
    pairs = [[j, j + e // 2] for j in range(e // 2)]
    rotary = np.array([
        [pair_scale(parts["Q"][g][:, rows], parts["K"][g][rows]) for rows in pairs] for g in range(groups)
    ])  # fmt: skip
    vo = np.stack(
        [
            geometric_balance(parts["V"][g], np.concatenate([parts["O"][g, h].T for h in range(queries)], axis=1))
            for g in range(groups)
        ]
    )
    up = np.array([pair_scale(parts["up"][u], parts["down"][:, u]) for u in range(len(parts["up"]))])
    return {"rotary": rotary, "vo": vo, "up": up}


def llama_balanced(parts: Layer, balances: Mapping[str, np.ndarray] | None = None) -> Layer:
    b = balances or llama_balances(parts)
    rotary = np.concatenate([b["rotary"], b["rotary"]], axis=1)  # rows j and j + e/2 share a scale
    return {
        **parts,
        "Q": parts["Q"] * rotary[:, None, :, None],
        "K": parts["K"] / rotary[:, :, None],
        "V": np.einsum("gij,gjd->gid", b["vo"], parts["V"]),
        "O": np.einsum("gqdi,gij->gqdj", parts["O"], np.linalg.inv(b["vo"])),
        "up": parts["up"] * b["up"][:, None],
        "down": parts["down"] / b["up"],
    }


# --- all of it --------------------------------------------------------------------------------------------------------
def canonical(family: str, found: Arrays, *, balance: bool = True, heads: int = 3) -> Arrays:
    """The whole canonical form of a model of `tiny.MODELS`."""
    result = dict(found)
    if family == "llama":
        stream_llama(result)
        for i in range(2):
            parts = read_llama(result, i)
            write_llama(result, i, llama_balanced(parts) if balance else parts)
        return result
    STREAMS[family](result)  # before balancing, which is done to folded and centred weights
    for i in range(2):
        parts = without_bias_gauges(read_layer(family, result, i, heads))
        write_layer(family, result, i, balanced(parts) if balance else parts)
    STREAMS[family](result)  # once more: the value biases have just been added to a writer
    return result
