#include "exec/device/ptx.h"

// The copy engine reads and writes as early as it may, or as late.
namespace ep::ptx {
namespace {

namespace order = simt::order;

struct Load {
    void* shared;
    const void* global;
    uint32_t bytes;
};
struct Barrier {
    uint32_t arrivals = 0, left = 0, phase = 0;
    int64_t bytes = 0;
    int polls = 0;            // of an arrived barrier that misses bytes
    std::vector<Load> loads;  // under way: they happen when somebody asks
    bool is_fenced = false;
};
struct Store {
    void* global;
    const void* shared;
    std::vector<char> read;  // what was in shared memory when it was read
};
using Group = std::vector<Store>;
struct Lane {
    Group open;
    std::vector<Group> committed;     // not written yet
    size_t read = 0;                  // of these, how many have read their source
    std::vector<uint64_t*> barriers;  // initialised, and not yet fenced
};

std::map<uint64_t*, Barrier> barriers;
std::map<std::pair<unsigned, unsigned>, Lane> lanes;

Lane& lane() { return lanes[{simt::warp_index(), simt::lane()}]; }

Barrier& ready(uint64_t* address) {
    order::read(address, sizeof(*address));  // of what initialised it
    return barriers[address];
}
order::Actor& phases(uint64_t* barrier) {
    return order::actor({reinterpret_cast<uintptr_t>(barrier)});
}

bool coin() {
    static std::minstd_rand random;
    return random() % 2;
}

void require_bulk(const void* shared, const void* global, uint32_t bytes) {
    require_aligned(shared);
    require_aligned(global);
    if (bytes % 16) simt::die("a bulk copy of a size that is no multiple of 16");
}

}  // namespace

void end_of_launch() {
    for (const auto& [_, lane] : lanes) {
        for (const Group& group : lane.committed) {
            if (!group.empty()) simt::die("a kernel ended before a bulk store was written");
        }
    }
    for (const auto& [_, barrier] : barriers) {
        if (!barrier.loads.empty()) simt::die("a kernel ended before a bulk load had come");
    }
    lanes.clear();
    barriers.clear();
    end_of_lines();
}

void barrier_init(uint64_t* barrier, uint32_t arrivals) {
    order::write(barrier, sizeof(*barrier));
    barriers[barrier] = {arrivals, arrivals};
    lane().barriers.push_back(barrier);
}
void fence_barrier_init() {
    for (uint64_t* barrier : std::exchange(lane().barriers, {})) barriers[barrier].is_fenced = true;
}

void barrier_arrive_expect(uint64_t* address, uint32_t bytes) {
    Barrier& barrier = ready(address);
    if (barrier.left == 0) simt::die("more arrivals at a barrier than it expects");
    --barrier.left;
    barrier.bytes += bytes;
}

bool barrier_try_wait(uint64_t* address, uint32_t parity) {
    Barrier& barrier = ready(address);
    if (barrier.phase % 2 == parity) {
        for (const Load& load : barrier.loads) {
            std::memcpy(load.shared, load.global, load.bytes);
            barrier.bytes -= load.bytes;
        }
        barrier.loads.clear();
        if (barrier.left == 0 && barrier.bytes == 0) {
            ++barrier.phase;
            barrier.left = barrier.arrivals;
            barrier.polls = 0;
        } else {
            if (barrier.left == 0 && ++barrier.polls > 100'000)
                simt::die("a barrier expects other bytes than come");
            simt::yield();  // another lane has not yet said what to expect, or what to load
        }
    }
    if (barrier.phase % 2 == parity) return false;
    order::learn(phases(address), barrier.phase);
    return true;
}

void load_by_engine(void* shared, const void* global, uint32_t bytes, uint64_t* address) {
    require_bulk(shared, global, bytes);
    Barrier& barrier = ready(address);
    if (!barrier.is_fenced) simt::die("a bulk copy may not see its barrier's initialisation");
    const order::Actor& engine = phases(address);
    order::read_by(engine, barrier.phase, global, bytes, order::Fence::AsyncGlobal);
    order::write_by(engine, barrier.phase, shared, bytes, order::Fence::AsyncShared);
    if (coin()) {
        std::memcpy(shared, global, bytes);
        barrier.bytes -= bytes;
    } else {
        barrier.loads.push_back({shared, global, bytes});
    }
}

void store_by_engine(void* global, const void* shared, uint32_t bytes) {
    require_bulk(shared, global, bytes);
    order::begin_bulk_read(shared, bytes);
    order::begin_bulk_write(global, bytes);
    lane().open.push_back({global, shared, std::vector<char>(bytes)});
}

void bulk_commit() { lane().committed.push_back(std::exchange(lane().open, {})); }

void wait_read_by_engine(size_t groups) {
    Lane& own = lane();
    for (; own.read + groups < own.committed.size(); ++own.read) {
        for (Store& store : own.committed[own.read]) {
            std::memcpy(store.read.data(), store.shared, store.read.size());
            order::end_bulk_read(store.shared, store.read.size());
        }
    }
}

void bulk_wait_written() {
    wait_read_by_engine(0);
    Lane& own = lane();
    for (const Group& group : own.committed) {
        for (const Store& store : group) {
            std::memcpy(store.global, store.read.data(), store.read.size());
            order::end_bulk_write(store.global, store.read.size());
        }
    }
    own.committed.clear();
    own.read = 0;
}

}  // namespace ep::ptx
