"""The same weights by another way: hooks on stock modules and numpy's least squares, written out layer by layer."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import models as tiny
from merging.layerwise.reconstructions import again, data, features, load, reconstruct

RIDGE, FLOOR = 1e-2, 1e-6


def seen(model, module, batches) -> tuple[np.ndarray, np.ndarray]:
    """All inputs and outputs of a module, one row per position."""
    found = []
    hook = module.register_forward_hook(lambda m, args, out: found.append((args[0], out)))
    with torch.no_grad():
        for batch in batches:
            model(**batch)
    hook.remove()
    return tuple(torch.cat([pair[k].reshape(-1, pair[k].shape[-1]) for pair in found]).numpy() for k in (0, 1))


def ridge_solution(x: np.ndarray, target: np.ndarray, average: np.ndarray, ridge: float, floor: float) -> np.ndarray:
    """argmin ‖xW − target‖² + Σ_j λ_j ‖W_j − average_j‖², by least squares on the stacked rows."""
    squares = (x * x).sum(0)
    root = np.sqrt(ridge * squares + floor * squares.mean())
    rows = np.concatenate([x, np.diag(root)])
    return np.linalg.lstsq(rows, np.concatenate([target, root[:, None] * average]), rcond=None)[0]


def put(linear, solution: np.ndarray) -> None:
    with torch.no_grad():
        linear.weight.copy_(torch.tensor(solution[:-1].T))
        linear.bias.copy_(torch.tensor(solution[-1]))


def with_ones(x: np.ndarray) -> np.ndarray:
    return np.concatenate([x, np.ones_like(x[:, :1])], 1)


def stacked(linear) -> np.ndarray:
    return np.concatenate([linear.weight.detach().numpy().T, linear.bias.detach().numpy()[None]])


@pytest.mark.parametrize("ridge, floor", [(RIDGE, FLOOR), (0.0, 0.0)])
def test_every_weight_of_a_network_with_norms_in_front_is_the_least_squares_optimum(ridge: float, floor: float) -> None:
    folders = [tiny.model("vit", seed) for seed in range(2)]
    batches = data(folders[0], 2)
    states = [tiny.tensors(f) for f in folders]
    a, b = (load(f) for f in folders)
    m = load(folders[0], {n: 0.3 * states[0][n] + 0.7 * states[1][n] for n in states[0]})

    def mean(pick, k: int) -> np.ndarray:
        return 0.3 * seen(a, pick(a), batches)[k] + 0.7 * seen(b, pick(b), batches)[k]

    def read(pick) -> None:
        linear = pick(m)
        x = with_ones(seen(m, linear, batches)[0])
        put(linear, ridge_solution(x, mean(pick, 1), stacked(linear), ridge, floor))

    def write(pick, following) -> None:
        """The stream after the block is the input of the norm that follows."""
        linear = pick(m)
        x, out = seen(m, linear, batches)
        stream_before = seen(m, following(m), batches)[0] - out
        target = mean(following, 0) - stream_before
        put(linear, ridge_solution(with_ones(x), target, stacked(linear), ridge, floor))

    def layer(model, i):
        return model.vit.layers[i]

    for i in range(2):
        for part in ("q_proj", "k_proj", "v_proj"):
            read(lambda model, part=part, i=i: getattr(layer(model, i).attention, part))
        write(lambda model, i=i: layer(model, i).attention.o_proj, lambda model, i=i: layer(model, i).layernorm_after)
        read(lambda model, i=i: layer(model, i).mlp.fc1)
        after = (lambda model: layer(model, 1).layernorm_before) if i == 0 else (lambda model: model.vit.layernorm)
        write(lambda model, i=i: layer(model, i).mlp.fc2, after)
    read(lambda model: model.classifier)

    merged = reconstruct(folders, again(batches), weights=[3, 7], align=False, ridge=ridge, floor=floor)
    got = merged.load_into(load(folders[0]))
    torch.testing.assert_close(features(got, batches), features(m, batches), rtol=1e-7, atol=1e-7)
    if ridge:  # without one, inputs that are normalised leave a direction in which the weights are free
        for (name, expected), tensor in zip(m.state_dict().items(), got.state_dict().values(), strict=True):
            torch.testing.assert_close(tensor, expected, rtol=1e-6, atol=1e-6, msg=lambda text, name=name: name + text)


def test_attention_and_feed_forward_side_by_side_are_solved_as_one_regression() -> None:
    folders = [tiny.model("neox", seed) for seed in range(2)]
    batches = [{"input_ids": batch["input_ids"]} for batch in data(folders[0], 2)]
    merged = reconstruct(folders, again(batches), align=False)
    m, a, b = merged.load_into(load(folders[0])), *(load(f) for f in folders)
    states = [tiny.tensors(f) for f in folders]
    average = load(folders[0], {n: (states[0][n] + states[1][n]) / 2 for n in states[0]})

    last = m.gpt_neox.layers[1]
    xs = [seen(m, linear, batches)[0] for linear in (last.attention.dense, last.mlp.dense_4h_to_h)]
    stream = seen(m, last.input_layernorm, batches)[0]
    after = sum(seen(model, model.gpt_neox.final_layer_norm, batches)[0] for model in (a, b)) / 2
    ones = np.ones_like(xs[0][:, :1])
    parts = [average.gpt_neox.layers[1].attention.dense, average.gpt_neox.layers[1].mlp.dense_4h_to_h]
    start = np.concatenate([*(stacked(p)[:-1] for p in parts), *(stacked(p)[-1:] for p in parts)])
    expected = ridge_solution(np.concatenate([*xs, ones, ones], 1), after - stream, start, RIDGE, FLOOR)

    got = [stacked(last.attention.dense), stacked(last.mlp.dense_4h_to_h)]
    joined = np.concatenate([*(g[:-1] for g in got), *(g[-1:] for g in got)])
    np.testing.assert_allclose(joined, expected, rtol=1e-6, atol=1e-7)


def test_a_norm_on_the_stream_is_refitted_to_the_mean_of_the_parents() -> None:
    folders = [tiny.model("bert", seed) for seed in range(2)]
    batches = [{"input_ids": batch["input_ids"]} for batch in data(folders[0], 2)]
    merged = reconstruct(folders, again(batches), align=False, ridge=0, floor=0)
    m, a, b = merged.load_into(load(folders[0])), *(load(f) for f in folders)
    norm = m.bert.encoder.layer[1].output.LayerNorm
    x = seen(m, norm, batches)[0]
    normed = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + norm.eps)
    goal = sum(seen(model, model.bert.encoder.layer[1].output.LayerNorm, batches)[1] for model in (a, b)) / 2
    for unit in range(normed.shape[1]):
        gain, bias = np.polyfit(normed[:, unit], goal[:, unit], 1)
        assert norm.weight[unit].item() == pytest.approx(gain, abs=1e-6)
        assert norm.bias[unit].item() == pytest.approx(bias, abs=1e-6)
