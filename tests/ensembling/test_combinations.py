"""Every combination beside a computation of its own: numpy, counting, scipy's optimum, scikit-learn, exact Bayes."""

from __future__ import annotations

import itertools
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from sklearn.linear_model import LogisticRegression

from isomerge import choices
from isomerge.ensembling.combinations import COMBINATIONS, Shares
from isomerge.ensembling.combinations.posterior import beliefs
from isomerge.ensembling.combinations.stacked import find_stack
from isomerge.ensembling.combinations.weighted import find_weights

random = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    """For every test, whichever ran before it."""
    random.bit_generator.state = np.random.default_rng(0).bit_generator.state


def logs_of(*shape: int, scale: float = 2.0) -> torch.Tensor:
    return torch.from_numpy(scale * random.standard_normal(shape)).log_softmax(-1)


def test_the_command_line_offers_all_of_them() -> None:
    assert set(choices.COMBINATIONS) == set(COMBINATIONS)
    assert all(one.summary and one.reference for one in COMBINATIONS.values())


@pytest.mark.parametrize("name", sorted(set(COMBINATIONS) - {"stacked"}))
def test_what_comes_out_is_a_distribution_and_one_member_stays_itself(name: str) -> None:
    logs = logs_of(3, 5, 4)
    together = COMBINATIONS[name](logs, Shares.of([1, 1, 1]))
    assert torch.allclose(together.exp().sum(-1), torch.ones(5, dtype=torch.float64))
    alone = COMBINATIONS[name](logs[:1], Shares.of([2]))
    assert torch.equal(alone.argmax(-1), logs[0].argmax(-1))
    assert name == "vote" or torch.allclose(alone, logs[0])


def test_probability_and_logit_are_means_of_what_a_softmax_gives() -> None:
    logits = random.standard_normal((3, 7, 4))
    chances = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    weights = np.array([0.5, 0.2, 0.3])
    logs, shares = torch.from_numpy(logits).log_softmax(-1), Shares.of([5, 2, 3])
    expected = np.einsum("m,mrc->rc", weights, chances)
    assert np.allclose(COMBINATIONS["probability"](logs, shares).exp().numpy(), expected, rtol=1e-12)
    raw = np.exp(np.einsum("m,mrc->rc", weights, logits))
    assert np.allclose(COMBINATIONS["logit"](logs, shares).exp(), raw / raw.sum(-1, keepdims=True), rtol=1e-12)


def test_a_class_that_a_member_without_weight_rules_out_stays() -> None:
    logs = torch.tensor([[[0.25, 0.75]], [[0.0, 1.0]]], dtype=torch.float64).log()
    assert torch.allclose(COMBINATIONS["logit"](logs, Shares.of([1, 0])), logs[0])


def test_a_vote_is_won_by_counting_and_ties_by_the_mean() -> None:
    for chosen in itertools.product(range(3), repeat=4):
        rows = random.dirichlet(np.ones(3), 4)
        for row, wanted in zip(rows, chosen, strict=True):
            best = row.argmax()
            row[[best, wanted]] = row[[wanted, best]]
        votes = Counter(chosen)
        leading = [c for c in range(3) if votes[c] == max(votes.values())]
        winner = max(leading, key=lambda c: rows[:, c].mean())
        found = COMBINATIONS["vote"](torch.from_numpy(rows)[:, None].log(), Shares.of([1] * 4))
        assert int(found.argmax(-1)) == winner
        exact = [Fraction(votes[c]) + Fraction(float(rows[:, c].mean())) for c in range(3)]
        assert np.allclose(found[0].exp(), [float(one / 5) for one in exact])


def test_found_weights_are_those_of_scipys_optimum() -> None:
    likelihoods = random.dirichlet(np.ones(4), (3, 300))[..., 0] * np.array([1.0, 0.7, 0.1])[:, None]
    likelihoods[1, 200:] *= 3

    def loss(weights: np.ndarray) -> float:
        return -float(np.log(weights @ likelihoods).mean())

    best = minimize(
        loss, np.ones(3) / 3, bounds=[(1e-12, 1)] * 3, method="SLSQP", options={"ftol": 1e-14},
        constraints={"type": "eq", "fun": lambda w: w.sum() - 1},
    )  # fmt: skip
    found = find_weights(torch.from_numpy(likelihoods).log()).numpy()
    assert found.sum() == pytest.approx(1) and loss(found) <= best.fun + 1e-7
    assert np.allclose(found, best.x, atol=2e-3)
    assert loss(found) < loss(np.ones(3) / 3) - 1e-3


def examples(rows: int = 400, classes: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of two members, and labels that the first knows by halves and the second by thirds."""
    targets = random.integers(0, classes, rows)
    logits = random.standard_normal((2, rows, classes))
    logits[0, np.arange(rows), targets] += 1.5
    logits[1, np.arange(rows), targets] += 0.8
    return torch.from_numpy(logits).log_softmax(-1), torch.from_numpy(targets)


def scipys_stack(inputs: np.ndarray, targets: np.ndarray, ridge: float) -> np.ndarray:
    """(classes, members · classes + 1): the same minimum, with a gradient by hand."""
    classes = int(targets.max()) + 1
    wide = np.concatenate([inputs, np.ones((len(inputs), 1))], 1)
    members = inputs.shape[1] // classes
    start = np.concatenate([np.tile(np.eye(classes) / members, (1, members)), np.zeros((classes, 1))], 1)

    def loss(flat: np.ndarray) -> tuple[float, np.ndarray]:
        table = flat.reshape(start.shape)
        scores = wide @ table.T
        top = scores.max(1, keepdims=True)
        chances = np.exp(scores - top) / np.exp(scores - top).sum(1, keepdims=True)
        gradient = (chances - np.eye(classes)[targets]).T @ wide / len(wide) + ridge * (table - start)
        fit = -np.log(chances[np.arange(len(wide)), targets]).mean()
        return fit + ridge / 2 * ((table - start) ** 2).sum(), gradient.ravel()

    options = {"ftol": 1e-15, "gtol": 1e-10, "maxiter": 20000}
    return minimize(loss, start.ravel(), jac=True, method="L-BFGS-B", options=options).x.reshape(start.shape)


@pytest.mark.parametrize("ridge", [0.01, 1.0])
def test_a_stack_is_scipys_optimum(ridge: float) -> None:
    logs, targets = examples(120)
    found = find_stack(logs, targets, ridge)
    expected = scipys_stack(np.concatenate(list(logs.numpy()), 1), targets.numpy(), ridge)
    assert np.allclose(found.matrix.numpy(), expected[:, :-1], atol=1e-5)
    assert np.allclose(found.bias.numpy(), expected[:, -1], atol=1e-5)


def test_a_stack_with_hardly_a_penalty_predicts_as_scikit_learn_does() -> None:
    logs, targets = examples()
    inputs = np.concatenate(list(logs.numpy()), 1)
    stack = find_stack(logs, targets, 1e-7)
    fitted = LogisticRegression(C=1e7 / len(inputs), max_iter=5000, tol=1e-10).fit(inputs, targets)
    ours = COMBINATIONS["stacked"](logs, Shares(Shares.of([1, 1]).weights, stack)).exp()
    assert np.allclose(ours.numpy(), fitted.predict_proba(inputs), atol=2e-3)


def test_a_stack_that_is_held_back_is_the_mean_logit() -> None:
    logs, targets = examples()
    shares = Shares(Shares.of([1, 1]).weights, find_stack(logs, targets, 1e6))
    assert torch.allclose(
        COMBINATIONS["stacked"](logs, shares), COMBINATIONS["logit"](logs, Shares.of([1, 1])), atol=1e-4
    )


def test_the_posterior_mixture_is_exact_bayes() -> None:
    """Of whole texts: p(next | text) = Σ π P(text, next) / Σ π P(text)."""
    members, length, words = 3, 6, 5
    logs = logs_of(members, 1, length, words)
    text, prior = random.integers(0, words, length), np.array([0.6, 0.3, 0.1])
    chances = logs[:, 0].exp().numpy()
    heard = torch.zeros(members, 1, length, dtype=torch.float64)
    for at in range(1, length):  # nobody predicted the first word
        heard[:, 0, at] = logs[:, 0, at - 1, text[at]]
    believed = beliefs(heard, torch.from_numpy(prior).log()[:, None])
    together = COMBINATIONS["posterior"](logs, Shares(torch.from_numpy(prior), beliefs=believed))
    for at in range(length):
        joint = prior * np.prod([chances[:, s - 1, text[s]] for s in range(1, at + 1)], axis=0)
        expected = (joint[:, None] * chances[:, at]).sum(0) / joint.sum()
        assert np.allclose(together[0, at].exp().numpy(), expected, rtol=1e-12)
