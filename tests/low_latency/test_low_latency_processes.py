"""The low-latency mode between processes: shared memory, and what happens when a rank misbehaves."""

import random

import comebacks
import pytest
import torch
import torch.distributed as dist
from low_latency_cases import receive_in_any_order
from modes import EXPERTS, HOST, TOKENS, LowLatency, W
from rank_processes import LinkedProcess
from run_on import run_on
from waits import come_last

import megatron_ep as ep
from megatron_ep import reference

MASKING = {"timeout": 30.0, "on_dead_rank": "mask", "mask_timeout": 5.0}


def start(calls, number):
    """A dispatch under way, unlike those before and after it; what its hook is and checks, and its sums."""
    topk = 1 + number % 3
    (own, own_ids, _), (x, ids, weights) = calls.own(topk), calls.inputs(topk)
    received, hook = calls.mode.dispatch(own, own_ids, return_recv_hook=True)
    expected, _, counts = (part[calls.rank] for part in reference.dispatch(x, ids, weights, EXPERTS))

    def receive():
        hook()
        assert torch.equal(received.recv_counts, counts.int())
        rows = torch.cat([part[:count] for part, count in zip(received.x, counts, strict=True)])
        assert torch.equal(rows, expected)
        return received

    return receive, topk * own


LATE_S = 0.5


@pytest.mark.parametrize("nodes", [1, 2])
@run_on("ranks")
def test_rows_and_waits_are_counted_by_rank(nodes):
    """All others wait for a rank that comes late."""
    calls = LowLatency(HOST, nodes, 20.0)
    with calls.buffer as buffer:
        rank, low_latency = calls.rank, calls.mode
        ids = [torch.arange(3 * t).view(t, 3) % EXPERTS for t in (16, 20, 5, 0)]
        x = torch.ones(len(ids[rank]), HOST.hidden)
        from_each = torch.tensor([int((idx // (EXPERTS // W) == rank).any(dim=1).sum()) for idx in ids])
        rows, dispatch_ns, combine_ns = (torch.zeros(W, dtype=torch.int64) for _ in range(3))

        def without(late, call, nanoseconds, waits):
            before = nanoseconds.clone()
            dist.barrier()
            if rank == late:
                come_last(buffer, LATE_S)
            result = call()
            waited = nanoseconds - before
            assert waited[rank] == 0 and (waited >= 0).all()
            if waits and rank != late:
                assert waited.argmax() == late and waited[late] >= 0.5 * LATE_S * 1e9, waited
            return result

        for number, late in enumerate((1, 3), 1):
            counting = dict(recv_rows=rows, recv_wait_ns=dispatch_ns)
            received = without(late, lambda: low_latency.dispatch(x, ids[rank], **counting), dispatch_ns, waits=True)  # noqa: B023
            assert torch.equal(rows, number * from_each)
            combine = (received.x, received.handle)
            without(late, lambda: low_latency.combine(*combine, recv_wait_ns=combine_ns), combine_ns, waits=len(x))  # noqa: B023


@pytest.mark.parametrize("nodes", [1, 4])
@run_on("ranks")
def test_hooks_at_different_places(nodes):
    """All ranks send the same calls in the same order; each receives them when it likes, within the rule of two."""
    calls = LowLatency(HOST, nodes, 20.0)
    with calls.buffer:
        shared, sent, done = random.Random(7), [], {}

        def dispatch():
            sent.append(number := len(sent))
            receive, sums = start(calls, number)

            def receive_and_keep():
                done[number] = (receive(), sums)

            return receive_and_keep

        def combine():
            received, sums = done[shared.randrange(len(sent) - 2)]
            y, hook = calls.mode.combine(received.x, received.handle, return_recv_hook=True)

            def receive():
                hook()
                assert torch.equal(y, sums)

            return receive

        def kind_of_next():  # every rank has received all dispatches but the last two by now
            return shared.choice(["dispatch", "combine"]) if len(sent) > 2 else "dispatch"

        starts = {"dispatch": dispatch, "combine": combine}
        receive_in_any_order(60, kind_of_next, starts, random.Random(100 + calls.rank))


@run_on("ranks")
def test_sizes_must_be_equal():
    with ep.Buffer(None, ep.Config(num_experts=EXPERTS, timeout=20)) as buffer:
        with pytest.raises(ValueError, match=r"max_tokens is . on rank . and . on rank ., must be equal"):
            ep.LowLatency(buffer, max_tokens=4 + buffer.rank % 2, hidden=8, topk=2)
        with pytest.raises((ValueError, ep.EPError), match="topk is 33"):
            ep.LowLatency(buffer, max_tokens=4, hidden=8, topk=33 if buffer.rank == 1 else 2)


@pytest.mark.parametrize("who", [dict(killed=(1, 2)), dict(late=(2,))], ids=str)
def test_ranks_come_back(tmp_path, who):
    comebacks.check_comebacks(tmp_path, nodes=2, **who)


@run_on("ranks")
def test_mistakes_of_readmit_are_named(tmp_path):
    calls = LowLatency(HOST, **MASKING)
    with calls.buffer:
        calls.round_trips()
        _, hook = calls.mode.dispatch(*calls.own()[:2], return_recv_hook=True)
        if calls.rank != 2:
            hook()
        error = ValueError if calls.rank == 2 else ep.EPError
        with pytest.raises(error, match="a dispatch is under way, must be received before"):
            calls.mode.readmit(1, dist.FileStore(f"{tmp_path}/0"))
        if calls.rank == 2:
            hook()
        with pytest.raises((ValueError, ep.EPError), match="ranks names 1, which has the process that it had"):
            calls.mode.readmit(1, dist.FileStore(f"{tmp_path}/1"))
        with pytest.raises(ValueError, match="ranks is 4, must be"):
            calls.mode.readmit([1, 4], dist.FileStore(f"{tmp_path}/2"))
        calls.round_trips()  # nothing was lost
        calls.is_usable_again()


def run_former_process_lives(folder):
    calls = LowLatency(HOST, **MASKING | {"mask_timeout": 20.0})
    with calls.buffer:
        active = torch.ones(W, W, dtype=torch.int32)
        active[1] = active[:, 1] = 0
        calls.mode.active_ranks.copy_(active[calls.rank])
        if calls.rank != 1:
            calls.round_trips(active)
            with pytest.raises(ep.EPError, match=r"rank 1 came back in process \d+, but its former one, \d+, lives"):
                calls.mode.readmit(1, dist.FileStore(f"{folder}/store"))
            calls.round_trips(active)
        dist.barrier()


def test_a_former_process_must_have_ended(ranks, tmp_path):
    sizes = {"max_tokens": max(TOKENS), "hidden": HOST.hidden, "topk": 3, "dtype": HOST.dtype, "on_dead_rank": "mask"}
    config, topology = ep.Config(num_experts=EXPERTS, timeout=MASKING["timeout"], num_sms=2), ep.Topology(2, 2)
    with LinkedProcess(comebacks.rejoin_in_vain, f"{tmp_path}/store", 1, config, topology, sizes) as early:
        ranks.run(run_former_process_lives, tmp_path)
        assert "but its former one" in early.hear()
