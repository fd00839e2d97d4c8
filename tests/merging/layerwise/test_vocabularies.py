"""Parents of other vocabularies than the first: offsets, predictions, merges that do not depend on the numbering."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import isomerge
from isomerge.checkpoint import open_checkpoint
from isomerge.data import open_data
from isomerge.data.base import Wanted
from isomerge.data.encode import Encoder
from isomerge.data.parallel import ParallelTexts, PendingTexts, TokenReading, matched
from isomerge.errors import RequestError
from isomerge.merging.layerwise.goals import expert_beliefs
from isomerge.merging.layerwise.token_matching import TokenMatch, find_matches
from isomerge.running.passes import DataPass
from isomerge.running.stock import load_stock, read_weights
from precision import float64_throughout

TEXT = "the cat sat on the mat, the hat was on the cat; naïve café, 日本語 — 👩‍🚀 and 🎉🎉! " * 3 + "\n"
STRINGS = ["", "the", " that cat", "né 日本 👩‍🚀x", "🎉", "\n\n the  mats", "ÿ日e"]


def tokenizer(out: Path, size: int, *, reverse: bool = False) -> list[int]:
    """A byte-level BPE, and for each token its number; `reverse`: in another order."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        [TEXT], trainers.BpeTrainer(
            vocab_size=size, show_progress=False, initial_alphabet=alphabet, special_tokens=["<pad>", "<s>"],
            max_token_length=6,
        )
    )  # fmt: skip
    content = json.loads(made.to_str())
    numbers = list(range(size))[:: -1 if reverse else 1]
    content["model"]["vocab"] = {token: numbers[id] for token, id in content["model"]["vocab"].items()}
    for added in content["added_tokens"]:
        added["id"] = numbers[added["id"]]
    made = Tokenizer.from_str(json.dumps(content))
    PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", bos_token="<s>").save_pretrained(out)
    return numbers


def random_model(out: Path, size: int, seed: int, kind: str = "LlamaForCausalLM") -> Path:
    """A random model, and a tokenizer of its own beside it."""
    import transformers

    torch.manual_seed(seed)
    config_class = getattr(transformers, kind).config_class
    config = config_class(
        vocab_size=size, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=48,
        pad_token_id=0, bos_token_id=1, initializer_range=0.5, num_labels=3,
    )  # fmt: skip
    if config.model_type == "llama":
        config.num_key_value_heads, config.intermediate_size = 1, 12
    getattr(transformers, kind)(config).double().save_pretrained(out)
    tokenizer(out, size)
    return out


def renumbered(model: Path, out: Path) -> Path:
    """The same model, whose tokens have other numbers."""
    import transformers

    kind = json.loads((model / "config.json").read_text())["architectures"][0]
    stock = getattr(transformers, kind).from_pretrained(model, dtype=torch.float64)
    numbers = torch.tensor(tokenizer(out, stock.config.vocab_size, reverse=True))
    for weight in stock.parameters():  # a tied table is one
        if weight.shape[0] == stock.config.vocab_size:
            weight.data[numbers] = weight.data.clone()
    stock.config.pad_token_id, stock.config.bos_token_id = int(numbers[0]), int(numbers[1])
    stock.save_pretrained(out)
    return out


def vocabularies(home: Path) -> Path:
    """Models a and b of one vocabulary, c like b with other numbers, d of a larger one; texts."""
    random_model(home / "a", 280, 0)
    renumbered(random_model(home / "b", 280, 1), home / "c")
    random_model(home / "d", 300, 2)
    texts = [TEXT[start : start + 30] for start in range(0, len(TEXT) - 30, 9)]
    (home / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return home


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vocabularies(tmp_path_factory.mktemp("vocabularies"))


def merged(folder: Path, names: str, **options: Any) -> Any:
    options = {"method": "reconstruct", "data": str(folder / "texts.jsonl"), "goals": "mean", **options}
    with float64_throughout():
        return isomerge.merge([folder / name for name in names], **options)


def scores(folder: Path, result: Any) -> torch.Tensor:
    ids = torch.arange(2, 42).reshape(2, 20)
    if isinstance(result, str):
        checkpoint = open_checkpoint(folder / result)
        return load_stock(checkpoint.config, read_weights(checkpoint), dtype=torch.float64)(ids).logits.detach()
    return load_stock(result.config, result.state_dict(), dtype=torch.float64)(ids).logits.detach()


def distance(first: torch.Tensor, second: torch.Tensor) -> float:
    return float((first - second).norm() / first.norm())


# --- offsets ----------------------------------------------------------------------------------------------------------
def bytes_of(token: str) -> int:
    """Byte-level tokens are written with one letter for each byte."""
    return len(token)


@pytest.mark.parametrize("text", [*STRINGS[1:], TEXT[:45]])
def test_tokens_end_at_the_bytes_that_their_names_add_up_to(text: str, folder: Path) -> None:
    for name in "acd":
        encoder = Encoder.of(open_checkpoint(folder / name), None, None)
        encoding = encoder.tokenizer(text)
        expected = list(itertools.accumulate(len(token) for token in encoding.tokens()))
        assert expected[-1] == len(text.encode())
        assert TokenReading.of(encoder, text).ends == expected


def test_positions_are_those_of_a_search_through_all_tokens() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        first, other = (torch.randint(0, 30, (12,), generator=generator).unique().tolist() for _ in range(2))
        expected = [max([at for at, end in enumerate(other) if end <= reached], default=0) for reached in first]
        assert matched(first, other).tolist() == expected


def test_a_batch_holds_every_reading_with_what_is_pending(folder: Path) -> None:
    first, other = (open_checkpoint(folder / name) for name in "ad")
    known = PendingTexts()
    data = ParallelTexts(open_data(str(folder / "texts.jsonl")), {1: other}, known)
    tokenizers = [Encoder.of(one, None, None).tokenizer for one in (first, other)]
    for batch in data.read(first, Wanted(batch_size=5, limit=10)):
        for row in range(len(batch["input_ids"])):
            names = [
                tokenizers[who].convert_ids_to_tokens(batch[ids][row][batch[mask][row].bool()].tolist())
                for who, (ids, mask) in enumerate(
                    [("input_ids", "attention_mask"), ("1:input_ids", "1:attention_mask")]
                )
            ]
            reached, seen = ([*itertools.accumulate(map(bytes_of, tokens))] for tokens in names)
            text = tokenizers[0].decode(batch["input_ids"][row][batch["attention_mask"][row].bool()])
            assert batch["0:bytes"][row] == reached[-1] - reached[0]
            assert batch["1:bytes"][row] == seen[-1] - seen[0]
            for at, end in enumerate(reached):
                place, number = int(batch["1:places"][row, at]), int(batch["1:pending"][row, at])
                assert place == max([k for k, own in enumerate(seen) if own <= end], default=0)
                left = text.encode()[seen[place] : end] if seen[place] <= end else b"\xff"
                if number >= 0:
                    assert known.texts[number].encode() == left
                else:
                    assert "\ufffd" in left.decode(errors="replace")
    assert len(known.texts) > 1


def test_running_text_is_cut_where_tokens_of_the_first_end(folder: Path, tmp_path: Path) -> None:
    text = TEXT.replace("\n", " ") * 4
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    encoder, stretches = open_data(str(tmp_path / "text.txt")).as_texts(open_checkpoint(folder / "a"))
    assert "".join(stretches).strip() == text.strip() and len(stretches) > 10
    assert all(len(encoder.tokenizer(one)["input_ids"]) <= 48 + 2 for one in stretches)


# --- predictions ------------------------------------------------------------------------------------------------------
def by_hand(match: TokenMatch, own: list[float], first: list[float], pending: str) -> list[float]:
    """q token by token, with names as they are in tokenizer.json; texts without characters of several bytes."""
    a, b = match.first, match.other

    def begin(texts: Any, text: str) -> int | None:
        pieces = texts.pieces([text])[0]
        return pieces[0][0] if pieces and (not pending or texts is a or pieces[0][1] > len(pending)) else None

    group = {t: begin(b, pending + text) for t, text in a.texts.items()}
    alone = [
        t for t, text in b.texts.items() if t not in group.values() and text.startswith(pending) and text != pending
    ]
    unknown = [t for t in range(len(first)) if t not in a.texts]
    if not pending:  # half characters and special tokens have the same names
        group |= {t: b.by_name.get(a.names[t]) for t in unknown}
        unknown = [t for t in unknown if group[t] is None]
    rest = sum(first[t] for t in unknown)
    possible = {g for g in group.values() if g is not None} | set(alone)
    total = sum(own[g] for g in possible)
    found = [0.0] * len(first)
    for t in unknown:
        found[t] = first[t]
    for t, g in group.items():
        if g is not None:
            found[t] = (1 - rest) * own[g] / total * first[t] / sum(first[s] for s in group if group[s] == g)
    for g in alone:
        found[begin(a, b.texts[g][len(pending) :])] += (1 - rest) * own[g] / total  # type: ignore[index]
    return found


@pytest.mark.parametrize("order", ["ad", "da"], ids=["a larger one", "a smaller one"])
def test_predictions_are_carried_token_by_token(order: str, folder: Path) -> None:
    (match,) = find_matches([open_checkpoint(folder / name) for name in order]).values()
    torch.manual_seed(0)
    texts = ["", "th", " t"]
    match.pending.texts += texts[1:]
    own, first = (torch.randn(3, one.rows).double().softmax(1) for one in (match.other, match.first))
    found = match.carried(own, first, torch.arange(3))
    assert torch.allclose(found.sum(1), torch.ones(3).double())
    for row, text in enumerate(texts):
        expected = by_hand(match, own[row].tolist(), first[row].tolist(), text)
        assert torch.allclose(found[row], torch.tensor(expected).double(), rtol=1e-4, atol=1e-8), text
    kept = match.carried(own, first, torch.full((3,), -1))
    assert torch.equal(kept, first)


def test_predictions_of_renumbered_tokens_are_renumbered(folder: Path) -> None:
    (match,) = find_matches([open_checkpoint(folder / name) for name in "ac"]).values()
    torch.manual_seed(0)
    own, first = torch.randn(2, 4, match.first.rows).double().softmax(-1)
    assert match.shared == match.first.rows
    assert torch.allclose(match.carried(own, first, torch.zeros(4).long()), own.flip(1), rtol=1e-12)
    table = torch.randn(match.first.rows, 3)
    assert all(torch.equal(match.rows(table, output=output), table.flip(0)) for output in (True, False))


# --- merges -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"output": "predictions", "refine": 1, "polish": 2, "start": "merge"}, id="mean"),
        pytest.param({"goals": "expert", "lean": "no"}, id="expert", marks=pytest.mark.slow),
        pytest.param({"output": "scores"}, id="scores", marks=pytest.mark.slow),
    ],
)
def test_the_merge_does_not_depend_on_the_numbers_of_tokens(options: dict[str, Any], folder: Path) -> None:
    plain = merged(folder, "ab", features="joint", **options)
    other = merged(folder, "ac", **options)
    assert "vocabularies" not in plain.report()
    assert other.report()["vocabularies"][0]["shared"] == 280
    assert distance(scores(folder, plain), scores(folder, other)) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["GPT2LMHeadModel", "LlamaForSequenceClassification"])
def test_other_models_do_not_depend_on_it_either(kind: str, folder: Path, tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 1)):
        random_model(tmp_path / name, 280, seed, kind)
    renumbered(tmp_path / "b", tmp_path / "c")
    (tmp_path / "texts.jsonl").write_bytes((folder / "texts.jsonl").read_bytes())
    plain, other = (
        merged(tmp_path, names, features="joint", polish=2, start="merge", output="predictions")
        for names in ("ab", "ac")
    )
    assert len(other.report()["vocabularies"]) == 1
    assert distance(scores(tmp_path, plain), scores(tmp_path, other)) < 1e-5


def test_a_share_of_nearly_one_and_the_first_parent_as_a_start_give_its_function(folder: Path) -> None:
    whole = merged(folder, "ad", weights=[1 - 1e-12, 1e-12])
    assert distance(scores(folder, "a"), scores(folder, whole)) < 1e-3
    start = merged(folder, "ad", start="parent-1", output="scores")
    assert distance(scores(folder, "a"), scores(folder, start)) < 1e-9


def test_likelihoods_are_of_the_same_bytes(folder: Path) -> None:
    """A model with other numbers is as likely as itself, and one of fewer, longer tokens counts for all its bytes."""
    models = [open_checkpoint(folder / name) for name in "bcd"]
    matches = find_matches(models)
    texts = ParallelTexts(open_data(str(folder / "texts.jsonl")), {m: models[m] for m in matches}, PendingTexts())
    stock = [load_stock(model.config, read_weights(model)) for model in models]
    examples = DataPass(texts.passes(models[0], limit=6), hashed=False)
    beliefs, _ = expert_beliefs(examples, stock, [1 / 3] * 3, 100.0)
    nats = torch.zeros(3, 6)
    (batch,) = examples
    for m, own in enumerate(["", "1:", "2:"]):
        for row in range(6):
            ids = batch[f"{own}input_ids"][row][batch[f"{own}attention_mask"][row].bool()][None]
            told = stock[m](ids).logits.log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None]).sum()
            nats[m, row] = told.detach() * batch["0:bytes"][row] / batch[f"{m}:bytes"][row]
    assert torch.allclose(beliefs.batches[0], (nats / 100).softmax(0), atol=1e-5)
    assert torch.allclose(beliefs.batches[0][0], beliefs.batches[0][1], atol=1e-6)


# --- what is refused --------------------------------------------------------------------------------------------------
def test_what_cannot_be_read_or_merged_is_refused(folder: Path, tmp_path: Path) -> None:
    bare = random_model(tmp_path / "bare", 290, 0)
    for file in bare.glob("tokenizer*"):
        file.unlink()
    cases: list[tuple[str, list[Path], dict[str, Any]]] = [
        ("no tokenizer beside it", [folder / "a", bare], {}),
        ("dream", [folder / "a", folder / "d"], {"dream": 4}),
        ("joint", [folder / "a", folder / "d"], {"features": "mean"}),
        ("plain texts", [folder / "a", folder / "d"], {"data": [{"input_ids": torch.ones(2, 4).long()}]}),
        ("vocabular", [folder / "a", folder / "d"], {"method": "mixture"}),
        ("vocabular", [folder / "a", folder / "c"], {"method": "mixture"}),
        ("vocabular", [folder / "a", folder / "c"], {"method": "regmean++", "data": [str(folder / "texts.jsonl")] * 2}),
    ]
    for why, models, options in cases:
        with pytest.raises(RequestError, match=why):
            isomerge.merge(models, **{"method": "reconstruct", "data": str(folder / "texts.jsonl"), **options})
