"""`check` of models whose weights cannot be averaged, but whose features can be merged."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

import isomerge
from isomerge.cli.app import app
from models import model

WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "one", "hat"]


@pytest.mark.parametrize("change", [{"hidden_size": 48}, {"num_hidden_layers": 3}, {"intermediate_size": 24}])
def test_other_widths_and_depths_get_the_command_that_merges_their_features(change: dict[str, int]) -> None:
    first = model("llama", 0)
    found = isomerge.check(first, model("llama", 1, **change))
    assert found.verdict == "incompatible" and "averaged or aligned" in found.summary
    assert "--method reconstruct --data DATA" in found.suggestion and found.recipe is None
    assert found.why is not None and "into the shape of" in found.why and "DATA" in found.why


def test_heads_of_another_size_get_no_such_command() -> None:
    found = isomerge.check(model("llama", 0), model("llama", 1, head_dim=16))
    assert found.verdict == "incompatible" and "reconstruct" not in found.suggestion and found.why is None


def language_model(folder: Path, words: list[str], seed: int, **shape: int) -> Path:
    import torch

    torch.manual_seed(seed)
    usual = {
        "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }  # fmt: skip
    config = LlamaConfig(vocab_size=len(words) + 2, **{**usual, **shape})
    LlamaForCausalLM(config).save_pretrained(folder)
    tokens = {word: number for number, word in enumerate(["<unk>", "</s>", *words])}
    made = Tokenizer(WordLevel(tokens, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", eos_token="</s>").save_pretrained(folder)
    return folder


def write_text(folder: Path) -> Path:
    text = folder / "text.txt"
    text.write_text("the cat sat on a mat and saw one hat\n" * 40)
    return text


@pytest.mark.slow
def test_the_command_for_another_shape_runs_as_it_is(tmp_path: Path) -> None:
    first = language_model(tmp_path / "first", WORDS, 0)
    second = language_model(tmp_path / "second", WORDS, 1, hidden_size=32, head_dim=8)
    found = isomerge.check(first, second, data=write_text(tmp_path))
    assert str(tmp_path / "text.txt") in found.suggestion and found.why and "DATA" not in found.why
    _runs(found.suggestion, tmp_path / "merged")
    assert LlamaForCausalLM.from_pretrained(tmp_path / "merged").config.hidden_size == 16


@pytest.mark.slow
def test_strangers_of_other_vocabularies_are_merged_by_features_where_there_are_data(tmp_path: Path) -> None:
    first = language_model(tmp_path / "first", WORDS, 0)
    second = language_model(tmp_path / "second", WORDS[::-1] + ["dog"], 1)
    without = isomerge.check(first, second)
    assert without.verdict == "strangers" and "--method linear" in without.suggestion
    assert without.why is not None and "reconstruct" in without.why
    found = isomerge.check(first, second, data=write_text(tmp_path))
    assert "--method reconstruct" in found.suggestion and "--tokenizer" not in found.suggestion
    _runs(found.suggestion, tmp_path / "merged")
    assert LlamaForCausalLM.from_pretrained(tmp_path / "merged").config.vocab_size == len(WORDS) + 2


def _runs(command: str, out: Path) -> None:
    program, *arguments = shlex.split(command)
    assert program == "isomerge"
    arguments[arguments.index("-o") + 1] = str(out)
    done = CliRunner().invoke(app, [*arguments, "--no-report", "--quiet"])
    assert done.exit_code == 0, done.output
