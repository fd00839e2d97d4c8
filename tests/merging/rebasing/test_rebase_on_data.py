"""With data: the regressions, the signs and the measurements are those of formulas written out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import isomerge
import models as tiny
from isomerge.errors import RequestError
from isomerge.merging.layerwise.solver import LayerSolver
from isomerge.merging.rebasing.mapped_features import LinearFit
from merging.layerwise.reconstructions import again, data, load
from merging.rebasing.fine_tunes import added, disguised, fine_tune, reordered
from models import difference, logits, model
from samples import digits

RIDGE, FLOOR = 0.03, 1e-6


def fitted(batches: Sequence[Mapping[str, Tensor]]) -> list[dict[str, Tensor]]:
    """All but every eighth example."""
    found, first = [], 0
    for batch in batches:
        size = len(next(iter(batch.values())))
        kept = (torch.arange(first, first + size) % 8) != 7
        found.append({name: tensor[kept] for name, tensor in batch.items()})
        first += size
    return found


def states(merged: isomerge.Merged) -> dict[str, Tensor]:
    return {name: tensor.double() for name, tensor in merged.tensors()}


def solved(gram: np.ndarray, cross: np.ndarray) -> np.ndarray:
    penalty = RIDGE * gram.diagonal() + FLOOR * gram.diagonal().mean()
    return np.linalg.solve(gram + np.diag(penalty), cross)


# --- features ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["llama", *tiny.mostly_slow(["vit", "bert", "gpt2"])])
def test_where_the_moved_change_is_exact_the_regressions_add_nothing(kind: str) -> None:
    base = model(kind, 0)
    tuned, onto = fine_tune(base), disguised(base)
    merged = isomerge.rebase(tuned, base, onto, data=again(data(onto)), correction="features")
    assert difference(logits(tuned), logits(onto, states(merged))) <= 1e-8
    shares = merged.details["rebased"]["shares"]
    assert shares["distance"] == pytest.approx(1, abs=1e-8)


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_a_fine_tuned_head_is_regressed_on_the_new_base_s_features_as_written_out(scale: float) -> None:
    """Only the classifier is tuned, so every other map is as in the new base, and one ridge regression is left."""
    base, onto = model("vit", 0), model("vit", 1)
    tuned = fine_tune(base, only="classifier")
    batches = data(onto)
    options = {"data": again(batches), "ridge": RIDGE, "scale": scale}
    result = states(isomerge.rebase(tuned, base, onto, correction="features", **options))
    start = states(isomerge.rebase(tuned, base, onto, scale=scale))
    own = tiny.tensors(onto)
    for name in own:
        if "classifier" not in name:
            assert torch.allclose(result[name], own[name], rtol=0, atol=1e-9), name
    modules = [load(folder) for folder in (onto, tuned, base)]
    gram, cross = np.zeros((13, 13)), np.zeros((13, 5))
    weight = np.vstack([start["classifier.weight"].numpy().T, start["classifier.bias"].numpy()])
    for batch in fitted(batches):
        with torch.no_grad():
            three = [module(**batch).logits.numpy() for module in modules]
            hidden = modules[0].vit(**batch).last_hidden_state[:, 0].numpy()
        x = np.hstack([hidden, np.ones((len(hidden), 1))])
        gram += x.T @ x
        cross += x.T @ (three[0] + scale * (three[1] - three[2]) - x @ weight)
    wanted = weight + solved(gram, cross)
    assert np.abs(wanted - weight).max() > 1e-3, "there is something to regress"
    np.testing.assert_allclose(result["classifier.weight"].numpy().T, wanted[:-1], atol=1e-9)
    np.testing.assert_allclose(result["classifier.bias"].numpy(), wanted[-1], atol=1e-9)


def test_the_head_of_a_base_of_another_shape_is_regressed_as_written_out() -> None:
    base, onto = model("vit", 0), model("vit", 1, num_hidden_layers=3, intermediate_size=11)
    tuned = fine_tune(base, only="classifier")
    batches = data(onto)
    merged = isomerge.rebase(tuned, base, onto, data=again(batches), ridge=RIDGE)
    assert merged.details["rebased"]["other_shape"]
    modules = [load(folder) for folder in (onto, tuned, base)]
    norm = modules[0].vit.layernorm
    seen: list[Tensor] = []
    norm.register_forward_pre_hook(lambda _, given: seen.append(given[0][:, 0]))

    def normed() -> np.ndarray:
        """What the classifier reads once the gains of the last norm are folded into it."""
        return F.layer_norm(seen.pop(), (12,), eps=norm.eps).numpy()

    gram, cross = np.zeros((13, 13)), np.zeros((13, 5))
    for batch in fitted(batches):
        with torch.no_grad():
            three = [module(**batch).logits.numpy() for module in modules]
        x = np.hstack([hidden := normed(), np.ones((len(hidden), 1))])
        gram += x.T @ x
        cross += x.T @ (three[1] - three[2])
    change = solved(gram, cross)
    with torch.no_grad():
        own = modules[0](**tiny.inputs(modules[0].config, torch.float64)).logits.numpy()
    x = normed()
    wanted = own + np.hstack([x, np.ones((len(x), 1))]) @ change
    assert np.abs(wanted - own).max() > 0.01
    np.testing.assert_allclose(logits(onto, states(merged), **merged.config_changes).numpy(), wanted, atol=1e-7)


def test_maps_between_activations_are_ridge_regressions_with_a_constant() -> None:
    random = np.random.default_rng(0)
    x, y = random.normal(size=(200, 6)) + 3, random.normal(size=(200, 4))
    y += x @ random.normal(size=(6, 4))
    fit = LinearFit()
    for rows in np.array_split(np.arange(200), 3):
        fit.add(torch.from_numpy(x[rows]), torch.from_numpy(y[rows]))
    centred = x - x.mean(0)
    gram = centred.T @ centred
    penalty = 0.01 * gram.diagonal() + FLOOR * gram.diagonal().mean()
    wanted = np.linalg.solve(gram + np.diag(penalty), centred.T @ (y - y.mean(0)))
    np.testing.assert_allclose(fit.solved().numpy(), wanted, atol=1e-10)


SHAPES = [
    ("llama", {"num_hidden_layers": 3}),
    ("llama", {"num_hidden_layers": 1, "intermediate_size": 9}),
    ("vit", {"hidden_size": 16, "num_attention_heads": 4}),
]


@pytest.mark.parametrize(("kind", "shape"), SHAPES)
def test_a_whole_fine_tune_comes_nearer_on_a_base_of_another_shape(kind: str, shape: dict[str, int]) -> None:
    base = model(kind, 0)
    tuned, onto = fine_tune(base, 0.3), model(kind, 1, **shape)
    merged = isomerge.rebase(tuned, base, onto, data=again(data(onto, 8)))
    rows = {row["model"]: row["distance"] for row in merged.details["rebased"]["held_out"]}
    assert "plain addition" not in rows
    assert rows["result"] < rows["new base"]
    assert merged.details["layers"], "every solved map is in the report"
    read = states(merged)
    assert logits(onto, read, **merged.config_changes).isfinite().all()


# --- signs ------------------------------------------------------------------------------------------------------------
def test_signs_keep_what_goes_down_the_gradient_to_the_fine_tune_s_predictions() -> None:
    base = model("vit", 0, torch.float64, **tiny.WIDE["vit"])
    tuned, onto = fine_tune(base, 0.05), tiny.noisy(base, 0.02)
    batches = data(onto)
    result = states(isomerge.rebase(tuned, base, onto, data=again(batches), correction="signs"))
    student, teacher = load(onto).requires_grad_(True), load(tuned)
    for batch in fitted(batches):
        wanted = teacher(**batch).logits.softmax(-1).detach()
        F.kl_div(student(**batch).logits.log_softmax(-1), wanted, reduction="batchmean").backward()
    by_name = {name: parameter for name, parameter in student.named_parameters()}
    plain, own = added(onto, tuned, base), tiny.tensors(onto)
    for file in ("classifier.weight", "vit.layernorm.weight", "vit.embeddings.cls_token"):
        change = plain[file] - own[file]
        agrees = change * by_name[file].grad < 0
        wanted = torch.where(agrees, plain[file], own[file])
        assert torch.allclose(result[file], wanted, rtol=0, atol=1e-12), file
        assert 0 < int(agrees.sum()) < agrees.numel()
    changed = sum(int((result[name] != own[name]).sum()) for name in own)
    assert 0.2 < changed / sum(tensor.numel() for tensor in own.values()) < 0.8, "every tensor has its gradient"


# --- what is measured -------------------------------------------------------------------------------------------------
def test_the_rows_are_losses_and_accuracies_of_the_stock_class_on_every_eighth_example() -> None:
    base, onto = model("vit", 0), model("vit", 1)
    tuned = fine_tune(base, 0.4)
    batches = [
        {
            **batch,
            "labels": torch.randint(0, 5, (len(batch["pixel_values"]),), generator=torch.Generator().manual_seed(k)),
        }
        for k, batch in enumerate(data(onto, 3))
    ]
    merged = isomerge.rebase(tuned, base, onto, data=again(batches))
    whole = {name: torch.cat([batch[name] for batch in batches])[7::8] for name in batches[0]}
    state = states(merged)
    plain = added(onto, tuned, base)
    made = {
        "fine-tune": load(tuned), "its base": load(base), "new base": load(onto), "plain addition": load(onto, plain),
        "result": load(onto, state),
    }  # fmt: skip
    about = merged.details["rebased"]
    assert [row["model"] for row in about["held_out"]] == list(made)
    scores = {name: _scores(module, whole) for name, module in made.items()}
    for row in about["held_out"]:
        wanted = scores[row["model"]]
        assert row["loss"] == pytest.approx(wanted["loss"], rel=1e-4)
        assert row["accuracy"] == pytest.approx(wanted["accuracy"], abs=1e-6)
        assert row["distance"] == pytest.approx(_distance(wanted, scores["fine-tune"]), rel=1e-3, abs=1e-6)
    for key, sign in (("loss", 1), ("accuracy", -1)):
        gain = sign * (scores["its base"][key] - scores["fine-tune"][key])
        share = sign * (scores["new base"][key] - scores["result"][key]) / gain if gain > 0 else None
        assert about["shares"][key] == (None if share is None else pytest.approx(share, rel=1e-3, abs=1e-6))


def _scores(module: Any, whole: Mapping[str, Tensor]) -> dict[str, Any]:
    with torch.no_grad():
        found = module(pixel_values=whole["pixel_values"]).logits
    right = (found.argmax(-1) == whole["labels"]).double().mean()
    return {"loss": float(F.cross_entropy(found, whole["labels"])), "accuracy": float(right), "logits": found}


def _distance(own: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    p, q = other["logits"].softmax(-1), own["logits"].log_softmax(-1)
    return float((p * (p.log() - q)).sum(-1).mean())


def test_of_few_examples_none_are_kept_aside_and_a_note_says_so() -> None:
    base, onto = model("vit", 0), model("vit", 1)
    few = [{"pixel_values": data(onto, 1)[0]["pixel_values"][:5]}]
    merged = isomerge.rebase(fine_tune(base), base, onto, data=again(few))
    assert not merged.details["rebased"]["new_examples"]
    assert any("fewer than 8 examples" in note for note in merged.notes)


# --- stopped and made again -------------------------------------------------------------------------------------------
def test_what_was_solved_before_a_kill_is_not_solved_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"data": str(digits(count=24)), "batch_size": 8, "progress": False}
    base, onto = model("vit", 0), model("vit", 1)
    tuned, path = fine_tune(base), tmp_path / "out"
    whole = isomerge.rebase(tuned, base, onto, **options).save(tmp_path / "whole").sha256
    solve, done = LayerSolver.solve, []

    def stopping(self: LayerSolver, stage: Any, examples: Any) -> None:
        if len(done) == 5:
            raise KeyboardInterrupt
        done.append(stage)
        solve(self, stage, examples)

    monkeypatch.setattr(LayerSolver, "solve", stopping)
    with pytest.raises(KeyboardInterrupt):
        isomerge.rebase(tuned, base, onto, resume=path, **options)
    again_solved = []
    monkeypatch.setattr(
        LayerSolver, "solve", lambda self, stage, examples: (again_solved.append(stage), solve(self, stage, examples))
    )
    monkeypatch.setattr("isomerge.alignment.solve_pair.solve_pair", None)  # the alignment is there already
    merged = isomerge.rebase(tuned, base, onto, resume=path, **options)
    assert not {stage.names for stage in again_solved} & {stage.names for stage in done}
    assert merged.save(path).sha256 == whole


# --- mistakes ---------------------------------------------------------------------------------------------------------
def test_bases_of_another_shape_are_refused_where_no_map_exists() -> None:
    base = model("llama", 0)
    tuned, batches = fine_tune(base), again(data(base))
    with pytest.raises(RequestError, match="heads are of size"):
        isomerge.rebase(tuned, base, model("llama", 1, head_dim=6), data=batches)
    with pytest.raises(RequestError, match="needs data and correction features"):
        isomerge.rebase(tuned, base, model("llama", 1, num_hidden_layers=3), data=batches, correction="signs")
    masked = model("bert", 0)
    with pytest.raises(RequestError, match="not everything can be joint"):
        isomerge.rebase(fine_tune(masked), masked, model("bert", 1, num_hidden_layers=3), data=again(data(masked)))


def test_reordered_units_with_data_too() -> None:
    base = model("llama", 0)
    tuned, onto = fine_tune(base), reordered(base)
    merged = isomerge.rebase(tuned, base, onto, data=again(data(onto)), correction="none")
    rows = {row["model"]: row["distance"] for row in merged.details["rebased"]["held_out"]}
    assert rows["result"] <= 1e-10 < rows["plain addition"]
