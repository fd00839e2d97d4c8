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

__version__ = "0.1.0"

_WHERE = {
    "Alignment": "isomerge.alignment.alignment",
    "Merged": "isomerge.merging.merged",
    "IsomergeError": "isomerge.errors",
    "align": "isomerge.alignment.api",
    "barrier": "isomerge.connectivity.barrier",
    "catalogue": "isomerge.listing",
    "check": "isomerge.checking.api",
    "demo": "isomerge.demonstration.run",
    "ensemble": "isomerge.evaluation.tasks.ensemble",
    "evaluate": "isomerge.evaluation.tasks.run",
    "merge": "isomerge.merging.api",
    "merge_recipe": "isomerge.merging.api",
    "merge_state_dicts": "isomerge.merging.state_dicts",
    "open_checkpoint": "isomerge.checkpoint",
    "open_data": "isomerge.data",
    "plane": "isomerge.connectivity.plane",
    "report": "isomerge.reporting.page",
    "selftest": "isomerge.alignment.selftest",
    "sweep": "isomerge.sweeping.api",
    "verify": "isomerge.evaluation.verify",
}

__all__ = ["__version__", *sorted(_WHERE)]

if TYPE_CHECKING:
    from isomerge.alignment.alignment import Alignment as Alignment
    from isomerge.alignment.api import align as align
    from isomerge.alignment.selftest import selftest as selftest
    from isomerge.checking.api import check as check
    from isomerge.checkpoint import open_checkpoint as open_checkpoint
    from isomerge.connectivity.barrier import barrier as barrier
    from isomerge.connectivity.plane import plane as plane
    from isomerge.data import open_data as open_data
    from isomerge.demonstration.run import demo as demo
    from isomerge.errors import IsomergeError as IsomergeError
    from isomerge.evaluation.tasks.ensemble import ensemble as ensemble
    from isomerge.evaluation.tasks.run import evaluate as evaluate
    from isomerge.evaluation.verify import verify as verify
    from isomerge.listing import catalogue as catalogue
    from isomerge.merging.api import merge as merge
    from isomerge.merging.api import merge_recipe as merge_recipe
    from isomerge.merging.merged import Merged as Merged
    from isomerge.merging.state_dicts import merge_state_dicts as merge_state_dicts
    from isomerge.reporting.page import report as report
    from isomerge.sweeping.api import sweep as sweep


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'isomerge' has no attribute '{name}'; it has {', '.join(sorted(_WHERE))}")
    module = importlib.import_module(_WHERE[name])
    globals()[name] = value = getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
