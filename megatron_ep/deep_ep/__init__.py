"""The module that replaces `deep_ep` for programs that import it: see docs/deepep.md.

    python -m megatron_ep.deep_ep script.py ARGS...      runs a script with this module as `deep_ep`
    import megatron_ep.deep_ep; megatron_ep.deep_ep.install()    replaces it from here on, also in child processes

The names are DeepEP's, which is not part of this project. Functions that are not supported raise NotImplementedError.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import NoReturn

import torch

from megatron_ep.deep_ep.buffer import Buffer
from megatron_ep.deep_ep.config import Config
from megatron_ep.deep_ep.elastic import ElasticBuffer, get_logical_domain_size, get_physical_domain_size
from megatron_ep.deep_ep.elastic_handle import EPHandle
from megatron_ep.deep_ep.events import EventHandle, EventOverlap

__version__ = "1.2.1+megatron_ep"  # DeepEP's version with this interface, and its implementation

__all__ = [
    "Buffer",
    "Config",
    "EPHandle",
    "ElasticBuffer",
    "EventHandle",
    "EventOverlap",
    "get_logical_domain_size",
    "get_physical_domain_size",
    "install",
    "topk_idx_t",
]

topk_idx_t = torch.int64

ABSENT = {"EPBuffer", "EngramBuffer", "PPBuffer", "BucketBuffer"}  # classes of DeepEP's newest version

SHIM = Path(__file__).parent / "shim"  # has a module `deep_ep` that imports this one


def __getattr__(name: str) -> NoReturn:
    """Raises AttributeError; for one of `ABSENT` in `from deep_ep import` an ImportError that says what there is."""
    if name in ABSENT and sys._getframe(1).f_code.co_name == "_handle_fromlist":  # of Python's import statement
        raise ImportError(
            f"megatron_ep does not have DeepEP's {name}, but Buffer and ElasticBuffer: see docs/deepep.md"
        )
    raise AttributeError(f"module {__name__} has no attribute {name}")


def install() -> None:
    """Makes `import deep_ep` find this module, here and in processes started from now on (PYTHONPATH).

    Raises ValueError if another deep_ep has been imported.
    """
    foreign = sys.modules.get("deep_ep")
    if foreign is not None and getattr(foreign, "__file__", None) != str(SHIM / "deep_ep" / "__init__.py"):
        where = getattr(foreign, "__file__", None) or list(getattr(foreign, "__path__", []))
        raise ValueError(f"deep_ep is {where}, imported already: must not be where megatron_ep.deep_ep takes its place")
    if str(SHIM) not in sys.path:
        sys.path.insert(0, str(SHIM))
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if str(SHIM) not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([str(SHIM), *paths])
    importlib.import_module("deep_ep")
