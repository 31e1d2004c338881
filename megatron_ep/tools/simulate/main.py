"""`megatron-ep simulate NODES RANKS`: predicts times of dispatch and combine by the protocol in virtual time."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any

from megatron_ep.buffer import sizes
from megatron_ep.config import Config, Topology, Tuning, require_int
from megatron_ep.tools.arguments import default_experts, numbers, output_file, require_ints
from megatron_ep.tools.simulate import Case, Machine, Phase, Prediction, predict, progress
from megatron_ep.tools.simulate.predict import machines_in_band

# Limit of simulated ranks, because more take minutes. --images overrides it.
MAX_RANKS = 8
TOKENS = {"normal": 4096, "low-latency": 128}  # defaults of --tokens
NOT_CALIBRATED = "not calibrated: of this phase alone nothing was measured"
# What Transformer Engine's grouped products of a layer with H = 7168 and F = 2048 do on an H200 in bf16.
EXPERT_TFLOPS = 570.0
NEAR = 1.03  # time over that of the fastest up to which fewer SMs are preferred


def main(argv: Sequence[str]) -> int:
    """Prints tables."""
    options = _parser().parse_args(argv)
    cases = list(_cases(options))
    several_nodes = any(case.uses_network for case in cases)
    machine = Machine.load(options.machine) if options.machine else Machine.default(several_nodes)
    _print_machine(machine, cases)
    found = []
    for case in cases:
        found.append(_predict(case, machine, not options.no_band))
        _print_prediction(*found[-1], has_roles=len(cases) == 1, ffn=options.ffn)
    _print_recommended(found)
    if options.json:
        options.json.write_text(json.dumps([_as_json(*each) for each in found], indent=1))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "megatron-ep simulate",
        description="Predicts what dispatch (its layout known) and combine take on GPUs that you do not have, and the "
        "exchange of counts before a dispatch (notify): runs the protocol's own roles in virtual time. Does not "
        "simulate the host's part, what runs in parallel, nor congestion between the cards. Needs no GPU.",
        epilog="example: megatron-ep simulate 2,4,8 8 --num-sms 8,12,24 --json times.json",
    )
    parser.add_argument("nodes", metavar="NODES", help="nodes, or several numbers of nodes: 2,4,8")
    parser.add_argument("ranks", metavar="RANKS", type=int, help="ranks of a node, one a GPU")
    parser.add_argument(
        "--machine", help="machine file, or the name of one that comes along (h200_cx7; for one node h200_nvlink)"
    )
    case = parser.add_argument_group("case")
    case.add_argument("--mode", default="normal", help="normal or low-latency (%(default)s)")
    case.add_argument("--tokens", type=int, metavar="T", help="per rank (4096; in mode low-latency 128)")
    case.add_argument("--hidden", type=int, default=7168, metavar="H", help="(%(default)s)")
    case.add_argument("--topk", type=int, default=8, metavar="K", help="(%(default)s)")
    case.add_argument("--experts", type=int, metavar="E", help="(the least multiple of the ranks from 256 on)")
    case.add_argument("--ffn", type=int, default=2048, metavar="F", help="width of an expert (%(default)s)")
    case.add_argument(
        "--dtype", default="bf16", help="of dispatch's rows, bf16 or fp8; combine's are bf16 (%(default)s)"
    )
    case.add_argument(
        "--sum-at", default="token", help="where mode low-latency sums rows, token or expert (%(default)s)"
    )
    case.add_argument(
        "--routing",
        default="uniform",
        help="uniform; zipf:S, expert i with weight 1 / (i + 1)^S; nodes:M, at most M nodes a token (%(default)s)",
    )
    case.add_argument("--seed", type=int, default=0, help="of the experts that tokens choose (%(default)s)")
    case.add_argument(
        "--images",
        type=int,
        metavar="M",
        help="simulate M nodes, which divide NODES; the others do the same with all nodes shifted (as many as have "
        f"{MAX_RANKS} ranks, at least one)",
    )
    settings = parser.add_argument_group("settings of the buffer", "Each a number, or several to compare: 8,12,24.")
    settings.add_argument("--num-sms", metavar="N", help="SMs (24; in mode normal from 8 nodes on 16)")
    settings.add_argument("--channels", metavar="C", help="(as many as keep the SMs busy)")
    settings.add_argument("--rdma-rows", metavar="N", help="rows of a network ring (8 to 32)")
    settings.add_argument("--chunk", metavar="N", help="rows of a put at most (8)")
    settings.add_argument("--local-pass", choices=("on", "off"), help="(where it saves time)")
    output = parser.add_argument_group("output")
    output.add_argument("--no-band", action="store_true", help="one guess for what is open about the network card")
    output.add_argument("--json", type=output_file, metavar="FILE", help="everything that is known of the predictions")
    return parser


def _cases(options: argparse.Namespace) -> Iterator[Case]:
    if options.mode == "low-latency":
        for name in ("channels", "rdma_rows", "chunk", "local_pass"):
            if getattr(options, name) is not None:
                raise ValueError(f"--{name.replace('_', '-')}: there is none in mode low-latency")
    require_ints(options, 0, 1 << 20, "seed")
    require_ints(options, 1, 1 << 20, "ffn")
    lists: list[Sequence[Any]] = [
        [None] if text is None else numbers(name, text)  # None: the default of the buffer
        for name, text in (
            ("NODES", options.nodes),
            ("--num-sms", options.num_sms),
            ("--channels", options.channels),
            ("--rdma-rows", options.rdma_rows),
            ("--chunk", options.chunk),
        )
    ]
    for nodes, sms, channels, rdma_rows, chunk in itertools.product(*lists):
        topology = Topology(nodes, options.ranks)
        experts = options.experts if options.experts is not None else default_experts(topology)
        tuning = Tuning(
            channels=channels,
            rdma_chunk_tokens=Tuning.rdma_chunk_tokens if chunk is None else chunk,
            local_pass=None if options.local_pass is None else options.local_pass == "on",
        )
        config = Config(num_experts=experts, num_sms=sms, row_bytes=2 * options.hidden, tuning=tuning)
        if rdma_rows is not None:
            require_int("--rdma-rows", rdma_rows, 1, 1 << 12)
            tuning = dataclasses.replace(tuning, rdma_ring_bytes=rdma_rows * sizes.slot_bytes(config))
            config = dataclasses.replace(config, tuning=tuning)
        yield Case(
            topology,
            config,
            mode=options.mode,
            num_tokens=TOKENS.get(options.mode, 0) if options.tokens is None else options.tokens,
            hidden=options.hidden,
            topk=options.topk,
            dtype=options.dtype,
            sum_at=options.sum_at,
            routing=options.routing,
            images=default_images(topology) if options.images is None else options.images,
            seed=options.seed,
        )


def default_images(topology: Topology) -> int:
    """Returns the number of simulated nodes if all ranks are alike."""
    allowed = [m for m in range(1, topology.nodes + 1) if topology.nodes % m == 0]
    return max((m for m in allowed if m * topology.ranks_per_node <= MAX_RANKS), default=1)


Found = tuple[Prediction, dict[str, tuple[float, float]]]


def _predict(case: Case, machine: Machine, with_band: bool) -> Found:
    """Returns the prediction, and the bounds of each phase's time in us."""
    choices = case.choices()
    with progress.shown(f"{case.topology.nodes} x {case.topology.ranks_per_node}") as on_progress:
        prediction = predict(case, machine, on_progress=on_progress, choices=choices)
        times = {name: [phase.us] for name, phase in all_phases(prediction).items()}
        for other in machines_in_band(machine) if with_band and case.uses_network else ():
            for name, phase in all_phases(predict(case, other, on_progress=on_progress, choices=choices)).items():
                times[name].append(phase.us)
    return prediction, {name: (min(values), max(values)) for name, values in times.items()}


def all_phases(prediction: Prediction) -> dict[str, Phase]:
    """Returns the phases in the order of a call, including notify."""
    notify = {"notify": prediction.notify} if prediction.notify else {}
    return {**notify, **prediction.phases}


# ---- printed output


def _print_machine(machine: Machine, cases: Sequence[Case]) -> None:
    if machine.unmeasured:
        print(f"machine {machine.name}: {machine.sms} SMs; NOT MEASURED: {machine.unmeasured}")
        print("  no prediction for it has been compared with a measurement")
    else:
        error = machine.held_out[cases[0].mode]
        print(f"machine {machine.name}: {machine.sms} SMs; constants fitted to measurements of {error.measured}")
        print(f"  error for topologies that were held out, within a node or with nodes mapped: {error}")
    if any(case.uses_network for case in cases):
        band = "; ".join(
            f"{name} {' or '.join(f'{value:g}' for value in values)}" for name, values in machine.band.items()
        )
        print("  its network card was not measured: constants from documents")
        if band:
            print(f"  between what two guesses give lies the band: {band}")
        print("  topology above the cards and congestion are not in it")


def floors_us(prediction: Prediction) -> dict[str, float]:
    """Returns the time of each phase that the busier of a rank's NVLink and network card needs for the rows alone."""
    case, constants = prediction.case, prediction.machine.constants
    floors = {}
    for name, phase in prediction.phases.items():
        payload, scales = case.row_bytes if name == "dispatch" else (case.combine_bytes, 0)
        floor = phase.peer_rows * payload / constants["link"]
        if case.uses_network:
            floor = max(floor, phase.rail_rows * case.row_format(payload, scales).slot_bytes / constants["card"])
        floors[name] = floor / case.simulated_ranks / 1e3
    return floors


def _settings(case: Case) -> str:
    if case.is_low_latency:
        return f"low-latency mode, {case.num_sms} SMs, sums at the {case.sum_at}"
    settings = case.compiled_settings()
    text = f"{case.num_sms} SMs, {settings['channels']} channels"
    if case.topology.nodes > 1:
        chunk = min(settings["rdma_chunk"], max(1, settings["rdma_rows"] // 2))
        text += f", network rings of {settings['rdma_rows']} rows, puts of {chunk}"
    return text


def _print_share(prediction: Prediction, ffn: int) -> None:
    """Prints the share of the calls in a layer whose experts, SwiGLU of width `ffn`, all have as many rows."""
    case = prediction.case
    calls = 2 * sum(phase.us for phase in prediction.phases.values()) / 1e3  # the backward passes take as long
    experts = 3 * 6 * case.hidden * ffn * case.num_tokens * case.topk / EXPERT_TFLOPS / 1e9  # and gradients twice that
    share = calls / (calls + experts)
    print(
        f"of a layer {share:.0%}: {calls:.1f} ms, forward and backward, beside {experts:.1f} ms of experts of width "
        f"{ffn} at {EXPERT_TFLOPS:.0f} TFLOP/s; two chunks (moe_chunks) can hide at most the smaller of the two"
    )


def _print_prediction(
    prediction: Prediction, band: dict[str, tuple[float, float]], *, has_roles: bool, ffn: int
) -> None:
    case = prediction.case
    topology = case.topology
    print(
        f"\n{topology.nodes} x {topology.ranks_per_node} ranks, T = {case.num_tokens}, H = {case.hidden} {case.dtype}, "
        f"K = {case.topk}, E = {case.config.num_experts}, {case.routing}; {_settings(case)}; simulated: "
        f"{case.simulated_nodes} node{'s' if case.simulated_nodes > 1 else ''}"
    )
    print(f"{'us':10} {'p50':>9} {'p99':>9} {'last':>9} {'band':>19} {'bytes alone':>12}  waits for")
    floors = floors_us(prediction)
    for name, phase in all_phases(prediction).items():
        low, high = band[name]
        bounds = f"{low:.1f} to {high:.1f}" if high > low else ""
        floor = f"{floors[name]:.1f}" if name in floors else ""  # notify sends no rows
        print(
            f"{name:10} {phase.at(0.5):9.1f} {phase.at(0.99):9.1f} {phase.us:9.1f} {bounds:>19} {floor:>12}  "
            f"{phase.bottleneck if phase.is_calibrated else NOT_CALIBRATED}",
            flush=True,
        )
    if case.uses_network:
        ranks = case.simulated_ranks
        sent = (
            f"{name} {phase.messages / ranks:.0f} for "
            + ("counts" if name == "notify" else f"{phase.rail_rows / ranks:.0f} rows")
            for name, phase in all_phases(prediction).items()
        )
        print(f"messages of a rank over the network: {', '.join(sent)}")
    if not case.is_low_latency and case.dtype == "bf16":
        _print_share(prediction, ffn)
    if has_roles:
        for name, phase in all_phases(prediction).items():
            _print_roles(name, phase)


def _print_roles(name: str, phase: Phase) -> None:
    print(f"\n{name + ': role':32} {'warps':>7} {'copies':>7} {'waits':>7}  longest waits")
    for role, of in phase.roles.items():
        waits = sorted(of.waited.items(), key=lambda item: -item[1])[:2]
        longest = ", ".join(f"{wait} {us / of.time:.0%}" for wait, us in waits)
        print(f"{role:32} {of.warps:7} {of.copied / of.time:7.0%} {sum(of.waited.values()) / of.time:7.0%}  {longest}")


def _print_recommended(found: Sequence[Found]) -> None:
    """Prints the fastest settings among those with the fewest SMs whose total time is near that of the fastest."""
    by_topology: dict[Any, list[tuple[float, Case]]] = {}
    for prediction, _ in found:
        us = sum(phase.us for phase in prediction.phases.values())
        by_topology.setdefault(prediction.case.topology, []).append((us, prediction.case))
    for topology, times in by_topology.items():
        if len(times) < 2:
            continue
        best = min(us for us, _ in times)
        fewest = min(case.num_sms for us, case in times if us <= NEAR * best)
        us, case = min((pair for pair in times if pair[1].num_sms == fewest), key=lambda pair: pair[0])
        print(
            f"\n{topology.nodes} x {topology.ranks_per_node}: recommended {_settings(case)}: both ways {us:.0f} us, of "
            f"all {best:.0f} to {max(us for us, _ in times):.0f}"
        )


def _as_json(prediction: Prediction, band: dict[str, tuple[float, float]]) -> dict[str, Any]:
    case, floors = prediction.case, floors_us(prediction)
    error = prediction.machine.held_out.get(case.mode)
    return {
        "case": dataclasses.asdict(case),
        "settings": case.compiled_settings(),
        "machine": prediction.machine.name,
        "held_out": None if error is None else dataclasses.asdict(error),
        "phases": {
            name: {
                "us": {"p50": phase.at(0.5), "p99": phase.at(0.99), "max": phase.us},
                "band": band[name],
                "is_calibrated": phase.is_calibrated,
                "bytes_alone": floors.get(name),
                "bottleneck": phase.bottleneck,
                "busy": phase.busy,
                "roles": {role: dataclasses.asdict(of) for role, of in phase.roles.items()},
                "bytes_sent": phase.bytes_sent,
                "messages": phase.messages,
                "rail_rows": phase.rail_rows,
            }
            for name, phase in all_phases(prediction).items()
        },
    }
