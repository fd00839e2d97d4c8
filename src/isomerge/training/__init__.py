"""Averages that act while a model is trained: callbacks for transformers' Trainer.

from isomerge.training import AverageCheckpoints
Trainer(…, callbacks=[AverageCheckpoints("swa", start=0.5)]).train()        # writes output_dir/averaged
"""

from isomerge.training.averages import AverageCheckpoints
from isomerge.training.hierarchy import hierarchical_average
from isomerge.training.lookahead import Lookahead
from isomerge.training.population import PopulationAverage
from isomerge.training.validation_window import ValidationWindow

__all__ = ["AverageCheckpoints", "Lookahead", "PopulationAverage", "ValidationWindow", "hierarchical_average"]
