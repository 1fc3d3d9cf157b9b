"""Horovod's name for `popdist.collectives`: poprun puts this folder on the path of instances where Horovod is absent.

It is for programs that reduce their metrics by Horovod. Gradients are summed by the executor, never here.
"""
