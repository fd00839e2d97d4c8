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


def test_with_expert_goals_every_example_counts_by_the_posterior() -> None:
    folders = [tiny.model("llama", seed) for seed in range(2)]
    batches = data(folders[0], 2)
    one = again(batches)
    options = {"align": False, "method": "regmean++", "floor": 0, "temperature": 4.0}
    merged = reconstruct(folders, [one, one], goals="expert", **options)
    m, parents = merged.load_into(load(folders[0])), [load(folder) for folder in folders]
    told = []
    with torch.no_grad():
        for parent in parents:
            scores = torch.cat([parent(**batch).logits for batch in batches]).log_softmax(-1)[:, :-1]
            ids, mask = (torch.cat([batch[k] for batch in batches])[:, 1:] for k in ("input_ids", "attention_mask"))
            told.append((scores.gather(2, ids[..., None])[..., 0] * mask).sum(1) / 4)
    believed = torch.stack(told).softmax(0)
    rows = believed[:, :, None].expand(-1, -1, batches[0]["input_ids"].shape[1])
    kept = torch.cat([batch["attention_mask"] for batch in batches]).bool()
    rows = rows[:, kept].numpy()
    for name in ("model.layers.0.mlp.up_proj", "model.layers.1.self_attn.o_proj"):
        x = seen(m, m.get_submodule(name), batches)[0][kept.flatten().numpy()]
        total, cross = 0.0, 0.0
        for parent, share in zip(parents, rows, strict=True):
            gram = (x * share[:, None]).T @ x
            gram = 0.9 * gram + 0.1 * np.diag(np.diag(gram))
            total, cross = total + gram, cross + gram @ parent.get_submodule(name).weight.detach().numpy().T
        found = m.get_submodule(name).weight.detach().numpy().T
        np.testing.assert_allclose(found, np.linalg.solve(total, cross), atol=1e-5)


def test_mean_goals_would_be_the_plain_average_and_are_refused() -> None:
    folders = [tiny.model("vit", seed) for seed in range(2)]
    with pytest.raises(RequestError, match="plain average") as caught:
        reconstruct(folders, [again(data(folders[0], 1))] * 2, align=False, method="regmean++", goals="mean")
    assert caught.value.keys == ("goals",)
