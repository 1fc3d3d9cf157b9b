"""Optimizers: torch's, with the arguments that devices need. They hold the rates; executors update."""

from poptorch.optim.attributes import VariableAttributes
from poptorch.optim.optimizer_base import Optimizer
from poptorch.optim.optimizers import SGD, Adam, AdamW, RMSprop
from poptorch.optim.own_rule import LAMB, LARS

__all__ = ["LAMB", "LARS", "SGD", "Adam", "AdamW", "Optimizer", "RMSprop", "VariableAttributes"]
