"""Two vocabularies: the rows of the merged tables, token by token. mergekit numbers new tokens anew in every run, so
rows are compared by token, not by number."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from models import FAMILY_VOCABULARY as VOCABULARY
from models import tensors, vocabulary_of, words, write_family, write_tokenizer
from peers.recipes import recipe, weighted
from peers.side_by_side import AGREE, TABLES, assert_same_config, by_token, isomerge, write_recipe

pytestmark = pytest.mark.peers

TOKENIZERS: dict[str, str] = {
    "union": recipe("linear", weighted(0.7, 0.3), base="a", tokenizer_source="union"),
    "union, in the longer form": recipe("linear", weighted(0.7, 0.3), base="a", tokenizer={"source": "union"}),
    "base": recipe("linear", weighted(0.7, 0.3), base="a", tokenizer_source="base"),
    "base, the other one": recipe("linear", weighted(0.7, 0.3), base="b", tokenizer_source="base"),
    "a model's": recipe("linear", weighted(0.7, 0.3), base="a", tokenizer={"source": "$b"}),
    "union on a base": recipe("ties", weighted(0.7, 0.3, density=0.5), base="base", tokenizer_source="union"),
    "union along the arc": recipe(
        "slerp", {"a": {}, "b": {}}, base="a", parameters={"t": 0.3}, tokenizer_source="union"
    ),
    "padded": recipe("linear", weighted(0.7, 0.3), base="a", tokenizer={"source": "union", "pad_to_multiple_of": 16}),
    "tokens": recipe(
        "linear",
        weighted(0.7, 0.3),
        base="a",
        tokenizer={
            "source": "union",
            "tokens": {
                "<zero>": {"source": {"kind": "zero"}},
                "<copied>": {"source": {"kind": "model_token", "model": "$b", "token": "w12"}},
                "w11": {"source": "$b", "force": True},
                "w45": {"source": "$b"},
                "w5": {"source": {"kind": "model_token", "model": "$a", "token_id": 7}, "force": True},
            },
        },
    ),
}


@pytest.fixture(scope="module")
def two_vocabularies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`b` has four tokens more, begins ten words later and lists its words backwards."""
    folder = tmp_path_factory.mktemp("vocabularies")
    write_family("llama", folder / "models")
    write_family("llama", folder / "larger", vocabulary=VOCABULARY + 4)
    shutil.rmtree(folder / "models" / "b")
    (folder / "larger" / "b").rename(folder / "models" / "b")
    write_tokenizer(folder / "models" / "b", words(VOCABULARY + 4, start=10)[::-1])
    return folder / "models"


@pytest.mark.parametrize("name", TOKENIZERS)
def test_every_token_gets_the_row_mergekit_gives_it(both: Any, two_vocabularies: Path, name: str) -> None:
    ours, theirs = both(TOKENIZERS[name], two_vocabularies)
    assert vocabulary_of(ours).keys() == vocabulary_of(theirs).keys()
    found, expected = by_token(ours), by_token(theirs)
    assert found.keys() == expected.keys()
    for tensor in expected:
        a, b = found[tensor], expected[tensor]
        assert a.shape == b.shape, tensor
        assert (a - b).abs().max() <= AGREE * b.abs().max(), tensor
    assert_same_config(ours, theirs, "vocab_size")


def test_a_zero_token_is_zero(two_vocabularies: Path, tmp_path: Path) -> None:
    file = write_recipe(TOKENIZERS["tokens"], two_vocabularies, tmp_path / "recipe.yml")
    out = isomerge(file, tmp_path / "ours")
    row = vocabulary_of(out)["<zero>"]
    assert all(tensors(out)[table][row].eq(0).all() for table in TABLES)
