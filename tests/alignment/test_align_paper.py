"""Level `rotation` is the founding paper, transcribed here with loops and scipy and compared to 1e-8.

Eq. 7 (feed-forward assignment), Theorem 4.1 (one rotation per head), eqs. 11–12 (one scale per head, after it).
"""

from __future__ import annotations

import numpy as np
import pytest
import scipy.linalg
import scipy.optimize
import torch

import isomerge
from alignment.layers import Layer, read_layer, read_llama, torch_state, write_layer, write_llama
from isomerge.alignment import head_scales
from models import arrays, difference, logits, model, mostly_slow, same_bytes, tensors

ENCODERS = ["bert", "roberta", "vit", "gpt2"]


# --- the paper --------------------------------------------------------------------------------------------------------
def polar(C: np.ndarray) -> np.ndarray:
    U, _, Vt = scipy.linalg.svd(C)
    return U @ Vt


def paper_order(C: np.ndarray) -> np.ndarray:
    """order[j]: the source unit that goes to place j."""
    rows, columns = scipy.optimize.linear_sum_assignment(C, maximize=True)
    order = np.empty(len(rows), dtype=int)
    order[columns] = rows
    return order


def paper_scale(q_b: np.ndarray, q_a: np.ndarray, k_b: np.ndarray, k_a: np.ndarray) -> float:
    """The real root of least cost of the quartic."""
    N, M, p, q = np.sum(q_b**2), np.sum(k_b**2), np.sum(q_b * q_a), np.sum(k_b * k_a)
    roots = np.roots([N, -p, 0.0, q, -M])
    real = [r.real for r in roots if abs(r.imag) < 1e-9 * max(1, abs(r))]
    return min(real, key=lambda a: np.sum((a * q_b - q_a) ** 2) + np.sum((k_b / a - k_a) ** 2))


def paper_layer(b: Layer, a: Layer, *, scale: bool) -> Layer:
    """One encoder layer of the source, moved."""
    moved = dict(b)
    order = paper_order(b["Wi"] @ a["Wi"].T + np.outer(b["bi"], a["bi"]) + b["Wo"].T @ a["Wo"])
    moved["Wi"], moved["bi"], moved["Wo"] = b["Wi"][order], b["bi"][order], b["Wo"][:, order]
    for n in ("Q", "K", "V", "O", "bq", "bk", "bv"):
        moved[n] = b[n].copy()
    for h in range(len(b["Q"])):
        C = b["Q"][h] @ a["Q"][h].T + b["K"][h] @ a["K"][h].T
        C = C + np.outer(b["bq"][h], a["bq"][h]) + np.outer(b["bk"][h], a["bk"][h])
        R = polar(C)
        q = [R.T @ np.column_stack([b["Q"][h], b["bq"][h]]), np.column_stack([a["Q"][h], a["bq"][h]])]
        k = [R.T @ np.column_stack([b["K"][h], b["bk"][h]]), np.column_stack([a["K"][h], a["bk"][h]])]
        s = paper_scale(q[0], q[1], k[0], k[1]) if scale else 1.0
        moved["Q"][h], moved["bq"][h] = s * q[0][:, :-1], s * q[0][:, -1]
        moved["K"][h], moved["bk"][h] = k[0][:, :-1] / s, k[0][:, -1] / s
        R = polar(b["V"][h] @ a["V"][h].T + b["O"][h].T @ a["O"][h] + np.outer(b["bv"][h], a["bv"][h]))
        v = [R.T @ np.column_stack([b["V"][h], b["bv"][h]]), np.column_stack([a["V"][h], a["bv"][h]])]
        o = b["O"][h] @ R
        s = paper_scale(v[0], v[1], o, a["O"][h]) if scale else 1.0
        moved["V"][h], moved["bv"][h], moved["O"][h] = s * v[0][:, :-1], s * v[0][:, -1], o / s
    return moved


def assert_close(found: dict[str, np.ndarray], expected: dict[str, np.ndarray], tolerance: float = 1e-8) -> None:
    assert found.keys() == expected.keys()
    worst = max(found, key=lambda n: np.abs(found[n] - expected[n]).max())
    assert np.abs(found[worst] - expected[worst]).max() <= tolerance, worst


# --- claims -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("scale", [False, True], ids=["rotated", "rescaled"])
@pytest.mark.parametrize("family", mostly_slow(ENCODERS, "bert", "gpt2"))
@pytest.mark.parametrize("seed", [0, 10])
def test_rotation_is_the_paper(family: str, scale: bool, seed: int) -> None:
    anchor, source = model(family, seed), model(family, seed + 1)
    a, expected = arrays(anchor), arrays(source)
    for layer in range(2):
        write_layer(family, expected, layer, paper_layer(
            read_layer(family, expected, layer), read_layer(family, a, layer), scale=scale,
        ))  # fmt: skip
    found = isomerge.align(source, anchor=anchor, level="rotation", scale=scale).state_dict()
    assert_close(arrays(found), expected)
    assert difference(logits(source), logits(source, found)) <= 1e-10


def test_rotation_does_not_rescale_unless_asked() -> None:
    anchor, source = model("bert", 0), model("bert", 1)
    plain, asked = (
        isomerge.align(source, anchor=anchor, level="rotation", scale=s).state_dict() for s in (None, False)
    )
    assert all(same_bytes(plain[n], asked[n]) for n in asked)


def test_rescaling_comes_nearer_than_rotating() -> None:
    anchor, source = model("bert", 0), model("bert", 1)
    a = arrays(anchor)

    def distance(scale: bool) -> float:
        found = arrays(isomerge.align(source, anchor=anchor, level="rotation", scale=scale).state_dict())
        return sum(float(np.sum((found[n] - a[n]) ** 2)) for n in a)

    assert distance(True) < distance(False)


# --- rotary positions -------------------------------------------------------------------------------------------------
def pair_cost(c: complex, q_b: np.ndarray, q_a: np.ndarray, k_b: np.ndarray, k_a: np.ndarray) -> float:
    """‖c q_B − q_A‖² + ‖k_B / conj(c) − k_A‖², in real arithmetic: rows (2, anything)."""
    turn = np.array([[c.real, -c.imag], [c.imag, c.real]])
    return float(np.sum((turn @ q_b - q_a) ** 2) + np.sum((np.linalg.inv(turn).T @ k_b - k_a) ** 2))


def best_phase(*pair: np.ndarray) -> complex:
    """A rotation of the plane onto another one: the angle of the 2 × 2 cross-covariance."""
    q_b, q_a, k_b, k_a = pair
    C = q_b @ q_a.T + k_b @ k_a.T
    angle = np.arctan2(C[0, 1] - C[1, 0], C[0, 0] + C[1, 1])
    return complex(np.cos(angle), np.sin(angle))


def best_complex(*pair: np.ndarray) -> complex:
    """Fine search over modulus and angle, then the stationary point of the cost by its gradient."""

    def cost(x: np.ndarray) -> float:
        return pair_cost(np.exp(x[0] + 1j * x[1]), *pair)

    q_b, q_a, k_b, k_a = pair
    a, b = (np.sum((u[0] + 1j * u[1]) * (v[0] - 1j * v[1])) for u, v in ((q_b, q_a), (k_b, k_a)))
    N, M = np.sum(q_b**2), np.sum(k_b**2)

    def gradient(x: np.ndarray) -> list[float]:  # of N r² + M/r² − 2 Re((r a + b/r) e^{iφ}), by (log r, φ)
        r, turn = np.exp(x[0]), np.exp(1j * x[1])
        return [N * r**2 - M / r**2 - ((r * a - b / r) * turn).real, ((r * a + b / r) * turn).imag]

    grid = [np.array([x, y]) for x in np.linspace(-2.5, 2.5, 51) for y in np.linspace(-np.pi, np.pi, 49)]
    start = scipy.optimize.minimize(cost, min(grid, key=cost), method="Nelder-Mead", options={"xatol": 1e-6}).x
    x = scipy.optimize.fsolve(gradient, start, xtol=1e-12)
    assert cost(x) <= cost(start) + 1e-12
    return complex(np.exp(x[0] + 1j * x[1]))


def paper_llama(b: Layer, a: Layer, *, scale: bool) -> Layer:
    """One rotary layer: a complex number per frequency and group, a rotation of values per group, the assignment."""
    moved = {n: x.copy() for n, x in b.items()}
    order = paper_order(b["gate"] @ a["gate"].T + b["up"] @ a["up"].T + b["down"].T @ a["down"])
    moved["gate"], moved["up"], moved["down"] = b["gate"][order], b["up"][order], b["down"][:, order]
    groups, queries, e, _ = b["Q"].shape
    for g in range(groups):
        for j in range(e // 2):
            rows = [j, j + e // 2]
            q = [np.concatenate([x["Q"][g, h][rows] for h in range(queries)], axis=1) for x in (b, a)]
            k = [x["K"][g][rows] for x in (b, a)]
            c = (best_complex if scale else best_phase)(*q, *k)
            turn = np.array([[c.real, -c.imag], [c.imag, c.real]])
            for h in range(queries):
                moved["Q"][g, h][rows] = turn @ b["Q"][g, h][rows]
            moved["K"][g][rows] = np.linalg.inv(turn).T @ b["K"][g][rows]
        R = polar(b["V"][g] @ a["V"][g].T + sum(b["O"][g, h].T @ a["O"][g, h] for h in range(queries)))
        v, o = R.T @ b["V"][g], np.stack([b["O"][g, h] @ R for h in range(queries)])
        s = paper_scale(v, a["V"][g], o, a["O"][g]) if scale else 1.0
        moved["V"][g], moved["O"][g] = s * v, o / s
    return moved


@pytest.mark.parametrize("block", [3, 1024], ids=["blocks-of-3", "one-block"])
@pytest.mark.parametrize("scale", [False, True], ids=["phases", "complex-numbers"])
def test_under_rotary_positions_a_head_turns_by_one_number_per_frequency_and_group(
    scale: bool, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers of a block may belong to several layers, and those of a layer to several blocks."""
    monkeypatch.setattr(head_scales, "BLOCK", block)
    anchor, source = model("llama", 0), model("llama", 1)
    a, expected = arrays(anchor), arrays(source)
    for layer in range(2):
        write_llama(expected, layer, paper_llama(read_llama(expected, layer), read_llama(a, layer), scale=scale))
    found = isomerge.align(source, anchor=anchor, level="rotation", scale=scale).state_dict()
    assert_close(arrays(found), expected)
    assert difference(logits(source), logits(source, found)) <= 1e-10


@pytest.mark.parametrize("device", ["cpu", "cpu:0"], ids=["layer-by-layer", "all-layers-at-once"])
def test_attention_alone_is_matched_alike_where_an_accelerator_takes_all_layers_at_once(device: str) -> None:
    """A device that is not named "cpu" is treated as an accelerator, this one too."""
    anchor, source = model("llama", 0), model("llama", 1)
    a, expected = arrays(anchor), arrays(source)
    for layer in range(2):
        b = read_llama(expected, layer)
        moved = paper_llama(b, read_llama(a, layer), scale=False)
        write_llama(expected, layer, {**moved, **{n: b[n] for n in ("gate", "up", "down")}})
    alignment = isomerge.align(source, anchor=anchor, level="rotation", only="attention", device=device)
    assert_close(arrays(alignment.state_dict()), expected)
    changed = arrays(dict(alignment.moved().changed()))
    assert {n.split(".")[-2] for n in changed} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert_close(changed, {n: expected[n] for n in changed})


def test_no_angle_of_a_fine_search_beats_the_phase() -> None:
    a, b = (read_llama(arrays(model("llama", s)), 0) for s in (0, 1))
    found = read_llama(
        arrays(isomerge.align(model("llama", 1), anchor=model("llama", 0), level="rotation").state_dict()), 0
    )
    for g in range(2):
        for rows in ([0, 2], [1, 3]):
            q_b, q_a, q_f = (np.concatenate([x["Q"][g, h][rows] for h in range(2)], axis=1) for x in (b, a, found))
            k_b, k_a, k_f = (x["K"][g][rows] for x in (b, a, found))
            reached = float(np.sum((q_f - q_a) ** 2) + np.sum((k_f - k_a) ** 2))
            angles = np.exp(1j * np.linspace(0, 2 * np.pi, 20001))
            assert reached <= min(pair_cost(c, q_b, q_a, k_b, k_a) for c in angles[::10]) + 1e-9


@pytest.mark.parametrize("scale", [False, True])
def test_a_norm_on_queries_and_keys_keeps_them_where_they_are(scale: bool) -> None:
    anchor, source = model("qwen3", 0), model("qwen3", 1)
    before, a = tensors(source), arrays(anchor)
    found = isomerge.align(source, anchor=anchor, level="rotation", scale=scale).state_dict()
    kept = [
        n for n in before if any(x in n for x in ("q_proj", "k_proj", "q_norm", "k_norm", "layernorm", "embed", "head"))
    ]
    assert kept and all(same_bytes(before[n], found[n]) for n in kept)
    expected = arrays(before)
    for layer in range(2):
        b = read_llama(expected, layer)
        moved = paper_llama(b, read_llama(a, layer), scale=scale)
        write_llama(expected, layer, {**moved, "Q": b["Q"], "K": b["K"]})
    assert_close(arrays(found), expected)


def test_partial_rotary_turns_one_part_and_rotates_the_rest() -> None:
    """GPT-NeoX: (head, 3, e) rows; the first half of each head is rotary, the rest takes a rotation."""
    anchor, source = model("neox", 0), model("neox", 1)
    a, b = arrays(anchor), arrays(source)
    found = arrays(isomerge.align(source, anchor=anchor, level="rotation").state_dict())
    for layer in range(2):
        at = f"gpt_neox.layers.{layer}.attention.query_key_value."
        (qa, ka, _), (qb, kb, _), (qf, kf, _) = (
            np.concatenate([x[at + "weight"], x[at + "bias"][:, None]], axis=1)
            .reshape(2, 3, 6, -1)
            .transpose(1, 0, 2, 3)
            for x in (a, b, found)
        )
        rotary = (int(6 * 0.5) + 1) // 2 * 2
        for h in range(2):
            for j in range(rotary // 2):
                rows = [j, j + rotary // 2]
                c = best_phase(qb[h][rows], qa[h][rows], kb[h][rows], ka[h][rows])
                turn = np.array([[c.real, -c.imag], [c.imag, c.real]])
                assert np.abs(turn @ qb[h][rows] - qf[h][rows]).max() <= 1e-8
                assert np.abs(turn @ kb[h][rows] - kf[h][rows]).max() <= 1e-8
            rest = slice(rotary, None)
            R = polar(qb[h][rest] @ qa[h][rest].T + kb[h][rest] @ ka[h][rest].T)
            assert np.abs(R.T @ qb[h][rest] - qf[h][rest]).max() <= 1e-8
            assert np.abs(R.T @ kb[h][rest] - kf[h][rest]).max() <= 1e-8
    assert difference(logits(source), logits(source, torch_state(found))) <= 1e-10


def test_rotation_never_moves_heads_nor_the_stream() -> None:
    source = model("bert", 1)
    alignment = isomerge.align(source, anchor=model("bert", 0), level="rotation")
    assert set(alignment.transform.elements) <= {f"{x}.{i}" for x in ("qk", "vo", "ffn") for i in range(2)}
    before, found = tensors(source), alignment.state_dict()
    stays = [n for n in before if "LayerNorm" in n or "embeddings" in n or "classifier" in n]
    assert stays and all(torch.equal(before[n], found[n]) for n in stays)
