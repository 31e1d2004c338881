#undef _FORTIFY_SOURCE  // which takes a jump to another stack for a mistake
#include "simt.h"
// after it
#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include "order.h"

namespace simt {
namespace {

constexpr size_t kStackBytes = 64 << 10;
constexpr size_t kSharedBytes = 228 << 10;

struct Warp {
    int arrived = 0;
    uint64_t generation = 0;
    Kind kind = Kind::Sync;
    std::array<uint64_t, 32> values[2] = {};
};

struct Lane {
    ucontext_t context;  // where it begins
    jmp_buf place;       // where it goes on
    bool begun = false;
    unsigned thread, block;  // that among the blocks of all grids
    unsigned index;          // of the block in its own
    const std::function<void()>* kernel;
    Warp* warp;
    bool done = false;
    uint64_t waits_for = 0;  // the generation of its warp at which it goes on
};

unsigned threads_per_block, blocks_per_grid;
std::vector<std::unique_ptr<char, decltype(&std::free)>> memories;
struct BlockMet {
    uint64_t lanes = 0;  // how often one has come to a meeting
    int lets_next_come = 0;
};
std::vector<BlockMet> blocks_met;
jmp_buf scheduler;
Lane* current;

// Jumps, because swapcontext asks the kernel for the mask of signals each time.
[[gnu::noinline]] void leave() {
    if (_setjmp(current->place) == 0) _longjmp(scheduler, 1);
}
[[gnu::noinline]] void resume() {
    if (_setjmp(scheduler) != 0) return;
    if (std::exchange(current->begun, true)) _longjmp(current->place, 1);
    setcontext(&current->context);
}

void enter() {
    (*current->kernel)();
    current->done = true;
    leave();
}

void prepare(Lane& lane, char* stack) {
    getcontext(&lane.context);
    lane.context.uc_stack.ss_sp = stack;
    lane.context.uc_stack.ss_size = kStackBytes;
    lane.context.uc_link = nullptr;
    makecontext(&lane.context, enter, 0);
}

}  // namespace

void die(const char* what) {
    std::fprintf(stderr, "%s (seed %lu, block %u, thread %u)\n", what, seed,
                 current ? current->block : 0, current ? current->thread : 0);
    std::exit(1);
}

// place(block): which of the kernels it runs, and its index in that one's grid.
template <class PlaceOf>
static void run_grids(const std::vector<std::function<void()>>& kernels, unsigned blocks,
                      unsigned blocks_per_rank, unsigned threads, uint64_t seed, PlaceOf&& place) {
    std::mt19937_64 random(seed);
    order::begin(blocks * threads / 32, blocks_per_rank * threads / 32);
    threads_per_block = threads;
    blocks_per_grid = blocks / kernels.size();
    memories.clear();
    blocks_met.assign(blocks, {});
    for (unsigned block = 0; block < blocks; ++block) {
        memories.emplace_back(static_cast<char*>(std::aligned_alloc(128, kSharedBytes)),
                              &std::free);
        std::memset(memories.back().get(), 0xcd, kSharedBytes);
        order::track(memories.back().get(), kSharedBytes, "shared memory");
    }
    std::vector<Warp> warps(blocks * threads / 32);
    std::vector<Lane> lanes(blocks * threads);
    char* stacks =
        static_cast<char*>(mmap(nullptr, lanes.size() * kStackBytes, PROT_READ | PROT_WRITE,
                                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (stacks == MAP_FAILED) die("no memory for stacks");
    for (size_t i = 0; i < lanes.size(); ++i) {
        Lane& lane = lanes[i];
        lane.block = i / threads;
        lane.thread = i % threads;
        const auto [kernel, index] = place(lane.block);
        lane.kernel = &kernels[kernel];
        lane.index = index;
        lane.warp = &warps[i / 32];
        prepare(lane, stacks + i * kStackBytes);
    }
    std::vector<size_t> order(warps.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = i;
    std::vector<int> lane_order(32);
    for (int i = 0; i < 32; ++i) lane_order[i] = i;
    while (!order.empty()) {
        bool progress = false;
        std::shuffle(order.begin(), order.end(), random);
        for (const size_t w : order) {
            // the lanes of a warp go to their next collective in any order
            std::shuffle(lane_order.begin(), lane_order.end(), random);
            if (background) background();
            for (const int i : lane_order) {
                Lane& lane = lanes[w * 32 + i];
                if (lane.done || lane.warp->generation < lane.waits_for) continue;
                progress = true;
                current = &lane;
                resume();
                current = nullptr;
            }
        }
        std::erase_if(order, [&](size_t w) {
            return std::all_of(&lanes[w * 32], &lanes[w * 32] + 32,
                               [](const Lane& lane) { return lane.done; });
        });
        if (!progress && !order.empty()) die("lanes wait for a collective that others never reach");
    }
    munmap(stacks, lanes.size() * kStackBytes);
    for (const auto& memory : memories) order::forget(memory.get());
    order::end();
}

void run(unsigned ranks, unsigned blocks_per_rank, unsigned threads, uint64_t seed,
         const std::function<void()>& kernel) {
    run_grids({kernel}, ranks * blocks_per_rank, blocks_per_rank, threads, seed,
              [](unsigned block) { return std::pair(0u, block); });
}
void run_at_once(const std::vector<std::function<void()>>& kernels, unsigned blocks,
                 unsigned threads, uint64_t seed) {
    run_grids(kernels, kernels.size() * blocks, blocks, threads, seed,
              [=](unsigned block) { return std::pair(block / blocks, block % blocks); });
}
void run_beside(unsigned ranks, unsigned blocks, const std::function<void()>& kernel,
                unsigned more_blocks, const std::function<void()>& another, unsigned threads,
                uint64_t seed) {
    const unsigned of_rank = blocks + more_blocks;
    run_grids({kernel, another}, ranks * of_rank, of_rank, threads, seed, [=](unsigned block) {
        const unsigned rank = block / of_rank, i = block % of_rank;
        return i < blocks ? std::pair(0u, rank * blocks + i)
                          : std::pair(1u, rank * more_blocks + i - blocks);
    });
}

void yield() { leave(); }

void meet() {
    uint64_t& met = blocks_met[current->block].lanes;
    const uint64_t before = order::fetch_add_acq_rel(&met, 1, order::Scope::Gpu);
    const uint64_t all = (before / threads_per_block + 1) * threads_per_block;
    while (order::acquire(&met, order::Scope::Gpu) < all) yield();
}

void launch_dependents() {
    if (blocks_met[current->block].lets_next_come++) die("a block lets the next launch come twice");
}

void may_wait_for_others() {
    if (current && blocks_met[current->block].lets_next_come)
        die("a block that lets the next launch come waits for another rank");
}

bool in_lane() { return current; }
unsigned warp_index() { return (current->block * threads_per_block + current->thread) / 32; }
uint64_t meetings() { return current->warp->generation; }
Index thread_index() { return {current->thread}; }
Index block_index() { return {current->index}; }
Index block_size() { return {threads_per_block}; }
Index grid_size() { return {blocks_per_grid}; }
char* block_memory() { return memories[current->block].get(); }

const std::array<uint64_t, 32>& exchange(Kind kind, uint64_t value) {
    Warp& warp = *current->warp;
    if (warp.arrived == 0) warp.kind = kind;
    if (warp.kind != kind) die("lanes of a warp meet at different collectives");
    const uint64_t generation = warp.generation;
    warp.values[generation % 2][current->thread % 32] = value;
    if (++warp.arrived == 32) {
        warp.arrived = 0;
        ++warp.generation;
        if (kind == Kind::Sync) order::sync(warp_index());
    }
    current->waits_for = generation + 1;
    leave();
    return warp.values[generation % 2];
}

}  // namespace simt
