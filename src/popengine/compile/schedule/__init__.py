"""Schedules: the order of computations on each ipu.

Integers only: stage and micro-batch. No tensors, devices or clocks, so a schedule can be printed, checked
and tested anywhere. `lower.py` turns it into instructions.
"""

from .check import check
from .depth_first import as_run, depth_first
from .draw import draw
from .pipelined import pipelined
from .sharded import sharded

__all__ = ["as_run", "check", "depth_first", "draw", "pipelined", "sharded"]
