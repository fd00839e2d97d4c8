"""Answers are ranked by comparing every two; likelihoods, scores and preferences are those of stock models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

import isomerge
from isomerge.ensembling.ranking import Verdicts, by_scores
from isomerge.errors import RequestError
from models import bert, llama

PROMPTS = ["the cat sat", "a dog ran on the"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("writers")
    for seed, name in enumerate("abc"):
        llama(home / name, seed=seed)
    bert(home / "scores", "sequence", ["score"], seed=5)
    bert(home / "compares", "sequence", ["first", "second"], seed=6)
    return home


def continued(folder: Path, prompt: str, tokens: int) -> str:
    """What transformers writes greedily after the prompt."""
    stock, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    given = tokenizer(prompt, return_tensors="pt")["input_ids"]
    found = stock.generate(given, max_new_tokens=tokens, do_sample=False, pad_token_id=0)[0]
    return tokenizer.decode(found, skip_special_tokens=True).removeprefix(prompt)


def likelihood(folder: Path, prompt: str, answer: str) -> float:
    """The mean log-probability of a byte; every word of the answer is a token."""
    stock, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(prompt + answer, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        logs = stock(ids).logits[0, :-1].double().log_softmax(-1)
    heard = [float(logs[at, token]) for at, token in enumerate(ids[0, 1:].tolist())]
    return sum(heard[-len(answer.split()) :]) / len(answer.encode())


@torch.no_grad()
def head(folder: Path, text: str, pair: str) -> torch.Tensor:
    stock = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    batch = AutoTokenizer.from_pretrained(folder)(text, pair, return_tensors="pt", return_token_type_ids=True)
    return stock(**batch).logits[0].double()


@pytest.mark.parametrize("rank", ["likelihood", "c", "scores", "compares"])
def test_the_best_answer_is_that_of_a_count_by_hand(folder: Path, rank: str) -> None:
    writers = [folder / name for name in "ab"]
    named = rank if rank == "likelihood" else folder / rank
    found = isomerge.generate(writers, PROMPTS, rank=named, tokens=4)
    for prompt, output in zip(PROMPTS, found.outputs, strict=True):
        texts = [continued(folder / name, prompt, 4) for name in "ab"]
        assert [row["text"] for row in output["candidates"]] == texts
        if rank == "compares":
            pairs = [(texts[0], texts[1]), (texts[1], texts[0])]
            one, other = (
                float(head(folder / rank, f"{prompt}\n{a}", f"{prompt}\n{b}").softmax(-1)[0]) for a, b in pairs
            )
            wins = [(one + 1 - other) / 2, (other + 1 - one) / 2]
        else:
            scores = [
                [likelihood(folder / judge, prompt, text) for text in texts]
                for judge in ("ab" if rank == "likelihood" else "c")
            ]
            if rank == "scores":
                scores = [[float(head(folder / rank, prompt, text)[0]) for text in texts]]
            wins = [
                sum(row[0] > row[1] for row in scores) / len(scores),
                sum(row[1] > row[0] for row in scores) / len(scores),
            ]
            means = [sum(row[n] for row in scores) / len(scores) for n in range(2)]
            assert [row["score"] for row in output["candidates"]] == pytest.approx(means, rel=1e-4)
        assert [row["wins"] for row in output["candidates"]] == pytest.approx(wins, abs=1e-5)
        best = max(range(2), key=lambda n: (wins[n], 0 if rank == "compares" else means[n]))
        assert output["text"] == texts[best] and output["model"] == str(writers[best])


def test_every_two_are_compared_and_ties_have_their_rules() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        scores = torch.randint(0, 3, (3, 4), generator=generator).double()
        verdicts = by_scores(scores)
        for i in range(4):
            won = sum(
                (scores[j, i] > scores[j, k]).double() + (scores[j, i] == scores[j, k]).double() / 2
                for j in range(3) for k in range(4) if k != i
            )  # fmt: skip
            assert float(verdicts.totals()[i]) == pytest.approx(float(won) / 3)
        ranking = sorted(
            range(4), key=lambda i: (-round(float(verdicts.totals()[i]), 9), -float(scores[:, i].mean()), i)
        )
        assert verdicts.best == ranking[0]
    assert Verdicts(torch.full((3, 3), 0.5), None).best == 0


def test_an_empty_answer_loses(folder: Path) -> None:
    from isomerge.checkpoint import open_checkpoint
    from isomerge.ensembling.ranking import Ranker
    from isomerge.running.stock import StockModel

    ranker = Ranker([StockModel.load(open_checkpoint(folder / "a"))], "likelihood")
    assert ranker("the cat", ["", " sat on"]).best == 1


def test_together_they_write_what_the_fused_model_writes(folder: Path) -> None:
    found = isomerge.generate([folder / "a", folder / "b"], PROMPTS[:1], tokens=3, combination="posterior")
    writer = isomerge.make_ensemble([folder / "a", folder / "b"], "posterior")
    tokenizer = AutoTokenizer.from_pretrained(folder / "a")
    ids = writer.generate(tokenizer(PROMPTS[0], return_tensors="pt")["input_ids"], max_new_tokens=3, do_sample=False)
    assert PROMPTS[0] + found.outputs[0]["text"] == tokenizer.decode(ids[0], skip_special_tokens=True)
    assert found.rank is None and found.combination == "posterior"
    assert isomerge.generate(writer, PROMPTS[:1], tokens=3).outputs == found.outputs


def test_what_cannot_be_ranked_or_written_is_refused(folder: Path, tmp_path: Path) -> None:
    bert(tmp_path / "three", "sequence", ["a", "b", "c"])
    with pytest.raises(RequestError, match="neither a language model nor a classifier"):
        isomerge.generate([folder / "a"], PROMPTS, rank=tmp_path / "three")
    with pytest.raises(RequestError, match="prompts must be a list"):
        isomerge.generate([folder / "a"], "the cat")
    with pytest.raises(RequestError, match="at least one is needed"):
        isomerge.generate([folder / "a"], PROMPTS, tokens=0)
    with pytest.raises(RequestError, match="Shorten it"):
        isomerge.generate([folder / "a"], ["the cat " * 20])
