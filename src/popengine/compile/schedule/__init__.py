"""Schedules: which ipu computes what, and in what order.

Integers only: stage and micro-batch. No tensors, devices or clocks, so a schedule can be printed, checked
and tested anywhere. `lower.py` turns it into instructions.
"""

from .check import check
from .draw import draw
from .pipelined import pipelined
from .sharded import sharded

__all__ = ["check", "draw", "pipelined", "sharded"]
