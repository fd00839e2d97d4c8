"""Language models that write together, beside loops over stock models and transformers' own search."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

import isomerge
from isomerge.ensembling.language import LanguageEnsemble
from isomerge.errors import RequestError
from merging.layerwise.test_vocabularies import vocabularies
from models import gpt2, llama, t5
from precision import float64_throughout

IDS = torch.tensor([[2, 5, 6, 7], [2, 8, 9, 10]])
PADDED = {
    "input_ids": torch.tensor([[0, 0, 5, 6, 7], [11, 8, 9, 10, 4]]),
    "attention_mask": torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]),
}
SEARCHES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "beams": {"num_beams": 3},
    "several beams": {"num_beams": 4, "num_return_sequences": 3, "length_penalty": 0.5},
    "sampling": {"do_sample": True, "top_k": 5},
    "sampled beams": {"do_sample": True, "num_beams": 2},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("writers")
    llama(home / "a", seed=0)
    llama(home / "b", seed=1)
    gpt2(home / "g", seed=2)
    return home


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vocabularies(tmp_path_factory.mktemp("vocabularies"))


def stock(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def made(folder: Path, names: str, combination: str = "probability", **options: Any) -> LanguageEnsemble:
    found = isomerge.make_ensemble([folder / name for name in names], combination, **options)
    assert isinstance(found, LanguageEnsemble)
    return found


@torch.no_grad()
def written_by_hand(models: list[Any], ids: torch.Tensor, combination: str, steps: int = 8) -> torch.Tensor:
    """Greedily, with no cache and no isomerge: the whole text goes through every model at every step."""
    for _ in range(steps):
        logs = torch.stack([model(input_ids=ids).logits for model in models]).double().log_softmax(-1)
        if combination == "probability":
            following = logs[:, :, -1].exp().mean(0)
        elif combination == "logit":
            following = logs[:, :, -1].mean(0)
        else:
            read = logs[:, :, :-1].gather(-1, ids[None, :, 1:, None].expand(len(models), -1, -1, 1)).sum((2, 3))
            following = (read.softmax(0)[..., None] * logs[:, :, -1].exp()).sum(0)
        ids = torch.cat([ids, following.argmax(-1, keepdim=True)], 1)
    return ids


@pytest.mark.parametrize("combination", ["probability", "logit", "posterior"])
@pytest.mark.parametrize("cache", [True, False])
def test_greedy_text_is_that_of_a_loop_over_stock_models(folder: Path, combination: str, cache: bool) -> None:
    expected = written_by_hand([stock(folder / name) for name in "ag"], IDS, combination)
    found = made(folder, "ag", combination).generate(
        IDS, max_new_tokens=8, do_sample=False, eos_token_id=None, use_cache=cache
    )
    assert torch.equal(found, expected)


@pytest.mark.parametrize("way", SEARCHES)
@pytest.mark.parametrize("name", ["a", "g"])
def test_a_single_member_searches_as_transformers_does(folder: Path, way: str, name: str) -> None:
    own, alone = stock(folder / name), made(folder, name)
    texts = []
    for writer in (own, alone):
        torch.manual_seed(0)
        texts.append(writer.generate(**PADDED, max_new_tokens=8, pad_token_id=0, **SEARCHES[way]))
    assert torch.equal(*texts)


@pytest.mark.parametrize("combination", ["logit", "posterior"])
@pytest.mark.parametrize("way", SEARCHES)
def test_a_cache_changes_nothing_of_what_is_searched(folder: Path, combination: str, way: str) -> None:
    writer = made(folder, "ag", combination, weights=[3, 1])
    texts = []
    for cache in (True, False):
        torch.manual_seed(0)
        texts.append(writer.generate(**PADDED, max_new_tokens=8, pad_token_id=0, use_cache=cache, **SEARCHES[way]))
    assert torch.equal(*texts)


def test_a_prior_decides_until_the_text_does(folder: Path) -> None:
    sure = made(folder, "ab", "posterior", weights=[1, 0])
    with torch.no_grad():
        assert torch.allclose(sure(input_ids=IDS).logits, stock(folder / "a")(IDS).logits.log_softmax(-1), atol=1e-5)


def test_padding_has_no_say_in_the_posterior(folder: Path) -> None:
    writer = made(folder, "ab", "posterior")
    alone = writer(input_ids=PADDED["input_ids"][:1, 2:]).logits
    positions = PADDED["attention_mask"].cumsum(-1).sub(1).clamp_min(0)
    padded = writer(**PADDED, position_ids=positions).logits[:1, 2:]
    assert torch.allclose(alone, padded, atol=1e-5)


def test_with_labels_there_is_the_loss_of_the_stock_class(folder: Path) -> None:
    output = made(folder, "ab")(input_ids=IDS, labels=IDS)
    with torch.no_grad():
        chances = sum(stock(folder / name)(IDS).logits.softmax(-1) for name in "ab") / 2
    expected = F.nll_loss(chances[:, :-1].flatten(0, 1).log(), IDS[:, 1:].flatten())
    assert float(output.loss) == pytest.approx(float(expected), rel=1e-5)
    assert type(output).__name__ == "CausalLMOutputWithPast"


def test_it_can_be_copied_pickled_and_saved(folder: Path, tmp_path: Path) -> None:
    writer = made(folder, "ag", "posterior", weights=[0.3, 0.7])
    expected = writer(input_ids=IDS).logits
    loaded = isomerge.load_ensemble(writer.save(tmp_path / "deep" / "ens.json"))
    for again in (copy.deepcopy(writer), pickle.loads(pickle.dumps(writer)), loaded):
        assert torch.equal(again(input_ids=IDS).logits, expected)
        assert torch.equal(again.generate(IDS, max_new_tokens=4), writer.generate(IDS, max_new_tokens=4))


def test_on_a_gpu_transformers_leaves_the_experts_of_the_members_alone(folder: Path) -> None:
    writer = made(folder, "ab")
    writer.config._experts_implementation = "grouped_mm"
    elsewhere = mock.patch.object(LanguageEnsemble, "device", torch.device("meta"))
    with elsewhere, writer._optimize_model_for_decode():
        assert writer.config._experts_implementation == "grouped_mm"


# --- other vocabularies -----------------------------------------------------------------------------------------------
def tokens_of(folder: Path, *texts: str) -> torch.Tensor:
    """As many of each as of the shortest."""
    ids = [AutoTokenizer.from_pretrained(folder)(text)["input_ids"] for text in texts]
    return torch.tensor([row[: min(map(len, ids))] for row in ids])


@pytest.mark.parametrize("combination", ["probability", "logit", "posterior"])
def test_it_does_not_matter_how_a_vocabulary_is_numbered(words: Path, combination: str) -> None:
    ids = tokens_of(words / "a", "the cat sat on the mat, the hat", "was on the cat; the hat on the mat")
    same, other = made(words, "ab", combination), made(words, "ac", combination)
    assert not same.others and list(other.others) == [1]
    with float64_throughout():
        assert torch.allclose(same(input_ids=ids).logits.exp(), other(input_ids=ids).logits.exp(), atol=1e-12)


def test_models_of_two_vocabularies_write_as_a_loop_over_their_tokenizers_does(words: Path) -> None:
    """Model c is b with token n called 279 − n, and reads anew what was written so far."""
    first, other = (AutoTokenizer.from_pretrained(words / name) for name in "ac")
    models = [stock(words / name).double() for name in "ac"]
    halves = [id for id in range(280) if "\ufffd" in first.decode([id])]
    ids = torch.tensor([first("the cat")["input_ids"]])
    found = made(words, "ac").generate(ids, max_new_tokens=6, suppress_tokens=halves, do_sample=False)
    with torch.no_grad(), float64_throughout():
        for _ in range(6):
            read = torch.tensor([other(first.decode(ids[0]))["input_ids"]])
            own, carried = models[0](ids).logits[0, -1], models[1](read).logits[0, -1].flip(0)
            together = own.softmax(-1) + carried.softmax(-1)
            together[halves] = 0
            ids = torch.cat([ids, together.argmax()[None, None]], 1)
    assert torch.equal(found, ids)


def test_a_coarser_vocabulary_is_carried_over_by_the_formula(words: Path) -> None:
    """q(t) = p(β(t)) f(t) / Σ f over the tokens with the same β, after a whole text, with a tokenizer of its own."""
    text = "the cat sat on the mat"
    first, other = (AutoTokenizer.from_pretrained(words / name) for name in "da")
    ids = torch.tensor([first(text)["input_ids"]])
    with torch.no_grad(), float64_throughout():
        found = made(words, "da")(input_ids=ids).logits[0, -1].exp()
        f = stock(words / "d").double()(ids).logits[0, -1].softmax(-1)
        p = stock(words / "a").double()(torch.tensor([other(text)["input_ids"]])).logits[0, -1].softmax(-1)
    names = first.convert_ids_to_tokens(range(300))
    alike = [other.convert_tokens_to_ids(name) if name in other.get_vocab() else None for name in names]
    texts = [first.decode([id]) for id in range(300)]
    begins = [
        b if b is not None else None if "\ufffd" in texts[id] else other(texts[id])["input_ids"][0]
        for id, b in enumerate(alike)
    ]
    kept = sum(float(f[id]) for id, b in enumerate(begins) if b is None)  # more than one half character: f stays
    sums = {b: sum(float(f[id]) for id in range(300) if begins[id] == b) for b in set(begins) - {None}}
    assert len(sums) == 280 and kept > 0
    q = [float(f[id]) * (1 if b is None else (1 - kept) * float(p[b]) / sums[b]) for id, b in enumerate(begins)]
    assert torch.allclose(found, (f + torch.tensor(q)) / 2, atol=1e-6)


def test_text_that_ends_within_a_character_is_left_to_the_first_model(words: Path) -> None:
    ids = tokens_of(words / "a", "the 日")
    ids = ids[:, : ids.shape[1] - 1]
    fused = made(words, "ad")
    with torch.no_grad(), float64_throughout():
        assert fused.others[1].read(ids[0].tolist())[0] == "the "
        own = stock(words / "a").double()(ids).logits[0, -1].log_softmax(-1)
        assert torch.allclose(fused(input_ids=ids).logits[0, -1], own, atol=1e-6)


def test_what_cannot_be_fused_says_why(words: Path, folder: Path, tmp_path: Path) -> None:
    fused = made(words, "ad")
    with pytest.raises(RequestError, match="use_cache=False"):
        fused(input_ids=IDS, use_cache=True)
    with pytest.raises(RequestError, match="has no tokenizer beside it"):
        isomerge.make_ensemble([stock(folder / "a"), words / "d"])
    t5(tmp_path / "t5")
    with pytest.raises(RequestError, match="causal language models"):
        isomerge.generate([tmp_path / "t5"], ["a dog"])
    with pytest.raises(RequestError, match="text before each token"):
        isomerge.make_ensemble([tmp_path / "t5"], "posterior")
    with pytest.raises(RequestError, match="too many for a linear model"):
        isomerge.make_ensemble([folder / "a", folder / "b"], "stacked", held_out="x.txt")
    with pytest.raises(RequestError, match="pass input_ids"):
        fused()
