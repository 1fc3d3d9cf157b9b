"""PopTorch's environment variables that have no effect here. The log lists the variables that are set.

Variables with an effect are read elsewhere: POPTORCH_LOG_LEVEL and POPTORCH_LOG_DEST in `logs.py`,
POPTORCH_CACHE_DIR and POPTORCH_DEFAULT_OPTIONS in `options/options.py`, POPLAR_ENGINE_OPTIONS in
`option_groups.py`.
"""

import os
from collections.abc import Mapping

from .logs import logger

RECORDED = {
    "POPTORCH_IPU_MODEL": "all ipus are models here",
    "POPTORCH_SMALL_IPU_MODEL": "ipus have no size here",
    "POPTORCH_IPU_MODEL_VERSION": "ipus have no version here",
    "POPTORCH_WAIT_FOR_IPU": "there is always an ipu: they are logical devices",
    "POPTORCH_EXPORT_PROTO_FILE": "there is no ONNX graph; a compiled model is written by save()",
    "POPTORCH_EXPORT_PROTO_AS_BINARY": "there is no ONNX graph; a compiled model is written by save()",
    "POPTORCH_MAX_GRAPH_LEN": "there is no ONNX graph",
    "PVTI_OPTIONS": "profiles are asked for with options.enableProfiling() or POPLAR_ENGINE_OPTIONS",
    "POPART_LOG_LEVEL": "there is one log: POPTORCH_LOG_LEVEL",
    "POPLAR_LOG_LEVEL": "there is one log: POPTORCH_LOG_LEVEL",
}


def log_recorded(environment: Mapping[str, str] = os.environ) -> None:
    """Log, at INFO, each variable in `RECORDED` that is set."""
    for name, why in RECORDED.items():
        if name in environment:
            logger.info("%s=%s has no effect: %s", name, environment[name], why)
