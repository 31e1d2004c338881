"""A network between ranks without a buffer, which `check --network` examines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from megatron_ep import _C
from megatron_ep.errors import EPError
from megatron_ep.fabrics.tcp import Network
from megatron_ep.meeting.rendezvous import StoreRendezvous

MAX_PUT_BYTES = 1 << 16  # default of max_bytes
Result = TypeVar("Result")


class NetworkTrial:
    """Send queues and connections (`network`) like those of a buffer, with rings in separate memory. A context manager.

    Collective. Only the two ranks concerned call methods between two ranks. Raises EPError, see `Network.connect`.

    rendezvous: the rendezvous of the ranks.
    machines: machine name of each rank; only ranks of different machines are connected.
    channels: number of rings between two ranks.
    address, card: see `Network`.
    max_bytes: limit of a put. A rank needs 16 * channels * max_bytes of memory for each rank that it exchanges with.
    """

    def __init__(
        self,
        rendezvous: StoreRendezvous,
        machines: Sequence[str],
        *,
        channels: int = 1,
        max_bytes: int = MAX_PUT_BYTES,
        address: str | None = None,
        card: _C.Card | None = None,
    ):
        sizes = dict(world=len(machines), channels=channels, max_bytes=max_bytes)
        self.max_bytes = max_bytes
        self.others = [rank for rank, machine in enumerate(machines) if machine != machines[rendezvous.rank]]
        rank = rendezvous.rank
        cards = [card] if card else []
        controls = [_C.Segment.anonymous(_C.SoftwareNic.mirror_bytes) for _ in machines]

        def make() -> tuple[Network, _C.NetworkLoad]:
            try:
                nic = _C.SoftwareNic(rank=rank, segments=controls, cards=cards)
                heap = _C.Segment.anonymous(_C.NetworkLoad.heap_bytes(**sizes))
                load = _C.NetworkLoad(nic, controls[rank], heap, rank=rank, **sizes)
            except RuntimeError as error:  # the card refused the memory
                raise EPError(str(error)) from None
            return Network(rank, machines, nic, address, cards), load

        # Memory must be registered before the connections, because puts of other ranks write to it.
        self.network, load = rendezvous.agree(make)
        self._load: _C.NetworkLoad | None = load
        try:
            self.network.connect(rendezvous)
        except BaseException:
            self.close()
            raise

    def ping(self, peer: int, *, begins: bool, size: int, rounds: int, timeout: float) -> list[float]:
        """Sends puts of `size` bytes with a signal to a rank that also calls this, and back. Returns half of each round
        trip in seconds. One of the ranks begins. Raises EPError if it is not done in `timeout` seconds."""
        return self._run(lambda load: load.ping(peer, begins=begins, bytes=size, rounds=rounds, timeout=timeout))

    def exchange(
        self,
        targets: Sequence[int],
        sources: Sequence[int],
        size: int,
        timeout: float,
        *,
        puts: int = 0,
        seed: int | None = None,
    ) -> float:
        """Sends `size` bytes to each of `targets` in every channel and receives as many from each of `sources`, in
        parallel. Returns the seconds until everything has arrived, on both sides.

        puts: number of puts, instead of a size in bytes. With a seed they have random sizes, and all received bytes are
            compared.

        Raises EPError if it is not done in `timeout` seconds, or if bytes differ.
        """
        count = puts or -(-size // self.max_bytes)
        return self._run(
            lambda load: load.exchange(
                targets=targets, sources=sources, puts=count, bytes=self.max_bytes, seed=seed, timeout=timeout
            )
        )

    def _run(self, step: Callable[[_C.NetworkLoad], Result]) -> Result:
        assert self._load is not None, "closed"
        try:
            return step(self._load)
        except RuntimeError as error:
            raise EPError(str(error)) from None

    def close(self) -> None:
        self._load = None
        self.network.close()

    def __enter__(self) -> NetworkTrial:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
