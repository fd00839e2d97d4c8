"""reproduce: the same inputs give the same hashes; a changed input is named; what differs is listed."""

from __future__ import annotations

import shutil
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from isomerge.checkpoint.lock import LOCK, Lock, read_lock
from isomerge.errors import CheckpointError
from isomerge.merging.reproduce import reproduce


def made_again(folder, rerun, **options):
    """`reproduce` with another way to merge."""
    with mock.patch("isomerge.merging.reproduce._merge_again", lambda lock, place, **_: rerun(lock, place)):
        return reproduce(folder, **options)


def average(parents, out, seed=0):
    """A merge that shares no code with isomerge: the mean of two files, with a little noise named by the seed."""
    shutil.copytree(parents[0], out)
    a, b = (load_file(parent / "model.safetensors") for parent in parents)
    noise = torch.Generator().manual_seed(seed)
    mean = {name: (a[name] + b[name]) / 2 + torch.randn(a[name].shape, generator=noise) for name in sorted(a)}
    save_file(mean, out / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(params=["llama-tied", "vit"])
def merged(request, save, tmp_path, tools):
    """(output, parents, rerun), the output with its lock."""
    parents = (save(request.param, "a", seed=1), save(request.param, "b", seed=2))
    out = tmp_path / "out"
    average(parents, out, seed=3)
    tools.lock(out, parents)
    calls = []

    def rerun(lock: Lock, place):
        calls.append(lock)
        average(parents, place, lock.seed)

    return out, parents, rerun, calls


def test_the_same_inputs_give_the_same_hashes_and_nothing_is_left(merged, tmp_path):
    out, parents, rerun, calls = merged
    before = sorted(tmp_path.iterdir())
    record = made_again(out, rerun, threads=2)
    assert record["verdict"] == "identical" and record["differences"] == [] and record["inputs"] == []
    assert record["sha256"] == record["expected_sha256"] == read_lock(out).sha256
    assert calls[0].recipe == "merge_method: linear\n" and calls[0].seed == 3
    assert sorted(tmp_path.iterdir()) == before and record["out"] is None


def test_the_new_copy_is_kept_where_asked(merged, tmp_path):
    out, parents, rerun, _ = merged
    record = made_again(out, rerun, out=tmp_path / "again")
    assert record["verdict"] == "identical" and record["out"] == str(tmp_path / "again")
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (out / "model.safetensors").read_bytes()


def test_another_result_is_told_tensor_by_tensor(merged):
    out, parents, _, _ = merged

    def careless(lock, place):
        average(parents, place, lock.seed)
        state = load_file(place / "model.safetensors")
        state[min(state)][0] += 1
        save_file(state, place / "model.safetensors", metadata={"format": "pt"})

    record = made_again(out, careless)
    victim = min(read_lock(out).tensors)
    assert record["verdict"] == "different" and record["differences"] == [f"changed tensors: '{victim}'"]
    assert record["sha256"] != record["expected_sha256"]


def test_a_changed_weight_of_an_input_is_named_and_nothing_is_run(merged, tools):
    out, parents, rerun, calls = merged
    tools.edit_weights(parents[1], lambda state: state[max(state)].add_(1))
    record = made_again(out, rerun)
    victim = max(read_lock(out).inputs[1].tensors)
    assert record["verdict"] == "inputs changed" and calls == []
    assert record["inputs"] == [{"reference": str(parents[1]), "changed": [f"changed tensors: '{victim}'"]}]


def test_changed_headers_of_several_inputs_are_told_at_once(merged, tools):
    out, parents, rerun, calls = merged
    tools.edit_config(parents[0], hidden_act="relu")
    tools.edit_weights(parents[1], lambda state: state.update({min(state): state[min(state)].double()}))
    tools.edit_weights(parents[1], lambda state: state.pop(max(state)))
    record = made_again(out, rerun)
    names = sorted(read_lock(out).inputs[1].tensors)
    assert calls == [] and [entry["reference"] for entry in record["inputs"]] == [str(p) for p in parents]
    assert record["inputs"][0]["changed"] == ["its config is not the one that was merged"]
    assert record["inputs"][1]["changed"] == [
        f"missing tensors: '{names[-1]}'", f"another shape or dtype: '{names[0]}'"
    ]  # fmt: skip


def test_a_missing_input_is_named(merged):
    out, parents, rerun, calls = merged
    shutil.rmtree(parents[0])
    record = made_again(out, rerun)
    assert record["verdict"] == "inputs changed" and calls == []
    assert "there is no such file or folder" in record["inputs"][0]["changed"][0]


def test_an_input_sharded_anew_is_the_same_input(save, tmp_path, tools):
    parents = (save("llama", "a", seed=1), save("llama", "b", seed=2))
    out = tmp_path / "out"
    average(parents, out, seed=3)
    tools.lock(out, parents)
    kept = tmp_path / "kept"
    shutil.copytree(parents[0], kept)
    shutil.rmtree(parents[0])
    save("llama", "a", seed=1, sharded=True)
    record = made_again(out, lambda lock, place: average((kept, parents[1]), place, lock.seed))
    assert record["verdict"] == "identical"


def test_other_versions_are_notes(merged):
    out, parents, rerun, _ = merged
    lock = read_lock(out)
    changed = Lock(**{**vars(lock), "versions": {**lock.versions, "torch": "2.0.0"}})
    (out / LOCK).write_text(changed.to_json(), encoding="utf-8")
    record = made_again(out, rerun)
    assert record["verdict"] == "identical"
    assert len(record["notes"]) == 1 and "torch 2.0.0" in record["notes"][0] and torch.__version__ in record["notes"][0]


def test_a_failed_rerun_leaves_nothing_behind(merged, tmp_path):
    out, parents, _, _ = merged
    before = sorted(tmp_path.iterdir())

    def fails(lock, place):
        place.mkdir()
        raise CheckpointError("the disk is full")

    with pytest.raises(CheckpointError, match="disk is full"):
        made_again(out, fails)
    assert sorted(tmp_path.iterdir()) == before


def test_a_folder_without_a_lock_cannot_be_made_again(save):
    with pytest.raises(CheckpointError, match=r"no isomerge\.lock\.json"):
        made_again(save("vit"), lambda lock, place: None)
