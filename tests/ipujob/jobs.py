"""IPUJobs for tests, as values and as files."""

import copy
from pathlib import Path

import yaml

FILES = Path(__file__).parent / "files"


def seed(name):
    """A file of EIDF's tutorials; its text is untouched."""
    return yaml.safe_load((FILES / f"{name}.yaml").read_text())


def job(name="train", annotations=None, container=None, template=None, **spec):
    """A small IPUJob; `spec`, `container` and the pod's `template` replace or add fields."""
    pod = {
        "containers": [
            {"name": "train", "image": "pando:1", "command": ["python3", "train.py"], **(container or {})}
        ]
    }
    workers = {"template": {"spec": {**pod, **(template or {})}}, **spec.pop("workers", {})}
    metadata = {"name": name, **({"annotations": annotations} if annotations else {})}
    spec = {"jobInstances": 1, "ipusPerJobInstance": "4", "workers": workers, **spec}
    return copy.deepcopy(
        {"apiVersion": "graphcore.ai/v1alpha1", "kind": "IPUJob", "metadata": metadata, "spec": spec}
    )
