"""The version: of the PopTorch interface that this package follows, and whose it is."""

__version__ = "3.4.0+pando"
