"""A rank whose DeepEP buffer meets the others by a communicator, as mpi4py's: RANK of WORLD_SIZE.

python communicator_ranks.py FILE, which nobody has written.
"""

import os
import pickle
import sys

import torch
import torch.distributed as dist

from megatron_ep.deep_ep import Buffer


class Communicator:
    """What a buffer asks of one of mpi4py, through a file."""

    def __init__(self, file, rank, size):
        self._store, self._rank, self._size, self._sent = dist.FileStore(file, size), rank, size, 0

    def Get_rank(self):
        return self._rank

    def Get_size(self):
        return self._size

    def bcast(self, obj, root=0):
        self._sent += 1
        if self._rank == root:
            self._store.set(str(self._sent), pickle.dumps(obj))
        return pickle.loads(self._store.get(str(self._sent)))


def main(file):
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    comm = Communicator(file, rank, world)
    for _ in range(2):  # they are told apart
        buffer = Buffer(None, comm=comm)
        assert buffer.group is comm and (buffer.rank, buffer.group_size) == (rank, world)
        ids = torch.arange(world).unsqueeze(1)
        x, weights = torch.full((world, 128), float(rank + 1), dtype=torch.bfloat16), torch.ones(world, 1)
        numbers = buffer.get_dispatch_layout(ids, world)[2]
        rows, _, _, counts, handle, _ = buffer.dispatch(
            x, num_tokens_per_expert=numbers, topk_idx=ids, topk_weights=weights
        )
        assert counts == [world] and rows[:, 0].tolist() == list(range(1, world + 1))
        assert torch.equal(buffer.combine(rows, handle)[0], x)
        rows, _, handle, _, _ = buffer.low_latency_dispatch(x, ids, world, world, use_fp8=False)
        assert torch.equal(buffer.low_latency_combine(rows, ids, weights, handle)[0], x)
        buffer.destroy()
    assert not dist.is_initialized()
    # a rank may go before the others are done: only the first has the store
    comm.bcast(None)
    print("done")


if __name__ == "__main__":
    main(sys.argv[1])
