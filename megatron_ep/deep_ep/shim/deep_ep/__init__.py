"""The module `deep_ep` if this folder's parent is on the path."""

from megatron_ep.deep_ep import *  # noqa: F403
from megatron_ep.deep_ep import __getattr__ as __getattr__
from megatron_ep.deep_ep import __version__ as __version__

from . import utils as utils
