"""Gram matrices against the activations themselves, for every architecture."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from calibration.hooks import batches, data, disk_name, inputs_by_module, patches, rows, stock
from isomerge.calibration import calibrate, open_statistics
from isomerge.errors import CheckpointError, IsomergeError, RequestError
from models import MODELS, model, tensors

every = pytest.mark.parametrize("name", MODELS)


@every
def test_the_gram_matrix_is_that_of_the_rows_each_layer_read(name: str) -> None:
    folder = model(name, dtype=torch.float32)
    batch, module = data(folder), stock(folder, torch.float32)
    batch = {k: v.float() if v.is_floating_point() else v for k, v in batch.items()}
    found = calibrate(folder, batches(batch))
    seen, checked = inputs_by_module(module, batch), 0
    for layer, values in seen.items():
        tied = module.get_submodule(layer).weight is getattr(module.get_input_embeddings(), "weight", None)
        stored = layer + ".weight" if tied else disk_name(module, layer, folder)
        if values.ndim == 4:
            x = patches(values, module.config.patch_size)
        else:
            x = rows(values, batch, layer)
        gram = found.gram(stored)
        assert gram.count == len(x), layer
        np.testing.assert_allclose(gram.product.numpy(), x.T @ x, rtol=1e-5, atol=1e-5, err_msg=layer)
        np.testing.assert_allclose(gram.total.numpy(), x.sum(0), rtol=1e-5, atol=1e-5, err_msg=layer)
        checked += 1
    assert checked >= 9


@every
def test_every_matrix_but_tables_has_one(name: str) -> None:
    folder = model(name)
    found = calibrate(folder, batches(data(folder)))
    module = stock(folder)
    tables = {id(m.weight) for m in module.modules() if isinstance(m, torch.nn.Embedding)}
    matrices = {
        disk_name(module, n, folder) for n, m in module.named_modules()
        if getattr(m, "weight", None) is not None and m.weight.ndim > 1 and id(m.weight) not in tables
    }  # fmt: skip
    experts = {n for n in tensors(folder) if ".experts." in n}
    assert {w for w in found.weights if w in tensors(folder)} == (matrices | experts) - {None}


@every
def test_batches_of_any_size_give_the_same(name: str) -> None:
    folder = model(name)
    batch = data(folder)
    whole, parts = (
        calibrate(folder, batches(batch, *s), what=("gram", "units", "activations")) for s in ((), (1, 3, 2))
    )
    assert whole.info == parts.info
    for tensor in whole.stored.tensors:
        one, other = whole.stored.read(tensor), parts.stored.read(tensor)
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6 * float(one.abs().max()), msg=tensor)


def test_padding_counts_nothing() -> None:
    folder = model("bert")
    batch = data(folder)
    wider = {n: torch.nn.functional.pad(t, (0, 3)) for n, t in batch.items()}
    one, other = (calibrate(folder, batches(b)) for b in (batch, wider))
    assert one.gram(one.weights[0]).count == int(batch["attention_mask"].sum())
    for weight in one.weights:
        torch.testing.assert_close(one.gram(weight).product, other.gram(weight).product, rtol=1e-6, atol=1e-6)


def test_each_expert_is_measured_on_the_tokens_that_were_sent_to_it() -> None:
    folder = model("mixtral")
    batch, module = data(folder), stock(folder)
    found = calibrate(folder, batches(batch))
    seen = {}
    layer = module.model.layers[1].mlp.experts
    handle = layer.register_forward_pre_hook(lambda m, args: seen.update(x=args[0], sent=args[1]))
    with torch.no_grad():
        module(**batch)
    handle.remove()
    stored, real = tensors(folder), batch["attention_mask"].reshape(-1).bool()
    for expert in range(3):
        prefix = f"model.layers.1.block_sparse_moe.experts.{expert}."
        x = seen["x"][real & (seen["sent"] == expert).any(1)]
        w1, w3 = (stored[prefix + f"{w}.weight"] for w in ("w1", "w3"))
        hidden = torch.nn.functional.silu(x @ w1.T) * (x @ w3.T)
        for weight, read in (("w1", x), ("w3", x), ("w2", hidden)):
            gram = found.gram(prefix + weight + ".weight")
            assert gram.count == len(read)
            torch.testing.assert_close(gram.product, read.T @ read, rtol=1e-6, atol=1e-8)


def test_a_file_says_what_was_measured_of_what_on_what(tmp_path: Path) -> None:
    folder = model("gpt2")
    path = calibrate(folder, batches(data(folder)), what=("gram", "fisher")).save(tmp_path / "s.safetensors")
    with safe_open(path, framework="pt") as file:
        told = json.loads(file.metadata()["isomerge"])
    assert told["examples"] == 6 and len(told["data_sha256"]) == 64 and len(told["model_sha256"]) == 64
    assert told["maps"]["transformer.h.0.attn.c_attn.weight"]["transposed"] is True
    again = open_statistics(path)
    assert set(again.fisher) == set(tensors(folder))
    other = calibrate(folder, batches(data(folder, seed=1)))
    assert other.info["data_sha256"] != again.info["data_sha256"]
    assert list(tmp_path.iterdir()) == [path]


def test_layers_with_the_same_input_share_one_matrix() -> None:
    folder = model("llama")
    found = calibrate(folder, batches(data(folder)))
    prefix = "model.layers.0.self_attn."
    assert f"gram:{prefix}q_proj.weight" in found.stored.tensors
    assert f"gram:{prefix}k_proj.weight" not in found.stored.tensors
    assert torch.equal(found.gram(prefix + "k_proj.weight").product, found.gram(prefix + "q_proj.weight").product)


def test_a_limit_reads_the_first_examples_only() -> None:
    folder = model("vit")
    batch = data(folder)
    first = {name: tensor[:4] for name, tensor in batch.items()}
    some, same = calibrate(folder, batches(batch, 3, 3), limit=4), calibrate(folder, batches(first))
    assert some.info == same.info
    weight = some.weights[0]
    torch.testing.assert_close(some.gram(weight).product, same.gram(weight).product)


def test_only_measures_what_it_names() -> None:
    folder = model("vit")
    found = calibrate(folder, batches(data(folder)), only=r"layer\.1\..*query")
    assert found.weights == ["vit.encoder.layer.1.attention.attention.query.weight"]
    with pytest.raises(RequestError, match="no name contains 'nothing'"):
        calibrate(folder, batches(data(folder)), only="nothing")


def test_activations_that_are_not_finite_are_refused_with_their_place() -> None:
    folder = model("vit")
    batch = data(folder)
    batch["pixel_values"][4, 0, 0, 0] = torch.nan
    with pytest.raises(
        IsomergeError, match=r"batch 2 of the data: .*patch_embeddings\.projection\.weight.* not finite"
    ):
        calibrate(folder, batches(batch, 3, 3))


def test_bad_requests_are_refused(tmp_path: Path) -> None:
    folder = model("vit")
    with pytest.raises(RequestError, match="Did you mean 'gram'"):
        calibrate(folder, batches(data(folder)), what={"grams"})
    with pytest.raises(RequestError, match="what is empty"):
        calibrate(folder, batches(data(folder)), what=())
    with pytest.raises(RequestError, match="not one batch"):
        calibrate(folder, lambda: iter([]))
    with pytest.raises(RequestError, match="at least one example"):
        calibrate(folder, batches(data(folder)), limit=0)
    with pytest.raises(RequestError, match="one row per"):
        calibrate(folder, lambda: iter([{"pixel_values": torch.zeros(2, 3, 8, 8), "labels": torch.zeros(3)}]))
    with pytest.raises(RequestError, match=r"no config\.json"):
        calibrate({"w": torch.zeros(2)}, batches(data(folder)))
    with pytest.raises(CheckpointError, match="does not say what was measured"):
        open_statistics(folder / "model.safetensors")
    found = calibrate(folder, batches(data(folder)), what={"units"})
    with pytest.raises(RequestError, match="was not measured"):
        found.gram("vit.layernorm.weight")
