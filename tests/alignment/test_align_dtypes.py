"""Exact in every dtype: OUT has the source's dtype, and differs from the source by that dtype's rounding alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import isomerge
from models import difference, logits, mean, model, mostly_slow, read_config, same_bytes, tensors, variant

# what rounding every weight once may change in the outputs, relative to the largest: a few dozen roundings add up
ROUNDING = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 1.5e-1}


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("family", mostly_slow(["vit", "gpt2", "llama", "bert"], "llama"))
@pytest.mark.parametrize("level", ["rotation", "full"])
def test_out_has_the_dtype_of_the_source_and_its_function(
    family: str, dtype: torch.dtype, level: str, tmp_path: Path
) -> None:
    anchor, source = model(family, 0, dtype), model(family, 1, dtype)
    isomerge.align(source, anchor=anchor, level=level).save(tmp_path / "out")
    found = tensors(tmp_path / "out")
    assert {t.dtype for t in found.values()} == {dtype}
    assert difference(logits(source), logits(tmp_path / "out")) <= ROUNDING[dtype]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_rounding_happens_once_at_the_end(dtype: torch.dtype) -> None:
    """The written tensors are the float64 solution, rounded: solving sees no rounding of its own."""
    anchor, source = model("vit", 0, dtype), model("vit", 1, dtype)
    wide = [variant(m, {n: t.double() for n, t in tensors(m).items()}, "wide") for m in (anchor, source)]
    narrow = isomerge.align(source, anchor=anchor).state_dict()
    exact = isomerge.align(wide[1], anchor=wide[0]).state_dict()
    assert all(same_bytes(narrow[n], t.to(dtype)) for n, t in exact.items())


def test_source_and_anchor_may_differ_in_dtype() -> None:
    anchor, source = model("bert", 0, torch.float64), model("bert", 1, torch.bfloat16)
    found = isomerge.align(source, anchor=anchor).state_dict()
    assert {t.dtype for t in found.values()} == {torch.bfloat16}


def test_another_dtype_can_be_asked_for(tmp_path: Path) -> None:
    source = model("bert", 1, torch.bfloat16)
    isomerge.align(source, anchor=model("bert", 0, torch.bfloat16)).save(tmp_path / "out", out_dtype="float32")
    assert {t.dtype for t in tensors(tmp_path / "out").values()} == {torch.float32}
    config = read_config(tmp_path / "out")
    assert config.get("dtype", config.get("torch_dtype")) == "float32"
    assert difference(logits(source), logits(tmp_path / "out")) <= 1e-5


# --- what does not fit the dtype is said ------------------------------------------------------------------------------
def with_gain(like: Path, gain: float, name: str, *, first: float | None = None) -> Path:
    """Layer 0's first norm with this gain on every unit, and another one on unit 0."""
    norms = ("vit.encoder.layer.0.layernorm_before.weight", "model.layers.0.input_layernorm.weight")
    norm = next(n for n in norms if n in tensors(like))
    weight = torch.full_like(tensors(like)[norm], gain)
    weight[0] = gain if first is None else first
    return variant(like, {norm: weight}, name)


def test_overflow_is_reported(tmp_path: Path) -> None:
    anchor = with_gain(model("vit", 0, torch.float16), 0.01, "small")
    source = with_gain(model("vit", 1, torch.float16), 4000.0, "large")
    alignment = isomerge.align(source, anchor=anchor)
    alignment.save(tmp_path / "out", verify=False)
    lost = [n for n, t in tensors(tmp_path / "out").items() if not torch.isfinite(t).all()]
    assert lost  # the weights really do not fit: 4000 / 0.01 · w > 65504
    notes = " ".join(alignment.report()["notes"])
    assert "overflow" in notes and all(n in notes for n in lost)


def test_underflow_is_reported(tmp_path: Path) -> None:
    anchor = with_gain(model("llama", 0, torch.float16), 4000.0, "large")
    source = with_gain(model("llama", 1, torch.float16), 0.001, "tiny")
    alignment = isomerge.align(source, anchor=anchor)
    alignment.save(tmp_path / "out", verify=False)
    lost = [n for n, t in tensors(tmp_path / "out").items() if (t == 0).any()]
    assert lost  # 0.001 / 4000 · w < 3e-8
    notes = [n for n in alignment.report()["notes"] if "became zero" in n]
    assert notes and all(any(name in n for n in notes) for name in lost)


def test_a_dtype_that_holds_everything_is_not_complained_about(tmp_path: Path) -> None:
    alignment = isomerge.align(model("vit", 1, torch.float32), anchor=model("vit", 0, torch.float32))
    alignment.save(tmp_path / "out")
    report = alignment.report()
    assert not any("overflow" in n or "became zero" in n for n in report["notes"])
    assert report["max_output_difference"] <= 1e-5


# --- gains that cannot be divided by ----------------------------------------------------------------------------------
@pytest.mark.parametrize("small", [0.0, 1e-6], ids=["zero", "tiny"])
def test_an_anchor_with_a_gain_near_zero_is_written_canonical_beside_out(small: float, tmp_path: Path) -> None:
    anchor, source = with_gain(model("vit", 0), 1.0, f"zero-{small}", first=small), model("vit", 1)
    alignment = isomerge.align(source, anchor=anchor)
    assert alignment.report()["gauge"] == "canonical"
    assert any("anchor_out" in n for n in alignment.report()["notes"])
    alignment.save(tmp_path / "out", anchor_out=tmp_path / "anchor")
    assert difference(logits(source), logits(tmp_path / "out")) <= 1e-10
    assert difference(logits(anchor), logits(tmp_path / "anchor")) <= 1e-10
    first, second = tensors(tmp_path / "anchor"), tensors(tmp_path / "out")
    norms = [n for n in first if "layernorm" in n]
    assert norms and all(first[n].equal(second[n]) for n in norms)  # one gauge for both: their mean is right
    near, far = logits(anchor, mean(first, second)), logits(anchor, mean(tensors(anchor), second))
    assert torch.isfinite(near).all() and difference(near, far) > 1e-3


def test_anchor_out_is_the_anchor_itself_where_nothing_had_to_change(tmp_path: Path) -> None:
    anchor = model("vit", 0)
    alignment = isomerge.align(model("vit", 1), anchor=anchor)
    assert alignment.report()["gauge"] == "anchor"
    alignment.save(tmp_path / "out", anchor_out=tmp_path / "anchor")
    before, after = tensors(anchor), tensors(tmp_path / "anchor")
    assert max(float((before[n] - after[n]).abs().max()) for n in before) <= 1e-12


# --- tied tables ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen2"])
def test_rotating_a_tied_stream_unties_it_and_says_so(family: str, tmp_path: Path) -> None:
    anchor, source = (model(family, s, tie_word_embeddings=True) for s in (0, 1))
    assert "lm_head.weight" not in tensors(source)
    alignment = isomerge.align(source, anchor=anchor)
    alignment.save(tmp_path / "out", anchor_out=tmp_path / "anchor")
    assert alignment.report()["untied"] and any("tie_word_embeddings" in n for n in alignment.report()["notes"])
    for folder, parent in ((tmp_path / "out", source), (tmp_path / "anchor", anchor)):
        assert read_config(folder)["tie_word_embeddings"] is False
        assert "lm_head.weight" in tensors(folder)
        assert difference(logits(parent), logits(folder)) <= 1e-10
    merged = mean(tensors(tmp_path / "anchor"), tensors(tmp_path / "out"))
    assert torch.isfinite(logits(tmp_path / "out", merged)).all()
    changed = {k for k, v in read_config(tmp_path / "out").items() if read_config(source).get(k) != v}
    assert changed == {"tie_word_embeddings"}


@pytest.mark.parametrize("options", [{"level": "permutation"}, {"level": "rotation"}, {"only": "ffn"}, {"layers": "0"}])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_tied_model_stays_tied_unless_its_stream_rotates(
    family: str, options: dict[str, str], tmp_path: Path
) -> None:
    anchor, source = (model(family, s, tie_word_embeddings=True) for s in (0, 1))
    alignment = isomerge.align(source, anchor=anchor, **options)
    alignment.save(tmp_path / "out")
    assert not alignment.report()["untied"]
    assert read_config(tmp_path / "out") == read_config(source)
    assert tensors(tmp_path / "out").keys() == tensors(source).keys()
    assert difference(logits(source), logits(tmp_path / "out")) <= 1e-10


def test_a_tied_post_norm_model_is_never_untied(tmp_path: Path) -> None:
    anchor, source = model("distilbert", 0), model("distilbert", 1)
    alignment = isomerge.align(source, anchor=anchor)
    alignment.save(tmp_path / "out")
    assert "residual" in alignment.transform.elements and not alignment.report()["untied"]
    assert read_config(tmp_path / "out") == read_config(source)
    assert difference(logits(source), logits(tmp_path / "out")) <= 1e-10


@pytest.mark.parametrize("zero_in", ["source", "anchor", "both"])
@pytest.mark.parametrize("family", ["vit", "llama"])
def test_a_norm_whose_gains_are_all_zero_is_not_divided_by(family: str, zero_in: str, tmp_path: Path) -> None:
    models = {role: model(family, seed) for role, seed in (("source", 1), ("anchor", 0))}
    for role in models if zero_in == "both" else [zero_in]:
        models[role] = with_gain(models[role], 0.0, "all-zero")
    isomerge.align(models["source"], anchor=models["anchor"]).save(tmp_path / "out")
    assert difference(logits(models["source"]), logits(tmp_path / "out")) <= 1e-10
    assert isomerge.selftest(models["source"]).unchanged is True
