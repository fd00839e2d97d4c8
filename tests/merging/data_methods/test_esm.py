"""Merging in the essential subspace, against the principal components of the outputs' shifts themselves."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import isomerge
from calibration.hooks import batches, data, disk_name, inputs_by_module, rows, stock
from isomerge.calibration import calibrate
from isomerge.errors import RequestError
from isomerge.merging.methods import METHODS
from isomerge.merging.run.rows import GramSource, InMemory, TensorGroup
from models import model, tensors

Array = np.ndarray
MANY = 30


def essential(T: Array, X: list[Array], lambda_: float = 1.0) -> Array:
    """The paper's decomposition of each (out, in) change by SVD of what it adds to the outputs on the inputs X."""
    k = T.shape[1] // len(T)
    bases, coordinates = [], []
    for tau, x in zip(T, X, strict=True):
        shift = x @ tau.T
        s, v = np.linalg.svd(shift, full_matrices=False)[1:]
        seen = min(k, np.linalg.matrix_rank(shift))  # what is wider than its inputs moves in fewer directions
        eigenvalues, v = s[:seen] ** 2 / (len(x) - 1), v[:seen]
        strength = (eigenvalues / eigenvalues.mean()) ** 0.15
        strength /= strength.mean()
        relative = np.linalg.norm(tau) / np.mean([np.linalg.norm(t) for t in T])
        bases.append(v.T * strength)
        coordinates.append(strength[:, None] * (v @ tau) * relative**2)
    P, A = np.hstack(bases), np.vstack(coordinates)
    lengths = np.linalg.norm(A, axis=0)
    return 2 * lambda_ * evened(P) @ evened(A * (lengths / lengths.mean()) ** 2)


def evened(matrix: Array) -> Array:
    u, s, v = np.linalg.svd(matrix, full_matrices=False)
    return s.mean() * u @ v


def merged(W: Array, B: Array, X: list[Array], transposed: bool = False, **options: float) -> Array:
    sources = [
        GramSource(len(x), transposed, "inputs", lambda x=x: torch.tensor(x.T @ x), lambda x=x: torch.tensor(x.sum(0)))
        for x in X
    ]
    turned = [torch.tensor(w.T if transposed else w).contiguous() for w in [*W, B]]
    group = TensorGroup(
        "layer.weight", [InMemory(w) for w in turned[:-1]], InMemory(turned[-1]), option_tensors={"statistics": sources}
    )
    combine = METHODS["esm"](group, **options)
    found = torch.cat([combine(block) for block in group.blocks()]).numpy()
    return found.T if transposed else found


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("shape", [(12, 8), (9, 14)])
def test_the_values_are_those_of_the_decomposition_of_the_activations(shape: tuple[int, int], transposed: bool) -> None:
    numbers = np.random.default_rng(0)
    W, B = numbers.normal(size=(3, *shape)), numbers.normal(size=shape)
    X = [numbers.normal(size=(32, shape[1])) @ numbers.normal(size=(shape[1], shape[1])) for _ in W]
    found = merged(W, B, X, transposed, **{"lambda": 0.5})
    np.testing.assert_allclose(found, B + essential(W - B, X, 0.5), rtol=1e-10, atol=1e-10)


def test_fewer_inputs_than_directions_leave_no_direction_to_chance() -> None:
    """Two inputs show two directions of each of two models, where four would fit."""
    numbers = np.random.default_rng(1)
    W, B = numbers.normal(size=(2, 8, 6)), numbers.normal(size=(8, 6))
    X = [numbers.normal(size=(2, 6)) for _ in W]
    change = merged(W, B, X) - B
    shown = np.linalg.svd(np.hstack([tau @ x.T for tau, x in zip(W - B, X, strict=True)]))[0][:, :4]
    np.testing.assert_allclose(shown @ shown.T @ change, change, atol=1e-9)


@pytest.mark.parametrize("name", ["vit", "gpt2"])
def test_data_and_files_give_what_the_inputs_of_each_model_give(name: str, tmp_path: Path) -> None:
    base, folders = model(name, 2), [model(name, 0), model(name, 1)]
    inputs = [data(folder, seed, MANY) for seed, folder in enumerate(folders)]
    found = isomerge.merge(folders, method="esm", base=base, data=[batches(b, 10, 20) for b in inputs]).state_dict()
    files = [
        str(calibrate(folder, batches(b)).save(tmp_path / f"{k}.safetensors"))
        for k, (folder, b) in enumerate(zip(folders, inputs, strict=True))
    ]
    again = isomerge.merge(folders, method="esm", base=base, statistics=files).state_dict()
    stored, origin, checked = [tensors(folder) for folder in folders], tensors(base), 0
    seen = [inputs_by_module(stock(folder), batch) for folder, batch in zip(folders, inputs, strict=True)]
    for layer in seen[0]:
        weight = disk_name(stock(folders[0]), layer, folders[0])
        if weight is None or seen[0][layer].ndim > 3 or "lm_head" in layer:
            continue
        turned = name == "gpt2"
        changes = [(s[weight] - origin[weight]).double().numpy() for s in stored]
        X = [rows(s[layer], batch, layer) for s, batch in zip(seen, inputs, strict=True)]
        expected = essential(np.stack([c.T if turned else c for c in changes]), X)
        for state in (found, again):
            change = (state[weight] - origin[weight]).double().numpy()
            np.testing.assert_allclose(change.T if turned else change, expected, rtol=1e-4, atol=1e-5, err_msg=weight)
        checked += 1
    assert checked >= 8
    bias = next(tensor for tensor in found if tensor.endswith("bias"))
    torch.testing.assert_close(found[bias], (stored[0][bias] + stored[1][bias]) / 2)


def test_without_data_or_files_the_request_says_what_is_missing() -> None:
    with pytest.raises(RequestError, match="needs Gram matrices"):
        isomerge.merge([model("vit", 0), model("vit", 1)], method="esm", base=model("vit", 2))
