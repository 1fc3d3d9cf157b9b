"""Backends: they make the pieces of a plan callable. The choice changes only speed and rounding.

eager     runs the Python source of a piece: no compilation time, and the same bits in every layout
inductor  compiles each piece into fused C++ kernels by torch._inductor, on CPUs; results differ by rounding
"""
