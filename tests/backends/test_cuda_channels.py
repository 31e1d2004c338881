"""How many channels a GPU gets by default."""

import pytest

from megatron_ep import _C

WARPS_PER_SM = 16


def channels(nodes: int, ranks_per_node: int, num_sms: int, local_ranks: int = 1) -> int:
    return _C.cuda_channels(nodes=nodes, ranks_per_node=ranks_per_node, num_sms=num_sms, local_ranks=local_ranks)


@pytest.mark.parametrize("nodes", [1, 2, 3, 8, 40, 256])
@pytest.mark.parametrize("ranks_per_node", [1, 2, 4, 8, 33])
def test_every_role_of_every_channel_has_a_warp(nodes: int, ranks_per_node: int) -> None:
    for num_sms in (1, 2, 4, 24, 132):
        for local_ranks in {1, nodes * ranks_per_node}:
            count = channels(nodes, ranks_per_node, num_sms, local_ranks)
            assert count >= 1
            shape = dict(nodes=nodes, ranks_per_node=ranks_per_node, num_sms=num_sms, channels=count)
            assert count == 1 or all(_C.cuda_roles(**shape, combine=combine) for combine in (False, True))


@pytest.mark.parametrize("nodes", [2, 4, 8, 16, 32, 64])
def test_channels_stay_with_the_nodes(nodes: int) -> None:
    assert channels(nodes, 8, 24) >= 16


def test_what_was_measured() -> None:
    assert channels(1, 2, 24) == 192
    assert channels(1, 4, 24) == 128
    assert channels(1, 8, 12, local_ranks=8) == 38
    assert channels(2, 4, 12, local_ranks=8) == 16
    assert channels(2, 4, 8, local_ranks=8) == 16
    assert channels(2, 2, 24) == 54


def test_a_shared_cache_leaves_enough_channels() -> None:
    assert channels(2, 8, 8, local_ranks=16) == 8
