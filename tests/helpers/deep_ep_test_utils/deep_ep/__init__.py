"""The module `deep_ep` with the helpers that DeepEP's own tests import, if this folder's parent is on the path before
that of the package's `deep_ep`: see tests/gpu/deep_ep.sh."""

from megatron_ep.deep_ep import *  # noqa: F403
from megatron_ep.deep_ep import __version__ as __version__
