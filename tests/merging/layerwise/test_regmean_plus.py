"""RegMean++ against its formula in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import models as tiny
from isomerge.errors import RequestError
from merging.layerwise.reconstructions import again, data, load, reconstruct
from merging.layerwise.test_reconstruct_truth import seen


def test_every_weight_is_the_gram_weighted_mean_on_the_merged_models_inputs() -> None:
    folders = [tiny.model("vit", seed) for seed in range(2)]
    own = [data(folders[0], 2, seed=s) for s in (0, 1)]
    own[1] = [{"pixel_values": 2 * b["pixel_values"] + 1} for b in own[1]]  # other data than the first model's
    weights = (0.25, 0.75)
    merged = reconstruct(
        folders, [again(o) for o in own], weights=weights, align=False, method="regmean++", floor=0, alpha=0.8
    )
    m, parents = merged.load_into(load(folders[0])), [load(f) for f in folders]
    for name, module in m.named_modules():
        if not isinstance(module, torch.nn.Linear):
            continue
        total, cross = 0.0, 0.0
        for batches, weight, parent in zip(own, weights, parents, strict=True):
            x = seen(m, module, batches)[0]
            gram = x.T @ x / len(x)
            gram = weight * (0.8 * gram + 0.2 * np.diag(np.diag(gram)))
            linear = parent.get_submodule(name)
            total, cross = total + gram, cross + gram @ linear.weight.detach().numpy().T
        np.testing.assert_allclose(module.weight.detach().numpy().T, np.linalg.solve(total, cross), atol=1e-7)
        bias = sum(w * p.get_submodule(name).bias for w, p in zip(weights, parents, strict=True))
        torch.testing.assert_close(module.bias, bias)


@pytest.mark.parametrize("name", ["mixtral", "gpt2"])
def test_on_one_set_of_data_for_all_it_is_the_average(name: str) -> None:
    folders = [tiny.model(name, seed) for seed in range(2)]
    batches = again(data(folders[0], 2))
    merged = reconstruct(folders, [batches, batches], align=False, method="regmean++").state_dict()
    first, second = (tiny.tensors(folder) for folder in folders)
    for tensor in first:
        torch.testing.assert_close(merged[tensor], (first[tensor] + second[tensor]) / 2, rtol=0, atol=1e-9)


def test_data_for_each_model_is_asked_for() -> None:
    folders = [tiny.model("vit", seed) for seed in range(2)]
    with pytest.raises(RequestError, match="each model's own data"):
        reconstruct(folders, again(data(folders[0], 1)), method="regmean++")
