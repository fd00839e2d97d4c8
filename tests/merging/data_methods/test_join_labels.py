"""join_labels: each part of the joined head says what its parent says, as far as the body is that parent's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import isomerge
from commands import said
from models import bert, gpt2_classifier, vit

PIXELS = torch.randn(6, 1, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
TOKENS = torch.tensor([[2, 5, 9, 7, 3]])


def stock(folder: Path) -> Any:
    config = transformers.AutoConfig.from_pretrained(folder)
    return getattr(transformers, config.architectures[0]).from_pretrained(folder, dtype=torch.float64).eval()


@torch.no_grad()
def logits(folder: Path, inputs: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = stock(folder)(inputs).logits
    return found


def saved(tmp_path: Path, models: list[Path], **options: Any) -> Path:
    isomerge.merge([str(one) for one in models], method="join_labels", **options).save(tmp_path / "joined")
    return tmp_path / "joined"


@pytest.mark.parametrize("whole", [0, 1])
def test_with_one_parent_s_body_its_logits_are_its_own(tmp_path: Path, whole: int) -> None:
    vit(tmp_path / "a", ["cat", "dog"], seed=0)
    vit(tmp_path / "b", ["bird", "fish", "cow"], seed=1)
    joined = saved(tmp_path, [tmp_path / "a", tmp_path / "b"], weights=[1 - whole, whole])
    assert stock(joined).config.id2label == dict(enumerate(["cat", "dog", "bird", "fish", "cow"]))
    assert stock(joined).config.label2id["fish"] == 3
    together = logits(joined, PIXELS)
    parts = (together[:, :2], together[:, 2:])
    assert (parts[whole] - logits(tmp_path / "ab"[whole], PIXELS)).abs().max() < 1e-12
    assert (parts[1 - whole] - logits(tmp_path / "ba"[whole], PIXELS)).abs().max() > 1e-3, "the other has no body"


def test_equal_bodies_keep_all_logits(tmp_path: Path) -> None:
    """Heads that were trained on one frozen body."""
    first, other = (vit(tmp_path / name, labels, seed=0) for name, labels in (("a", ["x", "y"]), ("b", ["z", "w"])))
    assert first.tensors.keys() == other.tensors.keys()
    head = {"classifier.weight": torch.randn(2, 16, generator=torch.Generator().manual_seed(1))}
    model = stock(tmp_path / "b")
    model.classifier.weight.data[:] = head["classifier.weight"][:, : model.classifier.weight.shape[1]]
    model.save_pretrained(tmp_path / "b")
    joined = logits(saved(tmp_path, [tmp_path / "a", tmp_path / "b"]), PIXELS)
    expected = torch.cat([logits(tmp_path / name, PIXELS) for name in "ab"], 1)
    assert (joined - expected).abs().max() < 1e-12


def test_a_label_that_both_have_is_one_row_their_mean(tmp_path: Path) -> None:
    vit(tmp_path / "a", ["cat", "dog"], seed=0)
    vit(tmp_path / "b", ["Dog", "fox"], seed=1)
    joined = stock(saved(tmp_path, [tmp_path / "a", tmp_path / "b"], weights=[3, 1]))
    assert list(joined.config.id2label.values()) == ["cat", "dog", "fox"]
    rows = [stock(tmp_path / name).classifier.weight for name in "ab"]
    expected = torch.stack([rows[0][0], 0.75 * rows[0][1] + 0.25 * rows[1][0], rows[1][1]])
    assert (joined.classifier.weight - expected).abs().max() < 1e-7  # written in float32
    body = [stock(tmp_path / name).vit.embeddings.cls_token for name in "ab"]
    assert (joined.vit.embeddings.cls_token - 0.75 * body[0] - 0.25 * body[1]).abs().max() < 1e-7


@pytest.mark.parametrize("kind", ["bert", "gpt2", "token"])
def test_heads_of_other_classes_are_found(tmp_path: Path, kind: str) -> None:
    for name, labels, seed in (("a", ["x", "y"], 0), ("b", ["z", "w", "q"], 2)):
        if kind == "gpt2":
            gpt2_classifier(tmp_path / name, labels)
        else:
            bert(tmp_path / name, kind="token" if kind == "token" else "sequence", labels=labels, seed=seed)
    joined = saved(tmp_path, [tmp_path / "a", tmp_path / "b"], weights=[1, 0])
    assert (logits(joined, TOKENS)[..., :2] - logits(tmp_path / "a", TOKENS)).abs().max() < 1e-12


def test_what_cannot_be_joined_is_refused(tmp_path: Path) -> None:
    vit(tmp_path / "a", ["cat", "dog"])
    vit(tmp_path / "large", ["x", "y"], size=16)
    vit(tmp_path / "nameless", ["LABEL_0", "LABEL_1"])
    for other, why in (("large", "must have one shape"), ("nameless", "have no names")):
        with pytest.raises(isomerge.IsomergeError, match=why):
            isomerge.merge([tmp_path / "a", tmp_path / other], method="join_labels").state_dict()
    vit(tmp_path / "b", ["cat", "fox"], seed=1)
    with pytest.raises(isomerge.RequestError, match="takes the models as they are"):
        isomerge.merge([tmp_path / "a", tmp_path / "b"], method="join_labels", align=True).state_dict()
    with pytest.raises(isomerge.RequestError, match="None of them may be negative"):
        isomerge.merge([tmp_path / "a", tmp_path / "b"], method="join_labels", weights=[2, -1]).state_dict()


def test_the_verbs_know_it(tmp_path: Path) -> None:
    """Written, checked and made again from its lock file."""
    vit(tmp_path / "a", ["cat", "dog"], seed=0)
    vit(tmp_path / "b", ["bird", "dog"], seed=1)
    record = said("merge", tmp_path / "a", tmp_path / "b", "--method", "join_labels", "-o", tmp_path / "out")
    assert record["verified"] and "3 labels of 2 models, 1 in common" in record["notes"]
    assert said("verify", tmp_path / "out")
    assert said("reproduce", tmp_path / "out")["verdict"] == "identical"
