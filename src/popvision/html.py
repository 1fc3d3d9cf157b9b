from pathlib import Path


def write_report(d: Path): ...
