"""Corners a careful reader tried: each was wrong once."""

from __future__ import annotations

import copy
import pickle
import shutil
from pathlib import Path

import pytest
import torch

import isomerge
from isomerge.errors import IsomergeError, RequestError
from models import difference, fingerprint, logits, model, noisy, read_config, tensors, variant


def test_no_output_of_a_family_ever_replaces_an_input(tmp_path: Path) -> None:
    """Two inputs of one name, one of them below OUT."""
    first, second = tmp_path / "p" / "c", tmp_path / "x" / "c"
    shutil.copytree(model("bert", 0), first)
    shutil.copytree(model("bert", 2), second)
    before = fingerprint(second)
    family = isomerge.align_family([first, second], anchor=model("bert", 1))
    with pytest.raises(RequestError, match="inputs are never modified"):
        family.save(tmp_path / "x", force=True)
    assert fingerprint(second) == before


@pytest.mark.parametrize("level", ["permutation", "rotation", "full"])
@pytest.mark.parametrize("wide", [0, 1])
def test_a_float64_and_a_float32_model_can_be_aligned_at_every_level(wide: int, level: str) -> None:
    dtypes = [torch.float32, torch.float32]
    dtypes[wide] = torch.float64
    source, anchor = model("bert", 1, dtypes[0]), model("bert", 0, dtypes[1])
    found = isomerge.align(source, anchor, level=level).state_dict()
    assert all(t.dtype == dtypes[0] for t in found.values())
    assert difference(logits(source), logits(source, found)) <= 1e-5


@pytest.mark.parametrize("level", ["rotation", "full"])
def test_layers_of_an_encoder_decoder_move_alone(level: str) -> None:
    source, anchor = model("t5", 1), model("t5", 0)
    found = isomerge.align(source, anchor, level=level, layers="1").state_dict()
    before = tensors(source)
    changed = {n for n in before if not torch.equal(before[n], found[n])}
    assert changed and all(".block.1." in name for name in changed)
    assert difference(logits(source), logits(source, found)) <= 1e-10


def test_outputs_are_compared_with_the_file_that_was_named(tmp_path: Path) -> None:
    folder = tmp_path / "two"
    shutil.copytree(model("bert", 2), folder)
    shutil.copy(model("bert", 0) / "model.safetensors", folder / "best.safetensors")
    alignment = isomerge.align(folder / "best.safetensors", model("bert", 1))
    alignment.save(tmp_path / "out")
    assert alignment.report()["max_output_difference"] <= 1e-5


def test_a_source_in_memory_has_its_outputs_compared_too(tmp_path: Path) -> None:
    source = isomerge.open_checkpoint(tensors(model("vit", 1)), config=read_config(model("vit", 1)))
    alignment = isomerge.align(source, model("vit", 0))
    alignment.save(tmp_path / "out")
    assert alignment.report()["max_output_difference"] <= 1e-5


@pytest.mark.parametrize("swapped", [False, True])
def test_a_leftover_pooler_in_one_model_stays_and_is_said(swapped: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    pooler = {
        "bert.pooler.dense.weight": torch.randn(12, 12, generator=generator, dtype=torch.float64),
        "bert.pooler.dense.bias": torch.randn(12, generator=generator, dtype=torch.float64),
    }
    pair = [variant(model("bert", 1), pooler, "pooler"), model("bert", 0)]
    source, anchor = reversed(pair) if swapped else pair
    alignment = isomerge.align(source, anchor)
    assert alignment.transform.elements and "pooler" not in alignment.transform.elements
    assert any("pooler" in note for note in alignment.notes())
    found = {n: t for n, t in alignment.state_dict().items() if "pooler" not in n}
    assert difference(logits(model("bert", int(not swapped))), logits(model("bert", 0), found)) <= 1e-10


def test_a_family_of_tied_models_is_written_all_untied_when_one_of_them_must_be(tmp_path: Path) -> None:
    wide = {"hidden_size": 48, "num_attention_heads": 4, "head_dim": 12, "intermediate_size": 64}
    anchor = model("llama", 0, tie_word_embeddings=True, **wide)
    sibling, stranger = noisy(anchor, 0.01), model("llama", 1, tie_word_embeddings=True, **wide)
    family = isomerge.align_family([sibling, stranger], anchor=anchor)
    family.save(tmp_path / "out", anchor_out=tmp_path / "anchor", verify=False)
    folders = [*sorted((tmp_path / "out").iterdir()), tmp_path / "anchor"]
    assert [read_config(f)["tie_word_embeddings"] for f in folders] == [False] * 3
    merged = isomerge.merge([anchor, sibling, stranger], align=True)
    assert "lm_head.weight" in merged.state_dict()


def test_the_universe_rescales_when_asked_to() -> None:
    models = [model("bert", seed) for seed in (0, 1, 2)]
    plain, scaled = (
        isomerge.align_family(models, level="rotation", scale=scale, many="universe") for scale in (False, True)
    )
    first, second = (f.members[1].state_dict() for f in (plain, scaled))
    name = "bert.encoder.layer.0.attention.self.query.weight"
    assert not torch.allclose(first[name], second[name])
    assert difference(logits(models[1]), logits(models[1], second)) <= 1e-10


def test_requests_that_cannot_be_met_are_refused_before_any_work() -> None:
    source, anchor = model("bert", 1), model("bert", 0)
    with pytest.raises(RequestError, match="device"):
        isomerge.align(source, anchor, device="nonsense")
    alignment = isomerge.align(source, anchor)
    with pytest.raises(IsomergeError, match="different architectures"):
        alignment.apply(model("vit", 0))
    with pytest.raises(IsomergeError, match="different width|intermediate_size"):
        alignment.apply(model("bert", 0, intermediate_size=9))
    found = isomerge.align(source, anchor, only="residual", level="rotation")
    assert any("nothing to move" in note for note in found.notes())


def test_one_checkpoint_merged_with_itself_is_itself() -> None:
    opened = isomerge.open_checkpoint(model("bert", 0))
    found = isomerge.merge([opened, opened], align=True).state_dict()
    assert all(torch.equal(found[n], t) for n, t in tensors(model("bert", 0)).items())


def test_without_an_anchor_two_models_give_one_alignment() -> None:
    assert len(isomerge.align_family([model("bert", 0), model("bert", 1)]).members) == 1


@pytest.mark.parametrize("kind", ["folder", "state_dict"])
def test_results_can_be_pickled_and_copied(kind: str) -> None:
    source, anchor = model("bert", 0), model("bert", 1)
    if kind == "state_dict":
        source, anchor = (isomerge.open_checkpoint(tensors(m), config=read_config(m)) for m in (source, anchor))
    alignment = isomerge.align(source, anchor, progress=lambda *_: None)
    for again in (pickle.loads(pickle.dumps(alignment)), copy.deepcopy(alignment)):
        assert again.report() == alignment.report() == pickle.loads(pickle.dumps(alignment.report()))
        torch.testing.assert_close(again.state_dict(), alignment.state_dict())
    family = isomerge.align_family([source], anchor=anchor)
    assert copy.deepcopy(pickle.loads(pickle.dumps(family))).report() == family.report()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("layers", [0]), ("threads", "2"), ("sweeps", "3"), ("sweeps", True), ("scale", "yes"), ("level", 1),
        ("only", ["ffn"]), ("limit", 2.5), ("device", None), ("max_memory", [1]), ("transform", 3),
    ],
)  # fmt: skip
def test_an_argument_of_the_wrong_type_is_named(name: str, value: object) -> None:
    with pytest.raises(RequestError, match=f"^{name} must be "):
        isomerge.align(model("bert", 0), model("bert", 1), **{name: value})  # type: ignore[arg-type]


def test_a_saved_alignment_can_be_reported(tmp_path: Path) -> None:
    isomerge.align(model("bert", 0), model("bert", 1)).save(tmp_path / "one")
    isomerge.align_family([model("bert", 0), model("bert", 1), model("bert", 2)]).save(tmp_path / "many", verify=False)
    for folder in (tmp_path / "one", *(tmp_path / "many").iterdir()):
        assert isomerge.report(folder)["kind"] == "align"
    isomerge.align(model("bert", 0), model("bert", 1)).save(tmp_path / "two", report=False)
    assert not (tmp_path / "two" / "isomerge.json").exists()
