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
    "Alignment": "isomerge.align.alignment",
    "Merged": "isomerge.merge.merged",
    "IsomergeError": "isomerge.errors",
    "align": "isomerge.align",
    "barrier": "isomerge.connect.barrier",
    "catalogue": "isomerge.catalogue",
    "check": "isomerge.check",
    "demo": "isomerge.demo",
    "ensemble": "isomerge.evaluate.tasks.ensemble",
    "evaluate": "isomerge.evaluate",
    "merge": "isomerge.merge",
    "merge_recipe": "isomerge.merge.api",
    "merge_state_dicts": "isomerge.merge.state_dicts",
    "open_checkpoint": "isomerge.checkpoint",
    "open_data": "isomerge.data",
    "plane": "isomerge.connect.plane",
    "report": "isomerge.report",
    "selftest": "isomerge.align.selftest",
    "sweep": "isomerge.sweep",
    "verify": "isomerge.evaluate.verify",
}
# Both a folder and a verb: the packages themselves are callable.
_PACKAGES = {"align", "check", "demo", "evaluate", "merge", "report", "sweep"}

__all__ = ["__version__", *sorted(_WHERE)]

if TYPE_CHECKING:
    from isomerge.align.alignment import Alignment as Alignment
    from isomerge.align.api import align as align
    from isomerge.align.selftest import selftest as selftest
    from isomerge.catalogue import catalogue as catalogue
    from isomerge.check.api import check as check
    from isomerge.checkpoint import open_checkpoint as open_checkpoint
    from isomerge.connect.barrier import barrier as barrier
    from isomerge.connect.plane import plane as plane
    from isomerge.data import open_data as open_data
    from isomerge.demo.run import demo as demo
    from isomerge.errors import IsomergeError as IsomergeError
    from isomerge.evaluate.tasks.ensemble import ensemble as ensemble
    from isomerge.evaluate.tasks.run import evaluate as evaluate
    from isomerge.evaluate.verify import verify as verify
    from isomerge.merge.api import merge as merge
    from isomerge.merge.api import merge_recipe as merge_recipe
    from isomerge.merge.merged import Merged as Merged
    from isomerge.merge.state_dicts import merge_state_dicts as merge_state_dicts
    from isomerge.report.page import report as report
    from isomerge.sweep.api import sweep as sweep


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'isomerge' has no attribute '{name}'; it has {', '.join(sorted(_WHERE))}")
    module = importlib.import_module(_WHERE[name])
    value = module if name in _PACKAGES else getattr(module, name)
    globals()[name] = value  # after the import, which sets submodules of the same name
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
