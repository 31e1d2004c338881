"""Which ranks a rank had to wait for."""

import pytest
import torch
from rank_threads import run_together, thread_ranks
from waits import come_last

import megatron_ep as ep

pytestmark = pytest.mark.usefixtures("closed_afterwards")
T, H = 12, 8
LATE_S = 0.8


def dispatch(buffer):
    ids = torch.arange(T * 2).reshape(T, 2) % 12
    return ep.dispatch([torch.ones(T, H)], [ids], [torch.ones(T, 2)], buffer=buffer)


@pytest.mark.parametrize("step", ["dispatch", "combine"])
def test_a_rank_that_comes_late_is_seen(step):
    late = 1
    with_rings_of_a_row = ep.Config(num_experts=12, timeout=20, tuning=ep.Tuning(nvl_ring_bytes=128))
    buffers = thread_ranks(1, 3, with_rings_of_a_row)
    rows = run_together(buffers, dispatch)
    for buffer in buffers:
        statistics = buffer.statistics()
        assert statistics["wait_ns"].shape == (1, 3) and statistics["wait_ns"].dtype == torch.int64
        assert torch.equal(*statistics.values()), "one call so far"
    before = [buffer.statistics()["wait_ns"][0] for buffer in buffers]

    def call(buffer):
        rank = buffer.rank
        if rank == late:
            come_last(buffer, LATE_S)
        if step == "dispatch":
            dispatch(buffer)
        else:
            ep.combine(rows[rank].x, rows[rank].handle)

    run_together(buffers, call)
    for buffer, earlier in zip(buffers, before, strict=True):
        rank = buffer.rank
        total, last = (buffer.statistics()[name][0] for name in ("wait_ns", "last_wait_ns"))
        assert torch.equal(total, earlier + last)
        assert last[rank] == 0
        if rank != late:
            assert last[late] >= 0.5 * LATE_S * 1e9 and last.argmax() == late, last
        else:
            assert last.max() < 0.5 * LATE_S * 1e9, last
        buffer.reset()
        assert not any(part.any() for part in buffer.statistics().values())
