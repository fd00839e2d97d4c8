"""Encoders, towers, stages: what is true of them beyond the table of models."""

import pytest
import torch

import isomerge
from architectures.row_models import bound, moved, moving, saved, state
from isomerge.architectures import describe
from isomerge.checkpoint import open_checkpoint
from isomerge.errors import IsomergeError, RequestError, SpecificationError
from isomerge.symmetry.architecture import Facts
from isomerge.symmetry.groups import Permutation, RotationFixingOnes
from isomerge.symmetry.transform import random_transform

KINDS = [
    "clip", "siglip", "whisper-lm", "whisper-sound", "swin-image", "convnext-image", "resnet-image", "dinov2-image",
    "dinov3-bare", "modernbert-lm", "electra-lm", "albert-lm", "bart-lm",
]  # fmt: skip


@pytest.mark.parametrize("row", KINDS)
def test_a_selftest_runs_the_stock_class_whatever_it_reads(row):
    found = isomerge.selftest(saved(row))
    assert found.unchanged is True and found.max_output_difference <= 1e-5
    assert found.recovered_distance <= 1e-5 < 0.1 < found.scrambled_distance


@pytest.mark.parametrize("row", ["clip", "resnet-image", "swin-image"])
def test_check_reads_models_of_several_streams(row):
    found = isomerge.check(saved(row), saved(row, 1))
    assert any("there are several" in reason for reason in found.reasons)


def test_the_joint_space_of_two_towers_stays(tmp_path):
    """Image and text embeddings are outputs: each stays what it was, not only their products."""
    source, anchor = (open_checkpoint(saved("clip", seed)) for seed in (0, 1))
    alignment = isomerge.align(source, anchor)
    assert {"text.residual", "vision.residual"} <= alignment.transform.elements.keys()
    layouts = bound("clip").layouts
    for name in ("text_projection.weight", "visual_projection.weight"):
        first, _ = layouts[name].axes
        assert all(atom.free for segment in first for atom in segment.atoms)


def test_each_stream_of_a_model_with_several_has_its_own_group():
    spaces = bound("swin-image").architecture.spaces
    assert spaces["stage0.residual"] == Permutation(8)
    assert spaces["stage1.residual"] == RotationFixingOnes(16)
    assert bound("whisper-lm-untied-relu").architecture.streams == ["encoder.residual", "decoder.residual"]
    assert bound("resnet-image-joined").architecture.streams[0] == "stage0.residual"


def test_running_statistics_are_those_of_the_anchor_after_alignment(tmp_path):
    """So that the mean of both has them as they are, and a convolution's size is no difference."""
    alignment = isomerge.align(saved("resnet-image", 1), anchor=saved("resnet-image"))
    alignment.save(tmp_path / "out")
    written, anchor = (open_checkpoint(folder) for folder in (tmp_path / "out", saved("resnet-image")))
    variances = [name for name in anchor.tensors if name.endswith("running_var")]
    assert variances and all(torch.equal(written.read(name), anchor.read(name)) for name in variances)


def test_a_convolution_of_another_size_and_sign_is_the_same_model():
    """One batch norm rescaled by hand, as the formula says: nothing is left of it after alignment."""
    source, model = open_checkpoint(saved("resnet-image")), bound("resnet-image")
    tensors = state(model, moved(moving(model), random_transform(model.architecture.spaces, 3)))
    stem = "resnet.embedder.embedder."
    size = torch.tensor([2.0, -0.5, 3.0, 1.0, -1.0, 0.1], dtype=torch.float64)
    norm = stem + "normalization."
    tensors[stem + "convolution.weight"] *= size[:, None, None, None]
    tensors[norm + "running_mean"] *= size
    tensors[norm + "running_var"] = size.square() * (tensors[norm + "running_var"] + 1e-5) - 1e-5
    tensors[norm + "weight"] *= size.sign()
    alignment = isomerge.align(tensors, anchor=source, config=source.config)
    written = alignment.state_dict()
    assert all(torch.allclose(written[n], source.read(n), atol=1e-9) for n in tensors if tensors[n].is_floating_point())


def test_the_graph_solver_refuses_several_streams():
    with pytest.raises(RequestError, match="several"):
        isomerge.align(saved("clip", 1), anchor=saved("clip"), solver="graph", level="permutation")


# --- configurations that are wrong ----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("row", "changes", "named"),
    [
        ("swin-image", {"depths": "two"}, "depths"),
        ("swin-image", {"depths": [1, 0, 1]}, "depths"),
        ("convnext-image", {"hidden_sizes": []}, "hidden_sizes"),
        ("resnet-image", {"hidden_sizes": [8, 2.5, 10]}, "hidden_sizes"),
        ("clip", {"vision_config": {"hidden_size": -3}}, "hidden_size"),
        ("dinov2-image", {"mlp_ratio": "wide"}, "mlp_ratio"),
    ],
)
def test_a_configuration_that_cannot_be_read_names_the_entry(row, changes, named):
    source = open_checkpoint(saved(row))
    tensors = {name: source.read(name) for name in source.tensors}
    with pytest.raises(SpecificationError, match=named):
        describe(open_checkpoint(tensors, config={**source.config, **changes}))


@pytest.mark.parametrize("row", ["resnet-image", "swin-image", "clip"])
def test_a_checkpoint_of_other_sizes_than_its_config_says_is_refused(row):
    source = open_checkpoint(saved(row))
    tensors = {name: source.read(name) for name in source.tensors}
    name = next(n for n, t in tensors.items() if t.ndim == 4)
    tensors[name] = tensors[name][:-1]
    with pytest.raises(IsomergeError, match=name.replace(".", r"\.")):
        describe(open_checkpoint(tensors, config=source.config))


def test_sizes_are_read_as_a_list():
    facts = Facts({"model_type": "a", "depths": [1, 2], "part": {"hidden_size": 3}}, "image", False)
    assert facts.sizes("depths", (9,)) == (1, 2) and facts.sizes("others", (9,)) == (9,)
    assert facts.part("part")["hidden_size"] == 3 and facts.part("none").get("hidden_size", 5) == 5
