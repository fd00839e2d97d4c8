"""The language experiments: data sets, fine-tuning, heads, layers, and both scripts from end to end on tiny models."""

from __future__ import annotations

import json
import shutil
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks" / "paper"))
import corpora
import figure4
import language
import parsers
import runner
import table1
import table1_report
from encoding import Inputs, batch_of, encode, load_tokenizer

OLD = "microsoft/deberta-v3-xsmall"
WORDS = ["joy", "anger", "fear", "sadness", "paris", "anna", "acme", "in", "the", "sees", "a", "b", "c", "good", "bad"]
TINY = language.Plan(1, 4, 1e-3, 8, 3, 8, 8, 4, length=24)
SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}


# --- tiny bases and data ----------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Untrained bases of all architectures, under the names that the scripts look for; OLD is no default any more."""
    from tokenizers import Tokenizer, normalizers, pre_tokenizers, processors
    from tokenizers.models import WordPiece

    home = tmp_path_factory.mktemp("models")
    vocabulary = {word: n for n, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, "##s"])}
    backend = Tokenizer(WordPiece(vocabulary, unk_token="[UNK]"))
    backend.normalizer, backend.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.Whitespace()
    backend.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    names = {"unk_token": "[UNK]", "pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **names)
    size: dict[str, Any] = {**SHAPE, "vocab_size": len(vocabulary), "max_position_embeddings": 64}
    relative: dict[str, Any] = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "share_att_key": True,
                "position_biased_input": False, "norm_rel_ebd": "layer_norm", "type_vocab_size": 0}  # fmt: skip
    torch.manual_seed(0)
    onward = onward_tokenizer()
    small, large = language.BASES["reduced"]
    rotary: dict[str, Any] = {**size, "num_hidden_layers": 3, "num_key_value_heads": 2, "vocab_size": len(onward)}
    for base, model, reader in (
        (small, transformers.BertModel(transformers.BertConfig(**size)), tokenizer),
        (OLD, transformers.DebertaV2Model(transformers.DebertaV2Config(**size, **relative)), tokenizer),
        (large, transformers.LlamaForCausalLM(transformers.LlamaConfig(**rotary)), onward),
    ):
        folder = home / language.title(base)
        model.save_pretrained(folder)
        reader.save_pretrained(folder)
    return home


def onward_tokenizer() -> Any:
    """As models that read from left to right have it: no separator, no class token, spaces belong to words."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
    from tokenizers.models import BPE

    backend = Tokenizer(BPE())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, special_tokens=["<end>"], initial_alphabet=alphabet)
    backend.train_from_iterator([f" {word}" for word in WORDS] * 9, trainer)
    names = ["input_ids", "attention_mask"]
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", model_input_names=names)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few examples in the format of each set that the reduced scale reads."""
    home = tmp_path_factory.mktemp("data")

    def write(path: str, lines: list[str]) -> None:
        (home / path).parent.mkdir(parents=True, exist_ok=True)
        (home / path).write_text("\n".join(lines) + "\n", encoding="utf-8")

    for emotion in parsers.EMOTIONS:
        for end in ("-ratings-0to1.train.txt", "-gold.dev.txt", "-gold.test.txt"):
            write(f"emotion/emoint/{emotion}{end}", [f"{n}\tthe {emotion} a\t{emotion}\t0.5" for n in range(2)])
    write(
        "emotion/tec/Jan9-2012-tweets-clean.txt",
        [f"{n}:\tin {emotion} b \t:: {emotion}" for n in range(5) for emotion in (*parsers.EMOTIONS, "surprise")],
    )
    write("emotion/dair-emotion/test.txt", ["text;label", *(f"a {emotion};{emotion}" for emotion in parsers.EMOTIONS)])
    sentences = ["anna\tB-politician", "sees\tO", "paris\tB-location", "", "the\tO", "acme\tB-politicalparty", ""] * 4
    for part in ("train", "dev", "test"):
        write(f"ner/crossner/politics/{part}.txt", sentences)
    for section in "abefg":
        write(f"ner/btc/{section}.conll", [line.replace("politician", "PER") for line in sentences])
    write(
        "ner/wikigold/wikigold.conll.txt",
        ["anna I-PER", "b I-PER", "sees O", "paris I-LOC", "", "-DOCSTART- O", "", "acme I-ORG", "c I-MISC", ""],
    )
    for part in ("train", "val", "dev"):
        write(f"glue/CoLA/{part}.tsv", [f"x\t{n % 2}\t\tthe {['bad', 'good'][n % 2]} a" for n in range(6)])
    scores = [f"{n}\tg\tf\ty\t1\tn\tn\tthe {WORDS[n]}\tthe a\t{n}.5" for n in range(4)]
    for part in ("train", "dev"):
        write(f"glue/STS-B/{part}.tsv", scores)
    write("glue/STS-B/test.tsv", ["index\tgenre\tfilename\tyear\told\ts1\ts2\tsentence1\tsentence2\tscore", *scores])
    return home  # fmt: skip


def job(models: Path, data: Path | None, work: Path, corpus: str, *, base: int = 0, seed: int = 0) -> language.Job:
    path = language.base_path(language.BASES["reduced"][base], models)
    return language.Job(path, corpus, seed, TINY, data, work, "cpu")


# --- data sets --------------------------------------------------------------------------------------------------------
def test_other_emotions_are_left_out_and_a_fifth_is_for_testing(data: Path) -> None:
    train, test = (corpora.read("tec", split, data) for split in ("train", "test"))
    assert (len(train), len(test)) == (16, 4)
    assert sorted(target for _, target in train + test) == sorted([0, 1, 2, 3] * 5)
    assert all(text == f"in {parsers.EMOTIONS[target]} b" for text, target in train)


def test_entities_are_those_that_seqeval_sees() -> None:
    from seqeval.metrics.sequence_labeling import get_entities

    inside = ["I-PER", "I-PER", "O", "I-LOC", "I-ORG", "B-ORG", "I-ORG", "O"]
    tags = parsers.shared_tags(inside)
    assert tags == ["B-PER", "I-PER", "O", "B-LOC", "B-ORG", "B-ORG", "I-ORG", "O"]
    assert get_entities(tags) == get_entities(inside)
    assert parsers.shared_tags(["B-writer", "I-writer", "B-song", "I-song"]) == ["B-PER", "I-PER", "O", "O"]


def test_a_kind_after_another_of_the_same_shared_kind_begins_anew() -> None:
    assert parsers.shared_tags(["B-person", "B-politician", "I-politician"]) == ["B-PER", "B-PER", "I-PER"]


def test_document_marks_are_no_sentences(data: Path) -> None:
    found = sorted(words for words, _ in corpora.read("wikigold", "test", data))
    assert found == [["acme", "c"], ["anna", "b", "sees", "paris"]]


def test_missing_data_are_refused_with_what_to_put_where(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"2 files are missing .*ner/wnut17/train.conll.*Put each set under"):
        corpora.require(["wnut17"], tmp_path)
    with pytest.raises(SystemExit, match="Give --data DIR, a folder that holds emotion/tec, ner/btc"):
        corpora.require(["tec", "btc"], None)
    corpora.require(["glue-cola"], None)  # from the hub


def test_a_missing_base_is_refused_with_its_folder(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="roberta-base holds no config.json"):
        language.base_path("FacebookAI/roberta-base", tmp_path)
    assert language.base_path("FacebookAI/roberta-base", None) == "FacebookAI/roberta-base"


def test_sets_of_the_hub_are_read_by_the_papers_names(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []
    stored = {
        "nyu-mll/glue": [{"sentence": "a", "label": 1, "sentence1": "b", "sentence2": "c"}],
        "eriktks/conll2003": [{"tokens": ["acme", "b"], "ner_tags": [3, 7]}],
        "ontonotes/conll2012_ontonotesv5": [
            {"document_id": "bc/x", "sentences": [{"words": ["paris", "a"], "named_entities": [9, 0]}]},
            {"document_id": "nw/x", "sentences": [{"words": ["anna"], "named_entities": [1]}]},
        ],
    }

    def load_dataset(name: str, config: str | None, *, split: str, revision: str | None) -> Any:
        asked.append((name, config, split))
        return stored[name]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    assert corpora.read("glue-cola", "test", None) == [("a", 1)]
    assert corpora.read("glue-stsb", "train", None) == [(("b", "c"), 1.0)]
    assert corpora.read("conll2003", "test", None) == [(["acme", "b"], [5, 0])]
    assert corpora.read("ontonotes-bc", "train", None) == [(["paris", "a"], [3, 0])]
    assert corpora.read("ontonotes-nw", "train", None) == [(["anna"], [1])]
    assert asked[:2] == [("nyu-mll/glue", "cola", "validation"), ("nyu-mll/glue", "stsb", "train")]


def test_unified_emotions_are_told_apart_by_their_source(tmp_path: Path) -> None:
    rows = [{"source": "ssec", "text": "a", "emotions": {"joy": 1, "fear": 0}},
            {"source": "ssec", "text": "b", "emotions": {"joy": 1, "fear": 1}},
            {"source": "tec", "text": "c", "emotions": {"fear": 1}}]  # fmt: skip
    path = tmp_path / corpora.UNIFIED
    path.parent.mkdir()
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert corpora.read("unified-ssec", "train", tmp_path) == [("a", parsers.EKMAN.index("joy"))]


# --- training and heads -----------------------------------------------------------------------------------------------
def test_a_tag_is_asked_at_the_first_token_of_its_word(models: Path, data: Path) -> None:
    inputs = Inputs(str(models / "all-MiniLM-L6-v2"), data, None, None, 24)
    row = next(row for row in inputs.rows("wikigold", "test") if len(row["labels"]) == 6)
    assert row["labels"] == [-100, 1, 2, 0, 3, -100]  # [CLS] anna b sees paris [SEP]
    batch = next(inputs.batches("wikigold", "test", 2))
    assert batch["labels"].shape == batch["input_ids"].shape == batch["attention_mask"].shape == (2, 6)
    assert sorted(batch["attention_mask"].sum(1).tolist()) == [4, 6]


def test_a_note_beside_a_base_says_where_it_is_from(tmp_path: Path) -> None:
    assert language.origin(str(tmp_path)) is None
    (tmp_path / "NOTE.txt").write_text("trained on for another task\n")
    assert language.origin(str(tmp_path)) == f"{tmp_path.name}: trained on for another task"


def test_heads_of_a_seed_begin_alike_and_those_of_another_do_not(models: Path) -> None:
    base = str(models / language.title(OLD))
    one, same, other = (language.new_model(base, "emotion", seed).state_dict() for seed in (0, 0, 1))
    head = language.head_names(language.new_model(base, "emotion", 0))
    assert head == ["pooler.dense.weight", "pooler.dense.bias", "classifier.weight", "classifier.bias"]
    assert torch.equal(one["classifier.weight"], same["classifier.weight"])
    assert not torch.equal(one["classifier.weight"], other["classifier.weight"])
    assert not one["classifier.bias"].any()


@pytest.mark.parametrize(("task", "expected"), [("CoLA", [(2, 32)]), ("STS-B", [(1, 32)]), ("ner", [(7, 32), (7,)])])
def test_the_head_of_a_model_that_reads_onward(task: str, expected: list[tuple[int, ...]], models: Path) -> None:
    model = language.new_model(str(models / language.title(language.BASES["reduced"][1])), task, 0)
    names = language.head_names(model)
    assert names == ["score.weight", "score.bias"][: len(names)]
    assert [tuple(model.state_dict()[name].shape) for name in names] == expected


def test_only_the_first_layers_are_kept_if_the_plan_says_so(models: Path, data: Path, tmp_path: Path) -> None:
    whole = job(models, data, tmp_path, "CoLA", base=1)
    folder = language.fine_tune(replace(whole, plan=replace(TINY, layers=2, rate=0.0)))
    kept, base = language.state_of(folder), language.state_of(Path(whole.base))
    assert json.loads((folder / "config.json").read_text())["num_hidden_layers"] == 2
    assert {figure4.layer_of(name) for name in base} == {-1, 0, 1, 2}
    assert {figure4.layer_of(name) for name in kept} == {-1, 0, 1}
    assert all(torch.equal(kept[name], base[name]) for name in kept if name != "score.weight")
    assert language.fine_tune(whole) != folder


def test_padding_does_not_change_what_is_read_onward(models: Path, data: Path, tmp_path: Path) -> None:
    folder = language.fine_tune(job(models, data, tmp_path, "STS-B", base=1))
    tokenizer = load_tokenizer(str(models / language.title(language.BASES["reduced"][1])))
    rows = encode(tokenizer, "STS-B", [(("the a", "b"), 2.5), (("anna sees paris", "the good anna"), 1.0)], 24)
    model = language.load_model(folder).eval()
    batches = [batch_of(few, tokenizer.pad_token_id) for few in (rows, rows[:1], rows[1:])]
    assert not batches[0]["attention_mask"].all()  # one is padded
    both, one, other = (
        model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits for batch in batches
    )
    assert torch.allclose(both, torch.cat([one, other]), atol=1e-5)
    assert not torch.allclose(one, other, atol=1e-3)


def test_words_are_tagged_where_they_end_by_a_model_that_reads_onward(models: Path, data: Path) -> None:
    base = str(models / language.title(language.BASES["reduced"][1]))
    tokenizer = load_tokenizer(base)
    (row,) = encode(tokenizer, "ner", [(["anna", "xy", "paris"], [1, 2, 3])], 24)
    pieces = tokenizer.convert_ids_to_tokens(row["input_ids"])
    assert pieces == ["\u0120anna", "\u0120", "x", "y", "\u0120paris"]
    assert row["labels"] == [1, -100, -100, 2, 3]
    (row,) = encode(tokenizer, "STS-B", [(("the a", "b"), 2.5)], 24)
    assert tokenizer.decode(row["input_ids"]) == "the a\nb" and row["labels"] == 2.5
    assert tokenizer.pad_token_id == tokenizer.eos_token_id


def test_the_pooler_that_only_classifiers_read_belongs_to_the_head(models: Path) -> None:
    head = language.head_names(language.new_model(str(models / "all-MiniLM-L6-v2"), "emotion", 0))
    assert head == ["bert.pooler.dense.weight", "bert.pooler.dense.bias", "classifier.weight", "classifier.bias"]


def test_training_lowers_the_loss_and_is_done_once(models: Path, data: Path, tmp_path: Path) -> None:
    longer = replace(job(models, data, tmp_path, "emoint"), plan=replace(TINY, least_steps=60, rate=1e-2, batch=8))
    folder = language.fine_tune(longer)
    judge = language.Judge(folder, "emotion", Inputs(longer.base, data, None, None, 24), "cpu")
    before = language.new_model(longer.base, "emotion", 0).state_dict()
    after = language.state_of(folder)
    assert judge(after, "emoint")["loss"] < judge(before, "emoint")["loss"] - 0.3
    stamp = (folder / "model.safetensors").stat().st_mtime_ns
    assert language.fine_tune(longer) == folder and (folder / "model.safetensors").stat().st_mtime_ns == stamp


def test_the_score_of_entities_is_that_of_seqeval(models: Path, data: Path, tmp_path: Path) -> None:
    from seqeval.metrics import f1_score

    folder = language.fine_tune(job(models, data, tmp_path, "btc"))
    inputs = Inputs(str(models / "all-MiniLM-L6-v2"), data, None, None, 24)
    judge = language.Judge(folder, "ner", inputs, "cpu")
    state = language.state_of(folder)
    state["classifier.weight"] *= 50  # an untrained model's guesses, of all kinds
    found = judge(state, "wikigold")["score"]
    said, right = [], []
    for batch in inputs.batches("wikigold", "test", 1):
        labels = batch.pop("labels")[0]
        guess = judge.model(**batch).logits[0].argmax(-1)[labels != -100]
        said.append([corpora.TAGS[n] for n in guess.tolist()])
        right.append([corpora.TAGS[n] for n in labels[labels != -100].tolist()])
    assert found == pytest.approx(100 * float(f1_score(right, said)))


# --- merging ----------------------------------------------------------------------------------------------------------
def test_every_set_has_two_partners_in_a_ring_and_seeds_have_others() -> None:
    rings = [table1.pairs(8, seed, every=False) for seed in range(3)]
    for ring in rings:
        assert all(sum(member in pair for pair in ring) == 2 for member in range(8))
    assert len({pair for ring in rings for pair in ring}) == 24
    assert table1.pairs(2, 0, every=False) == [(0, 1)]
    assert len(table1.pairs(6, 1, every=True)) == 15


def test_mixing_layers_is_matching_only_those(models: Path, data: Path, tmp_path: Path) -> None:
    import isomerge

    first, second = (job(models, data, tmp_path, "CoLA", base=1, seed=seed) for seed in (0, 1))
    for each in (first, second):
        language.fine_tune(each)
    head = ["score.weight"]
    plain, matched = figure4.merged_bodies(figure4.Pair(first, second, 1), head)
    found = isomerge.align(first.folder, second.folder, level="rotation", only="attention", layers="1")
    assert isinstance(found, isomerge.Alignment)
    alone = found.state_dict()
    expected = isomerge.merge_state_dicts([alone, language.state_of(second.folder)])
    mixed = figure4.mixed(plain, matched, [1])
    body = [name for name in mixed if name not in head]
    assert all(torch.allclose(mixed[name], expected[name], atol=1e-6) for name in body)
    moved = [name for name in body if not torch.equal(mixed[name], plain[name])]
    assert moved and all(".layers.1.self_attn." in name for name in moved)


# --- the scripts ------------------------------------------------------------------------------------------------------
@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, models: Path, data: Path, tmp_path: Path) -> list[str]:
    monkeypatch.setitem(language.PLANS, "reduced", TINY)
    monkeypatch.setattr(language, "OWN", {})
    places = {"--data": data, "--models": models, "--work": tmp_path / "work", "--out": tmp_path / "out"}
    return ["--scale", "reduced", "--device", "cpu", *(str(word) for pair in places.items() for word in pair)]


@pytest.mark.filterwarnings("ignore::isomerge.merge.statistics.StatisticsWarning")
def test_table1_from_end_to_end_and_again_from_its_cells(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = ("table1", "title", "paper", table1.script)
    runner.main(*told, tiny)
    record = json.loads((tmp_path / "out" / "table1.json").read_text())
    rows = {row[0]: row[1:] for row in record["tables"][0]["rows"]}
    assert len(rows) == 1 + len(table1.METHODS) * len(table1.MATCHINGS)
    assert all(len(cell["values"]) == 1 and 0 <= cell["values"][0] <= 100 for row in rows.values() for cell in row)
    assert any("Larger models gain more" in claim for claim in record["claims"])
    markdown = (tmp_path / "out" / "table1.md").read_text()
    assert "RegMean +full" in markdown and "Left out" in markdown
    monkeypatch.setattr(table1, "merged", None)  # would fail if anything were merged again
    shutil.rmtree(tmp_path / "work" / "language")  # finished cells need no models
    runner.main(*told, tiny)
    assert not (tmp_path / "work" / "language").exists()
    assert json.loads((tmp_path / "out" / "table1.json").read_text())["tables"] == record["tables"]


def test_figure4_from_end_to_end(tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figure4, "STRIDES", {"reduced": 1})
    runner.main("figure4", "title", "paper", figure4.script, [*tiny, "--seeds", "2"])
    record = json.loads((tmp_path / "out" / "figure4.json").read_text())
    assert [row[0] for row in record["tables"][0]["rows"]] == [
        f"{name}, {reading}" for reading in (figure4.ACROSS, figure4.WITHIN) for name in ("CoLA", "STS-B")
    ]
    losses = record["cells"][f"{figure4.ACROSS}, seed 0"]["values"]["losses"]["STS-B"]
    assert losses["first"]["3"] == losses["last"]["3"]  # all layers
    assert losses["first"]["1"] == losses["single"]["0"] and losses["last"]["1"] == losses["single"]["2"]
    assert sum("First layers matter most" in claim for claim in record["claims"]) == 4


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (table1, ["FacebookAI/roberta-base", "ontonotes/conll2012_ontonotesv5", "eriktks/conll2003", corpora.UNIFIED]),
        (figure4, ["microsoft/deberta-v3-large on glue-cola", "nyu-mll/glue stsb", "20 epochs, rate 1e-05"]),
    ],
)
def test_a_dry_run_of_the_original_says_what_it_would_do(
    script: Any, expected: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--scale", "original", "--dry-run", "--work", str(tmp_path / "work"), "--out", str(tmp_path / "out")]
    runner.main("dry", "title", "paper", script.script, argv)
    told = capsys.readouterr().out
    assert all(words in told for words in expected)
    assert "would compute" in told and not list(tmp_path.iterdir())


def test_other_bases_can_be_named(tiny: list[str], models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runner.main("dry", "title", "paper", figure4.script, [*tiny, "--dry-run", "--bases", OLD])
    assert f"would fine-tune {models / language.title(OLD)} on CoLA" in capsys.readouterr().out
    runner.main("dry", "title", "paper", figure4.script, [*tiny, "--dry-run"])
    assert f"would fine-tune {models / language.title(language.BASES['reduced'][1])} on" in capsys.readouterr().out


def test_claims_count_what_rose_and_what_fell() -> None:
    suite = table1.Suite("emotion", ("one", "two"), ("three",))
    changes = {"Simple": 2.0, "Fisher": 0.0, "RegMean": -1.0}
    scores = {
        method + mark: {name: 50 + (change if mark else 0) for name in ("one", "two", "three")}
        for method, change in changes.items()
        for mark in table1_report.MARKS
    }
    cell = {"scores": scores, "distances": {"+match": [0.02, 0.01], "+full": [0.02, 0.02]}}
    cells = {f"{base}, emotion, seed {seed}, one+two": cell for base in ("small", "large") for seed in range(3)}
    found = table1_report.claims(["small", "large"], [suite], cells)
    assert "Of 12 comparisons 4 rose and 4 fell" in found[0] and "from -1.00 to +2.00" in found[0]
    assert found[1].count("RegMean on emotion") == 4
    assert "2.000 % to 1.000 % (small)" in found[2]
    assert "Matching helps (+match (rotation, attention)): held in part." in found[0]
    assert "Larger models gain more: not to be told from noise" in found[-1]
    few = {key: cell for key, cell in cells.items() if "seed 0" in key}
    assert "Of 12 comparisons 0 rose and 0 fell" in table1_report.claims(["small", "large"], [suite], few)[0]


def test_cells_side_by_side_are_those_of_one_after_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import crew

    class Now:
        """A pool that runs each job when it is handed in, so that no process has to start."""

        def __enter__(self) -> Now:
            return self

        def __exit__(self, *_: object) -> None: ...

        def submit(self, function: Any, *given: Any) -> Any:
            from concurrent.futures import Future

            future: Future[Any] = Future()
            try:
                future.set_result(function(*given))
            except ValueError as error:
                future.set_exception(error)
            return future

    asked: list[int] = []

    def double(number: int) -> dict[str, Any]:
        asked.append(number)
        if number < 0:
            raise ValueError("negative")
        return {"twice": 2 * number}

    run = runner.Run("x", "small", tmp_path, "cuda", 1, None, None, tmp_path)
    monkeypatch.setattr(crew, "_pool", lambda workers: Now())
    monkeypatch.setattr(crew, "shared", lambda: True)
    run.cell("b", lambda: {"twice": 4})
    assert crew.cells(run, double, {"a": 1, "b": 2, "c": 3}) == {
        "a": {"twice": 2},
        "b": {"twice": 4},
        "c": {"twice": 6},
    }
    assert asked == [1, 3]
    assert crew.cells(run, double, {"a": 1, "c": 3}) == {"a": {"twice": 2}, "c": {"twice": 6}} and asked == [1, 3]
    with pytest.raises(ValueError, match="negative"):
        crew.cells(run, double, {"d": -1, "e": 5})
    assert crew.known(run, "e") and not crew.known(run, "d")


def test_merges_share_a_gpu_only_under_the_server_that_lets_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import crew

    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    assert not crew.shared()
    (tmp_path / "control").touch()
    assert crew.shared()
