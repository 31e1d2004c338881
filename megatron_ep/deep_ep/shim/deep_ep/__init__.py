"""The module `deep_ep` if this folder's parent is on the path. Its submodules are those of megatron_ep.deep_ep, so that
no class is defined twice."""

import importlib
import sys

from megatron_ep.deep_ep import *  # noqa: F403
from megatron_ep.deep_ep import __getattr__ as __getattr__
from megatron_ep.deep_ep import __version__ as __version__

for _name in ("utils", "utils.envs", "utils.event", "utils.gate", "utils.math", "utils.refs", "utils.testing"):
    sys.modules[f"{__name__}.{_name}"] = importlib.import_module(f"megatron_ep.deep_ep.{_name}")
utils = sys.modules[f"{__name__}.utils"]
