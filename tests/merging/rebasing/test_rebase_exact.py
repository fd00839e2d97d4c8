"""Where the truth is known: a new base that is the old one in disguise makes of the fine-tune the fine-tune itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import isomerge
import models as tiny
from isomerge.errors import RequestError
from merging.rebasing.fine_tunes import added, disguised, fine_tune, reordered
from models import difference, logits, model


@pytest.mark.parametrize("kind", ["vit", "llama", "bert", *tiny.mostly_slow(["gpt2", "qwen2", "t5", "neox", "olmo2"])])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_on_a_base_in_disguise_the_result_is_the_fine_tune(kind: str, dtype: torch.dtype, bound: float) -> None:
    base = model(kind, 0, dtype)
    tuned, onto = fine_tune(base), disguised(base)
    merged = isomerge.rebase(tuned, base, onto)
    truth = logits(tuned)
    assert difference(logits(base), logits(onto)) <= bound, "the new base is the old one in disguise"
    assert difference(truth, logits(onto, {n: t.double() for n, t in merged.tensors()})) <= bound
    # Negative controls: the fine-tune is something else than its base, and τ belongs to the old base.
    assert difference(truth, logits(base)) > 0.05
    assert difference(truth, logits(onto, {n: t.double() for n, t in added(onto, tuned, base).items()})) > 0.05


def test_units_that_changed_places_by_hand_are_followed() -> None:
    base = model("llama", 0)
    tuned, onto = fine_tune(base), reordered(base)
    merged = isomerge.rebase(tuned, base, onto)
    truth = logits(tuned)
    assert difference(truth, logits(onto, dict(merged.tensors()))) <= 1e-10
    assert difference(truth, logits(onto, added(onto, tuned, base))) > 0.05


@pytest.mark.parametrize("scale", [0.0, 0.5, -1.0])
def test_the_change_is_scaled(scale: float) -> None:
    base = model("llama", 0)
    tuned, onto = fine_tune(base), reordered(base)
    own, base_tensors = tiny.tensors(tuned), tiny.tensors(base)
    wanted = {name: base_tensors[name] + scale * (own[name] - base_tensors[name]) for name in own}
    merged = isomerge.rebase(tuned, base, onto, scale=scale)
    assert difference(logits(base, wanted), logits(onto, dict(merged.tensors()))) <= 1e-10


def test_tied_tables_are_followed_and_the_result_says_that_they_are_separate() -> None:
    base = model("llama", 0, tie_word_embeddings=True)
    tuned, onto = fine_tune(base), disguised(base)
    merged = isomerge.rebase(tuned, base, onto)
    state = {name: tensor.double() for name, tensor in merged.tensors()}
    got = logits(onto, state, **merged.config_changes)
    assert difference(logits(tuned), got) <= 1e-10


def test_a_base_that_was_trained_further_is_a_sibling_and_the_change_stays_what_it_is() -> None:
    base = model("llama", 0, torch.float64, **tiny.WIDE["llama"])
    tuned, onto = fine_tune(base, 0.05), tiny.noisy(base, 0.02)
    merged = isomerge.rebase(tuned, base, onto)
    about = merged.details["rebased"]
    assert about["siblings"] and about["correction"] == "none"
    wanted = added(onto, tuned, base)
    for name, tensor in merged.tensors():
        assert torch.allclose(tensor, wanted[name], rtol=0, atol=1e-13), name
    assert "nothing was measured" in merged.notes[0] and "sibling" in merged.notes[0]


def test_strangers_without_data_are_told_that_little_may_arrive() -> None:
    base = model("llama", 0)
    merged = isomerge.rebase(fine_tune(base), base, model("llama", 1))
    assert "trained apart" in merged.notes[0] and "`data`" in merged.notes[0]
    assert not merged.details["rebased"]["siblings"]


def test_the_inputs_are_not_changed_and_the_folder_passes_its_checks(tmp_path: Path) -> None:
    base = model("bert", 0, torch.float32)
    tuned, onto = fine_tune(base), disguised(base)
    before = [tiny.fingerprint(folder) for folder in (base, tuned, onto)]
    merged = isomerge.rebase(tuned, base, onto)
    written = merged.save(tmp_path / "out")
    assert merged.verify(written) and isomerge.reproduce(tmp_path / "out").verdict == "identical"
    assert [tiny.fingerprint(folder) for folder in (base, tuned, onto)] == before
    assert difference(logits(tuned), logits(tmp_path / "out")) <= 1e-5


# --- mistakes ---------------------------------------------------------------------------------------------------------
def _three(kind: str = "llama") -> tuple[Path, Path, Path]:
    base = model(kind, 0)
    return fine_tune(base), base, model(kind, 1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"scale": float("nan")}, "must be a number, and is nan"),
        ({"scale": "1"}, "scale must be"),
        ({"correction": "feature"}, "Did you mean 'features'"),
        ({"correction": "features"}, "looks at data, and there is none"),
        ({"correction": "signs"}, "looks at data, and there is none"),
        ({"level": "ful"}, "Did you mean 'full'"),
        ({"ridge": -1.0}, "must not be negative"),
        ({"ridge": 0.1, "correction": "none"}, "ridge is of the regressions"),
        ({"batch_size": "3"}, "batch_size must be"),
    ],
)
def test_a_wrong_option_is_one_paragraph(options: dict[str, object], words: str) -> None:
    with pytest.raises(RequestError, match=words.replace("(", r"\(")):
        isomerge.rebase(*_three(), **options)  # type: ignore[arg-type]


def test_models_that_do_not_fit_are_refused_with_what_differs(tmp_path: Path) -> None:
    tuned, base, onto = _three()
    with pytest.raises(RequestError, match="of type 'bert' and .* of type 'llama'"):
        isomerge.rebase(tuned, base, model("bert", 0))
    with pytest.raises(RequestError, match="needs data and correction features"):
        isomerge.rebase(tuned, base, model("llama", 1, intermediate_size=9))
    with pytest.raises(RequestError, match="differ in the names or shapes of .*Name the base"):
        isomerge.rebase(tuned, model("llama", 1, intermediate_size=9), onto)
    with pytest.raises(RequestError, match="both .* nothing to carry"):
        isomerge.rebase(tuned, base, base)
    with pytest.raises(RequestError, match="onto is None"):
        isomerge.rebase(tuned, base, None)
    broken = tiny.variant(base, {"lm_head.weight": torch.full((29, 12), float("nan"), dtype=torch.float64)}, "nan")
    with pytest.raises(isomerge.IsomergeError, match="lm_head.weight"):
        isomerge.rebase(tuned, base, broken).save(tmp_path / "out")
    assert not (tmp_path / "out" / "config.json").exists()


def test_bases_that_give_tokens_other_ids_are_refused(tmp_path: Path) -> None:
    for number, name in enumerate(("tuned", "base", "onto")):
        tiny.llama(tmp_path / name, seed=number)
    file = tmp_path / "onto" / "tokenizer.json"
    known = json.loads(file.read_text())
    ids = known["model"]["vocab"]
    first, last = list(ids)[4], list(ids)[-1]
    ids[first], ids[last] = ids[last], ids[first]
    file.write_text(json.dumps(known))
    with pytest.raises(RequestError, match="2 tokens have other ids .*the same tokenizer"):
        isomerge.rebase(*(tmp_path / name for name in ("tuned", "base", "onto")))


def test_a_recipe_does_the_same_and_refuses_what_the_method_does_itself(tmp_path: Path) -> None:
    tuned, base, onto = _three()
    recipe = {
        "merge_method": "rebase",
        "base_model": str(onto),
        "models": [{"model": str(tuned)}, {"model": str(base)}],
    }
    known = isomerge.merge_recipe(recipe).state_dict()
    for name, tensor in isomerge.rebase(tuned, base, onto).state_dict().items():
        assert torch.equal(known[name], tensor)
    with pytest.raises(RequestError, match="in a way of its own: leave 'align' out"):
        isomerge.merge_recipe({**recipe, "align": True})
    with pytest.raises(RequestError, match="needs 'base_model'"):
        isomerge.merge_recipe({key: value for key, value in recipe.items() if key != "base_model"})
    with pytest.raises(RequestError, match="exactly 2 models"):
        isomerge.merge_recipe({**recipe, "models": recipe["models"][:1]})
