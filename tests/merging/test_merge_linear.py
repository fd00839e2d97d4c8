"""The first merge: a weighted average, with or without alignment."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import isomerge
from isomerge.errors import IsomergeError, RequestError
from models import difference, fingerprint, logits, mean, model, mostly_slow, noisy, tensors, variant
from samples import batches


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_average_is_that_of_float64_rounded_once(dtype: torch.dtype, tmp_path: Path) -> None:
    first, second = model("bert", 0, dtype), model("bert", 1, dtype)
    merged = isomerge.merge([first, second], weights=[1, 3])
    merged.save(tmp_path / "out")
    a, b, found = tensors(first), tensors(second), tensors(tmp_path / "out")
    for name, tensor in found.items():
        expected = (0.25 * a[name].double() + 0.75 * b[name].double()).to(dtype)
        ulp = 4e-16 if dtype == torch.float64 else 0  # in float64 the sum itself may be rounded once or twice
        assert tensor.dtype == dtype and torch.allclose(tensor, expected, rtol=ulp, atol=ulp), name


@pytest.mark.parametrize("family", ["vit", "llama", "bert", "mixtral", "gpt2"])
def test_merging_with_alignment_is_the_mean_of_the_anchor_and_the_aligned_source(family: str) -> None:
    first, second = model(family, 0), model(family, 1)
    aligned = isomerge.align(second, first).state_dict()
    expected = mean(tensors(first), aligned)
    found = isomerge.merge([first, second], align=True).state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.allclose(tensor, expected[name], rtol=1e-12, atol=1e-14), name


@pytest.mark.slow
@pytest.mark.parametrize("family", mostly_slow(["vit", "llama", "bert", "gpt2"], "vit"))
def test_three_models_meet_at_a_common_mean(family: str) -> None:
    models = [model(family, seed) for seed in range(3)]
    common = {"many": "universe", "sweeps": 2}
    family_of_three = isomerge.align_family([*models[1::-1], *models[2:]], **common)
    moved = [member.state_dict() for member in family_of_three.members]
    found = isomerge.merge(models, align=common).state_dict()
    assert found.keys() == moved[0].keys()
    for name, tensor in found.items():
        assert torch.allclose(tensor, sum(state[name] for state in moved) / 3, rtol=1e-12, atol=1e-14), name
    align = {**common, "evidence": "weights"}
    with_data = isomerge.merge(
        models, method="reconstruct", goals="mean", data=batches(models[0]), ridge=1e12, align=align
    ).state_dict()
    assert all(torch.allclose(with_data[name], found[name], atol=1e-6) for name in found)


@pytest.mark.parametrize("share", [0.0, 1.0])
@pytest.mark.parametrize("family", ["vit", "llama", "bert"])
def test_at_either_end_the_merge_computes_what_that_parent_computes(family: str, share: float) -> None:
    models = [model(family, 0), model(family, 1)]
    found = isomerge.merge(models, align=True, weights=[1 - share, share]).state_dict()
    assert difference(logits(models[int(share)]), logits(models[0], found)) <= 1e-10


def test_a_tied_pair_is_merged_untied_and_loads(tmp_path: Path) -> None:
    models = [model("llama", seed, tie_word_embeddings=True) for seed in (0, 1)]
    isomerge.merge(models, align=True).save(tmp_path / "out")
    assert logits(tmp_path / "out").isfinite().all()
    assert "lm_head.weight" in tensors(tmp_path / "out")


def test_siblings_are_averaged_as_they_are() -> None:
    base = model("vit", 0, hidden_size=48, num_attention_heads=4, intermediate_size=64)
    models = [base, noisy(base, 0.01)]
    plain, aligned = (isomerge.merge(models, align=a).state_dict() for a in (False, True))
    assert all(torch.equal(plain[n], aligned[n]) for n in plain)


def test_the_base_gives_config_side_files_and_the_anchor(tmp_path: Path) -> None:
    first = variant(model("vit", 0), {}, "with-licence")
    (first / "LICENSE").write_text("first")
    merged = isomerge.merge([model("vit", 1), model("vit", 2)], base=first, align=True)
    merged.save(tmp_path / "out")
    assert (tmp_path / "out" / "LICENSE").read_text() == "first"
    assert merged.report()["donor"] == str(first)


def test_every_misfit_is_listed_before_anything_is_read_or_written(tmp_path: Path) -> None:
    other = variant(model("bert", 1), {"classifier.bias": torch.zeros(4)}, "wrong", drop=("classifier.weight",))
    before = fingerprint(other)
    with pytest.raises(RequestError, match=r"classifier\.weight.*classifier\.bias is \(5,\)"):
        isomerge.merge([model("bert", 0), other]).save(tmp_path / "out")
    assert not (tmp_path / "out").exists() and fingerprint(other) == before


def test_nan_weights_are_refused_and_nothing_is_left(tmp_path: Path) -> None:
    bad = tensors(model("bert", 1))["classifier.bias"].clone()
    bad[2] = float("nan")
    with pytest.raises(IsomergeError, match=r"classifier\.bias.*NaN"):
        isomerge.merge([model("bert", 0), variant(model("bert", 1), {"classifier.bias": bad}, "nan")]).save(
            tmp_path / "o"
        )
    assert not (tmp_path / "o").exists()


def test_wrong_requests_say_what_to_do() -> None:
    with pytest.raises(RequestError, match="Did you mean 'linear'"):
        isomerge.merge([model("vit", 0), model("vit", 1)], method="linaer")
    with pytest.raises(RequestError, match="1 values for 2 models"):
        isomerge.merge([model("vit", 0), model("vit", 1)], weights=[1])
    with pytest.raises(RequestError, match="needs .*base"):
        isomerge.merge([model("vit", 0), model("vit", 1)], method="ties")
    with pytest.raises(RequestError, match="models is empty"):
        isomerge.merge([])


@pytest.mark.parametrize("align", [False, True])
def test_a_buffer_only_one_model_stores_does_not_stand_in_the_way(align: bool) -> None:
    buffer = {"bert.embeddings.position_ids": torch.arange(19)[None], "bert.rotary.inv_freq": torch.ones(4)}
    models = [model("bert", 0), variant(model("bert", 1), buffer, "buffer")]
    for pair in (models, models[::-1]):
        found = isomerge.merge(pair, align=align).state_dict()
        assert ("bert.embeddings.position_ids" in found) == (pair[0] is models[1])
        assert found.keys() >= tensors(models[0]).keys()
