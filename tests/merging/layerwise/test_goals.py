"""Whose word counts: two language models that each know one text, one model that knows both."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import scipy.optimize
import scipy.special
import torch
import transformers
from torch import Tensor

import isomerge
from isomerge.errors import RequestError
from isomerge.merging.layerwise.candidates import leaning
from isomerge.merging.layerwise.dreams import with_dreams
from isomerge.merging.layerwise.goals import APART, OwnedBatches, expert_beliefs, in_turn, own_beliefs, token_beliefs
from isomerge.merging.layerwise.gradient_steps import POLISH_RATES
from isomerge.merging.layerwise.output_fit import DAMPING, PULL
from isomerge.merging.layerwise.ridge import ASIDE, RIDGES, OwnedRegression, RidgeSearch
from isomerge.merging.merge_inputs import MergeInputs
from isomerge.running.passes import DataPass

TOKENS, LENGTH = 24, 16
Batches = Callable[[], Iterator[dict[str, Tensor]]]


def text(skill: int, count: int, seed: int) -> Tensor:
    """Skill 0 counts up by the step its first two tokens show, skill 1 counts down and turns at zero."""
    generator = torch.Generator().manual_seed(seed + 1000 * skill)
    start, step = (torch.randint(1, 7, (count, 1), generator=generator) for _ in range(2))
    places = torch.arange(LENGTH)
    if skill == 0:
        return (start + step * places) % TOKENS
    return (TOKENS - 1 - (start * 3 + places) % (step + 6)).long()


def batches(skill: int, count: int = 48, seed: int = 7) -> Batches:
    rows = text(skill, count, seed)
    return lambda: ({"input_ids": part} for part in rows.split(16))


@functools.cache
def parent(skill: int, seed: int = 0) -> Any:
    torch.manual_seed(skill + 10 * seed)
    config = transformers.LlamaConfig(
        vocab_size=TOKENS, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=48, max_position_embeddings=LENGTH, tie_word_embeddings=False, use_cache=False,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(120):
        ids = text(skill, 64, step)
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    return model.eval()


@torch.no_grad()
def loss(model: Any, skill: int) -> float:
    ids = text(skill, 128, 99)
    return float(model(input_ids=ids, labels=ids).loss)


def merged(data: Any = None, **options: Any) -> isomerge.Merged:
    data = [batches(0), batches(1)] if data is None else data
    return isomerge.merge([parent(0), parent(1)], method="reconstruct", data=data, **options)


@functools.cache
def merged_by_default() -> isomerge.Merged:
    return merged()


def regret(result: isomerge.Merged) -> float:
    model = transformers.LlamaForCausalLM(parent(0).config).eval()
    model.load_state_dict(result.state_dict())
    return sum(loss(model, skill) - loss(parent(skill), skill) for skill in (0, 1))


# --- merging ----------------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_models_with_data_of_their_own_keep_more_of_what_each_knows() -> None:
    by_mean, by_own = merged(goals="mean", features="joint"), merged_by_default()
    assert by_own.report()["goals"] == {"kind": "own", "examples": [48.0, 48.0]}
    assert regret(by_own) < 0.6 * regret(by_mean)


@pytest.mark.slow
def test_experts_are_found_without_being_named() -> None:
    both = lambda: in_turn([batches(0)(), batches(1)()])  # noqa: E731
    found = merged(data=both)
    report = found.report()
    assert report["goals"]["kind"] == "expert" and report["goals"]["apart"] > APART
    assert report["goals"]["examples"] == pytest.approx([48, 48], abs=1)
    assert regret(found) == pytest.approx(regret(merged_by_default()), abs=0.3)


@pytest.mark.slow
def test_two_seeds_of_one_skill_are_met_in_the_middle() -> None:
    found = isomerge.merge([parent(0), parent(0, 1)], method="reconstruct", data=batches(0))
    assert found.report()["goals"]["kind"] == "mean"
    assert found.report()["goals"]["apart"] < APART


@pytest.mark.slow
def test_the_output_fitted_to_predictions_is_nearer_to_them_than_fitted_to_scores() -> None:
    found = merged(lean="no")
    fitted = found.report()["output"]
    assert fitted["loss_after"] < fitted["loss_before"]
    assert regret(found) < regret(merged(lean="no", output="scores"))


@pytest.mark.slow
def test_the_stream_leans_where_held_out_examples_say_so() -> None:
    tried = merged_by_default().report()["lean"]
    assert [one["weights"] for one in tried[:3]] == [[0.5, 0.5], [0.8, 0.2], [0.2, 0.8]]
    assert "lean" not in merged(lean="no").report() and "lean" not in merged(weights=[3, 1]).report()


@pytest.mark.slow
def test_the_control_stands_beside_a_polished_merge_and_the_best_is_taken() -> None:
    report = merged(polish=10).report()
    tried = report["start"]["tried"]
    assert [one["rate"] for one in tried] == [0.0, *POLISH_RATES] * 3
    best = min(tried, key=lambda one: one["held_out"])
    assert report["start"]["chosen"] == best["start"] == "the merge"
    (told,) = [note for note in report["notes"] if "started from the merge" in note]
    assert f"the merge {best['held_out']:.3f}, " in told and "(a parent is the control)" in told
    assert report["polished"]["steps"] == 10 and report["polished"]["rate"] == best["rate"] == report["start"]["rate"]


@pytest.mark.slow
def test_steps_that_only_learn_the_examples_by_heart_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_heart(loss: Any, steps: int, rate: float, report: Any, kept: Any) -> dict[str, Any]:
        with torch.no_grad():
            loss.merged.model.lm_head.weight.mul_(-1)
        return {"steps": steps, "loss_before": 1.0, "loss_after": 0.0}

    monkeypatch.setattr("isomerge.merging.layerwise.candidates.polish", by_heart)
    options: dict[str, Any] = {"data": [batches(0, 16), batches(1, 16)], "start": "parent", "features": "mean"}
    found, without = merged(polish=3, **options), merged(**options)
    start = found.report()["start"]
    assert min(start["tried"], key=lambda one: one["held_out"])["rate"] == start["rate"] == start["steps"] == 0
    assert "polished" not in found.report()
    assert any(note.startswith("not polished") for note in found.report()["notes"])
    assert all(torch.equal(found.state_dict()[n], without.state_dict()[n]) for n in without.state_dict())


@pytest.mark.slow
def test_one_parent_can_be_asked_for_and_is_changed_in_its_output_map_alone() -> None:
    found = merged(start="parent", features="mean")
    kept = found.report()["start"]["model"]
    own, state = parent(kept).state_dict(), found.state_dict()
    changed = [name for name in state if not torch.allclose(state[name], own[name])]
    assert changed == ["lm_head.weight"]


@pytest.mark.slow
def test_shares_of_the_stream_and_a_parent_to_start_from_can_be_named() -> None:
    by_name = merged(lean="0.8/0.2")
    assert "lean" not in by_name.report()
    assert by_name.report()["features"] != merged(lean="0.2/0.8").report()["features"]
    second = merged(start="parent-2", polish=3, rate=0.01).report()
    assert second["start"]["model"] == 1 and "tried" not in second["start"] and second["polished"]["steps"] == 3


@pytest.mark.slow
def test_models_trained_apart_get_joint_features_unless_they_are_aligned() -> None:
    apart = [parent(0), parent(0, 1)]
    assert "features" in isomerge.merge(apart, method="reconstruct", data=batches(0)).report()
    aligned = isomerge.merge(apart, method="reconstruct", data=batches(0), align={"evidence": "weights"})
    near = copy.deepcopy(parent(0))
    with torch.no_grad():
        for parameter in near.parameters():
            parameter.add_(0.1 * parameter.std() * torch.randn_like(parameter) if parameter.ndim > 1 else 0.0)
    siblings = isomerge.merge([parent(0), near], method="reconstruct", data=batches(0))
    assert "features" not in aligned.report() and "features" not in siblings.report()
    own = isomerge.merge([parent(0), near], method="reconstruct", data=[batches(0), batches(1)])
    assert own.report()["goals"]["kind"] == "own" and not {"features", "lean"} & set(own.report())


@pytest.mark.slow
def test_texts_that_the_parents_write_help_where_data_are_few() -> None:
    few = [batches(0, 4), batches(1, 4)]
    plain = merged(data=few, lean="no", polish=20, start="merge")
    dreamt = merged(data=few, lean="no", polish=20, start="merge", dream=48)
    assert dreamt.report()["goals"]["examples"] == [52.0, 52.0]
    assert regret(dreamt) < regret(plain)


def test_a_text_begins_in_the_data_and_is_what_its_model_finds_likely() -> None:
    data = OwnedBatches([batches(0, 8), batches(1, 8)], [[0], [1]])
    models = [isomerge.open_checkpoint(parent(skill)) for skill in (0, 1)]
    drawn = torch.get_rng_state()
    dreamt = with_dreams(data, MergeInputs(models, []), 12)
    assert torch.equal(drawn, torch.get_rng_state())
    assert list(dreamt.owners) == [[0], [1], [0], [1]]
    for skill in (0, 1):
        rows = torch.cat([batch["input_ids"] for batch in dreamt.passes[2 + skill]()])
        assert rows.shape == (12, LENGTH)
        runs = {tuple(row[k : k + 4].tolist()) for row in text(skill, 8, 7) for k in range(LENGTH - 3)}
        assert {tuple(row[:4].tolist()) for row in rows} <= runs
        with torch.no_grad():
            own, other = (float(parent(who)(input_ids=rows, labels=rows).loss) for who in (skill, 1 - skill))
        assert own < other - 1


@pytest.mark.slow
def test_the_same_request_gives_the_same_bytes() -> None:
    first, second = merged_by_default().state_dict(), merged().state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"goals": "owm"}, "goals"),
        ({"features": "whole"}, "features"),
        ({"lean": "left"}, "lean"),
        ({"lean": "0.5/0.5/0.5"}, "lean"),
        ({"lean": "1/0"}, "lean"),
        ({"start": "parent-3"}, "start"),
        ({"output": "logits"}, "output"),
        ({"start": "middle"}, "start"),
        ({"temperature": 0.0}, "temperature"),
        ({"rate": 0.0, "polish": 3}, "rate"),
        ({"goals": "own", "data": batches(0)}, "goals"),
    ],
)
def test_wrong_words_name_their_option(options: dict[str, Any], key: str) -> None:
    with pytest.raises(RequestError) as caught:
        merged(**options)
    assert key in caught.value.keys


def test_the_best_start_gives_the_merge_that_was_asked_for() -> None:
    """Trying parents before leaves nothing of them in the merge."""
    common = {"features": "mean", "output": "scores", "lean": "no"}
    direct, best = merged(**common, start="merge"), merged(**common, start="best")
    assert best.report()["start"]["chosen"] == "the merge"
    assert all(torch.equal(direct.state_dict()[n], best.state_dict()[n]) for n in direct.state_dict())


def test_a_model_that_is_believed_nowhere_is_no_error() -> None:
    torch.manual_seed(5)
    untrained = transformers.LlamaForCausalLM(parent(0).config).eval()
    found = isomerge.merge([parent(0), untrained], method="reconstruct", goals="expert", lean="no", data=batches(0))
    assert found.report()["goals"]["examples"] == pytest.approx([48, 0], abs=1e-3)
    assert all(tensor.isfinite().all() for tensor in found.state_dict().values())


def test_weights_that_joint_features_cannot_have_mean_the_mean() -> None:
    found = merged(weights=[1.5, -0.5])
    assert found.report()["goals"]["kind"] == "mean"


# --- against independent computations ---------------------------------------------------------------------------------
def test_the_posterior_is_that_of_a_loop_over_tokens() -> None:
    ids = torch.cat([text(0, 3, 1), text(1, 3, 1)])
    mask = torch.ones_like(ids)
    mask[2, 9:] = 0
    examples = DataPass(lambda: iter([{"input_ids": ids, "attention_mask": mask}]), hashed=False)
    beliefs, _ = expert_beliefs(examples, [parent(0), parent(1)], [0.25, 0.75], 4.0)
    expected = np.zeros((2, 6))
    for m in (0, 1):
        with torch.no_grad():
            scores = parent(m)(input_ids=ids, attention_mask=mask).logits.double().numpy()
        for row in range(6):
            for place in range(1, int(mask[row].sum())):
                one = scores[row, place - 1]
                expected[m, row] += one[ids[row, place]] - np.log(np.exp(one - one.max()).sum()) - one.max()
    odds = np.array([[0.25], [0.75]]) * np.exp((expected - expected.max(0)) / 4.0)
    np.testing.assert_allclose(beliefs.batches[0].numpy(), odds / odds.sum(0), atol=1e-6)


def test_the_posterior_of_a_token_knows_the_text_up_to_there_and_nothing_after_it() -> None:
    """Counted with scipy from stock models, token by token; padding at the end changes nothing before it."""
    ids = text(0, 5, 3)
    mask = torch.ones_like(ids)
    mask[2, 9:] = 0
    data = lambda: iter([{"input_ids": ids, "attention_mask": mask}])  # noqa: E731
    examples = DataPass(data, hashed=False)
    found = token_beliefs(examples, [parent(0), parent(1)], [0.25, 0.75], 4.0)
    assert found is not None and found.tokens is not None
    log_odds = np.log([[0.25], [0.75]])
    for row, length in enumerate(mask.sum(1).tolist()):
        expected = np.zeros((2, length))
        for m in (0, 1):
            with torch.no_grad():
                scores = parent(m)(input_ids=ids[row : row + 1, :length]).logits[0].double().numpy()
            told = scipy.special.log_softmax(scores, 1)[np.arange(length - 1), ids[row, 1:length]]
            expected[m, 1:] = np.cumsum(told)
        rows = found.rows(0, ids.numel())[:, row * LENGTH : row * LENGTH + length]
        np.testing.assert_allclose(rows.numpy(), scipy.special.softmax(expected / 4 + log_odds, 0), atol=1e-6)
    assert found.rows(0, 3).shape == (2, 3)  # of something else than tokens


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"posterior": "token"}, "the goals are own. Use goals expert"),
        ({"posterior": "words", "goals": "expert"}, "posterior.*'words'"),
    ],
)
def test_a_posterior_that_nothing_asks_for_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        merged(**options)


@pytest.mark.slow
def test_experts_by_token_are_as_good_as_experts_by_example() -> None:
    found = merged(goals="expert", posterior="token", lean="no")
    assert sum(found.report()["goals"]["examples"]) == pytest.approx(96)
    assert regret(found) == pytest.approx(regret(merged(goals="expert", lean="no")), abs=0.3)


def test_data_named_by_two_models_follows_both() -> None:
    data = OwnedBatches([batches(0, 16), batches(1, 32)], [[0, 2], [1]])
    beliefs = own_beliefs(data, DataPass(data, hashed=False), [0.2, 0.5, 0.3])
    assert [batch[:, 0].tolist() for batch in beliefs.batches] == [
        pytest.approx([0.4, 0, 0.6]), pytest.approx([0, 1, 0]), pytest.approx([0, 1, 0]),
    ]  # fmt: skip


def test_starts_are_compared_by_predictions_and_by_the_text_itself() -> None:
    """On every eighth example, in float64: the mean of KL(owner ‖ model) and of the text's loss above the owner's."""
    data = [batches(0, 16), batches(1, 16)]
    tried = merged(data, start="parent", features="mean", output="scores").report()["start"]["tried"]
    for number, one in enumerate(tried):
        found = []
        for owner in (0, 1):
            ids = text(owner, 16, 7)[7::8]
            with torch.no_grad():
                own, likely = (parent(m)(input_ids=ids).logits.double().log_softmax(-1) for m in (number, owner))
            divergence = float((likely.exp() * (likely - own)).sum(-1).mean())
            words = ids[:, 1:, None]
            above = float((likely[:, :-1].gather(2, words) - own[:, :-1].gather(2, words)).mean())
            found.append((divergence + above) / 2)
        assert one["held_out"] == pytest.approx(sum(found) / 2, abs=1e-5)


def test_an_owned_output_is_solved_on_the_rows_of_its_owner() -> None:
    generator = torch.Generator().manual_seed(0)
    x, r = (torch.randn(200, width, generator=generator, dtype=torch.float64) for width in (5, 4))
    believed = 0.01 + torch.rand(2, 200, generator=generator, dtype=torch.float64)
    owners = torch.tensor([0, 1, 1, 0])
    regression = OwnedRegression(owners)
    for rows in torch.arange(200).split(70):
        regression.add(x[rows], r[rows], r[rows], believed[:, rows])
    change = regression.solve(0.0, 0.0).change
    for column, owner in enumerate(owners.tolist()):
        scale = believed[owner].sqrt().numpy()
        expected = np.linalg.lstsq(x.numpy() * scale[:, None], r[:, column].numpy() * scale, rcond=None)[0]
        np.testing.assert_allclose(change[:, column].numpy(), expected, atol=1e-9)


def test_the_output_fit_is_the_optimum_that_scipy_finds() -> None:
    found = merged(start="parent", features="mean", output="predictions", ridge=1e9)  # the map stays, then it is fitted
    kept = found.report()["start"]["model"]
    first = [torch.cat([b["input_ids"] for b in batches(m)()]) for m in (0, 1)]
    with torch.no_grad():
        f = torch.cat([parent(kept).model(input_ids=ids).last_hidden_state.flatten(0, 1) for ids in first])
        p = torch.cat([parent(m)(input_ids=ids).logits.flatten(0, 1).softmax(-1) for m, ids in enumerate(first)])
    f, p = f.double().numpy(), p.double().numpy()
    gram = f.T @ f / len(f)
    gram += DAMPING * np.diag(gram).mean() * np.eye(len(gram))
    start = parent(kept).lm_head.weight.detach().double().numpy().T

    def objective(flat: np.ndarray) -> tuple[float, np.ndarray]:
        weight = flat.reshape(start.shape)
        scores, change = f @ weight, weight - start
        value = (scipy.special.logsumexp(scores, 1) - (p * scores).sum(1)).mean() + PULL * np.sum(
            change * (gram @ change)
        )
        slope = f.T @ (scipy.special.softmax(scores, 1) - p) / len(f) + 2 * PULL * gram @ change
        return float(value), slope.flatten()

    best = scipy.optimize.minimize(objective, start.flatten(), jac=True, method="L-BFGS-B", options={"maxiter": 2000})
    ours = objective(found.state_dict()["lm_head.weight"].double().numpy().T.flatten())[0]
    gained, possible = (objective(start.flatten())[0] - value for value in (ours, best.fun))
    assert 0.97 * possible < gained <= possible + 1e-6


@pytest.mark.parametrize(("anchor", "share", "count"), [(0, 0.8, 2), (2, 0.95, 4)])
def test_shares_that_lean_sum_to_one(anchor: int, share: float, count: int) -> None:
    shares = leaning(anchor, share, count)
    assert sum(shares) == pytest.approx(1) and shares[anchor] == share and len(set(shares)) == 2


def test_the_ridge_is_the_one_that_predicts_rows_best_that_it_has_not_seen() -> None:
    generator = np.random.default_rng(0)
    chosen = set()
    for noise in (0.01, 30.0):
        search, seen, unseen = RidgeSearch(), [], []
        for _ in range(4):
            x = generator.normal(size=(24, 10))
            y = x @ np.ones((10, 2)) + noise * generator.normal(size=(24, 2))
            search.add(*(torch.from_numpy(part) for part in (x, y, y)))
            cut = 24 - 24 // ASIDE
            seen.append((x[:cut], y[:cut]))
            unseen.append((x[cut:], y[cut:]))
        (x, y), (xs, ys) = ([np.concatenate(part) for part in zip(*rows, strict=True)] for rows in (seen, unseen))

        def error(ridge: float, x: Any = x, y: Any = y, xs: Any = xs, ys: Any = ys) -> float:
            gram = x.T @ x
            solution = np.linalg.solve(gram + ridge * np.diag(np.diag(gram)), x.T @ y)
            return float(np.square(xs @ solution - ys).sum())

        assert search.best_ridge(0.0) == min(RIDGES, key=error)
        chosen.add(search.best_ridge(0.0))
    assert len(chosen) == 2, "noise asks for a stronger ridge"
