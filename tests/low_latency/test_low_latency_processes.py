"""The low-latency mode between processes: shared memory, and what happens when a rank misbehaves."""

import random
import time

import comebacks
import pytest
import survivors
import torch
import what_was_sent
from rank_processes import LinkedProcess
from waits import come_last

import megatron_ep as ep
from megatron_ep import reference

W, EXPERTS, HIDDEN, MAX_TOKENS = 4, 8, 5, 20
TIMEOUT = 20


def make(nodes=2, timeout=TIMEOUT, **options):
    buffer = ep.Buffer(None, ep.Config(num_experts=EXPERTS, timeout=timeout), ep.Topology(nodes, W // nodes))
    sizes = {"max_tokens": MAX_TOKENS, "hidden": HIDDEN, "topk": 3, "dtype": torch.float32} | options
    return buffer, ep.LowLatency(buffer, **sizes)


def inputs(seed):
    r, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    tokens = [r.choice([0, 1, r.randint(0, MAX_TOKENS)]) for _ in range(W)]
    ids = [torch.rand(t, EXPERTS, generator=generator).topk(3, dim=1).indices for t in tokens]
    x = [torch.randint(-8, 9, (t, HIDDEN), generator=generator).float() for t in tokens]
    return x, ids


def start(low_latency, seed):
    """A dispatch under way, and what to do with its hook."""
    rank = low_latency.buffer.rank
    x, ids = inputs(seed)
    received, hook = low_latency.dispatch(x[rank], ids[rank], return_recv_hook=True)
    expected, _, counts = reference.dispatch(x, ids, [torch.ones(i.shape) for i in ids], EXPERTS)

    def receive():
        hook()
        assert torch.equal(received.recv_counts, counts[rank].int())
        rows = torch.cat([part[:count] for part, count in zip(received.x, counts[rank], strict=True)])
        assert torch.equal(rows, expected[rank])
        return received

    return receive, x[rank]


def round_trips(low_latency, rounds=6):
    for seed in range(rounds):
        receive, x = start(low_latency, seed)
        received = receive()
        assert torch.equal(low_latency.combine(received.x, received.handle), 3 * x)


LATE_S = 0.5


def run_counting(nodes):
    """All others wait for a rank that comes late."""
    buffer, low_latency = make(nodes)
    with buffer:
        rank = buffer.rank
        ids = [torch.arange(3 * t).view(t, 3) % EXPERTS for t in (16, 20, 5, 0)]
        x = torch.ones(len(ids[rank]), HIDDEN)
        from_each = torch.tensor([int((idx // (EXPERTS // W) == rank).any(dim=1).sum()) for idx in ids])
        rows, dispatch_ns, combine_ns = (torch.zeros(W, dtype=torch.int64) for _ in range(3))

        def without(late, call, nanoseconds, waits):
            before = nanoseconds.clone()
            torch.distributed.barrier()
            if rank == late:
                come_last(buffer, LATE_S)
            result = call()
            waited = nanoseconds - before
            assert waited[rank] == 0 and (waited >= 0).all()
            if waits and rank != late:
                assert waited.argmax() == late and waited[late] >= 0.5 * LATE_S * 1e9, waited
            return result

        for calls, late in enumerate((1, 3), 1):
            received = without(
                late,
                lambda: low_latency.dispatch(x, ids[rank], recv_rows=rows, recv_wait_ns=dispatch_ns),
                dispatch_ns,
                waits=True,
            )
            assert torch.equal(rows, calls * from_each)
            without(
                late,
                lambda received=received: low_latency.combine(received.x, received.handle, recv_wait_ns=combine_ns),
                combine_ns,
                waits=len(x),
            )


@pytest.mark.parametrize("nodes", [1, 2])
def test_rows_and_waits_are_counted_by_rank(ranks, nodes):
    ranks.run(run_counting, nodes)


def run_hooks_at_different_places(nodes):
    """All ranks send the same calls in the same order; each receives them when it likes, within the rule of two."""
    buffer, low_latency = make(nodes)
    with buffer:
        r, shared = random.Random(100 + buffer.rank), random.Random(7)
        done, under_way = [], {"dispatch": [], "combine": []}

        def combine(number):
            x, received = done_in_order[number]
            y, hook = low_latency.combine(received.x, received.handle, return_recv_hook=True)

            def receive():
                hook()
                assert torch.equal(y, 3 * x)

            return receive

        done_in_order = {}
        for step in range(60):
            # the numbers of calls that every rank has received by now, whatever it received besides
            ready = max(0, len(done) - 2)
            kind = shared.choice(["dispatch", "combine"]) if ready else "dispatch"
            calls = under_way[kind]
            if len(calls) == 2 and calls[0] is not None:
                calls[0]()
            if kind == "dispatch":
                receive, x = start(low_latency, step)
                number = len(done)
                done.append(number)

                def receive_and_keep(receive=receive, number=number, x=x):
                    done_in_order[number] = (x, receive())

                call = receive_and_keep
            else:
                number = shared.randrange(ready)
                call = combine(number)
            under_way[kind] = [*calls[-1:], call]
            for calls in under_way.values():
                for i, receive in enumerate(calls):
                    if receive is not None and r.random() < 0.3:
                        receive()
                        calls[i] = None
        for calls in under_way.values():
            for receive in filter(None, calls):
                receive()


@pytest.mark.parametrize("nodes", [1, 4])
def test_hooks_at_different_places(ranks, nodes):
    ranks.run(run_hooks_at_different_places, nodes)


def run_one_stops_between_halves():
    """Rank 1 receives a dispatch only after the others have finished two whole calls."""
    buffer, low_latency = make()
    with buffer:
        first, _ = start(low_latency, 1)
        if buffer.rank != 1:
            first()
        second, _ = start(low_latency, 2)
        if buffer.rank != 1:
            second()
        else:
            time.sleep(0.5)
            second()
            first()
        round_trips(low_latency)


def test_a_rank_that_stops_between_halves(ranks):
    ranks.run(run_one_stops_between_halves)


def run_disagreement(kind):
    """Odd ranks give rows of another shape: nobody ever gets the other's bytes."""
    buffer, low_latency = make()
    odd = buffer.rank % 2
    hidden, dtype, topk = HIDDEN, torch.float32, 2
    if kind == "hidden":
        hidden = 4 if odd else 5
    if kind == "dtype":
        hidden, dtype = (8, torch.bfloat16) if odd else (4, torch.float32)
    if kind == "topk":
        topk = 3 if odd else 2
    generator = torch.Generator().manual_seed(buffer.rank)
    ids = torch.rand(9, EXPERTS, generator=generator).topk(topk, dim=1).indices
    weights = torch.ones(9, topk) if kind == "weights" and odd else None
    sent = {
        "hidden": ("a dispatch, H = 5, float32, K = 2", "a dispatch, H = 4, float32, K = 2"),
        "dtype": ("a dispatch, H = 4, float32, K = 2", "a dispatch, H = 8, bfloat16, K = 2"),
        "topk": ("a dispatch, H = 5, float32, K = 2", "a dispatch, H = 5, float32, K = 3"),
        "weights": ("a dispatch, H = 5, float32, K = 2", "a dispatch, H = 5, float32, K = 2, weights of float32"),
        "sum_at": ("a combine with sum_at='expert', H = 5, float32, K = 2", "a combine, H = 5, float32, K = 2"),
    }[kind]
    with pytest.raises(ep.EPError, match=r"rank . met a row that was not meant for its call") as error:
        received = low_latency.dispatch(torch.ones(9, hidden, dtype=dtype), ids, weights)
        assert kind == "sum_at"
        low_latency.combine(received.x, received.handle, sum_at="token" if odd else "expert")
        low_latency.dispatch(torch.ones(9, hidden, dtype=dtype), ids)  # a rank that saw no difference hears of it now
    assert what_was_sent.is_said(str(error.value), *sent), error.value
    buffer.reset()
    round_trips(low_latency, rounds=2)
    buffer.close()


@pytest.mark.parametrize("kind", ["hidden", "dtype", "topk", "weights", "sum_at"])
def test_ranks_that_disagree_never_get_wrong_rows(ranks, kind):
    ranks.run(run_disagreement, kind)


def run_different_sizes():
    buffer = ep.Buffer(None, ep.Config(num_experts=EXPERTS, timeout=TIMEOUT))
    with pytest.raises(ValueError, match=r"max_tokens is . on rank . and . on rank ., must be equal"):
        ep.LowLatency(buffer, max_tokens=4 + buffer.rank % 2, hidden=8, topk=2)
    with pytest.raises((ValueError, ep.EPError), match="topk is 33"):
        ep.LowLatency(buffer, max_tokens=4, hidden=8, topk=33 if buffer.rank == 1 else 2)
    buffer.close()


def test_sizes_must_be_equal(ranks):
    ranks.run(run_different_sizes)


def masked_trip(low_latency, seed, active):
    """A dispatch and its combine, as they are with these active ranks of every rank."""
    rank = low_latency.buffer.rank
    x, ids = inputs(seed)
    kept = reference.without_masked(ids, active, EXPERTS)
    expected, _, counts = reference.dispatch(x, kept, [torch.ones(i.shape) for i in ids], EXPERTS)
    received = low_latency.dispatch(x[rank], ids[rank])
    assert torch.equal(received.recv_counts, counts[rank].int())
    rows = torch.cat([part[:count] for part, count in zip(received.x, counts[rank], strict=True)])
    assert torch.equal(rows, expected[rank])
    choices = (kept[rank] >= 0).sum(dim=1, keepdim=True)
    assert torch.equal(low_latency.combine(received.x, received.handle), choices * x[rank])


def run_different_masks():
    """Rank 0 leaves out rank 1, rank 2 rank 3: what is said of two ranks concerns these two alone."""
    buffer, low_latency = make(2, timeout=30.0, on_dead_rank="mask", mask_timeout=5.0)
    with buffer:
        active = torch.ones(W, W, dtype=torch.int32)
        active[0, 1] = active[2, 3] = 0
        low_latency.active_ranks.copy_(active[buffer.rank])
        for seed in range(4):
            masked_trip(low_latency, seed, active)
        assert low_latency.active_ranks.tolist() == (active * active.T)[buffer.rank].tolist()


def test_different_masks(ranks):
    ranks.run(run_different_masks)


def test_survivors_go_on(tmp_path, monkeypatch):
    """One rank is killed, which the others mask."""
    script = survivors.masking(survivors.with_low_latency(survivors.SURVIVOR))
    monkeypatch.setattr(survivors, "SURVIVOR", script)
    survivors.check_masked(tmp_path)


def test_ranks_come_back(tmp_path):
    comebacks.check_comebacks(tmp_path, nodes=2, killed=(1, 2))


def test_a_rank_that_came_too_late_comes_back(tmp_path):
    comebacks.check_comebacks(tmp_path, nodes=2, late=(2,))


def run_mistakes_of_readmit(folder):
    buffer, low_latency = make(timeout=30.0, on_dead_rank="mask", mask_timeout=5.0)
    with buffer:
        rank, active = buffer.rank, torch.ones(W, W, dtype=torch.int32)
        masked_trip(low_latency, 0, active)
        x, ids = inputs(1)
        _, hook = low_latency.dispatch(x[rank], ids[rank], return_recv_hook=True)
        if rank != 2:
            hook()
        error = ValueError if rank == 2 else ep.EPError
        with pytest.raises(error, match="a dispatch is under way, must be received before"):
            low_latency.readmit(1, torch.distributed.FileStore(f"{folder}/0"))
        if rank == 2:
            hook()
        with pytest.raises((ValueError, ep.EPError), match="ranks names 1, which has the process that it had"):
            low_latency.readmit(1, torch.distributed.FileStore(f"{folder}/1"))
        with pytest.raises(ValueError, match="ranks is 4, must be"):
            low_latency.readmit([1, 4], torch.distributed.FileStore(f"{folder}/2"))
        masked_trip(low_latency, 2, active)  # nothing was lost
        buffer.reset()
        masked_trip(low_latency, 3, active)


def test_mistakes_of_readmit_are_named(ranks, tmp_path):
    ranks.run(run_mistakes_of_readmit, str(tmp_path))


MASKING = {"timeout": 30.0, "on_dead_rank": "mask", "mask_timeout": 20.0}


def run_former_process_lives(folder):
    buffer, low_latency = make(**MASKING)
    with buffer:
        active = torch.ones(W, W, dtype=torch.int32)
        active[1], active[:, 1] = 0, 0
        low_latency.active_ranks.copy_(active[buffer.rank])
        if buffer.rank != 1:
            masked_trip(low_latency, 0, active)
            with pytest.raises(ep.EPError, match=r"rank 1 came back in process \d+, but its former one, \d+, lives"):
                low_latency.readmit(1, torch.distributed.FileStore(f"{folder}/store"))
            masked_trip(low_latency, 1, active)
        torch.distributed.barrier()


def test_a_former_process_must_have_ended(ranks, tmp_path):
    sizes = {"max_tokens": MAX_TOKENS, "hidden": HIDDEN, "topk": 3, "dtype": torch.float32, "on_dead_rank": "mask"}
    config, topology = ep.Config(num_experts=EXPERTS, timeout=MASKING["timeout"]), ep.Topology(2, 2)
    with LinkedProcess(comebacks.rejoin_in_vain, f"{tmp_path}/store", 1, config, topology, sizes) as early:
        ranks.run(run_former_process_lives, str(tmp_path))
        assert "but its former one" in early.hear()
