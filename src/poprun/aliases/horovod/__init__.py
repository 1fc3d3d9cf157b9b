"""Horovod's name for `popdist.collectives`, where Horovod is absent: `popengine.environment` puts it on Python's path.

It is for programs that reduce their metrics by Horovod. Gradients are summed by the executor, never here.
"""
