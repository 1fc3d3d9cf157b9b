"""Optimizers: torch's, with the arguments that devices need. They hold the rates; executors update."""

from poptorch.optim.attributes import VariableAttributes
from poptorch.optim.lamb import LAMB
from poptorch.optim.lars import LARS
from poptorch.optim.optimizer_base import Optimizer
from poptorch.optim.optimizers import SGD, Adam, AdamW, RMSprop

__all__ = ["LAMB", "LARS", "SGD", "Adam", "AdamW", "Optimizer", "RMSprop", "VariableAttributes"]
