"""The written model and tokenizer: same function for the same texts, and the same files whatever the hash seed."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
)

from isomerge.checkpoint import Checkpoint, open_checkpoint
from isomerge.merging.vocabulary import TokenRule, TokenSource, Vocabulary, merge_vocabularies
from merging.vocabulary.animals import animals, sources, tables, whole
from models import EMBEDDING, edit_json, pair_tokenizer, save_model, word_tokenizer

WORDS = ["<unk>", "<s>", "</s>", *(f"w{i}" for i in range(20))]
TEXTS = ["w3 w4 w19 w0", "w7 w7 w1", "<s> w2 </s>"]


def permuted(checkpoint: Checkpoint, folder: Path, vocabulary_tensors: list[str]) -> Checkpoint:
    """The same model under another numbering of its tokens, made without isomerge's vocabulary code."""
    order = torch.randperm(len(WORDS), generator=torch.Generator().manual_seed(3))
    state = {name: checkpoint.read(name) for name in checkpoint.tensors}
    for name in vocabulary_tensors:
        state[name] = state[name][order]
    words = [WORDS[i] for i in order.tolist()]
    folder.mkdir()
    save_file({name: t.contiguous() for name, t in state.items()}, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(checkpoint.config))
    edit_json(folder / "config.json", bos_token_id=words.index("<s>"), eos_token_id=words.index("</s>"))
    word_tokenizer(words).save_pretrained(folder)
    return open_checkpoint(folder)


def build(vocabulary: Vocabulary, models: dict[str, Checkpoint], vocabulary_tensors: list[str], folder: Path) -> Path:
    """The average of the models as a folder, the first one's other tensors as they are."""
    first = next(iter(models.values()))
    state = {name: first.read(name) for name in first.tensors}
    for name in vocabulary_tensors:
        given = sources(models, name)
        state[name] = torch.stack([whole(vocabulary.source(m, given)) for m in models]).mean(0)
    folder.mkdir()
    save_file({name: t.contiguous() for name, t in state.items()}, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**first.config, **vocabulary.config_changes()}))
    vocabulary.save(folder)
    return folder


def logits_by_token(folder: Path, auto: Any) -> list[dict[str, torch.Tensor]]:
    """For each text: token string → its logit at every position."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), auto.from_pretrained(folder).eval()
    found = []
    for text in TEXTS:
        inputs = tokenizer(text, return_tensors="pt", return_token_type_ids=False)
        with torch.no_grad():
            logits = model(**inputs).logits[0]
        found.append({token: logits[:, id] for token, id in tokenizer.get_vocab().items() if token in WORDS})
    return found


def kinds(tmp: Path) -> dict[str, tuple[Any, list[str], Any]]:
    """Model, names of its vocabulary tensors, loader."""
    torch.manual_seed(0)
    size, ids = len(WORDS), {"bos_token_id": 1, "eos_token_id": 2}
    gpt = GPT2LMHeadModel(GPT2Config(vocab_size=size, n_embd=8, n_layer=1, n_head=2, n_positions=16, **ids))
    bert = BertForMaskedLM(
        BertConfig(vocab_size=size, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    )
    with torch.no_grad():
        bert.cls.predictions.bias.normal_()
    save_model(tmp / "llama", word_tokenizer(WORDS))
    for name, model in (("gpt2", gpt), ("bert", bert)):
        model.save_pretrained(tmp / name)
        word_tokenizer(WORDS).save_pretrained(tmp / name)
    return {
        "llama": (tmp / "llama", [EMBEDDING, "lm_head.weight"], AutoModelForCausalLM),
        "gpt2": (tmp / "gpt2", ["transformer.wte.weight"], AutoModelForCausalLM),
        "bert": (
            tmp / "bert",
            ["bert.embeddings.word_embeddings.weight", "cls.predictions.bias"],
            AutoModelForMaskedLM,
        ),
    }


@pytest.mark.parametrize("source", ["union", "base", "P"])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert"])
def test_a_model_and_its_renumbered_copy_merge_into_the_same_function(tmp_path: Path, kind: str, source: str) -> None:
    folder, names, auto = kinds(tmp_path)[kind]
    original = open_checkpoint(folder)
    models = {"M": original, "P": permuted(original, tmp_path / "P", names)}
    vocabulary = merge_vocabularies(models, source=source, base="M")
    assert not vocabulary.identical and vocabulary.size == len(WORDS)
    out = build(vocabulary, models, names, tmp_path / "out")
    for before, after in zip(logits_by_token(folder, auto), logits_by_token(out, auto), strict=True):
        for token in WORDS:
            # Averages of two equal numbers are exact; only the head's product may be taken in another order.
            torch.testing.assert_close(after[token], before[token], rtol=0, atol=1e-6)


def test_rows_of_a_larger_vocabulary_leave_known_texts_alone(tmp_path: Path) -> None:
    original = save_model(tmp_path / "M", word_tokenizer(WORDS))
    other = save_model(tmp_path / "O", word_tokenizer([*reversed(WORDS), "more", "words"], ["<x>"]), seed=5)
    vocabulary = merge_vocabularies({"M": original, "O": other}, source="union", base="M", pad_to_multiple_of=8)
    out = build(vocabulary, {"M": original}, [], tmp_path / "out")
    state = load_file(out / "model.safetensors")
    for name in (EMBEDDING, "lm_head.weight"):
        state[name] = whole(vocabulary.source("M", sources({"M": original, "O": other}, name)))
    save_file(state, out / "model.safetensors", {"format": "pt"})
    before, after = (logits_by_token(f, AutoModelForCausalLM) for f in (tmp_path / "M", out))
    assert all(
        torch.allclose(a[token], b[token], atol=1e-6) for a, b in zip(after, before, strict=True) for token in WORDS
    )


def test_equal_vocabularies_are_identical_and_keep_their_padding(tmp_path: Path) -> None:
    # mergekit drops the 5 rows here (it wrote 6 rows for two copies of C, whose tables have 10).
    models = {n: save_model(tmp_path / n, word_tokenizer(WORDS), rows=28, seed=i) for i, n in enumerate("AB")}
    for source in ("union", "base", "B"):
        vocabulary = merge_vocabularies(models, source=source, base="A")
        assert vocabulary.identical and vocabulary.size == 28 and vocabulary.config_changes() == {}
        for name, table in tables(vocabulary, models).items():
            assert torch.equal(table, models[name].read(EMBEDDING))
    assert merge_vocabularies(models, base="A", pad_to_multiple_of=28).identical
    shorter = merge_vocabularies(models, base="A", pad_to_multiple_of=8)
    assert not shorter.identical and shorter.size == 24 and shorter.config_changes() == {"vocab_size": 24}
    assert "5 of 28 rows of 'A' belong to no token and were left out" in shorter.report["notes"]
    forced = {"w1": TokenRule(TokenSource("model", "B"), force=True)}
    changed = merge_vocabularies(models, base="A", rules=forced)
    assert not changed.identical and changed.size == 28
    found = tables(changed, models)["A"]
    assert torch.equal(found[4], models["B"].read(EMBEDDING)[4])
    assert torch.equal(found[5:], models["A"].read(EMBEDDING)[5:])


def test_tables_of_other_lengths_are_never_cut_without_a_word(tmp_path: Path) -> None:
    models = {
        "A": save_model(tmp_path / "A", word_tokenizer(WORDS), rows=23),
        "B": save_model(tmp_path / "B", word_tokenizer(WORDS), rows=32, seed=1),
    }
    vocabulary = merge_vocabularies(models, source="base", base="A")
    assert not vocabulary.identical and vocabulary.size == 23
    assert vocabulary.report["notes"] == ["9 of 32 rows of 'B' belong to no token and were left out"]


def test_unused_ids_inside_a_vocabulary_are_rows_without_a_token(tmp_path: Path) -> None:
    # mergekit sizes the table by the number of tokens and would index past its end.
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "b": 5}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    gaps = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<unk>", eos_token="<unk>")
    models_ = {
        "G": save_model(tmp_path / "G", gaps, first=10, rows=6),
        "A": save_model(tmp_path / "A", word_tokenizer(["<unk>", "<s>", "</s>", "b", "a"]), first=100),
    }
    vocabulary = merge_vocabularies(models_, source="G", base="G")
    assert vocabulary.size == 6 and vocabulary.report["rows_without_token"] == 3
    assert tables(vocabulary, models_)["A"][:, 0].tolist() == pytest.approx([100, 104, *[307 / 3] * 3, 103])


def test_the_report_counts_what_is_shared_and_what_is_not(tmp_path: Path) -> None:
    report = merge_vocabularies(animals(tmp_path), source="base", base="A").report
    assert json.loads(json.dumps(report)) == report
    assert report["shared"] == 3  # <unk> <s> </s>
    assert report["only_in"] == {"A": 1, "B": 1, "C": 1}  # sun, <x>, tree
    assert report["models"]["C"] == {
        "tokens": 6, "rows": 10, "rows_without_token": 4, "ranges_without_token": [[6, 10]], "tokens_without_row": 0,
        "missing_from_model": 3, "missing_from_output": 3,
    }  # fmt: skip
    assert report["filled"] == {"rule": 0, "base": 3, "one_model": 0, "mean": 0, "zero": 0}
    assert "3 tokens of 'C' are not in the output: 'bird', 'moon', 'tree'" in report["notes"]


def test_tokens_that_join_a_union_are_counted_and_explained(tmp_path: Path) -> None:
    vocabulary = merge_vocabularies(animals(tmp_path), source="union", base="A")
    assert vocabulary.report["joined"] == 3
    assert "('bird', 'moon', 'tree')" in vocabulary.report["notes"][-1]
    vocabulary.save(tmp_path / "out")
    # What the note says, of transformers' own tokenizer; mergekit's unions read texts the same way.
    assert AutoTokenizer.from_pretrained(tmp_path / "out").tokenize("moonlight") == ["moon", "<unk>"]


def test_a_pair_encoding_is_cut_to_its_table_with_its_merges_and_specials(tmp_path: Path) -> None:
    cut = pair_tokenizer("abc", [("a", "b"), ("ab", "c"), ("b", "c")], ["<pad>"])
    full = pair_tokenizer("abc", [("a", "b")], ["<pad>"])
    models = {
        "A": save_model(tmp_path / "A", cut, rows=7),  # up to 'ab'; 'abc', 'bc' and '<pad>' have no row
        "B": save_model(tmp_path / "B", full),
    }
    alone = merge_vocabularies(models, source="base", base="A")
    assert list(alone.tokens) == ["<unk>", "<s>", "</s>", "a", "b", "c", "ab"]
    alone.save(tmp_path / "alone")
    reloaded = AutoTokenizer.from_pretrained(tmp_path / "alone")
    assert len(reloaded) == 7 and reloaded.pad_token is None  # named again, it would come back on loading
    assert reloaded.tokenize("abc") == ["ab", "c"]
    joined = merge_vocabularies(models, source="union", base="A")
    joined.save(tmp_path / "joined")
    assert AutoTokenizer.from_pretrained(tmp_path / "joined").pad_token_id == joined.tokens["<pad>"] == 7


def test_an_unchanged_tokenizer_is_copied_as_it_is(tmp_path: Path) -> None:
    models = animals(tmp_path)
    (tmp_path / "B" / "tokenizer.model").write_bytes(b"an older form of the same")
    written = merge_vocabularies(models, source="B", base="A").save(tmp_path / "out")
    assert [path.name for path in written] == ["tokenizer.json", "tokenizer.model", "tokenizer_config.json"]
    assert all(path.read_bytes() == (tmp_path / "B" / path.name).read_bytes() for path in written)


def test_a_saved_union_gives_the_ids_and_the_chat_template_back(tmp_path: Path) -> None:
    models = animals(tmp_path)
    (tmp_path / "A" / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    vocabulary = merge_vocabularies(models, source="union", base="A")
    vocabulary.save(tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.get_vocab() == vocabulary.tokens
    assert tokenizer.chat_template == "{{ messages[0]['content'] }}"
    assert tokenizer("cat moon <x> tree")["input_ids"] == [vocabulary.tokens[t] for t in ("cat", "moon", "<x>", "tree")]
    assert "is_local" not in json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())


def test_nested_configs_change_where_the_vocabulary_is(tmp_path: Path) -> None:
    models = animals(tmp_path)
    models["A"].config = {
        "model_type": "some_vlm", "image_token_index": 4, "eos_token_id": [2, 3],
        "text_config": {"vocab_size": 6, "pad_token_id": None, "eos_token_id": 2, "hidden_size": 8},
        "audio_config": {"vocab_size": 2048, "eos_token_id": 2},
    }  # fmt: skip
    changes = merge_vocabularies(models, source="B", base="A").config_changes()
    assert changes == {
        "image_token_index": 2,  # dog
        "eos_token_id": [0, 5],
        "text_config": {"vocab_size": 8, "pad_token_id": None, "eos_token_id": 0, "hidden_size": 8},
    }


def test_an_id_whose_token_is_gone_passes_to_the_new_holder_of_its_role(tmp_path: Path) -> None:
    models = animals(tmp_path)
    models["A"].config |= {"eos_token_id": 5, "pad_token_id": 5}  # sun, which B lacks; B names no pad token
    changes = merge_vocabularies(models, source="B", base="A").config_changes()
    assert changes == {"vocab_size": 8, "eos_token_id": 0, "pad_token_id": None}


SCRIPT = """
import sys
from pathlib import Path
from isomerge.checkpoint import open_checkpoint
from isomerge.merging.vocabulary import chat_template, merge_vocabularies, write_chat_template
root, out = Path(sys.argv[1]), Path(sys.argv[2])
models = {name: open_checkpoint(root / name) for name in "BCA"}
vocabulary = merge_vocabularies(models, source="union")
vocabulary.save(out)
write_chat_template(out, chat_template("auto", models))
print(vocabulary.report, vocabulary.config_changes())
"""


def test_a_second_merge_writes_the_same_bytes(tmp_path: Path) -> None:
    models = animals(tmp_path)
    for out in ("one", "two"):  # a tokenizer gives its tokens out in another order each time
        merge_vocabularies(models, source="union", base="C").save(tmp_path / out)
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()


@pytest.mark.slow
def test_the_files_do_not_depend_on_the_hash_seed(tmp_path: Path) -> None:
    animals(tmp_path)
    for name, template in zip("BCA", ("{{ 'one' }}", "{{ 'two' }}", "{{ 'three' }}"), strict=True):
        (tmp_path / name / "chat_template.jinja").write_text(template)
    runs = []
    for seed in range(5):
        out = tmp_path / f"out{seed}"
        environment = {**os.environ, "PYTHONHASHSEED": str(seed)}
        command = [sys.executable, "-c", SCRIPT, str(tmp_path), str(out)]
        runs.append((out, subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)))
    found = set()
    for out, process in runs:
        printed, _ = process.communicate()
        assert process.returncode == 0
        files = [(p.name, hashlib.sha256(p.read_bytes()).hexdigest()) for p in sorted(out.iterdir())]
        found.add((printed, *files))
    assert len(found) == 1
    (only,) = found
    assert [name for name, _ in only[1:]] == ["chat_template.jinja", "tokenizer.json", "tokenizer_config.json"]
    assert (tmp_path / "out0" / "chat_template.jinja").read_text() == "{{ 'one' }}"
