"""The files of ../shared/data as their authors describe them: sizes, classes, first and last examples."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from isomerge.data import open_data

SHARED = Path(os.environ.get("ISOMERGE_SHARED", Path(__file__).resolve().parents[3] / "shared")) / "data"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not SHARED.is_dir(), reason="the shared data is not on this machine"),
]

# path, options, kind, examples, number of classes (None: numbers to predict, or no labels)
FILES: list[tuple[str, dict[str, Any], str, int, int | None]] = [
    ("glue/CoLA/train.tsv", {}, "texts", 7250, 2),
    ("glue/CoLA/test.tsv", {}, "texts", 1063, None),
    ("glue/MRPC/train.tsv", {}, "pairs", 2576, 2),
    ("glue/MRPC/test.tsv", {}, "pairs", 1725, 2),
    ("glue/RTE/val.tsv", {}, "pairs", 363, 2),
    ("glue/RTE/train.tsv", {}, "pairs", 2127, 2),
    ("glue/SST-2/train.tsv", {}, "texts", 67349, 2),
    ("glue/SST-2/test-labeled.tsv", {}, "texts", 1821, 2),
    ("glue/STS-B/train.tsv", {}, "pairs", 4249, None),
    ("glue/STS-B/test.tsv", {}, "pairs", 1500, None),
    ("emotion/affectivetext-SE0714/affectivetext.tsv", {"split": "test"}, "texts", 1000, 3),
    ("emotion/crowdflower/text_emotion.csv", {}, "texts", 40000, 13),
    ("emotion/dailydialog/train.tsv", {}, "texts", 87170, 7),
    ("emotion/dair-emotion/test.txt", {}, "texts", 2000, 6),
    ("emotion/emoint", {"split": "test", "label": "2"}, "texts", 3142, 4),
    ("emotion/emoint/joy-gold.dev.txt", {}, "texts", 79, None),
    ("emotion/goemotions/train.tsv", {}, "texts", 43410, 28),
    ("emotion/isear/isear.csv", {}, "texts", 7666, 7),
    ("emotion/meld", {"split": "dev"}, "texts", 1109, 7),
    ("emotion/ssec/train.csv", {}, "texts", 2622, 8),
    ("emotion/tec/Jan9-2012-tweets-clean.txt", {}, "texts", 21047, 6),
    ("emotion/tweeteval-emotion", {"split": "val"}, "texts", 374, 4),
    ("lm/tinyshakespeare/input.txt", {}, "corpus", 40000, None),
    ("lm/wikitext-2", {"split": "test"}, "corpus", 4358, None),
    ("ner/BC5CDR-IOB/test.tsv", {}, "tokens", 4797, 5),
    ("ner/NCBI-disease-IOB", {"split": "test"}, "tokens", 940, 3),
    ("ner/btc/a.conll", {}, "tokens", 1000, 7),
    ("ner/crossner/ai", {"split": "test"}, "tokens", 431, 29),
    ("ner/gum/test.conll", {}, "tokens", 1000, 23),
    ("ner/re3d/test.conll", {}, "tokens", 200, 21),
    ("ner/sec-filings/test_FIN3.txt", {}, "tokens", 303, 5),
    ("ner/wikigold/wikigold.conll.txt", {}, "tokens", 1696, 5),
    ("ner/wnut17", {"split": "test"}, "tokens", 1287, 13),
    ("bio/therasabdab/TheraSAbDab_clean.tsv", {"text": "Heavy Sequence", "label": "VD LC"}, "texts", 601, None),
    ("cifar10-jpeg.tar.xz", {"split": "test"}, "images", 10000, 10),
]


@pytest.mark.parametrize(("path", "options", "kind", "size", "classes"), FILES, ids=lambda value: str(value)[:40])
def test_shared_data_is_read_as_it_is_described(
    path: str, options: dict[str, Any], kind: str, size: int, classes: int | None
) -> None:
    data = open_data(SHARED / path, **options)
    assert (data.kind, data.size) == (kind, size)
    if "bio" not in path:
        assert (len(data.classes) if data.classes else None) == classes


def test_known_examples() -> None:
    def first(path: str, **options: Any) -> Any:
        return open_data(SHARED / path, **options)._examples[0]  # type: ignore[attr-defined]

    cola = first("glue/CoLA/val.tsv")
    assert (cola.text, cola.label) == ("Bill broke the bathtub.", "1")
    sts = first("glue/STS-B/train.tsv")
    assert (sts.text, sts.pair, sts.label) == ("A plane is taking off.", "An air plane is taking off.", "5.000")
    mrpc = first("glue/MRPC/train.tsv")
    assert mrpc.text.startswith('Amrozi accused his brother, whom he called "the witness", of') and mrpc.label == "1"
    assert first("emotion/tec/Jan9-2012-tweets-clean.txt").label == "surprise"
    assert first("emotion/ssec/train.csv").label == ("Anger", "Anticipation", "Disgust", "Fear", "Sadness", "Surprise")
    assert first("emotion/goemotions/dev.tsv").label == ("27",)
    assert first("emotion/meld/dev_sent_emo.csv").text == "Oh my God, he’s lost it. He’s totally lost it."
    wiki = first("ner/wikigold/wikigold.conll.txt")
    assert (wiki.text[0], wiki.label[0]) == ("010", "I-MISC")
    filing = first("ner/sec-filings/test_FIN3.txt")
    assert filing.text[:2] == ("Subordinated", "Loan") and filing.label[0] == "O"
