"""Tasks over real data with the metrics people report: classes, tags, numbers, language."""

from isomerge.evaluation.tasks.base import Task
from isomerge.evaluation.tasks.choose import choose_task
from isomerge.evaluation.tasks.model import Loaded, load_model
from isomerge.evaluation.tasks.run import evaluate

__all__ = ["Loaded", "Task", "choose_task", "evaluate", "load_model"]
