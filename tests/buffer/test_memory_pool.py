"""Memory that the host keeps for later outputs."""

import torch

from megatron_ep import _C


def first_bytes(size):
    """A block of the pool, as it was left, marked and freed again."""
    block = torch.from_dlpack(_C.pooled_bytes(size))
    found = block[:8].tolist()
    block[:8] = 7
    return found


def test_calls_with_outputs_of_different_sizes_keep_their_blocks():
    _C.release_pooled_memory()
    sizes = [8 << 20, 40 << 20, 1 << 20]
    for size in sizes:
        assert first_bytes(size) == [0] * 8, "a fresh page"
    for size in sizes * 3:
        assert first_bytes(size) == [7] * 8


def test_a_block_that_is_long_unused_goes_back():
    _C.release_pooled_memory()
    first_bytes(8 << 20)
    for _ in range(40):
        first_bytes(40 << 20)
    assert first_bytes(8 << 20) == [0] * 8
    _C.release_pooled_memory()
