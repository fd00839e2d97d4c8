"""Recovers: a model scrambled by random elements is brought back to where it was, to rounding."""

import isomerge
from architectures.row_models import build, difference, every_case, load_folder, moved, moving, outputs, saved, write
from isomerge.checkpoint import open_checkpoint
from isomerge.symmetry.transform import random_transform

RECOVERED = 1e-5

# Scrambling an untied copy gives an untied model, which the rows with `tie_word_embeddings=False` stand for.


def distance(folder, anchor) -> float:
    """‖folder − anchor‖ / ‖anchor‖ over all tensors; an untied table is held against the table it was."""
    written = open_checkpoint(folder)
    assert written.tensors.keys() >= anchor.checkpoint.tensors.keys()
    ties = anchor.architecture.tied

    def original(name):
        source, factor = (name, 1.0) if name in anchor.checkpoint.tensors else ties[name]
        return anchor.checkpoint.read(source).double() * factor

    pairs = [(written.read(name).double(), original(name)) for name in written.tensors]
    return (sum((a - b).square().sum() for a, b in pairs) / sum(b.square().sum() for _, b in pairs)).sqrt().item()


@every_case(untied=False)
def test_a_scrambled_model_is_aligned_back_to_itself(case, tmp_path):
    model, anchor = case.bound(), saved(case.row.id)
    form = moving(model)
    provider = moved(form, random_transform(model.architecture.spaces, 11))
    scrambled = write(case, model, lambda name: form.in_gauge(name, provider), tmp_path / "scrambled")

    alignment = isomerge.align(str(scrambled), anchor=str(anchor), level="full", threads=1)
    assert alignment.report()["distance"]["after"] <= RECOVERED
    alignment.save(tmp_path / "out", verify=False)
    assert distance(tmp_path / "out", model) <= RECOVERED <= 0.1 < distance(scrambled, model)

    loaded = load_folder(case, tmp_path / "out")
    assert difference(outputs(build(case.row.id), case.row), outputs(loaded, case.row)) <= RECOVERED
