"""Removes one fence, wait or order after the other from the kernels' source, and expects a test to fail each time.

    python tests/mutants.py [--build build/cpython-311] [--jobs 1] [NAME ...]

A mutant is the source with one text replaced, compiled into the lane-by-lane program that its row names (`cmake --build
BUILD --target simt` must have built it). It is killed by a run that fails, and survives when all runs pass. Prints a
table; the exit status is 1 if one survives. NAME: only mutants in whose name it is.
"""

import argparse
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CSRC = ROOT / "csrc"
# Cheap runs first: the first that fails is enough.
RUNS = {
    "p2p": [["0", "4"], ["4", "10"], ["10", "20"], ["20", "30"], ["absent"], ["unfit"]],
    "nccl": [["0", "4"], ["4", "10"], ["10", "20"]],
}
RUN_LIMIT_S = 300  # a run that hangs has failed, too

BULK, WARP = "exec/device/bulk.h", "exec/device/device_warp.h"
RING, DISPATCH, COMBINE = "protocol/ring.h", "protocol/dispatch.h", "protocol/combine.h"
COORDINATORS, NOTIFY, NCCL = "protocol/coordinators.h", "protocol/notify.h", "fabric/nccl/nccl_fabric.h"


@dataclass(frozen=True)
class Mutant:
    name: str
    file: str  # below csrc
    text: str  # occurs exactly once
    replacement: str
    program: str = "p2p"


MUTANTS = [
    # ---- the copy engine
    Mutant("init: no fence after the barriers", BULK, "            ptx::fence_barrier_init();\n", ""),
    Mutant("init: lanes do not meet", BULK, "        }\n        __syncwarp();\n    }\n};", "        }\n    }\n};"),
    Mutant("stage: no proxy fence", BULK, "        ptx::fence_proxy_async_global();\n        in_ =", "        in_ ="),
    Mutant(
        "multicast: the buffer is not waited for",
        BULK,
        "            wait_filled();\n            if (writes)",
        "            if (writes)",
    ),
    Mutant(
        "multicast: writes are not committed",
        BULK,
        "            ptx::bulk_commit();\n            ++emptied_;",
        "            ++emptied_;",
    ),
    Mutant(
        "drop: the buffer is not waited for",
        BULK,
        "            wait_filled();\n            ptx::bulk_commit();",
        "            ptx::bulk_commit();",
    ),
    Mutant(
        "sum: no proxy fence",
        BULK,
        "        ptx::fence_proxy_async_global();\n        ptx::bulk_wait_read<0>();",
        "        ptx::bulk_wait_read<0>();",
    ),
    Mutant("sum: older writes are not waited for", BULK, "        ptx::bulk_wait_read<0>();\n", ""),
    Mutant(
        "sum: lanes do not meet before the first piece",
        BULK,
        "        __syncwarp();  // now no lane's writes read the buffers any more\n",
        "",
    ),
    Mutant(
        "sum: lanes do not meet between pieces",
        BULK,
        "            __syncwarp();  // the pieces before these have been added by all lanes, too\n",
        "",
    ),
    Mutant(
        "sum: pieces are not waited for",
        BULK,
        "            while (!ptx::barrier_try_wait(&buffers_.pieces_filled, sums_ & 1)) {\n            }\n",
        "",
    ),
    Mutant(
        "wait_written: nothing is waited for",
        BULK,
        "void wait_written() { ptx::bulk_wait_written(); }",
        "void wait_written() {}",
    ),
    Mutant("share: no proxy fence", BULK, "        ptx::fence_proxy_async_shared();\n", ""),
    Mutant(
        "share: lanes do not meet", BULK, "        __syncwarp();\n        return {first};", "        return {first};"
    ),
    Mutant("fill: older writes are not waited for", BULK, "        ptx::bulk_wait_read<kPending>();\n", ""),
    Mutant(
        "fill: lanes do not meet",
        BULK,
        "        ptx::bulk_wait_read<kPending>();\n        __syncwarp();\n",
        "        ptx::bulk_wait_read<kPending>();\n",
    ),
    # ---- the warp
    Mutant(
        "end of a warp: staged rows are left",
        WARP,
        "        bulk_.drop();\n        finish_writes();",
        "        finish_writes();",
    ),
    Mutant(
        "end of a warp: writes are left",
        WARP,
        "        bulk_.drop();\n        finish_writes();",
        "        bulk_.drop();",
    ),
    Mutant(
        "lanes: they do not meet",
        WARP,
        "        if (lane_id() < count) f(lane_id());\n        __syncwarp();",
        "        if (lane_id() < count) f(lane_id());",
    ),
    Mutant(
        "met: lanes do not meet",
        WARP,
        "        __syncwarp();  // what a lane has acquired is there for all: a vote orders nothing\n",
        "",
    ),
    Mutant(
        "wait: lanes do not meet",
        WARP,
        "            if (enough(met)) {\n                __syncwarp();",
        "            if (enough(met)) {",
    ),
    Mutant(
        "finish_writes: the engine is not waited for",
        WARP,
        "        bulk_.wait_written();\n        __syncwarp();",
        "        __syncwarp();",
    ),
    Mutant(
        "finish_writes: lanes do not meet",
        WARP,
        "        bulk_.wait_written();\n        __syncwarp();",
        "        bulk_.wait_written();",
    ),
    Mutant(
        "publish: writes are not finished",
        WARP,
        " void publish(uint64_t* flag, uint64_t value) {\n        finish_writes();",
        " void publish(uint64_t* flag, uint64_t value) {",
    ),
    Mutant(
        "publish: relaxed",
        WARP,
        "            of_scope<scope>(ptx::store_release_gpu, ptx::store_release_sys)(flag, value);",
        "            of_scope<scope>(ptx::store_relaxed_gpu, ptx::store_relaxed_sys)(flag, value);",
    ),
    Mutant(
        "publish_lanes: writes are not finished",
        WARP,
        " void publish_lanes(int count, F&& f) {\n        finish_writes();",
        " void publish_lanes(int count, F&& f) {",
    ),
    Mutant(
        "publish_lanes: relaxed",
        WARP,
        "            f(lane_id(), of_scope<scope>(ptx::store_release_gpu, ptx::store_release_sys));",
        "            f(lane_id(), of_scope<scope>(ptx::store_relaxed_gpu, ptx::store_relaxed_sys));",
    ),
    Mutant(
        "acquire: a plain load",
        WARP,
        "        return of_scope<scope>(ptx::load_acquire_gpu, ptx::load_acquire_sys)(flag);",
        "        return *flag;",
    ),
    Mutant(
        "scopes: all are the GPU's", WARP, "        return scope == Scope::Rank ? gpu : sys;", "        return gpu;"
    ),
    # ---- NVLink rings
    Mutant("publish_tails: the rank's scope", RING, "publish_lanes<Scope::System>(", "publish_lanes<Scope::Rank>("),
    Mutant("publish_tails: a credit", RING, "publish_lanes<Scope::System>(", "credit_lanes<Scope::System>("),
    Mutant("publish_heads: the rank's scope", RING, "credit_lanes<Scope::System>(", "credit_lanes<Scope::Rank>("),
    Mutant(
        "nvl_credit: the rank's scope",
        RING,
        "acquire<Scope::System>(rings.nvl_out_head(node, peer)) + rings",
        "acquire<Scope::Rank>(rings.nvl_out_head(node, peer)) + rings",
    ),
    Mutant(
        "nvl_credit: a plain load",
        RING,
        "W::template acquire<Scope::System>(rings.nvl_out_head(node, peer)) + rings",
        "*rings.nvl_out_head(node, peer) + rings",
    ),
    Mutant(
        "nvl_row: the rank's scope",
        RING,
        "acquire<Scope::System>(rings.nvl_in_tail(node, peer))",
        "acquire<Scope::Rank>(rings.nvl_in_tail(node, peer))",
    ),
    Mutant(
        "nvl_row: a plain load",
        RING,
        "W::template acquire<Scope::System>(rings.nvl_in_tail(node, peer))",
        "*rings.nvl_in_tail(node, peer)",
    ),
    # ---- dispatch
    Mutant(
        "take_slots: no wait for room",
        DISPATCH,
        "if (!room && !warp.wait_all(Wait::NvlCredit, topk, credit)) return false;",
        "(void)room;",
    ),
    Mutant(
        "receiver: credit within the rank",
        DISPATCH,
        "credit<Scope::System>(rings.nvl_in_head",
        "credit<Scope::Rank>(rings.nvl_in_head",
    ),
    Mutant(
        "rdma_sender: a credit for a packed row",
        DISPATCH,
        "publish<Scope::Rank>(&rings.rdma_out(node).next",
        "credit<Scope::Rank>(&rings.rdma_out(node).next",
    ),
    # ---- combine
    Mutant(
        "combine_nvl_sender: the rank's scope",
        COMBINE,
        "publish<Scope::System>(rings.nvl_out_tail",
        "publish<Scope::Rank>(rings.nvl_out_tail",
    ),
    Mutant(
        "combine_nvl_sender: a credit",
        COMBINE,
        "publish<Scope::System>(rings.nvl_out_tail",
        "credit<Scope::System>(rings.nvl_out_tail",
    ),
    Mutant(
        "combine_forwarder: a credit for a packed row",
        COMBINE,
        "publish<Scope::Rank>(&rings.rdma_out(node).next",
        "credit<Scope::Rank>(&rings.rdma_out(node).next",
    ),
    # ---- coordinators and notify
    Mutant("follow: a plain load", COORDINATORS, "W::template acquire<Scope::Rank>(cursor(lane))", "*cursor(lane)"),
    Mutant(
        "relay_counts: the rank's scope",
        NOTIFY,
        "publish<Scope::System>(\n        fabric",
        "publish<Scope::Rank>(\n        fabric",
    ),
    Mutant(
        "relay_counts: a credit",
        NOTIFY,
        "publish<Scope::System>(\n        fabric",
        "credit<Scope::System>(\n        fabric",
    ),
    Mutant(
        "receive_counts: a plain load",
        NOTIFY,
        "W::template acquire<Scope::System>(fabric.template own<uint64_t>(flag))",
        "*fabric.template own<uint64_t>(flag)",
    ),
    # ---- the network
    Mutant("nccl put: no fence", NCCL, "    __threadfence_system();\n    gin_of", "    gin_of", "nccl"),
]


def mutated(mutant: Mutant) -> str:
    """The file with the text replaced. Raises ValueError unless it occurs exactly once."""
    source = (CSRC / mutant.file).read_text()
    if source.count(mutant.text) != 1:
        raise ValueError(
            f"'{mutant.name}': its text occurs {source.count(mutant.text)} times in {mutant.file}, must once"
        )
    return source.replace(mutant.text, mutant.replacement)


def commands_of(build: Path, program: str) -> tuple[str, str]:
    """How CMake's build compiles the kernels for a program, and links it."""
    listed = subprocess.run(["ninja", "-t", "commands", program], cwd=build, capture_output=True, text=True, check=True)
    lines = listed.stdout.splitlines()
    return next(line for line in lines if line.endswith("/device_warp.cpp")), lines[-1]


def outcome(mutant: Mutant, build: Path) -> str:
    """What killed it, or an empty text."""
    program = f"simt_{mutant.program}"
    compile_command, link_command = commands_of(build, program)
    with tempfile.TemporaryDirectory() as folder:
        changed = Path(folder, mutant.file)
        changed.parent.mkdir(parents=True)
        changed.write_text(mutated(mutant))
        built = f"tests/CMakeFiles/{program}.dir/device_warp.cpp.o"
        ours = f"{folder}/device_warp.o"
        # the changed file is found before the one in csrc
        compile_command = compile_command.replace(built, ours).replace(f"-I{CSRC} ", f"-I{folder} -I{CSRC} ", 1)
        link_command = link_command.replace(built, ours).replace(f"-o tests/{program}", f"-o {folder}/program")
        for command in (compile_command, link_command):
            done = subprocess.run(command, shell=True, cwd=build, capture_output=True, text=True)
            if done.returncode != 0:
                raise RuntimeError(f"'{mutant.name}' does not compile:\n{done.stderr[-2000:]}")
        for arguments in RUNS[mutant.program]:
            try:
                run = subprocess.run(
                    [f"{folder}/program", *arguments], capture_output=True, text=True, timeout=RUN_LIMIT_S
                )
            except subprocess.TimeoutExpired:
                return f"{program} {' '.join(arguments)}: hangs"
            if run.returncode != 0:
                return f"{program} {' '.join(arguments)}: {(run.stderr.splitlines() or ['?'])[-1]}"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--build", type=Path, default=ROOT / "build" / sys.implementation.cache_tag)
    parser.add_argument("--jobs", type=int, default=1)
    arguments = parser.parse_args()
    chosen = [m for m in MUTANTS if not arguments.names or any(name in m.name for name in arguments.names)]
    survivors = 0
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for mutant, killer in zip(chosen, pool.map(lambda m: outcome(m, arguments.build), chosen), strict=True):
            survivors += not killer
            print(f"{'killed' if killer else 'SURVIVED':9} {mutant.file}: {mutant.name}  [{killer[:110]}]", flush=True)
    print(f"{len(chosen) - survivors} of {len(chosen)} mutants killed")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
