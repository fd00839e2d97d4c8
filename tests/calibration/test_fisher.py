"""Diagonal Fisher information against plain autograd loops and sums over all labels."""

from __future__ import annotations

import itertools
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from calibration.hooks import Batch, batches, data, stock
from isomerge.calibration import calibrate
from isomerge.calibration.squared_gradients import SquaredGradients
from isomerge.errors import IsomergeError, RequestError
from models import MODELS, model, mostly_slow, tensors

State = dict[str, Tensor]


def squared(module: Any, score: Tensor) -> State:
    module.zero_grad()
    score.backward(retain_graph=True)
    return {n: p.grad.square() if p.grad is not None else torch.zeros_like(p) for n, p in module.named_parameters()}


def expectation(module: Any, terms: Iterable[tuple[float, Tensor]]) -> State:
    total: State = {}
    for chance, score in terms:
        for name, value in squared(module, score).items():
            total[name] = total.get(name, torch.zeros_like(value)) + chance * value
    return total


def by_value(module: Any, folder: Path) -> dict[str, str]:
    """From names in memory to names on disk, by what the tensors hold."""
    stored = tensors(folder)
    return {
        n: next(d for d, t in stored.items() if t.shape == p.shape and torch.equal(t.to(p.dtype), p))
        for n, p in module.named_parameters()
    }


def mean_over_examples(folder: Path, batch: Batch, terms: Callable[[Any, Batch], Any]) -> State:
    module, size = stock(folder), len(next(iter(batch.values())))
    total: State = {}
    for example in range(size):
        one = {name: tensor[example : example + 1] for name, tensor in batch.items()}
        for name, value in expectation(module, terms(module, one)).items():
            total[name] = total.get(name, torch.zeros_like(value)) + value / size
    names = by_value(module, folder)
    return {names[name]: value for name, value in total.items()}


def assert_same(found: State, expected: State) -> None:
    assert set(found) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value.double(), rtol=1e-6, atol=1e-12, msg=name)


def test_true_fisher_of_a_classifier_is_the_expectation_over_its_own_labels() -> None:
    folder = model("vit")
    batch = data(folder, examples=3)

    def terms(module: Any, one: Batch) -> Any:
        scores = module(**one).logits.log_softmax(-1)[0]
        return [(float(scores[c].detach().exp()), scores[c]) for c in range(5)]

    found = calibrate(folder, batches(batch, 1, 2), what={"fisher"})
    assert found.info["fisher"]["exact"] is True
    assert_same(found.fisher, mean_over_examples(folder, batch, terms))


def test_true_fisher_of_a_sentence_is_the_expectation_over_all_labellings() -> None:
    """Brute force over every sequence of labels: what the sum over positions stands for."""
    folder = model("bert")
    batch = {"input_ids": torch.tensor([[4, 9, 0]]), "attention_mask": torch.tensor([[1, 1, 0]])}

    def terms(module: Any, one: Batch) -> Any:
        scores = module(**one).logits.log_softmax(-1)[0]
        for labels in itertools.product(range(5), repeat=2):
            score = scores[0, labels[0]] + scores[1, labels[1]]
            yield float(score.exp()), score

    assert_same(calibrate(folder, batches(batch), what={"fisher"}).fisher, mean_over_examples(folder, batch, terms))


@pytest.mark.parametrize("name", sorted(set(MODELS) - {"mixtral"}))  # whose names on disk have a test below
def test_empirical_fisher_is_the_squared_gradient_of_the_stock_loss(name: str) -> None:
    folder = model(name)
    batch = data(folder, examples=4, labels=True)
    shifted = MODELS[name][0].endswith(("ForCausalLM", "LMHeadModel"))

    def terms(module: Any, one: Batch) -> Any:
        labels = one["labels"].reshape(1, -1)
        counted = int((labels[:, 1:] if shifted else labels).ne(-100).sum())
        return [(1.0, -module(**one).loss * counted)]

    batch = {n: t for n, t in batch.items() if n != "decoder_attention_mask"}
    found = calibrate(folder, batches(batch, 3, 1), what={"fisher"}, fisher="empirical")
    expected = mean_over_examples(folder, batch, terms)
    for tensor, value in expected.items():
        # transformers computes its losses in float32
        torch.testing.assert_close(found.fisher[tensor], value.double(), rtol=1e-4, atol=1e-7, msg=tensor)


@pytest.mark.slow
def test_drawn_labels_do_not_depend_on_the_batches_and_are_right_on_average() -> None:
    folder = model("gpt2")
    batch = {n: t[:2, :4] for n, t in data(folder).items()}

    def terms(module: Any, one: Batch) -> Any:
        scores = module(**one).logits.log_softmax(-1)[0, :-1]
        return [(float(scores[t, c].exp()), scores[t, c]) for t in range(len(scores)) for c in range(scores.shape[1])]

    expected = mean_over_examples(folder, batch, terms)
    many = calibrate(folder, batches(batch), what={"fisher"}, samples=200)
    assert many.info["fisher"]["exact"] is False
    drawn, exact = (sum(float(v.sum()) for v in state.values()) for state in (many.fisher, expected))
    assert drawn == pytest.approx(exact, rel=0.1)
    one, other = (calibrate(folder, batches(batch, *s), what={"fisher"}, seed=4).fisher for s in ((), (1, 1)))
    another = calibrate(folder, batches(batch), what={"fisher"}, seed=5).fisher
    assert all(torch.allclose(one[n], other[n], rtol=1e-6) for n in one)
    assert any(not torch.allclose(one[n], another[n]) for n in one)


@pytest.mark.parametrize("name", mostly_slow(sorted(MODELS), "llama", "mixtral"))
def test_a_batch_takes_one_backward_pass_unless_experts_pick_tokens(name: str) -> None:
    folder = model(name)
    module = stock(folder)
    batch = data(folder, examples=5)
    sizes: list[int] = []

    def scores(some: Batch, first: int) -> Any:
        sizes.append(len(next(iter(some.values()))))
        yield module(**some).logits.log_softmax(-1)[..., 0].sum()

    squares = SquaredGradients(module, scores)
    squares.add(batch, 0)
    assert squares.one_by_one == (name == "mixtral")
    assert sizes == ([5, 1, 1, 1, 1, 1] if name == "mixtral" else [5, 1])
    for parameter, total in zip(squares.parameters, squares.sums, strict=True):
        expected = torch.zeros_like(parameter)
        for example in range(5):
            one = {n: t[example : example + 1] for n, t in batch.items()}
            score = module(**one).logits.log_softmax(-1)[..., 0].sum()
            (grad,) = torch.autograd.grad(score, [parameter], allow_unused=True)
            expected += 0 if grad is None else grad.square()
        torch.testing.assert_close(total, expected.detach(), rtol=1e-8, atol=1e-14)


class Positions(torch.nn.Module):
    """Adds a position to what it reads, and gives every example as many copies of a gain as there are positions."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.gain, self.mixed = (torch.nn.Parameter(torch.arange(1.0, 4) / 5) for _ in range(3))

    def forward(self, x: Tensor, mixing: bool) -> Tensor:
        made = x + self.table + self.gain.expand(len(x), 3) * x
        return made + (x.sum(0) * self.mixed if mixing else 0)


@pytest.mark.parametrize(("size", "mixing"), [(2, False), (3, False), (5, False), (2, True), (4, True)])
def test_examples_that_cannot_be_told_apart_go_one_by_one(size: int, mixing: bool) -> None:
    """Lengths that agree by chance, and a sum over the batch, where an example in a batch is not what it is alone."""
    module = Positions().double()
    batch = {"x": torch.randn(size, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(size))}

    def scores(some: Batch, first: int) -> Any:
        yield module(some["x"], mixing).square().sum()

    squares = SquaredGradients(module, scores)
    squares.add(batch, 0)
    assert squares.one_by_one == mixing
    expected = [torch.zeros(3, dtype=torch.float64) for _ in range(3)]
    for row in batch["x"]:
        score = module(row[None], mixing).square().sum()
        for total, grad in zip(
            expected, torch.autograd.grad(score, squares.parameters, allow_unused=True), strict=True
        ):
            total += 0 if grad is None else grad.square()
    torch.testing.assert_close(squares.sums, expected, rtol=1e-10, atol=1e-14)


def test_a_classifier_without_a_padding_token_takes_one_example_at_a_time() -> None:
    settings = MODELS["gpt2"][1] | {"pad_token_id": None, "num_labels": 3}
    torch.manual_seed(0)
    module = transformers.GPT2ForSequenceClassification(transformers.GPT2Config(**settings)).double().eval()
    batch = {"input_ids": torch.randint(3, 20, (4, 6))}
    found = calibrate(module, batches(batch), what={"fisher"}).fisher
    expected = torch.zeros_like(module.score.weight)
    for one in batch["input_ids"]:
        scores = module(one[None]).logits.log_softmax(-1)[0]
        for c in range(3):
            (grad,) = torch.autograd.grad(scores[c], [module.score.weight], retain_graph=True)
            expected += scores[c].detach().exp() * grad.square() / 4
    torch.testing.assert_close(found["score.weight"], expected.detach(), rtol=1e-8, atol=1e-14)


def test_experts_have_their_information_under_their_names_on_disk() -> None:
    folder = model("mixtral")
    batch = data(folder, examples=2, labels=True)
    found = calibrate(folder, batches(batch), what={"fisher"}, fisher="empirical").fisher
    module = stock(folder)
    total: dict[str, Tensor] = {}
    for example in range(2):
        one = {name: tensor[example : example + 1] for name, tensor in batch.items()}
        score = -module(**one).loss * int(one["labels"][:, 1:].ne(-100).sum())
        for name, value in squared(module, score).items():
            total[name] = total.get(name, torch.zeros_like(value)) + value / 2
    stacked = total["model.layers.0.mlp.experts.gate_up_proj"]
    prefix = "model.layers.0.block_sparse_moe.experts."
    expected = {
        f"{prefix}{e}.{w}.weight": stacked[e, k * 7 : k * 7 + 7] for e in range(3) for k, w in enumerate(("w1", "w3"))
    }
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value.double(), rtol=1e-5, atol=1e-10, msg=name)
    assert set(found) == set(tensors(folder))


@pytest.mark.parametrize(
    ("name", "pattern", "count"),
    [("vit", r"layer\.1\..*attention", 8), ("bert", "embeddings|classifier", 7), ("mixtral", r"0\..*experts\.2", 3)],
)
def test_a_part_of_a_model_has_the_information_it_has_in_the_whole(name: str, pattern: str, count: int) -> None:
    """For names that are other ones in memory, and for tensors stacked there; the whole is compared above."""
    folder = model(name)
    batch = data(folder, examples=3, labels=True)
    part = calibrate(folder, batches(batch), what={"fisher"}, fisher="empirical", only=pattern)
    whole = calibrate(folder, batches(batch), what={"fisher"}, fisher="empirical")
    assert set(part.fisher) == {each for each in tensors(folder) if re.search(pattern, each)}
    assert len(part.fisher) == count
    assert part.info["only"] == pattern
    assert_same(part.fisher, {each: whole.fisher[each] for each in part.fisher})
    assert all(bool(value.any()) for value in part.fisher.values())


def test_information_of_what_is_no_parameter_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    shutil.copytree(model("bert"), tmp_path / "bert")
    file = tmp_path / "bert" / "model.safetensors"
    save_file({**load_file(file), "bert.embeddings.position_ids": torch.arange(8.0)}, file, metadata={"format": "pt"})
    batch = data(tmp_path / "bert")
    with pytest.raises(RequestError, match="no name of a parameter contains 'position_ids', only 'bert.embeddings.pos"):
        calibrate(tmp_path / "bert", batches(batch), what={"gram", "fisher"}, only="position_ids")


def test_the_information_of_a_tied_table_is_that_of_the_one_it_is_tied_to() -> None:
    folder = model("gpt2", tie_word_embeddings=True)
    assert "lm_head.weight" not in tensors(folder)
    batch = data(folder, examples=3)
    part = calibrate(folder, batches(batch), what={"gram", "fisher"}, only="lm_head")
    assert part.weights == ["lm_head.weight"] and set(part.fisher) == {"transformer.wte.weight"}
    assert_same(part.fisher, {"transformer.wte.weight": calibrate(folder, batches(batch), what={"fisher"}).fisher[
        "transformer.wte.weight"]})  # fmt: skip


def test_information_that_cannot_be_measured_is_refused() -> None:
    folder = model("vit")
    batch = data(folder)
    with pytest.raises(RequestError, match="the data have no labels"):
        calibrate(folder, batches(batch), what={"fisher"}, fisher="empirical")
    with pytest.raises(RequestError, match="Did you mean 'empirical'"):
        calibrate(folder, batches(batch), what={"fisher"}, fisher="emprical")
    with pytest.raises(RequestError, match="at least one"):
        calibrate(folder, batches(batch), what={"fisher"}, samples=0)
    batch["pixel_values"][1, 0, 0, 0] = torch.inf
    with pytest.raises(IsomergeError, match="example 1 are not finite"):
        calibrate(folder, batches(batch), what={"fisher"})
