"""The same question as zoo_ranking.py for classifiers of texts: does `isomerge.find` say which will be useful?

    python benchmarks/zoo_texts.py --emotions FOLDER --json record.json     # minutes on one core

FOLDER holds dair-emotion, crowdflower, isear, tec and meld, as they are published. The zoo: small stock BERTs with one
word vocabulary, fine-tuned from one base. Every model has its own source and its own emotions (2 to 5 of anger, fear,
joy, sadness, surprise). A query is 100 other texts of a source to rank by and 300 to test on. Rankings, truths and τ
are those of zoo_ranking.py.
"""

from __future__ import annotations

import argparse
import csv
import json
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers
from zoo_ranking import SEEN, measured, summary, table

import isomerge
from isomerge.checkpoint.memory import quiet_transformers
from isomerge.data import open_data

SOURCES = ("dair-emotion", "crowdflower", "isear", "tec", "meld")
EMOTIONS = ["anger", "fear", "joy", "sadness", "surprise"]
OTHER_NAMES = {"happiness": "joy"}
WORDS, LENGTH, TEST, EXAMPLES = 3000, 32, 300, 1500
Texts = list[tuple[str, str]]


def read(folder: Path, source: str) -> Texts:
    """Texts with one of the emotions, in a fixed random order."""
    contents = open_data(folder / source).contents()
    named = [(str(one.value), OTHER_NAMES.get(one.label or "", one.label or "")) for one in contents]
    return [(text, label) for text, label in named if label in EMOTIONS]


def written(folder: Path, texts: Texts) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "texts.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("text", "label"), *texts])
    return folder


def tokenizer_of(texts: list[str]) -> Any:
    before = tokenizers.pre_tokenizers.BertPreTokenizer()
    words = Counter(word for text in texts for word, _ in before.pre_tokenize_str(text.lower()))
    names = ["[PAD]", "[UNK]", *(word for word, _ in words.most_common(WORDS))]
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({n: k for k, n in enumerate(names)}, unk_token="[UNK]"))
    made.normalizer, made.pre_tokenizer = tokenizers.normalizers.Lowercase(), before
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]", model_max_length=LENGTH
    )


def new_model(vocabulary: int) -> Any:
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "vocab_size": vocabulary, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 96, "max_position_embeddings": LENGTH, "hidden_dropout_prob": 0.1,
        "id2label": dict(enumerate(EMOTIONS)), "label2id": {name: k for k, name in enumerate(EMOTIONS)},
    }  # fmt: skip
    return transformers.BertForSequenceClassification(transformers.BertConfig(**shape))


def train(model: Any, tokenizer: Any, texts: Texts, seed: int, epochs: int) -> Any:
    torch.manual_seed(seed)
    inputs = tokenizer([text for text, _ in texts], padding=True, truncation=True, return_tensors="pt")
    labels = torch.tensor([EMOTIONS.index(label) for _, label in texts])
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
    model.train()
    for _ in range(epochs):
        for chosen in torch.randperm(len(labels)).split(32):
            batch = {key: inputs[key][chosen] for key in ("input_ids", "attention_mask")}
            optimizer.zero_grad()
            model(**batch, labels=labels[chosen]).loss.backward()
            optimizer.step()
    return model.eval()


def make_zoo(work: Path, count: int, sources: dict[str, Texts]) -> list[dict[str, Any]]:
    tokenizer = tokenizer_of([text for texts in sources.values() for text, _ in texts])

    def saved(model: Any, folder: Path) -> None:
        with quiet_transformers():
            model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    base = train(new_model(len(tokenizer)), tokenizer, [one for texts in sources.values() for one in texts[:100]], 0, 1)
    saved(base, work / "base")
    told = []
    for number in range(count):
        random, name = np.random.default_rng(100 + number), list(sources)[number % len(sources)]
        emotions = sorted(random.permutation(EMOTIONS)[: random.integers(2, 6)].tolist())
        seen = [one for one in sources[name] if one[1] in emotions][:EXAMPLES]
        model = new_model(len(tokenizer))
        model.load_state_dict(base.state_dict())
        folder, epochs = work / "zoo" / f"{number:02}", int(random.integers(1, 5))
        saved(train(model, tokenizer, seen, number, epochs), folder)
        isomerge.describe(folder, written(work / "seen" / f"{number:02}", seen), score=False)
        told.append({"source": name, "emotions": emotions, "epochs": epochs, "examples": len(seen)})
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--emotions", type=Path, required=True)
    parser.add_argument("--models", type=int, default=30)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    start = time.perf_counter()
    texts = {name: read(given.emotions, name) for name in SOURCES}
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        told = make_zoo(work, given.models, {name: own[SEEN + TEST :] for name, own in texts.items()})
        models = sorted((work / "zoo").iterdir())
        print(f"{len(models)} models after {time.perf_counter() - start:.0f} s", flush=True)
        records = []
        for number, (name, own) in enumerate(texts.items()):
            written(work / name / "seen", own[:SEEN])
            written(work / name / "test", own[SEEN : SEEN + TEST])
            records.append({"source": name} | measured(work, work / name, models, np.random.default_rng(number)))
            print(f"query {name} after {time.perf_counter() - start:.0f} s", flush=True)
    rows = summary(records)
    print(table(rows, records))
    if given.json:
        given.json.write_text(json.dumps({"zoo": told, "queries": records, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
