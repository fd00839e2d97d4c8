"""Tasks over real data with the metrics people report: classes, tags, numbers, language."""

from isomerge.evaluate.tasks.base import Task
from isomerge.evaluate.tasks.choose import choose_task
from isomerge.evaluate.tasks.model import Loaded, load_model
from isomerge.evaluate.tasks.run import evaluate

__all__ = ["Loaded", "Task", "choose_task", "evaluate", "load_model"]
