"""Untrained bases and a little data, made once for all tests of the language experiments."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks" / "paper"))
import language
import parsers

from paper.small_jobs import OLD, SHAPE, TINY, WORDS, onward_tokenizer


@pytest.fixture(scope="session")
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


@pytest.fixture(scope="session")
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


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, models: Path, data: Path, tmp_path: Path) -> list[str]:
    monkeypatch.setitem(language.PLANS, "reduced", TINY)
    monkeypatch.setattr(language, "OWN", {})
    places = {"--data": data, "--models": models, "--work": tmp_path / "work", "--out": tmp_path / "out"}
    return ["--scale", "reduced", "--device", "cpu", *(str(word) for pair in places.items() for word in pair)]
