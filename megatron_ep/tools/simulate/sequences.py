"""Predicts the times of moving attention's rows by a plan: the roles of `SequenceDispatcher` in virtual time."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from megatron_ep import _simulate
from megatron_ep.buffer.cuda import CudaBackend
from megatron_ep.config import MAX_NODE_RANKS, Config, Topology, require_int
from megatron_ep.sequences.handles import Way, ways_of
from megatron_ep.sequences.plan import SequencePlan
from megatron_ep.sequences.planner import RowBytes
from megatron_ep.tools.simulate.case import MAX_SIMULATED_RANKS, ring_settings
from megatron_ep.tools.simulate.machine import Machine
from megatron_ep.tools.simulate.predict import OnProgress, Phase, phase_of

# Exchanges in the order of a call. The backward pass has those after the output, and the reverse of Q's and the
# output's.
Q, K_AND_V, OUT, K_GRADIENT = "Q", "K and V", "output", "gradient of K"
WAYS = (Q, K_AND_V, OUT, K_GRADIENT)


def predict_ways(
    plan: SequencePlan,
    topology: Topology,
    machine: Machine,
    *,
    row_bytes: RowBytes,
    num_sms: int,
    on_progress: OnProgress | None = None,
) -> dict[str, Phase]:
    """Returns the phases of `WAYS`. The gradient of V has a phase like that of K.

    row_bytes: bytes of 16-bit rows; those of K and V are equal. Gradients of K and V that nodes sum are twice as long.
    num_sms: SMs of each rank.
    on_progress: called regularly with the exchange and its progress, 0 to 1.

    Raises ValueError for a plan of other ranks, rows of K and V that differ, several nodes on a machine without a
    network card, and settings that no buffer could have; RuntimeError if a wait expires.
    """
    if plan.world != topology.world_size:
        raise ValueError(f"plan is for {plan.world} ranks, must be for the {topology.world_size} of the topology")
    require_int("ranks_per_node", topology.ranks_per_node, 1, MAX_NODE_RANKS)
    require_int("ranks that are simulated", plan.world, 1, MAX_SIMULATED_RANKS)
    if topology.nodes > 1 and not machine.has_card:
        raise ValueError(
            f"machine is {machine.name}, which has no network card, but the topology has {topology.nodes} nodes"
        )
    if row_bytes.kv % 2:
        raise ValueError(f"row_bytes.kv is {row_bytes.kv}, must be even: K and V are alike")
    config = Config(plan.world, num_sms=num_sms, row_bytes=max(row_bytes.q, 2 * row_bytes.kv))
    config.check_ranks(topology)
    ways, k, least = ways_of(plan, topology), row_bytes.kv // 2, CudaBackend.min_local_bytes
    gradient = 2 * k if ways.has_partial_sums else k

    def transfers(way: Way, payload: int, scales: int) -> _simulate.Transfers:
        table, tokens = way.table(), way.tokens.int()
        combined = (payload + scales, 0)  # rows with scales, which are V, are not combined
        rings = ring_settings(topology, config, num_sms, (payload, scales), combined, topk=way.topk, weight_bytes=0)
        return _simulate.Transfers.planned(
            machine.compiled(),
            moves=table.data_ptr(),
            count=len(table),
            tokens=tokens.data_ptr(),
            leaving=way.leaving,
            copies_apart=(payload * way.own_rows() >= least).tolist(),
            settings={
                "nodes": topology.nodes,
                "ranks_per_node": topology.ranks_per_node,
                "simulated_nodes": topology.nodes,
                "num_experts": plan.world,
                "topk": way.topk,
                "num_tokens": int(tokens.max()),
                "num_sms": num_sms,
                "maps_rail": False,
                "seed": 0,
                "permutes_apart": False,
                "sums_apart": False,
                **rings,
            },
        )

    def run(name: str, way: Way, payload: int, scales: int = 0, *, sums: bool = False) -> Phase:
        report = partial(on_progress, name) if on_progress else None
        mode = transfers(way, payload, scales)
        found = mode.dispatch(report)
        if sums:
            found = mode.combine(report)
        return phase_of(found, mode.rail_rows, mode.peer_rows, is_calibrated=False)

    return {
        Q: run(Q, ways.q, row_bytes.q),
        K_AND_V: run(K_AND_V, ways.kv, k, k),
        OUT: run(OUT, ways.out, row_bytes.out),
        K_GRADIENT: run(K_GRADIENT, ways.kv, gradient, sums=True),
    }


def times_of(phases: Mapping[str, Phase]) -> dict[str, float]:
    """Returns the ms of each exchange, and of a call's exchanges there and back, alone and with its gradients."""
    times = {way: phases[way].us / 1e3 for way in WAYS}
    forth, copies, back, gradient = times.values()
    return times | {
        "there and back": forth + copies + back,
        "with gradients": 2 * (forth + back) + copies + 2 * gradient,
    }
