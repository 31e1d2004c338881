"""A host backend that launches a dispatch ahead of its counts, as a GPU's does."""

from unittest import mock

from megatron_ep.buffer.host import HostBackend


class AheadBackend(HostBackend):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.launches_ahead = True
        self.guesses = []  # whether they were right
        self._is_due = False

    def dispatch_ahead(self, tensors, row, nvl_batch, rdma_chunk, counts):
        totals = self.exchange_counts(tensors, counts)
        (t,), (total,) = tensors, totals
        assert not t["is_flat"] or t["max_received"] == t["max_rows"], "what lies behind the last row is marked"
        rows = total.received_rows if t["is_flat"] else total.expert_rows
        is_right = (
            t["min_rows"] <= rows <= t["max_rows"]
            and total.received_rows <= t["max_received"]
            and total.rail_rows <= t["max_rail"]
        )
        self.guesses.append(is_right)
        self._is_due = not is_right
        if is_right and total.bad_token < 0 and self.aborted() is None:
            super().enqueue_dispatch(tensors, row, nvl_batch, rdma_chunk, None)
        return totals, is_right

    def enqueue_dispatch(self, tensors, row, nvl_batch, rdma_chunk, counts, again=False):
        assert again == self._is_due
        self._is_due = False
        super().enqueue_dispatch(tensors, row, nvl_batch, rdma_chunk, counts)


def ahead():
    """Buffers on the host that are made inside have such a backend."""
    return mock.patch("megatron_ep.buffer.host.HostBackend", AheadBackend)
