"""The version of the PopTorch interface that this package implements, with the suffix "+pando"."""

__version__ = "3.4.0+pando"
