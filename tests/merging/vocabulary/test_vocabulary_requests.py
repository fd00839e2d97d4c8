"""Wrong requests and broken tokenizers: all problems at once, each with what to do."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import pytest

import isomerge
from isomerge.checkpoint import open_checkpoint
from isomerge.errors import CheckpointError, IsomergeError, RequestError
from isomerge.merging.vocabulary import TokenRule, TokenSource, is_tokenizer_file, merge_vocabularies
from merging.vocabulary.animals import animals
from models import EMBEDDING, edit_json, word_tokenizer

WRONG = {
    "cat": TokenRule(TokenSource("model", "Z")),
    "tree": TokenRule(TokenSource("model", "A")),
    "dog": TokenRule(TokenSource("model_token", "B", token="mooon")),
    "sun": TokenRule(TokenSource("model_token", "C", token_id=10)),
    "bird": TokenRule(TokenSource("model_token", "C", token_id=-1)),
    "moon": TokenRule(TokenSource("model_token", "C")),
    "<new>": TokenRule(None),
}
OF_THE_REQUEST = [
    "the base model 'Q'",
    "source 'unoin' is unknown. Did you mean 'union'",
    "pad_to_multiple_of is -3",
    "token 'cat' is to come from 'Z', which is not among the models",
    "token 'moon': a source of kind model_token names either a token or a token_id",
]
OF_THE_ROWS = [
    "token 'tree' is to take the row of 'tree' in 'A', whose tokenizer does not know it",
    "token 'dog' is to take the row of 'mooon' in 'B'",
    "Did you mean 'moon'",
    "token 'sun' is to take row 10 of 'C', whose table has 10 rows, 0 to 9",
    "token 'bird' is to take row -1 of 'C'",
    "token '<new>' is in no model, so its rule has to name a source",
]


def test_all_problems_of_the_request_are_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = animals(tmp_path)
    without_transformers(monkeypatch)
    with pytest.raises(RequestError) as caught:
        merge_vocabularies(models, source="unoin", base="Q", rules=WRONG, pad_to_multiple_of=-3)
    assert "5 problems" in str(caught.value)
    for text in OF_THE_REQUEST:
        assert text in str(caught.value)


def test_a_good_request_has_no_problem(tmp_path: Path) -> None:
    rules = {
        "cat": TokenRule(TokenSource("model", "B"), force=True),
        "<new>": TokenRule(TokenSource("model_token", "C", token_id=9)),
        "sun": TokenRule(None, force=True),
    }
    merged = merge_vocabularies(animals(tmp_path), source="C", base="A", rules=rules, pad_to_multiple_of=8)
    assert set(rules) <= set(merged.tokens) and merged.size % 8 == 0


def test_the_loaded_tokenizers_are_checked_the_same_way(tmp_path: Path) -> None:
    models = animals(tmp_path)
    rules = {token: rule for token, rule in WRONG.items() if token not in ("cat", "moon")}
    with pytest.raises(RequestError) as caught:
        merge_vocabularies(models, base="A", rules=rules)
    assert "5 problems" in str(caught.value)
    for text in OF_THE_ROWS:
        assert text in str(caught.value)
    with pytest.raises(RequestError, match="source 'unoin' is unknown"):
        merge_vocabularies(models, source="unoin")


def test_models_without_tokenizers_are_all_named(tmp_path: Path) -> None:
    models = animals(tmp_path)
    for name in "AC":
        for file in ("tokenizer.json", "tokenizer_config.json"):
            (tmp_path / name / file).unlink()
    with pytest.raises(RequestError, match="2 problems.*/A has no tokenizer files.*/C has no tokenizer files"):
        merge_vocabularies(models)


def test_a_checkpoint_in_memory_has_no_tokenizer(tmp_path: Path) -> None:
    models = animals(tmp_path)
    state = {name: models["A"].read(name) for name in models["A"].tensors}
    with pytest.raises(RequestError, match="has no tokenizer files"):
        merge_vocabularies({"A": open_checkpoint(state)})


def test_a_broken_tokenizer_is_named_with_its_folder(tmp_path: Path) -> None:
    models = animals(tmp_path)
    (tmp_path / "B" / "tokenizer.json").write_text("{broken")
    with pytest.raises(CheckpointError, match=r"loading the tokenizer of .*/B.*AutoTokenizer"):
        merge_vocabularies(models)


def without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *rest: Any, **named: Any) -> Any:
        if name.split(".")[0] == "transformers":
            raise ImportError(name)
        return real(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", refuse)


def test_without_transformers_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = animals(tmp_path)
    without_transformers(monkeypatch)
    with pytest.raises(IsomergeError, match=r"needs transformers, and .* cannot be imported"):
        merge_vocabularies(models)


def test_a_config_that_leaves_its_vocabulary_size_out_means_the_default_of_its_class(tmp_path: Path) -> None:
    from models import save_model, word_tokenizer

    save_model(tmp_path / "M", word_tokenizer(["<unk>", "<s>", "</s>"]))
    edit_json(tmp_path / "M" / "config.json", vocab_size=None)
    config = (tmp_path / "M" / "config.json").read_text().replace('"vocab_size": null', '"unused": 0')
    (tmp_path / "M" / "config.json").write_text(config)
    vocabulary = merge_vocabularies({"M": open_checkpoint(tmp_path / "M")}, pad_to_multiple_of=8)
    assert vocabulary.report["models"]["M"]["rows"] == 32000  # transformers' own default
    assert vocabulary.config_changes()["vocab_size"] == 8


@pytest.mark.parametrize(
    ("name", "belongs"),
    [(n, True) for n in ("tokenizer.json", "tokenizer.model", "vocab.txt", "merges.txt", "chat_template.jinja")]
    + [(n, True) for n in ("additional_chat_templates/rag.jinja", "spiece.model", "special_tokens_map.json")]
    + [(n, False) for n in ("generation_config.json", "README.md", "preprocessor_config.json", "config.json")],
)
def test_the_files_of_a_tokenizer_are_known(name: str, belongs: bool) -> None:
    assert is_tokenizer_file(name) is belongs


# --- a base whose tables nobody reads ---------------------------------------------------------------------------------
def linear(tmp: Path, names: str, **more: Any) -> dict[str, Any]:
    entries = [{"model": str(tmp / name), "parameters": {"weight": 1.0}} for name in names]
    return {"merge_method": "linear", "models": entries, **more}


def test_a_rule_that_names_the_base_of_a_method_without_one_is_told_so(tmp_path: Path) -> None:
    """The base has the table; the method does not read it."""
    base = str(tmp_path / "A")
    animals(tmp_path)
    rules = {"moon": {"source": {"kind": "model_token", "model": base, "token": "sun"}, "force": True}}
    recipe = linear(tmp_path, "BC", base_model=base, tokenizer={"source": "union", "tokens": rules})
    with pytest.raises(RequestError) as caught:
        isomerge.merge_recipe(recipe)
    told = str(caught.value)
    assert f"token 'moon' is to take its row from {base}" in told and "linear has no base" in told
    assert "only the config and side files are used" in told and "no such tensor" not in told
    # what the message says to do
    recipe["models"].append({"model": base, "parameters": {"weight": 0.0}})
    merged = isomerge.merge_recipe(recipe)
    row = merged.state_dict()[EMBEDDING][merged.vocabulary.tokens["moon"]]
    assert row.tolist() == [105.0] * 8  # the row of 'sun' in A


def test_a_tokenizer_may_lie_in_a_folder_without_weights(tmp_path: Path) -> None:
    animals(tmp_path)
    alone = tmp_path / "alone"
    word_tokenizer(["<unk>", "<s>", "</s>", "dog", "cat"]).save_pretrained(alone)
    merged = isomerge.merge([tmp_path / "A", tmp_path / "B"], tokenizer=alone)
    table = merged.state_dict()[EMBEDDING][:, 0].tolist()
    assert merged.vocabulary.tokens == {"<unk>": 0, "<s>": 1, "</s>": 2, "dog": 3, "cat": 4}
    # A counts from 100, B from 200: the means of each token's own rows
    assert table == [(100 + 203) / 2, (101 + 201) / 2, (102 + 200) / 2, (104 + 202) / 2, (103 + 205) / 2]
    (alone / "tokenizer.json").unlink()
    (alone / "tokenizer_config.json").unlink()
    (alone / "config.json").write_text("{}")
    with pytest.raises(RequestError, match="alone has no tokenizer files"):
        isomerge.merge([tmp_path / "A", tmp_path / "B"], tokenizer=alone)
