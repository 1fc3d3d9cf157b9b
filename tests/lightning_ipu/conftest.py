"""These tests need Lightning, which is a dependency of the tests alone."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("lightning") and find_spec("pytorch_lightning") else ["test_*.py"]
