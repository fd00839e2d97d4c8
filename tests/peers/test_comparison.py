"""What docs/comparison.md says the others have and isomerge has not: they do have it."""

from __future__ import annotations

import os
import re
import subprocess

import pytest

from peers.side_by_side import ROOT

pytestmark = pytest.mark.peers
TEXT = (ROOT / "docs" / "comparison.md").read_text()


def asked(variable: str, folder: str, code: str) -> str:
    python = os.environ.get(variable) or str(ROOT / folder / "bin" / "python")
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True, env=environment).stdout


def test_mergekit_has_the_programs_that_are_named() -> None:
    code = (
        "import importlib.metadata as m\n"
        "found = m.distribution('mergekit')\n"
        "print(found.version, found.metadata['License'], *(e.name for e in found.entry_points))"
    )
    version, licence, *programs = asked("MERGEKIT_PYTHON", ".venv-peers", code).split()
    assert f"mergekit {version}" in TEXT and licence.removesuffix("-only") in TEXT
    named = set(re.findall(r"`(mergekit-\w+)`", TEXT))
    assert named and named <= set(programs)


def test_mergekit_runs_on_several_gpus() -> None:
    code = "from mergekit.options import MergeOptions; print('multi_gpu' in MergeOptions.model_fields)"
    assert asked("MERGEKIT_PYTHON", ".venv-peers", code).strip() == "True"


def test_fusion_bench_has_the_methods_that_are_named() -> None:
    code = (
        "from fusion_bench.method import CLIPLayerWiseAdaMergingAlgorithm, SmileUpscalingAlgorithm, "
        "CLIPWeightEnsemblingMoEAlgorithm, MagnitudePruningForLlama, RegMeanAlgorithmForCLIP\n"
        "from fusion_bench.method.knots.knots_utils import subspace_alignment\n"
        "from importlib.util import find_spec\n"
        "print(all(find_spec('fusion_bench.' + n) for n in ('method.lm_finetune', 'taskpool.clip_vision', 'tasks')))"
    )
    assert asked("FUSION_BENCH_PYTHON", ".venv-fusion-bench", code).split()[-1] == "True"
