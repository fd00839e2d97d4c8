"""Tables of positions and tokens that differ in length: merged on the rows that all have, the longest kept.

The truth for the common rows is the merge of models that were cut to one length, and for the others the file itself.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import isomerge
from alignment.test_align_real import sapiens
from commands import said, verb
from isomerge.errors import RequestError
from isomerge.merging.methods import METHODS
from merging.methods.cases import IMPORTANCE, NEEDED
from merging.test_resume import content, interrupted, same
from models import logits, model, read_config, save_model, stock, tensors, variant, word_tokenizer

SHORT, LONG = 19, 23
POSITIONS = "bert.embeddings.position_embeddings.weight"


def bert(seed: int, positions: int) -> Path:
    return model("bert", seed, torch.float32, max_position_embeddings=positions)


def cut(long: Path) -> Path:
    """The model as if it had been trained for shorter inputs."""
    table = tensors(long)[POSITIONS][:SHORT].clone()
    return variant(long, {POSITIONS: table}, "cut", max_position_embeddings=SHORT)


def merged(models: list[Path], **options: Any) -> dict[str, Tensor]:
    return isomerge.merge(models, **options).state_dict()


def importances(folder: Path, out: Path) -> str:
    state = {name: 0.1 + tensor.abs() for name, tensor in tensors(folder).items()}
    save_file(state, out)
    return str(out)


GRAMS = ("regmean", "esm")
PAIRWISE = [name for name, method in METHODS.items() if method.most != 1 and name not in (*GRAMS, *IMPORTANCE)]
ONE_AND_ITS_BASE = [name for name, method in METHODS.items() if method.most == 1 and method.base != "ignored"]


def test_every_method_has_a_test() -> None:
    assert {*PAIRWISE, *ONE_AND_ITS_BASE, *IMPORTANCE} | {*GRAMS, "passthrough"} == set(METHODS)


def require_common_rows_merged(name: str, models: list[Path], long: Path, **options: Any) -> None:
    """As if the longest were cut; its other rows are the file's, bit for bit."""
    found = merged(models, method=name, **options)
    expected = merged([cut(folder) if folder == long else folder for folder in models], method=name, **options)
    assert torch.equal(found[POSITIONS][SHORT:], tensors(long)[POSITIONS][SHORT:])
    found[POSITIONS] = found[POSITIONS][:SHORT]
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[weight], tensor) for weight, tensor in expected.items())


@pytest.mark.parametrize("name", PAIRWISE)
def test_the_rows_that_all_have_are_merged_and_the_others_kept(name: str) -> None:
    options = {**NEEDED.get(name, {}), **({"weight": [0.4, 0.6]} if name == "rewarded_soup" else {})}
    if METHODS[name].base != "ignored":
        options["base"] = bert(2, SHORT)
    require_common_rows_merged(name, [bert(0, SHORT), bert(1, LONG)], bert(1, LONG), **options)


@pytest.mark.parametrize("name", ONE_AND_ITS_BASE)
def test_a_model_that_is_longer_than_its_base_keeps_its_rows(name: str) -> None:
    require_common_rows_merged(name, [bert(1, LONG)], bert(1, LONG), base=bert(0, SHORT), **NEEDED.get(name, {}))


@pytest.mark.parametrize("name", sorted(IMPORTANCE))
def test_importances_of_the_whole_table_weigh_the_rows_that_all_have(name: str, tmp_path: Path) -> None:
    short, long = bert(0, SHORT), bert(1, LONG)
    base = {} if METHODS[name].base == "ignored" else {"base": bert(2, SHORT)}
    if any(option.name == "base_importance" for option in METHODS[name].options):
        base["base_importance"] = importances(bert(2, SHORT), tmp_path / "base.safetensors")
    files = {
        folder: importances(folder, tmp_path / f"{folder.name}.safetensors") for folder in (short, long, cut(long))
    }
    found = merged([short, long], method=name, importance=[files[short], files[long]], **base)[POSITIONS]
    less = merged([short, cut(long)], method=name, importance=[files[short], files[cut(long)]], **base)[POSITIONS]
    assert torch.equal(found, torch.cat([less, tensors(long)[POSITIONS][SHORT:]]))


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_stock_class_takes_the_longer_inputs_whoever_comes_first(order: tuple[int, int], tmp_path: Path) -> None:
    models = [bert(0, SHORT), bert(1, LONG)]
    result = isomerge.merge([models[place] for place in order])
    result.save(tmp_path / "out")
    assert read_config(tmp_path / "out")["max_position_embeddings"] == LONG
    table = load_file(tmp_path / "out" / "model.safetensors")[POSITIONS]
    short, long = (tensors(folder)[POSITIONS] for folder in models)
    assert torch.allclose(table[:SHORT], (short + long[:SHORT]) / 2) and torch.equal(table[SHORT:], long[SHORT:])
    assert logits(tmp_path / "out").isfinite().all()  # no key is missing or of another shape
    (note,) = result.tensor_plans.tables
    assert note in result.notes and f"{SHORT} in {models[0]}" in note and f"those of {models[1]}, unmerged" in note
    for file in ("README.md", "isomerge.json"):
        assert "unmerged" in (tmp_path / "out" / file).read_text()
    assert isomerge.verify(tmp_path / "out").verdict == "good"
    assert isomerge.reproduce(tmp_path / "out").verdict == "identical"


@pytest.mark.parametrize(
    ("family", "key", "table", "beyond"),
    [
        ("gpt2", "n_positions", "transformer.wpe.weight", 0),
        ("opt", "max_position_embeddings", "model.decoder.embed_positions.weight", 2),
        ("roberta", "max_position_embeddings", "roberta.embeddings.position_embeddings.weight", 0),
    ],
)
def test_tables_are_known_by_what_config_says(family: str, key: str, table: str, beyond: int) -> None:
    models = [model(family, seed, torch.float32, **{key: 19 + 3 * seed}) for seed in (0, 1)]
    found = isomerge.merge(models)
    one, other = (tensors(folder)[table] for folder in models)
    assert len(one) == 19 + beyond and len(other) == 22 + beyond
    assert torch.allclose(found.state_dict()[table], torch.cat([(one + other[: len(one)]) / 2, other[len(one) :]]))
    assert found.config[key] == 22


def test_of_three_lengths_the_rows_that_all_have_are_merged() -> None:
    models = [bert(0, SHORT), bert(1, LONG), bert(2, 21)]
    table = isomerge.merge(models).state_dict()[POSITIONS]
    parts = [tensors(folder)[POSITIONS] for folder in models]
    mean = torch.stack([part[:SHORT] for part in parts]).mean(0)
    assert torch.allclose(table[:SHORT], mean) and torch.equal(table[SHORT:], parts[1][SHORT:])


def test_of_equally_long_tables_the_bases_rows_are_kept() -> None:
    models, base = [bert(0, SHORT), bert(1, LONG)], bert(2, LONG)
    table = merged(models, method="task_arithmetic", base=base)[POSITIONS]
    assert torch.equal(table[SHORT:], tensors(base)[POSITIONS][SHORT:])


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("t5", {"relative_attention_num_buckets": 10}),
        ("deberta", {"position_buckets": 5}),
        ("vit", {"image_size": 12}),
        ("bert", {"type_vocab_size": 3}),
    ],
)
def test_rows_that_do_not_correspond_are_refused(family: str, changes: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="tensors of different shapes cannot be merged"):
        isomerge.merge([model(family, 0, torch.float32), model(family, 1, torch.float32, **changes)])


def test_the_mask_of_the_longest_model_goes_with_its_table() -> None:
    folders = []
    for seed in (0, 1):
        folder = model("gpt2", seed, torch.float32, n_positions=19 + 3 * seed)
        mask = torch.ones(19 + 3 * seed, 19 + 3 * seed).tril()[None, None]
        folders.append(variant(folder, {"transformer.h.0.attn.bias": mask}, "mask"))
    found = merged(folders)
    assert torch.equal(found["transformer.h.0.attn.bias"], torch.ones(22, 22).tril()[None, None])


# --- an alignment, data, several runs ---------------------------------------------------------------------------------
def test_aligned_models_keep_the_moved_rows_of_the_longest() -> None:
    models = [bert(0, SHORT), bert(1, LONG)]
    found = merged(models, align=True)[POSITIONS]
    moved = isomerge.align(models[1], models[0]).state_dict()[POSITIONS]
    anchor = tensors(models[0])[POSITIONS]
    torch.testing.assert_close(found, torch.cat([(anchor + moved[:SHORT]) / 2, moved[SHORT:]]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["fisher", "regmean"])
def test_statistics_from_data_weigh_the_rows_that_all_have(name: str) -> None:
    batches = [{"input_ids": torch.arange(3, 11)[None], "labels": torch.ones(1, 8, dtype=torch.long)}]
    require_common_rows_merged(name, [bert(0, SHORT), bert(1, LONG)], bert(1, LONG), data=[batches, batches])


def test_a_killed_merge_goes_on_to_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = [bert(0, SHORT), bert(1, LONG)]

    def merge(out: Path) -> Any:
        return isomerge.merge(models, threads=1).save(out, shard_size="2KB")

    interrupted(monkeypatch, lambda: merge(tmp_path / "again"))
    merge(tmp_path / "again")
    merge(tmp_path / "whole")
    assert content(tmp_path / "again") and same(tmp_path / "again", tmp_path / "whole")


def test_methods_that_run_whole_models_still_refuse() -> None:
    with pytest.raises(RequestError, match="tensors of different shapes cannot be merged"):
        batches = [{"input_ids": torch.arange(3, 11)[None]}]
        isomerge.merge([bert(0, SHORT), bert(1, LONG)], method="regmean++", data=[batches, batches])


# --- tokens -----------------------------------------------------------------------------------------------------------
WORDS = ["<unk>", "<s>", "</s>", "sun", "moon"]
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`a` with five tokens, and `b` with two more."""
    save_model(tmp_path / "a", word_tokenizer(WORDS), seed=0)
    save_model(tmp_path / "b", word_tokenizer([*WORDS, "tree", "star"]), seed=1)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def joined(one: Tensor, other: Tensor) -> Tensor:
    return torch.cat([(one + other[: len(one)]) / 2, other[len(one) :]])


def test_tokens_at_the_end_are_kept_with_their_tokenizer(pair: Path) -> None:
    record = said("merge", "a", "b", "-o", "out")
    assert any("the first 5 rows are merged" in note and "those of b" in note for note in record["notes"])
    a, b, out = (tensors(pair / name) for name in ("a", "b", "out"))
    for name in (EMBEDDING, HEAD):
        assert torch.allclose(out[name], joined(a[name], b[name]))
    assert read_config(pair / "out")["vocab_size"] == 7
    assert (pair / "out" / "tokenizer.json").read_bytes() == (pair / "b" / "tokenizer.json").read_bytes()
    assert said("verify", "out")["verdict"] == "good" and said("reproduce", "out")["verdict"] == "identical"
    assert "merge a b" in said("check", "a", "b")["suggestion"]


def test_a_tied_table_stays_tied(tmp_path: Path) -> None:
    for name, words in (("a", WORDS), ("b", [*WORDS, "tree"])):
        save_model(tmp_path / name, word_tokenizer(words), seed=len(words), tie_word_embeddings=True)
    found = isomerge.merge([tmp_path / "a", tmp_path / "b"])
    a, b = (tensors(tmp_path / name)[EMBEDDING] for name in "ab")
    assert HEAD not in found.plan and torch.allclose(found.state_dict()[EMBEDDING], joined(a, b))
    assert found.config["tie_word_embeddings"] is True and logits(tmp_path / "b", found.state_dict()).shape[-1] == 6


def test_another_token_under_one_id_is_refused(pair: Path) -> None:
    save_model(pair / "c", word_tokenizer([*WORDS, "rain", "star", "tree"]), seed=2)
    for flags in ([], ["--tokenizer", "rows"]):
        refused = verb("merge", "b", "c", "-o", "out", *flags)
        assert refused.exit_code == 2 and "--tokenizer" in refused.stderr and "union" in refused.stderr
    with pytest.raises(RequestError, match="id 5 is 'tree' and 'rain'.*set tokenizer to union"):
        recipe = {"merge_method": "linear", "models": [{"model": str(pair / name)} for name in "bc"]}
        isomerge.merge_recipe(recipe)
    assert said("merge", "b", "c", "--tokenizer", "union", "-o", "out")["tensors"]


def test_padding_and_models_without_tokenizer_files_are_merged_by_their_rows(tmp_path: Path) -> None:
    save_model(tmp_path / "a", word_tokenizer(WORDS), seed=0)
    save_model(tmp_path / "b", word_tokenizer(WORDS), seed=1, rows=8)
    for file in (tmp_path / "b").glob("tokenizer*"):
        file.unlink()
    found = isomerge.merge([tmp_path / "a", tmp_path / "b"]).state_dict()
    a, b = (tensors(tmp_path / name) for name in "ab")
    assert all(torch.allclose(found[name], joined(a[name], b[name])) for name in (EMBEDDING, HEAD))


def test_tables_of_many_blocks_are_read_in_their_order(tmp_path: Path) -> None:
    for seed, rows in enumerate((70_001, 131_111)):  # of 8 numbers: 65,536 rows are a block
        stock(
            "LlamaForCausalLM",
            seed,
            vocab_size=rows,
            hidden_size=8,
            intermediate_size=4,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            tie_word_embeddings=True,
        ).save_pretrained(tmp_path / "ab"[seed])
    written = isomerge.merge([tmp_path / "a", tmp_path / "b"]).save(tmp_path / "out")
    a, b, out = (tensors(tmp_path / name)[EMBEDDING] for name in ("a", "b", "out"))
    assert torch.allclose(out, joined(a, b), atol=1e-7) and torch.equal(out[70_001:], b[70_001:])
    lock = json.loads((written.out / "isomerge.lock.json").read_text())
    assert len(lock["inputs"]) == 2


@pytest.mark.slow
def test_two_real_models_of_different_length(tmp_path: Path) -> None:
    longer, shorter = sapiens()
    table = "roberta.embeddings.position_embeddings.weight"
    checked = isomerge.check(longer, shorter)
    assert "--align" in checked.suggestion and any("the first 130 rows" in reason for reason in checked.reasons)
    isomerge.merge([shorter, longer], align=True).save(tmp_path / "out")
    assert tensors(tmp_path / "out")[table].shape == (146, 128)
    assert isomerge.verify(tmp_path / "out").verdict == "good"
    assert isomerge.reproduce(tmp_path / "out").verdict == "identical"
