"""What cannot be aligned is refused: the error names file and tensor, inputs stay as they are, OUT stays empty."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import isomerge
from isomerge.errors import CheckpointError, IsomergeError, RequestError
from models import difference, fingerprint, logits, model, tensors, variant

QUERY = "bert.encoder.layer.0.attention.self.query.weight"


def refused(source: Path, anchor: Path, out: Path, kind: type[IsomergeError] = IsomergeError, **options: Any) -> str:
    """Align and save, which must fail with one paragraph; inputs unchanged and nothing left behind."""
    before = [fingerprint(f) for f in (source, anchor)]
    existed = out.exists()
    with pytest.raises(kind) as caught:
        isomerge.align(source, anchor=anchor, **options).save(out, verify=False)
    assert [fingerprint(f) for f in (source, anchor)] == before
    assert out.exists() == existed
    text = str(caught.value)
    assert "\n" not in text and text.rstrip()[-1] in ".?"
    return text


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


# --- models that do not fit together ----------------------------------------------------------------------------------
def test_different_architectures_are_refused_by_name(out: Path) -> None:
    text = refused(model("bert", 0), model("gpt2", 0), out, RequestError)
    assert "bert" in text and "gpt2" in text


@pytest.mark.parametrize(("family", "change", "said"), [
    ("bert", {"hidden_size": 24}, ("12", "24")),
    ("bert", {"num_hidden_layers": 3}, ("2", "3")),
    ("bert", {"num_attention_heads": 4}, ("3", "4")),
    ("bert", {"intermediate_size": 9}, ("7", "9")),
    ("gpt2", {"n_embd": 24}, ("12", "24")),
    ("gpt2", {"n_layer": 3}, ("2", "3")),
    ("gpt2", {"n_head": 4}, ("3", "4")),
    ("gpt2", {"n_inner": 9}, ("7", "9")),
    ("llama", {"num_key_value_heads": 4}, ("2", "4")),
    ("llama", {"head_dim": 6}, ("4", "6")),
    ("opt", {"ffn_dim": 9}, ("7", "9")),
    ("t5", {"d_kv": 6}, ("4", "6")),
    ("mixtral", {"num_local_experts": 4}, ("3", "4")),
], ids=str)  # fmt: skip
def test_different_sizes_are_refused_with_both(
    family: str, change: dict[str, int], said: tuple[str, str], out: Path
) -> None:
    text = refused(model(family, 1), model(family, 0, **change), out, RequestError)
    assert all(s in text for s in said)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_tied_source_fits_an_untied_anchor_once_it_is_untied(family: str, out: Path) -> None:
    source, anchor = model(family, 1, tie_word_embeddings=True), model(family, 0)
    isomerge.align(source, anchor=anchor).save(out)
    assert tensors(out).keys() == tensors(anchor).keys()
    assert difference(logits(source), logits(out)) <= 1e-10


@pytest.mark.parametrize(("family", "same"), [("bert", {}), ("opt", {}), ("opt", {"word_embed_proj_dim": 5})], ids=str)
def test_tables_of_another_length_fit(family: str, same: dict[str, int], out: Path) -> None:
    source = model(family, 1, vocab_size=31, max_position_embeddings=23, **same)
    isomerge.align(source, anchor=model(family, 0, **same)).save(out)
    assert difference(logits(source), logits(out)) <= 1e-10
    assert {n: t.shape for n, t in tensors(out).items()} == {n: t.shape for n, t in tensors(source).items()}


# --- weights that are not sound ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("side", ["source", "anchor"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("level", ["rotation", "full"])
def test_values_that_are_not_finite_are_refused_with_tensor_and_count(
    side: str, bad: float, level: str, out: Path
) -> None:
    sound, other = model("bert", 0), model("bert", 1)
    weight = tensors(other)[QUERY]
    weight[0, :3] = bad
    broken = variant(other, {QUERY: weight}, f"bad-{bad}")
    pair = (broken, sound) if side == "source" else (sound, broken)
    text = refused(*pair, out, CheckpointError, level=level)
    said = "3 of its 144 values are NaN" if bad != bad else "3 are infinite"
    assert QUERY in text and said in text and str(broken) in text


@pytest.mark.parametrize(
    "name", ["bert.embeddings.word_embeddings.weight", "classifier.bias", "bert.embeddings.LayerNorm.bias"]
)
def test_a_bad_value_in_a_tensor_that_would_not_move_is_found_too(name: str, out: Path) -> None:
    other = model("bert", 1)
    weight = tensors(other)[name]
    weight.view(-1)[0] = float("nan")
    text = refused(
        variant(other, {name: weight}, "bad-" + name), model("bert", 0), out, CheckpointError, level="rotation"
    )
    assert name in text


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.uint8], ids=str)
def test_integer_tensors_are_refused(dtype: torch.dtype, out: Path) -> None:
    other = model("bert", 1)
    weight = (tensors(other)[QUERY] * 10).to(dtype)
    text = refused(variant(other, {QUERY: weight}, f"integer-{dtype}"), model("bert", 0), out)
    assert QUERY in text and str(dtype).removeprefix("torch.") in text


def test_a_quantised_model_is_refused(out: Path) -> None:
    quantised = variant(model("bert", 1), {}, "quantised", quantization_config={"quant_method": "gptq", "bits": 4})
    assert "gptq" in refused(quantised, model("bert", 0), out)


def test_weights_that_do_not_fit_the_config_are_refused(out: Path) -> None:
    wrong = variant(model("bert", 1), {QUERY: torch.zeros(10, 12, dtype=torch.float64)}, "shape")
    text = refused(wrong, model("bert", 0), out)
    assert QUERY in text and "10" in text and "12" in text


def test_a_missing_tensor_is_refused_by_name(out: Path) -> None:
    wrong = variant(model("bert", 1), {}, "missing", drop=(QUERY,))
    assert QUERY in refused(wrong, model("bert", 0), out)


def test_a_config_of_another_depth_than_the_weights_is_refused(out: Path) -> None:
    shallow = variant(model("bert", 1), {}, "shallow", num_hidden_layers=3)
    text = refused(shallow, variant(model("bert", 0), {}, "shallow", num_hidden_layers=3), out)
    assert "layer.2" in text


def test_a_truncated_file_is_refused(out: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(model("bert", 1), broken)
    data = (broken / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(data[: len(data) // 2])
    assert "model.safetensors" in refused(broken, model("bert", 0), out)


def test_a_folder_without_a_model_is_refused(out: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "empty" in refused(tmp_path / "empty", model("bert", 0), out)


def test_bare_state_dicts_are_refused_with_the_way_to_say_what_they_are() -> None:
    with pytest.raises(RequestError, match=r"Pass config=… for state_dicts") as caught:
        isomerge.align(tensors(model("bert", 1)), anchor=tensors(model("bert", 0)))
    assert "how many heads" in str(caught.value)


def test_a_request_that_leaves_nothing_to_move_is_not_called_siblings() -> None:
    alignment = isomerge.align(model("bert", 1), anchor=model("bert", 0), level="rotation", only="residual")
    assert not alignment.siblings and "siblings" not in alignment.report()["verdict"]


# --- outputs that would hurt ------------------------------------------------------------------------------------------
def copied(tmp_path: Path) -> tuple[Path, Path]:
    source, anchor = tmp_path / "source", tmp_path / "anchor"
    shutil.copytree(model("bert", 1), source)
    shutil.copytree(model("bert", 0), anchor)
    return source, anchor


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("where", [
    lambda s, a: s, lambda s, a: a, lambda s, a: s / "inside", lambda s, a: a / "deep" / "inside",
    lambda s, a: s.parent / "x" / ".." / "source",
], ids=["source", "anchor", "inside-source", "inside-anchor", "source-spelled-otherwise"])  # fmt: skip
def test_inputs_are_never_written_into(where: Callable[[Path, Path], Path], force: bool, tmp_path: Path) -> None:
    source, anchor = copied(tmp_path)
    before = fingerprint(tmp_path)
    alignment = isomerge.align(source, anchor=anchor, level="permutation")
    for options in ({}, {"anchor_out": tmp_path / "elsewhere"}):
        with pytest.raises(RequestError, match="never modified"):
            alignment.save(where(source, anchor), force=force, verify=False, **options)
    with pytest.raises(RequestError, match="never modified"):
        alignment.save(tmp_path / "out", anchor_out=where(source, anchor), force=force, verify=False)
    assert fingerprint(tmp_path) == before


def test_a_link_to_an_input_is_an_input(tmp_path: Path) -> None:
    source, anchor = copied(tmp_path)
    (tmp_path / "link").symlink_to(source)
    with pytest.raises(RequestError, match="never modified"):
        isomerge.align(source, anchor=anchor, level="permutation").save(tmp_path / "link", force=True, verify=False)


def test_out_and_anchor_out_must_differ(tmp_path: Path) -> None:
    alignment = isomerge.align(model("bert", 1), anchor=model("bert", 0), level="permutation")
    with pytest.raises(RequestError, match="two folders"):
        alignment.save(tmp_path / "out", anchor_out=tmp_path / "out", verify=False)
    assert not (tmp_path / "out").exists()


def test_a_folder_with_something_in_it_is_not_overwritten_unasked(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    alignment = isomerge.align(model("bert", 1), anchor=model("bert", 0), level="permutation")
    with pytest.raises(RequestError, match="not empty"):
        alignment.save(tmp_path / "out", verify=False)
    assert fingerprint(tmp_path / "out").keys() == {"notes.txt"}


def test_inputs_are_untouched_by_an_alignment_that_succeeds(tmp_path: Path) -> None:
    source, anchor = copied(tmp_path)
    before = fingerprint(source), fingerprint(anchor)
    alignment = isomerge.align(source, anchor=anchor)
    alignment.save(tmp_path / "out", anchor_out=tmp_path / "anchor-out")
    alignment.report()
    assert (fingerprint(source), fingerprint(anchor)) == before


def test_modules_are_untouched_by_an_alignment() -> None:
    import transformers

    load = transformers.BertForTokenClassification.from_pretrained
    source, anchor = load(model("bert", 1)), load(model("bert", 0))
    before = {n: t.clone() for n, t in source.state_dict().items()}
    moved = isomerge.align(source, anchor=anchor).apply(source)
    assert all(torch.equal(before[n], t) for n, t in source.state_dict().items())
    assert moved is not source and any(not torch.equal(before[n], t) for n, t in moved.state_dict().items())


# --- options ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("options", "said"), [
    ({"level": "rotatoin"}, "Did you mean 'rotation'?"),
    ({"level": "Full"}, "full"),
    ({"level": "permutations"}, "Did you mean 'permutation'?"),
    ({"level": ""}, "permutation, rotation, full"),
    ({"only": "atention"}, "Did you mean 'attention'?"),
    ({"only": "mlp"}, "attention, ffn, residual"),
    ({"level": "permutation", "scale": True}, "Leave scale out"),
    ({"layers": "7"}, "layers 0 to 1"),
    ({"layers": "0-5"}, "layers 0 to 1"),
    ({"layers": "two"}, "'two'"),
    ({"layers": "1-0"}, "runs backwards. Write 0-1"),
    ({"layers": ""}, "Name some"),
    ({"layers": "-1"}, "'-1'"),
    ({"max_memory": "lots"}, "lots"),
], ids=lambda v: str(v) if isinstance(v, dict) else "")  # fmt: skip
def test_a_wrong_option_is_refused_with_the_nearest_right_one(options: dict[str, Any], said: str, out: Path) -> None:
    assert said in refused(model("bert", 1), model("bert", 0), out, RequestError, **options)


def test_a_wrong_option_is_noticed_before_anything_is_opened() -> None:
    with pytest.raises(RequestError, match="level cannot be 'rotate'"):
        isomerge.align("there/is/no/such/model", anchor="nor/this", level="rotate")


@pytest.mark.parametrize("missing", ["source", "anchor"])
def test_a_path_that_does_not_exist_is_named(missing: str, tmp_path: Path) -> None:
    absent, there = tmp_path / "no" / "such" / "model", model("bert", 0)
    with pytest.raises(IsomergeError, match="no/such/model"):
        isomerge.align(*((absent, there) if missing == "source" else (there, absent)))


@pytest.mark.parametrize("dtype", ["float12", "int8"])
def test_a_wrong_out_dtype_is_refused_and_leaves_nothing(dtype: str, out: Path) -> None:
    alignment = isomerge.align(model("bert", 1), anchor=model("bert", 0), level="permutation")
    with pytest.raises(IsomergeError, match=dtype):
        alignment.save(out, out_dtype=dtype)
    assert not out.exists()


def test_the_record_is_plain_json(out: Path) -> None:
    alignment = isomerge.align(model("bert", 1), anchor=model("bert", 0))
    alignment.save(out)
    record = json.loads(json.dumps(alignment.report().to_dict()))
    assert {"distance", "spaces", "max_output_difference", "seconds"} <= record.keys()
    assert {"before", "after"} <= record["distance"].keys()
    assert all({"name", "group", "moved", "gain"} <= row.keys() for row in record["spaces"])
