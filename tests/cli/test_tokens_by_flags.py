"""Models that give tokens other ids, merged by flags: refused, or matched as asked; every row against a hand count."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import isomerge
from commands import said, verb
from isomerge.errors import RequestError
from models import EMBEDDING, HEAD, save_model, word_tokenizer

FIRST = ["<unk>", "<s>", "</s>", "sun", "moon", "star"]
SECOND = ["<unk>", "<s>", "</s>", "star", "sea", "moon"]  # two tokens elsewhere, one that the first lacks


@pytest.fixture
def models(tmp_path: Path) -> tuple[Path, Path]:
    save_model(tmp_path / "a", word_tokenizer(FIRST), seed=1)
    save_model(tmp_path / "b", word_tokenizer(SECOND), seed=2)
    return tmp_path / "a", tmp_path / "b"


def tokens(folder: Path) -> dict[str, int]:
    """As tokenizer.json numbers them."""
    content = json.loads((folder / "tokenizer.json").read_text())
    return content["model"]["vocab"] | {entry["content"]: entry["id"] for entry in content["added_tokens"]}


def rows(folder: Path, table: str = EMBEDDING) -> dict[str, np.ndarray]:
    """Token → its row."""
    values = load_file(folder / "model.safetensors")[table]
    return {token: values[id] for token, id in tokens(folder).items()}


def by_text(token: str, *folders: Path, table: str = EMBEDDING) -> np.ndarray:
    """The mean of those that have it: a model that lacks a token takes the row of the other."""
    return np.mean([found[token] for folder in folders if token in (found := rows(folder, table))], axis=0)


def test_tokens_with_other_ids_are_refused(models: tuple[Path, Path], tmp_path: Path) -> None:
    done = verb("merge", *models, "--method", "linear", "-o", tmp_path / "out")
    told = " ".join(done.stderr.split())
    assert done.exit_code == 2 and not (tmp_path / "out").exists()
    assert f"2 tokens have other ids in {models[1]} than in {models[0]} ('moon', 'star')" in told
    assert "'union' keeps" in told and "On the command line: --tokenizer union|base|MODEL|rows" in told
    planned = verb("plan", *models)
    assert planned.exit_code == 2 and " ".join(planned.stderr.split()) == told
    with pytest.raises(RequestError, match="2 tokens have other ids"):
        isomerge.merge(models)


def test_a_sweep_by_flags_refuses_them_too_and_takes_a_tokenizer(models: tuple[Path, Path], tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("moon star star moon moon star\n" * 4)
    asked = ("sweep", *models, "--method", "slerp", "--base", models[0], "--over", "t=0,1", "--data", text)
    asked += ("--kind", "lines")
    refused = verb(*asked)
    assert refused.exit_code == 2 and "2 tokens have other ids" in " ".join(refused.stderr.split())
    ends = [point["loss"] for point in said(*asked, "--tokenizer", models[1])["points"]]
    # matched by text, t = 1 is the second model, whose ids are other ones: its own loss on the same words
    assert ends[1] == pytest.approx(said("eval", models[1], "--data", text, "--kind", "lines")["loss"], rel=1e-5)
    row_by_row = [point["loss"] for point in said(*asked, "--tokenizer", "rows")["points"]]
    assert row_by_row[1] != pytest.approx(ends[1], rel=1e-3)


@pytest.mark.parametrize("source", ["union", "second"])
def test_with_a_tokenizer_every_row_is_that_of_its_token(
    source: str, models: tuple[Path, Path], tmp_path: Path
) -> None:
    out, wanted = tmp_path / "out", str(models[1]) if source == "second" else source
    record = said("merge", *models, "--tokenizer", wanted, "-o", out)
    assert record["verified"] is True and record["vocabulary"]["source"] == wanted
    expected = {*FIRST, *SECOND} if source == "union" else set(SECOND)
    size = sum(value.nbytes for value in load_file(out / "model.safetensors").values())
    assert said("plan", *models, "--tokenizer", wanted)["bytes_written"] == size
    assert set(tokens(out)) == expected
    if source == "second":
        assert tokens(out) == tokens(models[1])
    for table in (EMBEDDING, HEAD):
        for token, row in rows(out, table).items():
            np.testing.assert_allclose(row, by_text(token, *models, table=table), rtol=0, atol=1e-6)
    for name, value in isomerge.merge(models, tokenizer=wanted).state_dict().items():
        np.testing.assert_array_equal(value.numpy(), load_file(out / "model.safetensors")[name])


def test_the_tokenizer_of_the_base(models: tuple[Path, Path], tmp_path: Path) -> None:
    first, second = models
    out = tmp_path / "out"
    flags = ("--method", "task_arithmetic", "--base", first, "--weights", "0.5", "--tokenizer")
    said("merge", second, *flags, "base", "-o", out)
    assert tokens(out) == tokens(first)
    for token, row in rows(out).items():
        np.testing.assert_allclose(row, by_text(token, first, second), rtol=0, atol=1e-6)
    refused = verb("merge", *models, "--tokenizer", "base", "-o", tmp_path / "none")
    assert refused.exit_code == 2 and "--base" in refused.stderr


@pytest.mark.parametrize("how", ["flag", "recipe", "python"])
def test_row_by_row_where_that_is_asked_for(how: str, models: tuple[Path, Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    if how == "flag":
        notes = said("merge", *models, "--tokenizer", "rows", "-o", out)["notes"]
    elif how == "recipe":  # as mergekit reads it: no tokenizer named, no row moved
        recipe = tmp_path / "r.yml"
        entries = "".join(f"- {{model: {m}, parameters: {{weight: 1}}}}\n" for m in models)
        recipe.write_text(f"merge_method: linear\nmodels:\n{entries}")
        notes = said("merge", recipe, "-o", out)["notes"]
        assert "belongs in the recipe" in verb("merge", recipe, "--tokenizer", "rows", "-o", tmp_path / "x").stderr
    else:
        merged = isomerge.merge(models, tokenizer="rows")
        merged.save(out)
        notes = merged.report()["notes"]
    assert any("2 tokens have other ids" in note for note in notes)
    assert tokens(out) == tokens(models[0])
    a, b, found = (load_file(folder / "model.safetensors")[EMBEDDING] for folder in (*models, out))
    np.testing.assert_allclose(found, (a + b) / 2, rtol=0, atol=1e-6)


def without_tokenizer(folder: Path) -> None:
    for path in folder.glob("*token*"):
        path.unlink()


@pytest.mark.parametrize("case", ["lacks a tokenizer", "one token more at the end"])
def test_what_no_row_can_get_wrong_is_merged_unasked(case: str, tmp_path: Path) -> None:
    save_model(tmp_path / "a", word_tokenizer(FIRST), seed=1, rows=8)
    more = ["<|chat|>"] if case.startswith("one") else []
    save_model(tmp_path / "b", word_tokenizer(FIRST, more), seed=2, rows=8)
    if case.startswith("lacks"):
        without_tokenizer(tmp_path / "b")
    said("merge", tmp_path / "a", tmp_path / "b", "-o", tmp_path / "out")
    a, b, found = (load_file(tmp_path / n / "model.safetensors")[EMBEDDING] for n in ("a", "b", "out"))
    np.testing.assert_allclose(found, (a + b) / 2, rtol=0, atol=1e-6)


def test_a_vocabulary_in_the_older_form_and_a_third_model_are_seen_too(tmp_path: Path) -> None:
    """The second and third disagree about a token that the first lacks; one has nothing but vocab.json."""
    for seed, (name, words) in enumerate({"a": ["x"], "b": ["sea", "sky"], "c": ["sky", "sea"]}.items()):
        save_model(tmp_path / name, word_tokenizer(["<unk>", "<s>", "</s>", *words]), seed=seed, rows=8)
    vocabulary = tokens(tmp_path / "c")
    without_tokenizer(tmp_path / "c")
    (tmp_path / "c" / "vocab.json").write_text(json.dumps(vocabulary))
    done = verb("merge", *(tmp_path / n for n in "abc"), "-o", tmp_path / "out")
    told = " ".join(done.stderr.split())
    assert done.exit_code == 2 and f"in {tmp_path / 'c'} than in {tmp_path / 'b'} ('sea', 'sky')" in told


def test_a_merge_that_runs_the_models_is_not_told_to_match_tokens(models: tuple[Path, Path], tmp_path: Path) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text("sun moon star\n" * 8)
    done = verb("merge", *models, "--method", "fisher", "--data", texts, "-o", tmp_path / "out")
    told = " ".join(done.stderr.split())
    assert done.exit_code == 2 and "models of one tokenizer" in told and "--tokenizer union" not in told


def test_a_word_that_is_no_model_is_met_with_the_known_ones(models: tuple[Path, Path], tmp_path: Path) -> None:
    done = verb("merge", *models, "--tokenizer", "unoin", "-o", tmp_path / "out")
    assert done.exit_code == 2 and "--tokenizer cannot be 'unoin'" in done.stderr and "'union'?" in done.stderr


def test_adapters_have_no_tokens(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text("{}")
    done = verb("merge", tmp_path / "a", tmp_path / "b", "--tokenizer", "union", "-o", tmp_path / "out")
    assert done.exit_code == 2 and "--tokenizer has no effect when merging adapters" in " ".join(done.stderr.split())


def test_a_vocabulary_of_lines_ends_them_at_line_ends_alone(tmp_path: Path) -> None:
    """Some characters that Python calls line ends are tokens; the other model has the same ones in tokenizer.json."""
    words = ["[UNK]", "\u2028", "\u0085", "sun", "moon"]
    save_model(tmp_path / "a", word_tokenizer(words), seed=1)
    save_model(tmp_path / "b", word_tokenizer(words), seed=2)
    ids = tokens(tmp_path / "b")
    (tmp_path / "b" / "tokenizer.json").unlink()
    (tmp_path / "b" / "vocab.txt").write_text("".join(f"{word}\n" for word in sorted(ids, key=ids.__getitem__)))
    assert said("plan", tmp_path / "a", tmp_path / "b")["tensors"] > 0


@pytest.mark.parametrize("damaged", [{"model": None}, {"added_tokens": None}, {"added_tokens": [{}]}])
def test_a_damaged_tokenizer_is_no_defect_of_the_merge(
    damaged: dict[str, object], models: tuple[Path, Path], tmp_path: Path
) -> None:
    (models[1] / "tokenizer.json").write_text(json.dumps(damaged))
    assert said("merge", *models, "-o", tmp_path / "out")["verified"] is True


def test_a_later_point_with_other_ids_is_refused_before_the_first_is_measured(
    models: tuple[Path, Path], tmp_path: Path
) -> None:
    save_model(tmp_path / "c", word_tokenizer(FIRST), seed=3)
    text = tmp_path / "text.txt"
    text.write_text("moon star star moon moon star\n" * 4)
    asked = ("--over", f"models.1.model={tmp_path / 'c'},{models[1]}", "--data", text, "--kind", "lines")
    done = verb("sweep", models[0], tmp_path / "c", *asked)
    assert done.exit_code == 2 and "2 tokens have other ids" in " ".join(done.stderr.split())
    assert "2 points" not in done.stderr
