"""Refining: a few gradient steps on each block, towards the goal its maps were solved to."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import models as tiny
from isomerge.merging.layerwise import gradient_steps
from merging.layerwise.reconstructions import again, data, load, reconstruct
from merging.layerwise.test_reconstruct_data import padded
from merging.layerwise.test_reconstruct_truth import seen
from models import mostly_slow


def pair(name: str, **changes):
    return [tiny.model(name, seed, **changes) for seed in range(2)]


@pytest.mark.parametrize(
    "name", mostly_slow(["vit", "gpt2", "llama", "bert", "gemma2", "mixtral", "t5", "neox", "deberta"], "vit", "llama")
)
def test_the_error_of_every_block_is_lower(name: str) -> None:
    folders = pair(name)
    merged = reconstruct(folders, again(data(folders[0], 2)), align=False, features="joint", refine=50)
    blocks = merged.report()["refined"]
    assert len(blocks) == (4 if name == "t5" else 2)
    for block in blocks:
        assert block["error_after"] < block["error_before"] and block["batches"] == 2
        stored = [tensor for tensor in tiny.tensors(folders[0]) if tensor.startswith(block["block"] + ".")]
        assert stored, "blocks are named as on disk"
    assert tiny.logits(folders[0], merged.state_dict(), **merged.config_changes).isfinite().all()


def test_the_error_is_that_of_the_stream_after_the_block() -> None:
    """Against hooks on stock modules; the last block is what the final norm reads."""
    folders = pair("vit")
    batches = data(folders[0], 2)
    merged = reconstruct(folders, again(batches), align=False, weights=[0.3, 0.7], refine=30)
    m, a, b = merged.load_into(load(folders[0])), *(load(f) for f in folders)
    stream, first, second = (seen(model, model.vit.layernorm, batches)[0] for model in (m, a, b))
    goal = 0.3 * first + 0.7 * second
    spread = np.mean([part.var(0).mean() for part in np.split(goal, 2)])
    told = merged.report()["refined"][-1]
    assert told["block"] == "vit.encoder.layer.1"
    assert told["error_after"] == pytest.approx(np.sqrt(((stream - goal) ** 2).mean() / spread), rel=1e-9)


def test_the_old_weights_stay_where_steps_do_not_help(monkeypatch) -> None:
    folders = pair("vit")
    batches = again(data(folders[0], 1))
    expected = reconstruct(folders, batches, align=False)
    monkeypatch.setattr(gradient_steps, "REFINE_RATE", 1e3)
    got = reconstruct(folders, batches, align=False, refine=2)
    assert all(torch.equal(got.state_dict()[name], tensor) for name, tensor in expected.state_dict().items())
    assert all(block["error_after"] == block["error_before"] for block in got.report()["refined"])


def test_copies_of_a_model_stay_that_model() -> None:
    model = tiny.model("llama", 0)
    merged = reconstruct([model, model], again(data(model, 1)), align=False, refine=5)
    for name, tensor in tiny.tensors(model).items():
        torch.testing.assert_close(merged.state_dict()[name], tensor, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", mostly_slow(["vit", "t5"], "vit"))
def test_two_runs_give_the_same_bits(name: str) -> None:
    folders = pair(name)
    batches = again(data(folders[0], 2, size=4))
    options = {"features": "joint", "refine": 8, "polish": 5}
    first, second = (reconstruct(folders, batches, **options).state_dict() for _ in range(2))
    assert all(tiny.same_bytes(first[name], second[name]) for name in first)


@pytest.mark.parametrize("cache, batches", [("0", 1), ("300KB", 2), ("1GB", 6)])
def test_memory_is_bounded_by_taking_fewer_batches(cache, batches: int) -> None:
    """72 images of 5 positions and 12 numbers: 69 kB for input and goal together; half of the cache is for them."""
    folders = pair("vit")
    merged = reconstruct(folders, again(data(folders[0], 6)), align=False, refine=3, cache=cache)
    assert {block["batches"] for block in merged.report()["refined"]} == {batches}


def test_the_batches_are_taken_evenly_over_the_data(monkeypatch) -> None:
    """Where two of six fit, they are the first and the fourth."""
    folders = pair("vit")
    batches = data(folders[0], 6)
    used = [batches[0], batches[3]]
    model = load(folders[0])
    seen_by_block: list[list[torch.Tensor]] = []

    class Spy(gradient_steps.BlockRefinement):
        def _collect(self, *args):
            found = super()._collect(*args)
            seen_by_block.append([one.arguments[0] for one in found])
            return found

    monkeypatch.setattr("isomerge.merging.layerwise.candidates.BlockRefinement", Spy)
    reconstruct([folders[0]] * 2, again(batches), align=False, refine=1, cache="300KB")
    for got, batch in zip(seen_by_block[0], used, strict=True):
        torch.testing.assert_close(got, model.vit.embeddings(batch["pixel_values"]).detach())


@pytest.mark.parametrize("name", mostly_slow(["bert", "gpt2", "t5"], "gpt2"))
def test_padding_has_no_influence(name: str) -> None:
    folders = pair(name)
    batches = data(folders[0], 2)
    expected, got = (
        reconstruct(folders, again(b), align=False, refine=4).report()["refined"]
        for b in (batches, [padded(b, 5) if name != "t5" else _longer(b) for b in batches])
    )
    for first, second in zip(expected, got, strict=True):
        assert first["error_after"] == pytest.approx(second["error_after"], rel=1e-5)


def _longer(batch):
    """More padding for the encoder alone: the decoder of these batches has no mask."""
    found = padded({name: tensor for name, tensor in batch.items() if not name.startswith("decoder")}, 5)
    return {**found, "decoder_input_ids": batch["decoder_input_ids"]}


def test_a_model_whose_blocks_are_one_block_again_and_again_is_left_as_solved(monkeypatch) -> None:
    config = {**tiny.TEXT, "embedding_size": 6, "num_labels": 5}
    monkeypatch.setitem(tiny.MODELS, "albert", ("AlbertForTokenClassification", config))
    folders = pair("albert")
    merged = reconstruct(folders, again(data(folders[0], 1)), align=False, refine=2)
    assert merged.report()["layers"] and "refined" not in merged.report()
