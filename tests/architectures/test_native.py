"""Native: a moved checkpoint loads in the stock class it came from, and every tensor has its pattern."""

import json

from architectures.row_models import build, difference, every_case, load_folder, moved, moving, outputs, write
from isomerge.symmetry.architecture import is_stream
from isomerge.symmetry.groups import Trivial
from isomerge.symmetry.transform import random_transform


@every_case()
def test_a_moved_folder_loads_in_the_stock_class_with_no_key_left_over(case, tmp_path):
    model = case.bound()
    form = moving(model)
    provider = moved(form, random_transform(model.architecture.spaces, 3))
    folder = write(case, model, lambda name: form.in_gauge(name, provider), tmp_path / "out")
    loaded = load_folder(case, folder)
    assert difference(outputs(build(case.row.id), case.row), outputs(loaded, case.row)) <= 1e-5

    config = json.loads((folder / "config.json").read_text())
    changed = {key for key in config if config[key] != model.checkpoint.config.get(key)}
    assert changed <= set(model.architecture.untied_config), "only untying changes the config"
    assert ("tie_word_embeddings" in changed) == case.untie


@every_case()
def test_every_tensor_on_disk_has_a_pattern_and_every_space_a_tensor(case):
    model = case.bound()
    tensors = model.checkpoint.tensors
    towers = {name for name in tensors if name.startswith(tuple(model.architecture.elsewhere))}
    left = {*model.extra}
    assert model.stale == () and towers <= left
    assert all(not tensors[name].dtype.is_floating_point for name in left - towers)  # counters
    assert {file for files in model.files.values() for file in files} == {*tensors} - left
    touched = {space for layout in model.layouts.values() for space in layout.spaces()}
    unused = {s for s, g in model.architecture.spaces.items() if s not in touched and not isinstance(g, Trivial)}
    assert {s for s in unused if s.rstrip(".0123456789") not in OPTIONAL} == set()


OPTIONAL = {"pooler", "dense", "transform"}  # parts of heads that only some classes have


@every_case()
def test_a_bare_encoder_keeps_its_stream_and_a_head_lets_it_move(case):
    streams = {s: g for s, g in case.bound().architecture.spaces.items() if is_stream(s)}
    bare = case.row.model.endswith(("Model", "WithProjection")) and not case.row.model.endswith("LMHeadModel")
    held = (bare and case.row.kind != "towers") or case.row.kind == "choice"
    assert streams and all(isinstance(group, Trivial) == held for group in streams.values())
