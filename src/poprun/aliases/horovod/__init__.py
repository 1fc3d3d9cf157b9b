"""`popdist.collectives` under Horovod's name, for programs that reduce their metrics by Horovod.

If Horovod is not installed, `popengine.environment` puts this package on Python's path. Gradients are summed
by the executor, never here.
"""
