"""What mergekit 0.1.5 wrote for the same three models, by token string: the first number of each merged row.

Made by hand with `mergekit-yaml` (method linear, equal weights, float32) on `small_models.animals`. Ids are compared
only where mergekit's are the same on every run: it adds the tokens of a union in the order a hash table gives them,
and without a base_model its donor was A for PYTHONHASHSEED 0 and 3, and B for 1, 2 and 4.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from isomerge.merging.vocabulary import TokenRule, TokenSource, merge_vocabularies
from merging.vocabulary.animals import animals, tables
from models import HEAD

# fmt: off
RUNS: dict[str, tuple[str, str | None, dict[str, Any], dict[str, TokenRule], dict[str, float], int]] = {
    "union of two": ("AB", "A", {"source": "union"}, {}, {
        "<unk>": 151.5, "<s>": 151.0, "</s>": 151.0, "cat": 154.0, "dog": 153.0, "sun": 105.0,
        "bird": 204.0, "moon": 206.0, "<x>": 207.0}, 9),
    "union of three, padded": ("ABC", "A", {"source": "union", "pad_to_multiple_of": 8}, {}, {
        "<unk>": 201.0, "<s>": 201.0, "</s>": 201.333, "cat": 137.0, "dog": 136.667, "sun": 105.0,
        "moon": 254.5, "bird": 254.0, "tree": 305.0, "<x>": 207.0}, 16),
    "union without a base": ("ABC", None, {"source": "union"}, {}, {
        "</s>": 201.333, "<s>": 201.0, "dog": 153.0, "<unk>": 201.0, "bird": 254.0, "cat": 154.0,
        "moon": 254.5, "<x>": 207.0, "tree": 305.0, "sun": 105.0}, 10),
    "the base's": ("AB", "A", {"source": "base"}, {}, {
        "<unk>": 151.5, "<s>": 151.0, "</s>": 151.0, "cat": 154.0, "dog": 153.0, "sun": 105.0}, 6),
    "another model's": ("AB", "A", {"source": "B"}, {}, {
        "</s>": 151.0, "<s>": 151.0, "dog": 153.0, "<unk>": 151.5, "bird": 204.0, "cat": 154.0, "moon": 206.0,
        "<x>": 207.0}, 8),
    "every kind of rule": ("AB", "A", {"source": "union"}, {
        "cat": TokenRule(TokenSource("model", "B"), force=True),
        "dog": TokenRule(TokenSource("model", "B")),
        "moon": TokenRule(TokenSource("model_token", "A", token="sun")),
        "new1": TokenRule(TokenSource("model_token", "B", token_id=4)),
        "new0": TokenRule(TokenSource("zero")),
        "sun": TokenRule(TokenSource("zero"), force=True),
    }, {
        "<unk>": 151.5, "<s>": 151.0, "</s>": 151.0, "cat": 205.0, "dog": 153.0, "sun": 0.0, "moon": 155.5,
        "bird": 204.0, "<x>": 207.0, "new1": 204.0, "new0": 0.0}, 11),
}
# fmt: on


@pytest.mark.parametrize("run", RUNS)
def test_every_row_is_what_mergekit_wrote(tmp_path: Path, run: str) -> None:
    names, base, settings, rules, expected, size = RUNS[run]
    models = {name: checkpoint for name, checkpoint in animals(tmp_path).items() if name in names}
    vocabulary = merge_vocabularies(models, base=base, rules=rules, **settings)
    assert vocabulary.size == size
    assert set(vocabulary.tokens) == set(expected)
    for tensor, sign in (("model.embed_tokens.weight", 1), (HEAD, -1)):
        merged = sign * torch.stack(list(tables(vocabulary, models, tensor).values())).mean(0)
        found = {token: merged[id, 0].item() for token, id in vocabulary.tokens.items()}
        assert found == pytest.approx(expected, abs=1e-3)
        # mergekit: 200.25 in every padding row of the padded run
        assert merged[len(expected) :].flatten().tolist() == pytest.approx([200.25] * 8 * (size - len(expected)))


def test_the_donors_ids_stay_and_the_new_ones_follow_by_model_and_id(tmp_path: Path) -> None:
    vocabulary = merge_vocabularies(animals(tmp_path), base="A", source="union")
    assert list(vocabulary.tokens.items()) == [
        ("<unk>", 0), ("<s>", 1), ("</s>", 2), ("cat", 3), ("dog", 4), ("sun", 5),  # A, as mergekit keeps it
        ("bird", 6), ("moon", 7), ("tree", 8),  # ordinary tokens of B, then of C
        ("<x>", 9),  # added tokens last, as in mergekit
    ]  # fmt: skip


def test_special_ids_follow_their_tokens_where_mergekit_leaves_them(tmp_path: Path) -> None:
    # mergekit wrote B's tokenizer with A's "eos_token_id": 2, which is 'dog' there.
    models = {name: checkpoint for name, checkpoint in animals(tmp_path).items() if name in "AB"}
    vocabulary = merge_vocabularies(models, base="A", source="B")
    assert vocabulary.tokens["dog"] == 2
    assert vocabulary.config_changes() == {"vocab_size": 8, "eos_token_id": 0}
    assert vocabulary.generation_config_changes() == {"eos_token_id": 0}


def test_tokens_beyond_the_table_of_any_kind_of_tokenizer_are_dropped(tmp_path: Path) -> None:
    # mergekit stops here: "Tokenizer for ./D has type WordLevel, but only BPE is currently supported".
    from models import save_model, word_tokenizer

    words = ["<unk>", "<s>", "</s>", "cat", "dog", "sun"]
    models = {
        "D": save_model(tmp_path / "D", word_tokenizer(words), first=400, rows=5),
        "E": save_model(tmp_path / "E", word_tokenizer(words), first=500),
    }
    vocabulary = merge_vocabularies(models, base="D", source="base")
    assert list(vocabulary.tokens) == words[:5]
    assert vocabulary.report["models"]["D"]["tokens_without_row"] == 1
    assert any("'sun'" in note and "beyond its 5 rows" in note for note in vocabulary.report["notes"])
    joined = merge_vocabularies(models, base="D", source="union")
    assert tables(joined, models)["D"][joined.tokens["sun"], 0].item() == 505.0
