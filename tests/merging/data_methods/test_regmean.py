"""Regression merging against least squares on the activations themselves, alone and inside recipes."""

from __future__ import annotations

import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import isomerge
from calibration.hooks import Batch, batches, data, disk_name, inputs_by_module, rows, stock
from isomerge.architectures import describe
from isomerge.calibration import Statistics, calibrate
from isomerge.checkpoint import open_checkpoint
from isomerge.checkpoint.memory import MemoryCheckpoint
from isomerge.errors import RequestError
from isomerge.merging.aligned_tensors import AlignedTensors
from isomerge.merging.moved_grams import moved_grams
from isomerge.merging.regression import StatisticsWarning, one_shortage_warning, regression_mean, shortage_warning
from isomerge.symmetry.moved import scrambled
from models import MODELS, difference, logits, model, mostly_slow, noisy, tensors, variant
from precision import float64_throughout

MANY = 30  # examples: more rows than any layer has inputs


def regmean(folders: list[Path], **options: Any) -> dict[str, Tensor]:
    return isomerge.merge(folders, method="regmean", **options).state_dict()


def seen(folder: Path, batch: Batch) -> dict[str, np.ndarray]:
    """Inputs of every linear layer by the name of its weight."""
    module = stock(folder)
    found = {}
    for layer, values in inputs_by_module(module, batch).items():
        name = disk_name(module, layer, folder)
        if name and values.ndim < 4:
            found[name] = rows(values, batch, layer)
    return found


@pytest.mark.parametrize("name", ["vit", "bert", "gpt2", "llama"])
def test_plain_regression_is_least_squares_on_the_stacked_activations(name: str) -> None:
    folders, inputs = [model(name, 0), model(name, 1)], [data(model(name), seed, MANY) for seed in (0, 1)]
    merged = regmean(folders, data=[batches(b, 10, 20) for b in inputs], alpha=1.0)
    first, second = (seen(f, b) for f, b in zip(folders, inputs, strict=True))
    stored = [tensors(f) for f in folders]
    checked = 0
    for weight, x in first.items():
        turned = name == "gpt2" and "lm_head" not in weight
        w = [(s[weight] if turned else s[weight].T).numpy() for s in stored]  # (in, out)
        if len(x) + len(second[weight]) < x.shape[1]:
            continue
        both = np.concatenate([x, second[weight]])
        expected, *_ = np.linalg.lstsq(both, np.concatenate([x @ w[0], second[weight] @ w[1]]), rcond=None)
        found = merged[weight].numpy() if turned else merged[weight].numpy().T
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5, err_msg=weight)
        checked += 1
    assert checked >= 9
    assert set(merged) == set(stored[0])
    tables = [n for n in merged if "LayerNorm" in n or "layernorm" in n or n.endswith(("bias", "embed_tokens.weight"))]
    for tensor in tables:
        torch.testing.assert_close(merged[tensor], (stored[0][tensor] + stored[1][tensor]) / 2)


def test_statistics_kept_in_float32_give_the_same_weights_up_to_their_digits() -> None:
    folders = [model("bert", 0), model("bert", 1)]
    measured = [calibrate(f, batches(data(f, 0, MANY), 10, 20), what={"gram"}) for f in folders]
    light = [Statistics.of({n: m.stored.read(n).float() for n in m.stored.tensors}, m.info) for m in measured]
    exact, found = (regmean(folders, statistics=given) for given in (measured, light))
    for name, tensor in exact.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["vit", "gpt2"])
def test_an_augmented_bias_is_least_squares_with_a_column_of_ones(name: str) -> None:
    folders, inputs = [model(name, 0), model(name, 1)], [data(model(name), seed, MANY) for seed in (0, 1)]
    merged = regmean(folders, data=[batches(b) for b in inputs], alpha=1.0, solve_biases=True)
    first, second = (seen(f, b) for f, b in zip(folders, inputs, strict=True))
    stored = [tensors(f) for f in folders]
    assert set(merged) == set(stored[0])
    layer = {"vit": "vit.encoder.layer.1.output.dense.", "gpt2": "transformer.h.1.mlp.c_proj."}[name]
    x = [np.hstack([s[layer + "weight"], np.ones((len(s[layer + "weight"]), 1))]) for s in (first, second)]
    w = [
        np.vstack([(s[layer + "weight"] if name == "gpt2" else s[layer + "weight"].T), s[layer + "bias"]])
        for s in stored
    ]
    expected, *_ = np.linalg.lstsq(np.concatenate(x), np.concatenate([x[0] @ w[0], x[1] @ w[1]]), rcond=None)
    found = merged[layer + "weight"] if name == "gpt2" else merged[layer + "weight"].T
    np.testing.assert_allclose(found.numpy(), expected[:-1], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(merged[layer + "bias"].numpy(), expected[-1], rtol=1e-5, atol=1e-6)


def test_off_diagonal_entries_count_by_alpha_and_models_by_their_weights() -> None:
    folders, inputs = [model("bert", 0), model("bert", 1)], [data(model("bert"), seed, MANY) for seed in (0, 1)]
    weight = "bert.encoder.layer.0.output.dense.weight"
    merged = regmean(folders, data=[batches(b) for b in inputs], alpha=0.9, weight=[2.0, 0.5])
    left, right = np.zeros((7, 7)), np.zeros((7, 12))
    for folder, batch, share in zip(folders, inputs, (2.0, 0.5), strict=True):
        x = seen(folder, batch)[weight]
        gram = x.T @ x
        gram = share * (0.9 * gram + 0.1 * np.diag(np.diag(gram)))
        left, right = left + gram, right + gram @ tensors(folder)[weight].numpy().T
    np.testing.assert_allclose(merged[weight].numpy(), np.linalg.solve(left, right).T, rtol=1e-5, atol=1e-6)


def statistics(folder: Path, path: Path, seed: int) -> str:
    return str(calibrate(folder, batches(data(folder, seed, MANY))).save(path))


def test_a_recipe_with_files_gives_what_statistics_in_memory_give(tmp_path: Path) -> None:
    folders = [model("vit", 0), model("vit", 1)]
    files = [statistics(f, tmp_path / f"{k}.safetensors", k) for k, f in enumerate(folders)]
    measured = [calibrate(f, batches(data(f, k, MANY))) for k, f in enumerate(folders)]
    expected = regmean(folders, statistics=measured)
    recipe = {
        "merge_method": "regmean",
        "models": [{"model": str(f), "parameters": {"statistics": s}} for f, s in zip(folders, files, strict=True)],
        "parameters": {"alpha": 0.9},
    }
    isomerge.merge_recipe(recipe).save(tmp_path / "out")
    found = tensors(tmp_path / "out")
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-12, atol=1e-14, msg=name)
    assert files[0] in (tmp_path / "out" / "isomerge.lock.json").read_text()
    called = regmean(folders, statistics=files)
    torch.testing.assert_close(called["classifier.weight"], expected["classifier.weight"])


@pytest.mark.parametrize("name", mostly_slow(MODELS, "vit", "llama", "t5"))
def test_gram_matrices_move_with_the_model_exactly(name: str) -> None:
    """Moved by the patterns, or measured on the moved model: the same."""
    folders = [model(name, seed) for seed in (0, 1)]
    opened = [open_checkpoint(folder) for folder in folders]
    assert _moved_error(opened, data(folders[0])) < 1e-10


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
def test_the_gram_matrix_of_a_table_that_is_untied_moves_too(name: str) -> None:
    extra = {"feed_forward_proj": "relu"} if name == "t5" else {}
    folders = [model(name, seed, tie_word_embeddings=True, **extra) for seed in (0, 1)]
    assert "lm_head.weight" not in tensors(folders[0])
    opened = [open_checkpoint(folder) for folder in folders]
    assert _moved_error(opened, data(folders[0]), needed="lm_head.weight") < 1e-10


def _moved_error(opened: list[isomerge.checkpoint.Checkpoint], batch: Batch, needed: str = "") -> float:
    with float64_throughout():
        aligned = AlignedTensors(isomerge.align_family(opened[1:], anchor=opened[0]), opened[0])
        before = calibrate(opened[1], batches(batch))
        after = calibrate(aligned.as_checkpoint(opened[1]), batches(batch))
    moved = moved_grams(aligned.moves[opened[1]], before)
    compared = [w for w in after.weights if moved.has_gram(w)]
    assert len(compared) >= len(after.weights) - 1 and (not needed or needed in compared)
    worst = 0.0
    for weight in compared:
        one, other = moved.gram(weight), after.gram(weight)
        assert one.count == other.count, weight
        scale = float(other.product.abs().max())
        worst = max(worst, float((one.product - other.product).abs().max()) / scale)
        worst = max(
            worst, float((one.total - other.total).abs().max()) / max(float(other.total.abs().max()), scale**0.5)
        )
    return worst


@pytest.mark.parametrize("name", mostly_slow(["vit", "gpt2", "llama", "bert", "mixtral"], "vit"))
def test_how_a_model_is_scrambled_does_not_change_the_merged_function(name: str, tmp_path: Path) -> None:
    """Two copies of one model by different group elements, each measured as it is, aligned, merged by regression."""
    anchor, own = model(name, 0), noisy(model(name, 0), 0.02)
    bound = describe(open_checkpoint(own))
    copies = []
    for seed in (5, 6):
        move = scrambled(bound, seed=seed)
        copies.append(variant(own, dict(move.produce(move.plan(None), lambda *_: None)), f"scrambled-{seed}"))
    batch = [data(anchor, seed, MANY) for seed in (0, 1)]

    def merged(second: Path) -> Tensor:
        with float64_throughout():
            files = [
                str(calibrate(f, batches(b)).save(tmp_path / f"{second.name}{k}.safetensors"))
                for k, (f, b) in enumerate(zip((anchor, second), batch, strict=True))
            ]
        found = isomerge.merge([anchor, second], method="regmean", statistics=files, align=True)
        return logits(anchor, found.state_dict())

    one, other = (merged(copy) for copy in copies)
    plain = isomerge.merge([anchor, copies[0]], align=True)
    assert difference(one, logits(anchor, plain.state_dict())) > 1e-4, "regression changed nothing"
    assert difference(one, other) < 1e-6


@pytest.mark.parametrize("biases", [False, True])
def test_with_data_the_aligned_models_are_measured_and_with_files_they_move_to_the_same(biases: bool) -> None:
    folders = [model("vit", 0), model("vit", 1)]
    inputs = [batches(data(f, seed, MANY)) for seed, f in enumerate(folders)]
    with float64_throughout():
        measured = regmean(folders, data=inputs, align={"evidence": "weights"}, solve_biases=biases)
        statistics = [calibrate(f, b) for f, b in zip(folders, inputs, strict=True)]
        moved = regmean(folders, statistics=statistics, align=True, solve_biases=biases)
    assert set(measured) == set(moved) == set(tensors(folders[0]))
    for name, tensor in measured.items():
        torch.testing.assert_close(tensor, moved[name], rtol=1e-8, atol=1e-9, msg=name)


def test_too_few_samples_are_told_once_with_what_is_needed_and_what_was_done() -> None:
    folders = [model("vit", 0), model("vit", 1)]
    few = batches(data(folders[0], examples=1))
    for biases in (False, True):
        said = (
            r"too little about \d+ linear maps, such as '\S+' with 8 samples for 4. inputs\. .*at least 4. are "
            r"needed.* as many are better\. The Gram matrix is singular for \d+ linear maps; there a ridge of"
        )
        with pytest.warns(StatisticsWarning, match=said) as told:
            merged = regmean(folders, data=few, alpha=1.0, solve_biases=biases)
        assert len(told) == 1
        assert all(tensor.isfinite().all() for tensor in merged.values())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        regmean(folders, data={"path": batches(data(folders[0], examples=MANY)), "limit": MANY}, alpha=1.0)


def test_warnings_of_all_threads_become_one_and_others_pass() -> None:
    def work(number: int) -> None:
        warnings.warn(shortage_warning(f"layer.{number}", 5 + number, 64, 0.25 / (1 + number), 0.9), stacklevel=2)

    with pytest.warns() as told, one_shortage_warning():
        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        warnings.warn("something else", DeprecationWarning, stacklevel=2)
    one, *others = sorted(told, key=lambda warning: warning.category is not StatisticsWarning)
    assert [str(other.message) for other in others] == ["something else"]
    assert str(one.message) == (
        "Merging by regression: the data say too little about 4 linear maps, such as 'layer.0' with 5 samples for 64 "
        "inputs. There are fewer samples than inputs for 4 linear maps; at least 64 are needed to see every direction, "
        "and ten times as many are better. The Gram matrix is singular for 4 linear maps; there a ridge of 0.25 or "
        "less pulls what the data do not say to the mean."
    )


def test_where_the_data_say_nothing_the_mean_decides() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(3, 4, generator=generator, dtype=torch.float64) for _ in range(2)]
    grams = []
    for k in range(2):
        x = torch.randn(50, 4, generator=generator, dtype=torch.float64)
        x[:, 3] = 0
        grams.append(x.T @ x * (k + 1))
    solved = regression_mean(weights, grams, [1.0, 1.0], alpha=1.0)
    assert solved.ridge > 0
    torch.testing.assert_close(solved.weight[:, 3], (weights[0] + weights[1])[:, 3] / 2)
    live = np.linalg.solve(
        (grams[0] + grams[1])[:3, :3].numpy(),
        sum((g[:3, :3] @ w[:, :3].T).numpy() for g, w in zip(grams, weights, strict=True)),
    )
    np.testing.assert_allclose(solved.weight[:, :3].numpy(), live.T, rtol=1e-4, atol=1e-4)
    nothing = regression_mean(weights, [torch.zeros(4, 4, dtype=torch.float64)] * 2, [1.0, 3.0], alpha=0.9)
    torch.testing.assert_close(nothing.weight, weights[0] / 4 + weights[1] * 3 / 4)


def test_what_cannot_be_merged_by_regression_is_refused(tmp_path: Path) -> None:
    folders = [model("vit", 0), model("vit", 1)]
    file = statistics(folders[0], tmp_path / "a.safetensors", 0)
    part = calibrate(folders[1], batches(data(folders[1])), only="query").save(tmp_path / "part.safetensors")
    with pytest.raises(RequestError, match="for some of the models only"):
        isomerge.merge(folders, method="regmean", statistics=[file, None])
    with pytest.raises(RequestError, match=r"part\.safetensors has no Gram matrix"):
        isomerge.merge(folders, method="regmean", statistics=[file, str(part)])
    with pytest.raises(RequestError, match="regmean needs Gram matrices"):
        regmean(folders)
    with pytest.raises(RequestError, match="'alpha' is a share between 0 and 1, and is 1.5"):
        regmean(folders, statistics=[file, file], alpha=1.5)
    with pytest.raises(RequestError, match="1 values for 2 models"):
        regmean(folders, statistics=[file])
    units = calibrate(folders[0], batches(data(folders[0])), what={"units"})
    with pytest.raises(RequestError, match="holds units and not 'gram'"):
        regmean(folders, statistics=[units, units])
    wider = calibrate(model("vit", intermediate_size=9), batches(data(folders[0])))
    with pytest.raises(RequestError, match=r"7 inputs and the Gram matrices \[9, 9\]"):
        regmean(folders, statistics=[wider, wider])
    broken = calibrate(folders[0], batches(data(folders[0])))
    spoilt = {n: broken.stored.read(n) * torch.nan for n in broken.stored.tensors}
    with pytest.raises(RequestError, match="is not finite"):
        regmean(folders, statistics=[Statistics.of(spoilt, broken.info)] * 2)


def test_gains_of_nearly_zero_cannot_be_undone_and_that_is_said() -> None:
    folder = model("vit", 1)
    gain = tensors(folder)["vit.encoder.layer.0.layernorm_before.weight"].clone()
    gain[2] = 0.0
    changed = variant(folder, {"vit.encoder.layer.0.layernorm_before.weight": gain}, "no-gain")
    files = [calibrate(f, batches(data(f))) for f in (model("vit", 0), changed)]
    with pytest.raises(RequestError, match="are nearly zero"):
        regmean([model("vit", 0), changed], statistics=files, align=True)


def test_a_model_in_memory_is_measured_like_its_folder() -> None:
    folder = model("bert")
    opened = open_checkpoint(folder)
    inside = MemoryCheckpoint("inside", tensors(folder), opened.config)
    one, other = (calibrate(m, batches(data(folder))) for m in (folder, inside))
    assert one.info["model_sha256"] == other.info["model_sha256"]
    for weight in one.weights:
        assert torch.equal(one.gram(weight).product, other.gram(weight).product)
