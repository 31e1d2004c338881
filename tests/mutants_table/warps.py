"""What a warp of a GPU does by itself, and warps that meet."""

from mutants_table.mutant import Table

POINTS = "if (lane_id() == 0) of_scope<scope>(ptx::store_release_gpu, ptx::store_release_sys)(flag, value);"
LANES = "f(lane_id(), of_scope<scope>(ptx::store_release_gpu, ptx::store_release_sys));"

MUTANTS: Table = {
    ("exec/device/bulk.h", "rows"): [
        ("init: no fence after the barriers", "ptx::fence_barrier_init();"),
        ("for_each_chunk: the buffer is not waited for", "«wait_filled();» f(buffer"),
        ("for_each_chunk: writes are not committed", "«ptx::bulk_commit();» ++emptied_; //"),
        ("drop: the buffer is not waited for", "«wait_filled();» ptx::bulk_commit();"),
        ("sum: older writes are not waited for", "fence_proxy_async_global(); «ptx::bulk_wait_read<0>();»"),
        ("sum: lanes do not meet before the first piece", "«__syncwarp();»  // now no lane's writes read the …"),
        ("sum: lanes do not meet between pieces", "«__syncwarp();»  // the pieces before these"),
        ("sum: pieces are not waited for", "while (!ptx::barrier_try_wait(&buffers_.pieces_filled, …}"),
        ("copy_each: older writes are not waited for", "«ptx::bulk_wait_read<0>();» uint64_t*"),
        ("copy_each: lanes do not meet", "«__syncwarp();»  // now no lane's writes read that"),
        ("copy_each: rows are not waited for", "«wait_filled();» if (is_in(first))"),
        (
            "copy_each: writes are not committed",
            "buffer(emptied_) + (own - first) * size, size); «ptx::bulk_commit();»",
        ),
        ("wait_written: nothing is waited for", "ptx::bulk_wait_written();"),
        ("share: no proxy fence", "«ptx::fence_proxy_async_shared();» return {first};"),
        ("quantize: no proxy fence", "«ptx::fence_proxy_async_shared();» __syncwarp();"),
        ("quantize: lanes do not meet", "ptx::fence_proxy_async_shared(); «__syncwarp();»"),
        ("fill: older writes are not waited for", "ptx::bulk_wait_read<kPending>();"),
    ],
    ("exec/device/bulk.h", "p2p"): [
        ("stage: no proxy fence", "«ptx::fence_proxy_async_global();» in_ ="),
        ("sum: no proxy fence", "«ptx::fence_proxy_async_global();» ptx::bulk_wait_read<0>();"),
        ("fill: lanes do not meet", "ptx::bulk_wait_read<kPending>(); «__syncwarp();»"),
    ],
    ("exec/device/quantize.h", "rows"): [
        ("quantize_shared: lanes do not meet", "«__syncwarp();»  // all have read"),
    ],
    ("exec/device/device_warp.h", "rows"): [
        ("end of a warp: staged rows are left", "«bulk_.drop();» finish_writes();"),
    ],
    ("exec/device/device_warp.h", "p2p"): [
        ("end of a warp: writes are left", "bulk_.drop(); «finish_writes();»"),
        ("lanes: they do not meet", "if (lane_id() < count) f(lane_id()); «__syncwarp();»"),
        ("met: lanes do not meet", "«__syncwarp();»  // what a lane has acquired is there for all: a vote"),
        ("wait: lanes do not meet", "if (began) note_wait(peer, began); «__syncwarp();»"),
        ("finish_writes: the engine is not waited for", "bulk_.wait_written();"),
        ("finish_writes: lanes do not meet", "bulk_.wait_written(); «__syncwarp();»"),
        ("publish: writes are not finished", "void publish(uint64_t* …{ «finish_writes();»"),
        ("publish: relaxed", POINTS, POINTS.replace("release", "relaxed")),
        ("publish_lanes: writes are not finished", "void publish_lanes(…{ «finish_writes();»"),
        ("publish_lanes: relaxed", LANES, LANES.replace("release", "relaxed")),
        ("acquire: a plain load", "return of_scope<scope>(ptx::load_acquire…;", "return *flag;"),
        ("scopes: all are the GPU's", "return scope == Scope::Rank ? gpu : sys;", "return gpu;"),
    ],
    ("exec/device/device_warp.h", "low_latency"): [
        (
            "launch_dependents: the first warp does",
            "if (lane_id() == 0 && ptx::fetch_add_shared…;",
            "blockDim.x / 32",
            "1",
        ),
    ],
    ("launch/cuda/kernels.h", "p2p"): [
        ("meet: a block before all of its warps", "«__syncthreads();» if (warp_of_block() == 0) {"),
        ("meet: warps before the others of their block", ">= all, 0)) { } } «__syncthreads();»"),
        ("meet: relaxed", "if (first) all = …;", "fetch_add_acq_rel_gpu", "fetch_add_sys"),
        ("end_call: lanes do not meet before", "«__syncwarp();» uint64_t before = 0;"),
        ("end_call: lanes do not meet behind", "«__syncwarp();»  // extends lane 0's acquire to the other"),
        ("end_call: relaxed", "if (first) before = …;", "fetch_add_acq_rel_gpu", "fetch_add_sys"),
    ],
    ("router/warp_team.h", "router"): [
        ("router each: lanes do not meet", "f(i); «__syncwarp();»"),
        ("router once: lanes do not meet", "f(); «__syncwarp();»"),
        ("router take_top: lanes do not meet", "f(rank, winner); } «__syncwarp();»"),
    ],
}
