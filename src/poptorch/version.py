"""The version: of the PopTorch interface that this package follows, and whose it is."""

VERSION = "3.4.0+pando"
