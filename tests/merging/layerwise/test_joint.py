"""Joint features: one parent's width out of all parents side by side."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import models as tiny
from isomerge.errors import RequestError
from merging.layerwise.reconstructions import again, data, distance, features, load, moved, reconstruct
from merging.layerwise.test_reconstruct_data import padded
from merging.layerwise.test_reconstruct_truth import seen
from models import mostly_slow
from precision import float64_throughout

HEADS, GROUPS = {"head", "ffn"}, {"kv", "ffn"}
# family -> the stream, and which units are chosen. Heads are not where a table of position biases goes through all
# layers or where all heads share the gains of a norm; experts and their units are not.
EXPECTED = {
    **{name: ("joint", HEADS) for name in ("vit", "gpt2", "neox", "opt")},
    **{name: ("joint", GROUPS) for name in ("llama", "qwen2")},
    **{name: ("mean", HEADS) for name in ("bert", "roberta", "distilbert", "deberta")},
    # Queries and keys pass one norm over all heads, with a gain for each: a head brings its gains along, and the sizes
    # of heads from two models even out in the norm as far as the models are alike.
    **{name: ("mean", GROUPS) for name in ("gemma2", "olmo2")},
    "qwen3": ("joint", {"ffn"}),
    "mixtral": ("joint", {"kv"}),
    "t5": ("joint", {"ffn", "cross"}),
}
FREE = ["vit", "gpt2", "llama", "neox", "opt"]  # nothing is left to align


def joint(folders, batches, unseen, **options) -> torch.Tensor:
    merged = reconstruct(folders, again(batches), features="joint", **options)
    return features(load(folders[0], merged.state_dict(), **merged.config_changes), unseen)


@pytest.mark.parametrize("name", mostly_slow(tiny.MODELS, "vit", "llama"))
def test_every_family_has_the_joint_features_it_can_have(name: str) -> None:
    first, second = tiny.model(name, 0), tiny.model(name, 1)
    merged = reconstruct([first, second], again(data(first, 2)), features="joint")
    # `logits` loads by from_pretrained and fails on any missing, unexpected or reshaped key.
    assert tiny.logits(first, merged.state_dict(), **merged.config_changes).isfinite().all()
    found = merged.report()["features"]
    words = {word for space in found["chosen"] for word in space.split(".") if word in {"head", "kv", "ffn", "cross"}}
    assert (found["stream"], words) == EXPECTED[name]
    sizes = {"head": {2, 3}, "kv": {2}, "ffn": {7}, "cross": {3}}
    for space, counts in found["chosen"].items():
        assert len(counts) == 2 and any(sum(counts) in sizes[w] for w in space.split(".") if w in sizes)
    for layer in merged.report()["layers"]:
        assert layer["residual_after"] <= layer["residual_before"] * (1 + 1e-9), layer


@pytest.mark.parametrize("name", mostly_slow(tiny.MODELS, "vit", "llama"))
def test_copies_of_a_model_give_its_function(name: str) -> None:
    model = tiny.model(name, 0)
    batches, unseen = data(model, 1), data(model, 1, seed=9)
    with float64_throughout():
        expected = features(load(model), unseen)
        assert distance(expected, joint([model] * 3, batches, unseen, weights=[0.5, 0.2, 0.3])) < 1e-9


@pytest.mark.parametrize("name", mostly_slow([*FREE, "qwen3", "mixtral"], "vit", "llama"))
def test_a_model_and_its_scrambled_copy_give_its_function(name: str) -> None:
    """To 1e-6: directions without evidence are drawn to the mean of both by a millionth."""
    model = tiny.model(name, 0)
    batches, unseen = data(model, 1), data(model, 1, seed=9)
    with float64_throughout():
        expected = features(load(model), unseen)
        assert distance(expected, joint([model, moved(model, 3)], batches, unseen, weights=[0.7, 0.3])) < 1e-6


@pytest.mark.parametrize("name", mostly_slow(FREE, "vit"))
def test_the_basis_of_a_parent_makes_no_difference(name: str) -> None:
    """To 1e-4 without a ridge; the ridge is per coordinate, so with it to 5 %."""
    first, second = tiny.model(name, 0), tiny.model(name, 1)
    batches, unseen = data(first, 2), data(first, 1, seed=9)
    for options, tolerance in (({"ridge": 1e-8, "floor": 1e-10}, 1e-4), ({}, 5e-2)):
        expected = joint([first, second], batches, unseen, weights=[0.7, 0.3], **options)
        got = joint([first, moved(second, 5)], batches, unseen, weights=[0.7, 0.3], **options)
        assert distance(expected, got) < tolerance


@pytest.mark.parametrize("name", ["vit", "llama", "bert"])
def test_in_float32_copies_agree_to_its_precision(name: str) -> None:
    model = tiny.model(name, 0, torch.float32)
    batches, unseen = data(model, 1), data(model, 1, seed=9)
    for batch in [*batches, *unseen]:
        batch.update({k: t.float() for k, t in batch.items() if t.is_floating_point()})
    expected = features(load(model, dtype=torch.float32), unseen)
    merged = reconstruct([model, model], again(batches), features="joint")
    assert {t.dtype for t in merged.state_dict().values()} == {torch.float32}
    got = features(load(model, merged.state_dict(), dtype=torch.float32), unseen)
    assert distance(expected, got) < 1e-5


@pytest.mark.parametrize("name", mostly_slow(["bert", "gpt2", "mixtral"], "gpt2"))
def test_padding_has_no_influence_on_the_choice(name: str) -> None:
    folders = [tiny.model(name, seed) for seed in range(2)]
    batches = data(folders[0], 2)
    with float64_throughout():
        expected, got = (
            reconstruct(folders, again(b), align=False, features="joint")
            for b in (batches, [padded(b, 5) for b in batches])
        )
    first, second = (merged.report()["features"] for merged in (expected, got))
    assert first["chosen"] == second["chosen"]
    assert first["lost"]["chosen"] == pytest.approx(second["lost"]["chosen"], rel=1e-6)
    unseen = data(folders[0], 1, seed=9)
    first, second = (features(load(folders[0], m.state_dict(), **m.config_changes), unseen) for m in (expected, got))
    assert distance(first, second) < 1e-5


def test_the_stream_is_the_best_of_its_width_and_in_the_basis_nearest_to_the_mean() -> None:
    """Against numpy's eigenvectors of streams that hooks have seen. Gains of 1 leave nothing to fold."""
    folders = []
    for seed in range(2):
        like = tiny.model("llama", seed)
        ones = {n: torch.ones_like(t) for n, t in tiny.tensors(like).items() if "norm" in n}
        folders.append(tiny.variant(like, ones, "no-gains"))
    batches = [{"input_ids": b["input_ids"]} for b in data(folders[0], 2)]
    weights = np.array([0.7, 0.3])
    merged = reconstruct(folders, again(batches), features="joint", weights=weights.tolist())

    # The embeddings are not solved, so they show the map: z = Σ P_m s_m, 29 tokens for 24 coordinates.
    name = "model.embed_tokens.weight"
    tables = np.concatenate([tiny.tensors(f)[name].numpy() for f in folders], 1)
    maps = np.linalg.lstsq(tables, merged.state_dict()[name].numpy(), rcond=None)[0].T  # (12, 24): P_1 beside P_2
    root = np.repeat(np.sqrt(weights), 12)
    basis = maps / root
    np.testing.assert_allclose(basis @ basis.T, np.eye(12), atol=1e-9)

    streams = []
    for model in (load(f) for f in folders):
        after = [layer.post_attention_layernorm for layer in model.model.layers]
        after += [model.model.layers[1].input_layernorm, model.model.norm]
        streams.append(np.concatenate([seen(model, norm, batches)[0] for norm in after]))
    wide = np.concatenate(streams, 1) * root
    wide /= np.linalg.norm(wide, axis=1, keepdims=True)
    vectors = np.linalg.eigh(wide.T @ wide)[1][:, -12:]
    np.testing.assert_allclose(basis.T @ basis, vectors @ vectors.T, atol=1e-4)

    # Nearest to the mean: what is between them is symmetric and positive, as in a polar decomposition.
    between = basis @ (np.concatenate([np.eye(12), np.eye(12)]) * root[:, None])
    np.testing.assert_allclose(between, between.T, atol=1e-9)
    assert np.linalg.eigvalsh(between).min() > -1e-9


def test_experts_read_and_write_the_joint_stream() -> None:
    """Without solving, the weights of an expert are those of the parents seen through the maps of the stream."""
    folders = [tiny.model("mixtral", seed) for seed in range(2)]
    first, second = (tiny.tensors(f) for f in folders)
    merged = reconstruct(folders, again(data(folders[0], 1)), features="joint", align=False, ridge=1e12).state_dict()
    tables = np.concatenate([t["model.embed_tokens.weight"].numpy() for t in (first, second)], 1)
    maps = np.linalg.lstsq(tables, merged["model.embed_tokens.weight"].numpy(), rcond=None)[0].T
    for expert in range(3):
        name = f"model.layers.1.block_sparse_moe.experts.{expert}.w2.weight"
        expected = maps @ np.concatenate([first[name].numpy(), second[name].numpy()])
        np.testing.assert_allclose(merged[name].numpy(), expected, atol=1e-7)


def test_a_tied_table_is_separated_and_saved(tmp_path) -> None:
    folders = [tiny.model("gpt2", seed, torch.bfloat16, tie_word_embeddings=True) for seed in range(2)]
    assert "lm_head.weight" not in tiny.tensors(folders[0])
    merged = reconstruct(folders, again(data(folders[0], 1)), features="joint")
    assert any("now separate" in note for note in merged.report()["notes"])
    merged.save(tmp_path / "out")
    saved, config = tiny.tensors(tmp_path / "out"), tiny.read_config(tmp_path / "out")
    assert config["tie_word_embeddings"] is False and saved["lm_head.weight"].dtype == torch.bfloat16
    assert {n: t.dtype for n, t in saved.items()} == dict.fromkeys(saved, torch.bfloat16)
    assert tiny.logits(tmp_path / "out").isfinite().all()
    with pytest.raises(RequestError, match="tie_word_embeddings=False"):
        merged.load_into(load(folders[0]))


def test_a_gain_too_small_to_divide_by_leaves_the_stream_at_the_mean() -> None:
    """The bias of the last norm has no reader with a bias to go into."""
    like = tiny.model("gpt2", 1)
    gains = tiny.tensors(like)["transformer.ln_f.weight"].clone()
    gains[2] = 0.0
    folders = [tiny.model("gpt2", 0), tiny.variant(like, {"transformer.ln_f.weight": gains}, "zero-gain")]
    merged = reconstruct(folders, again(data(folders[0], 1)), features="joint", align=False)
    report = merged.report()
    assert report["features"]["stream"] == "mean" and any("too small to divide by" in n for n in report["notes"])
    assert tiny.logits(folders[0], merged.state_dict(), **merged.config_changes).isfinite().all()


@pytest.mark.parametrize(
    "options, said",
    [
        ({"features": "jiont"}, "Did you mean 'joint'?"),
        ({"refine": -1, "polish": 1}, "refine is -1"),
        ({"polish": 1.5}, "'polish' must be a whole number"),
        ({"features": "joint", "weights": [1, 0]}, "joint features need positive weights"),
        ({"features": "joint", "method": "regmean++"}, "'features' is not an option of regmean"),
    ],
)
def test_what_is_wrong_with_a_request(options, said: str) -> None:
    folders = [tiny.model("vit", seed) for seed in range(2)]
    with pytest.raises(RequestError, match=said):
        reconstruct(folders, again(data(folders[0], 1)), **options)


def test_models_that_do_not_fit_are_refused() -> None:
    folders = [tiny.model("vit", 0), tiny.model("vit", 1, num_labels=7)]
    with pytest.raises(RequestError, match=r"labels"):
        reconstruct(folders, again(data(folders[0], 1)), features="joint")
