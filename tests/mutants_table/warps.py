"""What a warp of a GPU does by itself, and warps that meet."""

from mutants_table.mutant import BULK, KERNELS, LL, ROWS, WARP, Mutant, changed

QUANTIZE, WARP_TEAM = "exec/device/quantize.h", "router/warp_team.h"
ROUTER = ("router",)
LETS_COME = """if (lane_id() == 0 && ptx::fetch_add_shared(&done_of_block(), 1) + 1 == blockDim.x / 32)
                ptx::launch_dependents();"""
POINTS = (
    "if (lane_id() == 0)\n            of_scope<scope>(ptx::store_release_gpu, ptx::store_release_sys)(flag, value);"
)
LANES = "f(lane_id(), of_scope<scope>(ptx::store_release_gpu, ptx::store_release_sys));"

MUTANTS = [
    # ---- the copy engine
    Mutant("init: no fence after the barriers", BULK, "ptx::fence_barrier_init();", programs=ROWS),
    Mutant("stage: no proxy fence", BULK, "«ptx::fence_proxy_async_global();»\n        in_ ="),
    Mutant(
        "for_each_chunk: the buffer is not waited for", BULK, "«wait_filled();»\n            f(buffer", programs=ROWS
    ),
    Mutant(
        "for_each_chunk: writes are not committed",
        BULK,
        "«ptx::bulk_commit();»\n            ++emptied_;\n            //",
        programs=ROWS,
    ),
    Mutant(
        "drop: the buffer is not waited for", BULK, "«wait_filled();»\n            ptx::bulk_commit();", programs=ROWS
    ),
    Mutant("sum: no proxy fence", BULK, "«ptx::fence_proxy_async_global();»\n        ptx::bulk_wait_read<0>();"),
    Mutant(
        "sum: older writes are not waited for",
        BULK,
        "fence_proxy_async_global();\n        «ptx::bulk_wait_read<0>();»",
        programs=ROWS,
    ),
    Mutant(
        "sum: lanes do not meet before the first piece",
        BULK,
        "«__syncwarp();»  // now no lane's writes read the buffers",
        programs=ROWS,
    ),
    Mutant("sum: lanes do not meet between pieces", BULK, "«__syncwarp();»  // the pieces before these", programs=ROWS),
    Mutant(
        "sum: pieces are not waited for",
        BULK,
        "while (!ptx::barrier_try_wait(&buffers_.pieces_filled, sums_ & 1)) {\n            }",
        programs=ROWS,
    ),
    Mutant(
        "copy_each: older writes are not waited for",
        BULK,
        "«ptx::bulk_wait_read<0>();»\n                uint64_t* barrier",
        programs=ROWS,
    ),
    Mutant("copy_each: lanes do not meet", BULK, "«__syncwarp();»  // now no lane's writes read that", programs=ROWS),
    Mutant(
        "copy_each: rows are not waited for", BULK, "«wait_filled();»\n                if (is_in(first))", programs=ROWS
    ),
    Mutant(
        "copy_each: writes are not committed",
        BULK,
        "«ptx::bulk_commit();»\n                ++emptied_;",
        programs=ROWS,
    ),
    Mutant("wait_written: nothing is waited for", BULK, "ptx::bulk_wait_written();", programs=ROWS),
    Mutant("share: no proxy fence", BULK, "«ptx::fence_proxy_async_shared();»\n        return {first};", programs=ROWS),
    Mutant(
        "quantize: no proxy fence", BULK, "«ptx::fence_proxy_async_shared();»\n            __syncwarp();", programs=ROWS
    ),
    Mutant(
        "quantize: lanes do not meet",
        BULK,
        "ptx::fence_proxy_async_shared();\n            «__syncwarp();»",
        programs=ROWS,
    ),
    Mutant("quantize_shared: lanes do not meet", QUANTIZE, "«__syncwarp();»  // all have read", programs=ROWS),
    Mutant("fill: older writes are not waited for", BULK, "ptx::bulk_wait_read<kPending>();", programs=ROWS),
    Mutant("fill: lanes do not meet", BULK, "ptx::bulk_wait_read<kPending>();\n        «__syncwarp();»"),
    # ---- the warp
    Mutant("end of a warp: staged rows are left", WARP, "«bulk_.drop();»\n        finish_writes();", programs=ROWS),
    Mutant("end of a warp: writes are left", WARP, "bulk_.drop();\n        «finish_writes();»"),
    Mutant("lanes: they do not meet", WARP, "if (lane_id() < count) f(lane_id());\n        «__syncwarp();»"),
    Mutant("met: lanes do not meet", WARP, "«__syncwarp();»  // what a lane has acquired is there for all: a vote"),
    Mutant("wait: lanes do not meet", WARP, "if (began) note_wait(peer, began);\n                «__syncwarp();»"),
    Mutant("finish_writes: the engine is not waited for", WARP, "bulk_.wait_written();"),
    Mutant("finish_writes: lanes do not meet", WARP, "bulk_.wait_written();\n        «__syncwarp();»"),
    Mutant(
        "publish: writes are not finished",
        WARP,
        " void publish(uint64_t* flag, uint64_t value) {\n        «finish_writes();»",
    ),
    Mutant("publish: relaxed", WARP, POINTS, POINTS.replace("release", "relaxed")),
    Mutant(
        "publish_lanes: writes are not finished",
        WARP,
        " void publish_lanes(int count, F&& f) {\n        «finish_writes();»",
    ),
    Mutant("publish_lanes: relaxed", WARP, LANES, LANES.replace("release", "relaxed")),
    Mutant(
        "acquire: a plain load",
        WARP,
        "return of_scope<scope>(ptx::load_acquire_gpu, ptx::load_acquire_sys)(flag);",
        "return *flag;",
    ),
    Mutant("scopes: all are the GPU's", WARP, "return scope == Scope::Rank ? gpu : sys;", "return gpu;"),
    changed("launch_dependents: the first warp does", WARP, LETS_COME, "blockDim.x / 32", "1", LL),
    # ---- warps that meet
    Mutant("meet: a block before all of its warps", KERNELS, "«__syncthreads();»\n    if (warp_of_block() == 0) {"),
    Mutant(
        "meet: warps before the others of their block",
        KERNELS,
        ">= all, 0)) {\n        }\n    }\n    «__syncthreads();»",
    ),
    changed(
        "meet: relaxed",
        KERNELS,
        "if (first) all = (quotient(ptx::fetch_add_acq_rel_gpu(arrivals, 1), blocks) + 1) * blocks;",
        "fetch_add_acq_rel_gpu",
        "fetch_add_sys",
    ),
    Mutant("end_call: lanes do not meet before", KERNELS, "«__syncwarp();»\n    uint64_t before = 0;"),
    Mutant("end_call: lanes do not meet behind", KERNELS, "«__syncwarp();»  // extends lane 0's acquire to the other"),
    changed(
        "end_call: relaxed",
        KERNELS,
        "if (first) before = ptx::fetch_add_acq_rel_gpu(arrivals, 1);",
        "fetch_add_acq_rel_gpu",
        "fetch_add_sys",
    ),
    # ---- the gate's warp
    Mutant("router each: lanes do not meet", WARP_TEAM, "f(i);\n        «__syncwarp();»", programs=ROUTER),
    Mutant("router once: lanes do not meet", WARP_TEAM, "f();\n        «__syncwarp();»", programs=ROUTER),
    Mutant(
        "router take_top: lanes do not meet",
        WARP_TEAM,
        "f(rank, winner);\n        }\n        «__syncwarp();»",
        programs=ROUTER,
    ),
]
