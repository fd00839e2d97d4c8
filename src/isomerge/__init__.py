"""isomerge: bring one checkpoint next to another without changing what it computes, then merge.

    import isomerge
    alignment = isomerge.align("model-b", anchor="model-a")
    alignment.save("model-b-next-to-a")
    isomerge.merge(["model-a", "model-b"], align=True).save("merged")

Names load when they are first used, so importing isomerge costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

_WHERE = {
    "AlignedFamily": "isomerge.alignment.family",
    "Alignment": "isomerge.alignment.result",
    "Merged": "isomerge.merging.outcome.merged",
    "IsomergeError": "isomerge.errors",
    "RequestError": "isomerge.errors",
    "Checkpoint": "isomerge.checkpoint",
    "Sweep": "isomerge.sweeping.result",
    "align": "isomerge.alignment.api",
    "align_family": "isomerge.alignment.api",
    "barrier": "isomerge.connectivity.barrier",
    "best": "isomerge.choosing.api",
    "calibrate": "isomerge.calibration.api",
    "catalogue": "isomerge.listing",
    "check": "isomerge.checking.api",
    "convert": "isomerge.conversion",
    "curve": "isomerge.connectivity.curve",
    "demo": "isomerge.demonstration.run",
    "describe": "isomerge.zoo.describe",
    "distill": "isomerge.merging.distill_api",
    "ensemble": "isomerge.ensembling.measure",
    "extract": "isomerge.adapters.extract",
    "evaluate": "isomerge.evaluation.evaluate",
    "find": "isomerge.zoo.find",
    "generate": "isomerge.ensembling.generation",
    "load_ensemble": "isomerge.ensembling.manifest",
    "make_ensemble": "isomerge.ensembling.api",
    "merge": "isomerge.merging.api",
    "merge_recipe": "isomerge.merging.api",
    "merge_state_dicts": "isomerge.merging.state_dicts",
    "moe": "isomerge.merging.moe_api",
    "open_checkpoint": "isomerge.checkpoint",
    "open_data": "isomerge.data",
    "plan": "isomerge.merging.api",
    "plane": "isomerge.connectivity.plane",
    "push": "isomerge.reporting.publish",
    "rebase": "isomerge.merging.rebase_api",
    "rebase_adapter": "isomerge.merging.rebase_api",
    "report": "isomerge.reporting.page",
    "reproduce": "isomerge.merging.reproduce",
    "search": "isomerge.sweeping.search_api",
    "selftest": "isomerge.alignment.selftest",
    "sweep": "isomerge.sweeping.api",
    "transplant": "isomerge.merging.transplant_api",
    "trust_remote_code": "isomerge.checkpoint.remote_code",
    "verify": "isomerge.evaluation.verify",
}

__all__ = ["__version__", *sorted(_WHERE)]

if TYPE_CHECKING:
    from isomerge.adapters.extract import extract as extract
    from isomerge.alignment.api import align as align
    from isomerge.alignment.api import align_family as align_family
    from isomerge.alignment.family import AlignedFamily as AlignedFamily
    from isomerge.alignment.result import Alignment as Alignment
    from isomerge.alignment.selftest import selftest as selftest
    from isomerge.calibration.api import calibrate as calibrate
    from isomerge.checking.api import check as check
    from isomerge.checkpoint import Checkpoint as Checkpoint
    from isomerge.checkpoint import open_checkpoint as open_checkpoint
    from isomerge.checkpoint.remote_code import trust_remote_code as trust_remote_code
    from isomerge.choosing.api import best as best
    from isomerge.connectivity.barrier import barrier as barrier
    from isomerge.connectivity.curve import curve as curve
    from isomerge.connectivity.plane import plane as plane
    from isomerge.conversion import convert as convert
    from isomerge.data import open_data as open_data
    from isomerge.demonstration.run import demo as demo
    from isomerge.ensembling.api import make_ensemble as make_ensemble
    from isomerge.ensembling.generation import generate as generate
    from isomerge.ensembling.manifest import load_ensemble as load_ensemble
    from isomerge.ensembling.measure import ensemble as ensemble
    from isomerge.errors import IsomergeError as IsomergeError
    from isomerge.errors import RequestError as RequestError
    from isomerge.evaluation.evaluate import evaluate as evaluate
    from isomerge.evaluation.verify import verify as verify
    from isomerge.listing import catalogue as catalogue
    from isomerge.merging.api import merge as merge
    from isomerge.merging.api import merge_recipe as merge_recipe
    from isomerge.merging.api import plan as plan
    from isomerge.merging.distill_api import distill as distill
    from isomerge.merging.moe_api import moe as moe
    from isomerge.merging.outcome.merged import Merged as Merged
    from isomerge.merging.rebase_api import rebase as rebase
    from isomerge.merging.rebase_api import rebase_adapter as rebase_adapter
    from isomerge.merging.reproduce import reproduce as reproduce
    from isomerge.merging.state_dicts import merge_state_dicts as merge_state_dicts
    from isomerge.merging.transplant_api import transplant as transplant
    from isomerge.reporting.page import report as report
    from isomerge.reporting.publish import push as push
    from isomerge.sweeping.api import sweep as sweep
    from isomerge.sweeping.result import Sweep as Sweep
    from isomerge.sweeping.search_api import search as search
    from isomerge.zoo.describe import describe as describe
    from isomerge.zoo.find import find as find


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'isomerge' has no attribute '{name}'; it has {', '.join(sorted(_WHERE))}")
    module = importlib.import_module(_WHERE[name])
    globals()[name] = value = getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
