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
            shape = dict(nodes=nodes, ranks_per_node=ranks_per_node, num_sms=num_sms, channels=count, ring_rows=4)
            assert count == 1 or all(_C.cuda_roles(**shape, combine=combine) for combine in (False, True))


def combine_roles(ring_rows: int, channels: int) -> tuple[int, int]:
    roles = _C.cuda_roles(nodes=1, ranks_per_node=8, num_sms=24, channels=channels, ring_rows=ring_rows, combine=True)
    assert roles is not None
    return roles["self_warps"], roles["peer_warps"]


def test_combine_has_no_more_receivers_than_its_rings_have_room_for() -> None:
    most = {ring_rows: combine_roles(ring_rows, 8) for ring_rows in (1, 2, 4, 8, 16)}  # 48 warps for each channel
    assert most == {1: (1, 7), 2: (1, 7), 4: (2, 7), 8: (4, 7), 16: (6, 7)}
    assert combine_roles(2, 76) == (1, 4)  # 5 warps: none of the senders makes room for a receiver that cannot be
    assert combine_roles(4, 76) == (2, 3)


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
