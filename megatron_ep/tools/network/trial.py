"""A network between ranks, without a buffer, in order to see how it does: what `bench network` times and `check
--network` examines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from megatron_ep import _C
from megatron_ep.errors import EPError
from megatron_ep.fabrics.tcp import Network
from megatron_ep.meeting.rendezvous import StoreRendezvous

MAX_PUT_BYTES = 1 << 16  # unless a trial says otherwise
Result = TypeVar("Result")


class NetworkTrial:
    """Send queues and connections as those of a buffer, and rings for puts in memory of their own. A context manager.

    Collective. Methods between two ranks are called by these two only. Raises EPError as `Network.connect` does.

    rendezvous: of the ranks.
    machines: of each rank, by name; only ranks of different ones are connected.
    channels: rings between two ranks.
    address, card: as of `Network`.
    max_bytes: of a put. A rank takes 16 * channels * max_bytes of memory for each rank that it exchanges with.
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

        # before the connections: the others' puts find its memory there
        self._network, load = rendezvous.agree(make)
        self._load: _C.NetworkLoad | None = load
        try:
            self._network.connect(rendezvous)
        except BaseException:
            self.close()
            raise

    def ping(self, peer: int, *, begins: bool, size: int, rounds: int, timeout: float) -> list[float]:
        """A put of `size` bytes and its signal to a rank that calls this, too, and back: half of each round trip, in
        seconds. Of the two ranks one begins. Raises EPError when that is not done in `timeout` seconds."""
        return self._run(
            lambda load: load.ping(peer, begins=begins, bytes=size, rounds=rounds, timeout=timeout),
        )

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
        """Sends `size` bytes to each of `targets` in every channel and receives as many from each of `sources`, all at
        once. Returns the seconds until all is there, on both sides.

        puts: instead of a size in bytes, so many puts. With a seed they are of random sizes, and all bytes are compared
            when they have come.

        Raises EPError when that is not done in `timeout` seconds, and when bytes differ.
        """
        count = puts or -(-size // self.max_bytes)
        return self._run(
            lambda load: load.exchange(
                targets=targets, sources=sources, puts=count, bytes=self.max_bytes, seed=seed, timeout=timeout
            )
        )

    def segments_sent(self) -> dict[int, tuple[int, int]]:
        """See `Network.segments_sent`."""
        return self._network.segments_sent()

    def _run(self, step: Callable[[_C.NetworkLoad], Result]) -> Result:
        assert self._load is not None, "closed"
        try:
            return step(self._load)
        except RuntimeError as error:
            raise EPError(str(error)) from None

    def close(self) -> None:
        self._load = None
        self._network.close()

    def __enter__(self) -> NetworkTrial:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
