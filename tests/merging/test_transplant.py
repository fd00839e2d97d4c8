"""Models with the tokenizer of another one: rows, files, and losses before and after."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from sklearn.linear_model import OrthogonalMatchingPursuit

import isomerge
from isomerge.errors import RequestError
from isomerge.merging.transplanting.matching_pursuit import matching_pursuit
from models import EMBEDDING, HEAD, model, pair_tokenizer, read_config, save_model, tensors, vocabulary_of

LETTERS = "abcdefgh"
PAIRS = [("a", "b"), ("c", "d"), ("ab", "cd")]
"""What the donor's tokenizer joins: the model's has letters alone."""
NEW = ("ab", "cd", "abcd")


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """A model of letters, and a wider donor that numbers them backwards and joins some."""
    small = pair_tokenizer(LETTERS, [], added=("<pad>",))
    large = pair_tokenizer(LETTERS[::-1], PAIRS, added=("<pad>", "<tool>"))
    large.chat_template = "{{ messages }}!"
    save_model(tmp_path / "model", small, seed=1, pad_token_id=small.pad_token_id)
    save_model(tmp_path / "donor", large, seed=2, hidden_size=16, num_attention_heads=4)
    return tmp_path / "model", tmp_path / "donor"


def out(pair: tuple[Path, Path], **options: Any) -> Path:
    folder = pair[0].parent / "out"
    merged = isomerge.transplant(*pair, **options)
    merged.verify(merged.save(folder, force=True))
    return folder


# --- the pursuit ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("most", [1, 3, 8])
def test_the_pursuit_is_scikit_learns(most: int) -> None:
    draw = np.random.default_rng(0)
    atoms, targets = draw.normal(size=(40, 12)), draw.normal(size=(9, 12))
    chosen, coefficients = matching_pursuit(torch.from_numpy(targets), torch.from_numpy(atoms), most)
    for row, target in enumerate(targets):
        truth = OrthogonalMatchingPursuit(n_nonzero_coefs=most, fit_intercept=False).fit(atoms.T, target)
        own = np.zeros(len(atoms))
        own[chosen[row].tolist()] += coefficients[row].numpy()
        assert np.allclose(own, truth.coef_, atol=1e-10)
        assert set(chosen[row].tolist()) == set(np.flatnonzero(truth.coef_))


def test_a_target_that_is_reached_ends_early() -> None:
    atoms = torch.eye(6, dtype=torch.float64)
    targets = torch.tensor([[0, 2.0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0], [1.0, -3.0, 0, 0.5, 0, 0]], dtype=torch.float64)
    chosen, coefficients = matching_pursuit(targets, atoms, 64)
    assert chosen.shape == (3, 6)
    rebuilt = torch.einsum("ts,tsd->td", coefficients, atoms[chosen])
    assert torch.equal(rebuilt, targets) and (coefficients != 0).sum(1).tolist() == [1, 0, 3]
    twice = torch.cat([atoms, atoms])  # every atom is there twice: the second adds nothing
    chosen, coefficients = matching_pursuit(targets, twice, 12)
    assert torch.allclose(torch.einsum("ts,tsd->td", coefficients, twice[chosen]), targets)


# --- rows -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("how", ["omp", "subword", "mean", "zero"])
@pytest.mark.parametrize("table", [EMBEDDING, HEAD])
def test_rows_are_what_the_method_says(pair: tuple[Path, Path], how: str, table: str) -> None:
    folder = out(pair, how=how, k=3)
    before, after, theirs = (tensors(one)[table].double().numpy() for one in (pair[0], folder, pair[1]))
    old, new = vocabulary_of(pair[0]), vocabulary_of(folder)
    assert new == vocabulary_of(pair[1]) and len(after) == len(new) == read_config(folder)["vocab_size"]
    shared = [token for token in new if token in old]
    assert set(new) - set(old) == {*NEW, "<tool>"}
    for token in shared:
        assert np.array_equal(after[new[token]], before[old[token]]), token
    atoms, cut = theirs[[new[token] for token in shared]], transformers.AutoTokenizer.from_pretrained(pair[0])
    assert cut("abcd", add_special_tokens=False)["input_ids"] == [old[letter] for letter in "abcd"]
    for token in set(new) - set(old):
        if how == "omp":
            fitted = OrthogonalMatchingPursuit(n_nonzero_coefs=3, fit_intercept=False).fit(atoms.T, theirs[new[token]])
            wanted = fitted.coef_ @ before[[old[one] for one in shared]]
        elif how == "subword":
            wanted = before[cut(token, add_special_tokens=False)["input_ids"]].mean(0)
        else:
            wanted = before.mean(0) if how != "zero" else np.zeros(8)
        assert np.allclose(after[new[token]], wanted, atol=1e-6), token


def test_stored_rows_are_the_donors(pair: tuple[Path, Path]) -> None:
    save_model(pair[1], pair_tokenizer(LETTERS[::-1], PAIRS), seed=3)
    folder = out(pair, how="stored")
    new = vocabulary_of(folder)
    assert all(
        torch.equal(tensors(folder)[t][new[w]], tensors(pair[1])[t][new[w]]) for t in (EMBEDDING, HEAD) for w in NEW
    )


def test_the_same_vocabulary_in_another_order_is_the_same_function(tmp_path: Path) -> None:
    """Every token is known, so the transplanted model says the same of the same text."""
    first, second = pair_tokenizer(LETTERS, PAIRS), pair_tokenizer(LETTERS[::-1], PAIRS)
    save_model(tmp_path / "model", first, seed=1)
    save_model(tmp_path / "donor", second, seed=2)
    for tied in (False, True):
        save_model(tmp_path / "model", first, seed=1, tie_word_embeddings=tied)
        folder = out((tmp_path / "model", tmp_path / "donor"))
        found = []
        for place in (tmp_path / "model", folder):
            tokenizer = transformers.AutoTokenizer.from_pretrained(place)
            loaded = transformers.AutoModelForCausalLM.from_pretrained(place)
            ids = tokenizer("abcd ef gh", return_tensors="pt")["input_ids"]
            with torch.no_grad():
                logits = loaded(input_ids=ids).logits[0, -1]
            found.append({token: logits[id].item() for token, id in tokenizer.get_vocab().items()})
        assert found[0].keys() == found[1].keys() and max(abs(found[0][t] - found[1][t]) for t in found[0]) < 1e-6
        assert ("lm_head.weight" in tensors(folder)) is not tied


def test_a_donor_with_one_table_for_both_serves_both(pair: tuple[Path, Path]) -> None:
    large = pair_tokenizer(LETTERS[::-1], PAIRS)
    save_model(pair[1], large, seed=2, hidden_size=16, num_attention_heads=4, tie_word_embeddings=True)
    after = tensors(out(pair, k=64))
    assert after[EMBEDDING].shape == after[HEAD].shape == (len(large), 8)


@pytest.mark.parametrize("name", ["gpt2", "opt", "gemma2", "mixtral"])
def test_other_architectures_take_it_too(tmp_path: Path, name: str) -> None:
    small, large = pair_tokenizer(LETTERS, []), pair_tokenizer(LETTERS[::-1], PAIRS)
    folder = tmp_path / "model"
    loaded = transformers.AutoModelForCausalLM.from_pretrained(model(name, 1, torch.float32))
    loaded.save_pretrained(folder)
    small.save_pretrained(folder)
    save_model(tmp_path / "donor", large, seed=2)
    found = out((folder, tmp_path / "donor"))
    again = transformers.AutoModelForCausalLM.from_pretrained(found, experts_implementation="eager")
    assert again.get_input_embeddings().weight.shape[0] == len(large)
    assert torch.isfinite(again(input_ids=torch.arange(6)[None]).logits).all()


# --- files ------------------------------------------------------------------------------------------------------------
def test_files_follow_the_donors_tokenizer(pair: tuple[Path, Path]) -> None:
    (pair[0] / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, "pad_token_id": 11}))
    (pair[0] / "merges.txt").write_text("stale")
    folder = out(pair)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert (
        tokenizer("abcd e")["input_ids"] == transformers.AutoTokenizer.from_pretrained(pair[1])("abcd e")["input_ids"]
    )
    assert tokenizer.chat_template == "{{ messages }}!" and not (folder / "merges.txt").exists()
    config, generation = read_config(folder), json.loads((folder / "generation_config.json").read_text())
    for role in ("eos", "pad"):
        assert generation[f"{role}_token_id"] == config[f"{role}_token_id"] == getattr(tokenizer, f"{role}_token_id")
    assert isomerge.reproduce(folder).verdict == "identical"


def test_losses_before_and_after_are_per_byte(pair: tuple[Path, Path]) -> None:
    file = pair[0].parent / "texts.txt"
    file.write_text("abcd ab\ncdab ef gh\nhgfe dcba\n" * 3)
    merged = isomerge.transplant(*pair, data={"path": str(file), "kind": "lines"})
    merged.save(pair[0].parent / "out")
    loss = merged.details["transplant"]["loss"]
    for when, folder in (("before", pair[0]), ("after", pair[0].parent / "out")):
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        loaded = transformers.AutoModelForCausalLM.from_pretrained(folder)
        nats, written = 0.0, 0
        for text in file.read_text().splitlines():
            encoded = tokenizer(text, return_offsets_mapping=True)
            ids = torch.tensor([encoded["input_ids"]])
            with torch.no_grad():
                nats += loaded(input_ids=ids, labels=ids).loss.item() * (ids.shape[1] - 1)
            written += len(text) - encoded["offset_mapping"][0][1]
        assert loss[when]["bits_per_byte"] == pytest.approx(nats / math.log(2) / written, rel=1e-5)
        assert loss[when]["bytes"] == written
    assert loss["after"]["tokens"] < loss["before"]["tokens"]


# --- what is refused --------------------------------------------------------------------------------------------------
def test_mistakes_are_named(pair: tuple[Path, Path], tmp_path: Path) -> None:
    for arguments, words in (
        ({"how": "ompp"}, "how"), ({"k": 0}, "k is 0"), ({"how": "stored"}, "16 numbers wide"),
        ({"data": "nowhere.txt"}, "nowhere.txt"),
    ):  # fmt: skip
        with pytest.raises(RequestError, match=words):
            isomerge.transplant(*pair, **arguments)
    with pytest.raises(isomerge.IsomergeError, match="has no tokenizer files"):
        isomerge.transplant(model("llama"), pair[1])
    save_model(tmp_path / "strange", pair_tokenizer("xyz", []), seed=1)
    for token in ("unk_token", "bos_token", "eos_token"):
        for name in ("tokenizer_config.json", "tokenizer.json"):
            path = tmp_path / "strange" / name
            text = path.read_text().replace("<unk>", "<?>").replace("<s>", "<x>").replace("</s>", "<y>")
            path.write_text(text.replace(f'"{token}"', f'"no_{token}"') if name == "tokenizer_config.json" else text)
    with pytest.raises(RequestError, match="no token in common"):
        isomerge.transplant(pair[0], tmp_path / "strange")
