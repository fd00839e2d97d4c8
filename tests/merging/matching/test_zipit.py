"""ZipIt as a method: correlations of numpy, weights by the definition, one model's layers, classifiers side by side."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

import isomerge
import models as tiny
from isomerge.errors import RequestError
from isomerge.evaluation.verify import verify
from isomerge.merging.matching.zipping import zip_units
from merging.matching.unit_models import copied, feed_forwards, reordered, with_other_units
from merging.transport.model_pairs import batches, permuted, seen
from models import mostly_slow

FAMILIES = ["vit", "llama", "gpt2", "bert", "distilbert", "opt", "olmo2", "gemma2", "deberta", "neox", "qwen3"]


def zipped(*models: Path, **options: object) -> isomerge.Merged:
    return isomerge.merge(list(models), method="zipit", data=batches(models[0]), **options)


@pytest.mark.parametrize("name", mostly_slow(FAMILIES, "vit", "llama"))
def test_copies_of_a_model_zip_to_it_bit_for_bit(name: str) -> None:
    model = tiny.model(name)
    state = zipped(model, copied(model)).state_dict()
    assert all(tiny.same_bytes(state[n], t) for n, t in tiny.tensors(model).items())


@pytest.mark.parametrize("name", ["vit", "llama"])
def test_units_in_another_order_find_each_other(name: str) -> None:
    model = tiny.model(name)
    merged = zipped(model, reordered(model))
    assert all(torch.equal(merged.state_dict()[n], t) for n, t in tiny.tensors(model).items())
    assert all(row == {"across": 7, "within": 0, "single": 0} for row in merged.report()["zipped"].values())


@pytest.mark.parametrize("name", ["vit", "llama"])
def test_a_model_in_another_basis_comes_back_after_its_alignment(name: str) -> None:
    model = tiny.model(name)
    merged = zipped(model, permuted(model), align=True)
    expected, got = tiny.logits(model), tiny.logits(model, merged.state_dict(), **merged.config_changes)
    assert tiny.difference(expected, got) < 1e-12


@pytest.mark.parametrize("options", [{}, {"repeats": 0.0, "within": 0.0}, {"repeats": 0.9, "within": 1.0}], ids=str)
@pytest.mark.parametrize("count", [2, 3])
def test_weights_are_those_of_the_definition(count: int, options: dict[str, float]) -> None:
    first = tiny.model("vit")
    models = [first, *(with_other_units(first, tiny.model("vit", seed)) for seed in range(1, count))]
    weights = [1.0, 2.0, 3.0][:count]
    merged = zipped(*models, weights=weights, **options)
    found, states = tiny.arrays(merged.state_dict()), [tiny.arrays(model) for model in models]
    shares = np.array(weights) / sum(weights)
    names = [f"vit.layers.{layer}.mlp.fc2" for layer in range(2)]  # in memory
    activations = [seen(model, names, batches(first)) for model in models]
    for layer, (up, down) in enumerate(feed_forwards(first)):
        S = np.corrcoef(np.concatenate([one[layer].T for one in activations]))
        settings = {"repeats": 0.3, "within": 0.125, **options}
        groups = zip_units(torch.tensor(S), torch.arange(7 * count) // 7, 7, **settings)
        for number, group in enumerate(groups):
            units = [divmod(unit, 7) for unit in group]
            for name in up:
                mean = np.mean([states[k][name][i] for k, i in units], axis=0)
                np.testing.assert_allclose(found[name][number], mean, rtol=1e-12, atol=1e-14)
            handed = sum(shares[k] * states[k][down][:, i] for k, i in units)
            np.testing.assert_allclose(found[down][:, number], handed, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", mostly_slow([*FAMILIES[:4], "gemma2", "neox", "qwen3"], "vit", "llama"))
def test_up_to_a_layer_the_rest_is_that_of_the_named_model(name: str) -> None:
    pair = [tiny.model(name), tiny.model(name, 1)]
    merged = [zipped(*pair, up_to=1, rest=rest).state_dict() for rest in (1, 2)]
    whole = zipped(*pair).state_dict()
    for state, model in zip(merged, pair, strict=True):
        own = tiny.tensors(model)
        assert {n: t.shape for n, t in state.items()} == {n: t.shape for n, t in own.items()}
        for n, t in own.items():
            late = ".1." in n or n.startswith(("classifier", "lm_head", "embed_out", "vit.layernorm", "model.norm"))
            late |= "final_layer_norm" in n or "ln_f" in n
            assert torch.equal(state[n], t if late else whole[n]), n
    assert any(not torch.equal(merged[0][n], merged[1][n]) for n in whole)


def test_the_classifiers_of_all_models_stand_side_by_side(tmp_path: Path) -> None:
    """Of copies that have other classifiers, the merged model's outputs are those of all."""
    first = tiny.model("vit")
    other = tiny.tensors(tiny.model("vit", 1))
    heads = {n: t for n, t in other.items() if n.startswith("classifier")}
    labels = {"id2label": {str(k): f"kind {k}" for k in range(5)}}
    second = tiny.variant(reordered(first), heads, "other-task", **labels)
    merged = zipped(first, second, outputs="apart")
    out = tmp_path / "merged"
    merged.save(out)
    assert verify(out).verdict == "good"
    expected = torch.cat([tiny.logits(first), tiny.logits(second)], 1)
    assert tiny.difference(expected, tiny.logits(out)) < 1e-12
    assert merged.report()["outputs"] == [[0, 5], [5, 10]]
    config = transformers.AutoConfig.from_pretrained(out)
    assert config.num_labels == 10 and config.id2label[7] == "kind 2" and config.label2id["LABEL_3"] == 3


def test_labels_that_several_models_have_get_the_number_of_the_model() -> None:
    merged = zipped(tiny.model("vit"), tiny.model("vit", 1), outputs="apart")
    names = merged.config_changes["id2label"]
    assert names[0] == "LABEL_0 (1)" and names[9] == "LABEL_4 (2)"


@pytest.mark.parametrize(("name", "options", "words"), [
    ("vit", {"up_to": 3}, "up_to is 3, and the models have 2 layers"), ("vit", {"rest": 3}, "one of 2 models"),
    ("vit", {"up_to": 1, "outputs": "apart"}, "no stock class has a tail for each"),
    ("llama", {"outputs": "apart"}, "in a classifier only"), ("vit", {"repeats": 1.5}, "between 0 and 1"),
    ("t5", {"up_to": 1}, "an encoder and a decoder"), ("mixtral", {}, "no feed-forward is known"),
], ids=str)  # fmt: skip
def test_what_cannot_be_zipped_says_why(name: str, options: dict[str, object], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        zipped(tiny.model(name), tiny.model(name, 1), **options)


def test_data_are_needed() -> None:
    with pytest.raises(RequestError, match="data"):
        isomerge.merge([tiny.model("vit"), tiny.model("vit", 1)], method="zipit")
