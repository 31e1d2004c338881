// What the host code of the CUDA backend does with devices and memory, seen by a stand-in for the
// CUDA runtime.

#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "core/cuda/deferred_release.h"
#include "expect.h"
#include "fabric/cuda/device_memory.h"
#include "fabric/cuda/p2p_fabric.h"
#include "launch/cuda/group.inl"

// Of combine no kernel is named.
template <class P, int kRanks, bool kWeighted>
void ep::CombineLaunch<P, kRanks, kWeighted>::load_kernels() {}

namespace {

using Group = ep::CudaGroup<ep::P2pFabricParams>;

const ep::Heap kHeap{{1, 1}, 2, 1, 4096, 4096}, kTwo{{1, 2}, 2, 1, 4096, 4096};

void close_descriptor(const std::string& handle) {
    if (close(ep::handle_of<int>(handle))) std::abort();
}

void start() {
    ep::run_deferred();  // with the test before
    fake_cuda = {};
}

std::unique_ptr<ep::DeviceMemory> memory_of(int device, size_t bytes, const std::string& group = "",
                                            ep::MemoryKind kind = ep::MemoryKind::Ipc) {
    return ep::DeviceMemory::create(device, bytes, group, kind);
}

// As another process maps it.
std::unique_ptr<ep::DeviceMemory> opened(int device, ep::DeviceMemory& memory,
                                         ep::MemoryKind kind = ep::MemoryKind::Ipc) {
    const std::string handle = memory.handle();
    auto other = ep::DeviceMemory::open(device, handle, memory.bytes(), kind);
    if (kind == ep::MemoryKind::Descriptor) close_descriptor(handle);
    return other;
}

ep::ControlBlock& block_in(std::string& heap) {  // of kHeap or kTwo
    return reinterpret_cast<ep::ControlBlock&>(heap[kHeap.control()]);
}

// Of as many ranks as there are heaps of its own, in reach of these.
Group group_of(const ep::Heap& heap, const std::vector<char*>& own,
               const std::vector<char*>& reached) {
    ep::P2pFabricParams fabric{heap.topology, {}};
    std::copy(reached.begin(), reached.end(), fabric.heaps);
    std::vector<int> ranks(own.size());
    std::iota(ranks.begin(), ranks.end(), 0);
    return Group(heap, fabric, ranks, own, reached, 1, 1, 1.0);
}

// A group on device 1, with its heap.
void use_group(char* heap) {
    const Group group = group_of(kHeap, {heap}, {heap});
    EXPECT(!fake_cuda.live.empty());
    EXPECT(group.aborted() == 0);
}

void test_a_group_gives_back_what_it_has() {
    const std::string zeros(kHeap.bytes(), 0);
    std::string heap = zeros;
    start();
    use_group(heap.data());
    ep::run_deferred();
    EXPECT(fake_cuda.live.empty());
    int calls = 0;
    for (bool failed = true; failed; ++calls) {
        start();
        fake_cuda.fails_in = calls;
        failed = !error_of([&] { use_group(heap.data()); }).empty() || fake_cuda.fails_in < 0;
        fake_cuda.fails_in = -1;
        ep::run_deferred();
        EXPECT(fake_cuda.live.empty());
    }
    EXPECT(calls > 10);
}

// Somebody may capture a CUDA graph meanwhile.
void test_destructors_call_no_cuda() {
    start();
    auto own = memory_of(1, kHeap.bytes());
    auto lent = memory_of(1, 64, "1 2");
    auto mapped = opened(1, *lent);
    std::optional<Group> group;
    ep::P2pFabricParams fabric{kHeap.topology, {own->data()}};
    group.emplace(kHeap, fabric, std::vector{0}, std::vector{own->data()}, std::vector{own->data()},
                  1, 1, 1.0);
    fake_cuda.is_idle = false;  // a kernel uses all of it
    const int calls = fake_cuda.calls;
    const size_t live = fake_cuda.live.size();
    group.reset();
    mapped.reset();
    lent.reset();
    own.reset();
    EXPECT(fake_cuda.calls == calls && fake_cuda.live.size() == live);
    ep::run_deferred();
    EXPECT(fake_cuda.is_idle);
    EXPECT(fake_cuda.live.size() == 1);  // which others may have mapped
    const int caught_up = fake_cuda.calls;
    ep::run_deferred();
    EXPECT(fake_cuda.calls == caught_up);
}

// The stand-in ends a launch of what has not been loaded. One rank of two, and two of one process.
void test_kernels_are_loaded_before_they_are_launched() {
    std::string first(kTwo.bytes(), 0), second(kTwo.bytes(), 0);
    const std::vector<char*> heaps{first.data(), second.data()};
    for (const size_t ranks : {1, 2}) {
        start();
        Group group = group_of(kTwo, {heaps.begin(), heaps.begin() + ranks}, heaps);
        for (const bool has_intra_rank_pass : {false, true}) {
            ep::DispatchCallArgs args{};
            args.heap = kTwo;
            args.has_intra_rank_pass = has_intra_rank_pass;
            group.dispatch({ranks, args}, nullptr);
            group.dispatch_without_wait({ranks, args}, nullptr);
        }
    }
}

// While this rank's kernel is behind other work, which waits for the rank that has given up.
void test_a_wait_for_counts_hears_of_other_ranks() {
    std::string own(kTwo.bytes(), 0), other(kTwo.bytes(), 0);
    start();
    Group group = group_of(kTwo, {own.data()}, {own.data(), other.data()});
    fake_cuda.streams_wait = true;
    std::vector<ep::NotifyArgs> args(1);
    group.request_reports(args);
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    const auto totals = group.wait_for_reports(nullptr, [&] {
        block_in(own).abort = ep::ControlBlock::abort_word(ep::Outcome::Failed, 1);
        if (std::chrono::steady_clock::now() > deadline) throw std::runtime_error("it hangs");
    });
    EXPECT(group.aborted() == ep::ControlBlock::abort_word(ep::Outcome::Failed, 1));
    EXPECT(totals.size() == 1 && totals[0].ticket == 0 && args[0].report.totals->ticket == 0);
    fake_cuda.streams_wait = false;
}

// Ranks 0 and 1 of one process. The host of rank 0 gives up while a kernel does, too.
void test_the_first_reason_stays() {
    const uint64_t timeout = ep::ControlBlock::abort_word(ep::Outcome::Timeout, 1);
    const uint64_t refusal = ep::ControlBlock::abort_word(ep::Outcome::BadInput, 0);
    for (const std::string kernel : {"never", "before", "meanwhile", "after"}) {
        std::string own(kTwo.bytes(), 0), other(kTwo.bytes(), 0);
        start();
        Group group = group_of(kTwo, {own.data()}, {own.data(), other.data()});
        auto give_up = [&] {  // by another rank's kernel: the host has not heard of it
            for (std::string* heap : {&own, &other}) {
                uint64_t& word = block_in(*heap).abort;
                if (word == 0) word = timeout;
            }
        };
        if (kernel == "before") give_up();
        fake_cuda.before_copy = [&](void* to) {
            const char* first = reinterpret_cast<char*>(&block_in(own).abort);
            const bool is_word = to >= first && to < first + sizeof(uint64_t);
            if (kernel == "meanwhile" && is_word) give_up();
        };
        group.abort(ep::Outcome::BadInput, "a \"reason\"");
        fake_cuda.before_copy = nullptr;
        if (kernel == "after") give_up();
        const bool was_first = kernel == "before" || kernel == "meanwhile";
        for (std::string* heap : {&own, &other}) {
            const uint64_t reason = ep::ControlBlock::first_reason(block_in(*heap).abort);
            EXPECT(reason == (was_first ? timeout : refusal));
        }
        EXPECT(ep::ControlBlock::first_reason(group.aborted()) == (was_first ? timeout : refusal));
        group.abort(ep::Outcome::Failed, "another");
        EXPECT(ep::ControlBlock::first_reason(group.aborted()) == (was_first ? timeout : refusal));
        const auto blocks = group.control_blocks();
        EXPECT(blocks.size() == 2 && group.first_in_reach() == 0);
        EXPECT(std::string(blocks[0].reason.text, blocks[0].reason.bytes) == "a \"reason\"");
        EXPECT(blocks[1].reason.bytes == 0);
        group.reset();
        EXPECT(group.aborted() == 0 && block_in(own).reason.bytes == 0);
    }
}

void test_graphs_count_until_they_are_gone() {
    start();
    ep::CudaGraphs graphs;
    graphs.note(nullptr);  // no capture
    EXPECT(graphs.alive() == 0);
    auto first = std::make_unique<FakeGraph>(), second = std::make_unique<FakeGraph>();
    auto capture = [&](FakeGraph& graph) {
        fake_cuda.captured = &graph;
        ++fake_cuda.capture;
        graphs.note(nullptr);
        graphs.note(nullptr);  // a second launch
    };
    capture(*first);
    capture(*second);
    EXPECT(graphs.alive() == 2 && first->objects.size() == 1);
    for (const int calls : {0, 1, 2}) {
        ++fake_cuda.capture;
        fake_cuda.fails_in = calls;
        EXPECT(!error_of([&] { graphs.note(nullptr); }).empty());
        EXPECT(graphs.alive() == 2);
    }
    first.reset();
    EXPECT(graphs.alive() == 1);
    graphs = {};  // the buffer goes before the graph
    second.reset();
}

// What comes next on the caller's stream waits until the branch's launch has begun, in a graph and
// only where there is a branch.
void test_branches_of_a_graph_are_ordered() {
    constexpr int kSms = 132, kFew = 24, kMany = 120;
    FakeGraph graph;
    for (const bool captured : {false, true}) {
        for (const int busy : {kFew, kMany}) {
            start();
            fake_cuda.captured = captured ? &graph : nullptr;
            const ep::SideStream side(0, kSms, busy);
            const ep::CudaEvent begun = side.begun(nullptr);
            EXPECT((begun != nullptr) == (captured && busy == kFew));
            side.wait_for(begun, nullptr);
            EXPECT(fake_cuda.waited_for.size() == (begun != nullptr));
            if (begun) EXPECT(fake_cuda.waited_for[0] == begun);
        }
    }
    fake_cuda.driver = 12030;
    EXPECT(ep::SideStream::orders_graphs());
    fake_cuda.driver = 12020;
    EXPECT(!ep::SideStream::orders_graphs());
}

void test_a_retired_group_leaves_others_alone() {
    std::string own(kHeap.bytes(), 0), other(kHeap.bytes(), 0);
    start();
    Group group = group_of(kHeap, {own.data()}, {own.data(), other.data()});
    group.retire();
    EXPECT(block_in(own).abort != 0 && block_in(other).abort == 0);
}

void test_the_current_device_is_left_alone() {
    std::string heap(kHeap.bytes(), 0);
    start();
    fake_cuda.current = 1;
    use_group(heap.data());
    {
        auto memory = memory_of(1, 64);
        auto other = opened(1, *memory);
    }
    ep::run_deferred();
    EXPECT(fake_cuda.switches == 0);
    EXPECT(fake_cuda.contexts == std::set<int>{1});
}

void test_another_device_is_made_current_and_back() {
    start();
    {
        const ep::DeviceGuard guard(1);
        EXPECT(fake_cuda.current == 1);
    }
    EXPECT(fake_cuda.current == 0);
    fake_cuda.fails_in = 0;
    EXPECT(!error_of([] { memory_of(1, 64); }).empty());
}

void test_memory_is_given_back_at_once() {
    fake_cuda = {};
    auto left = [](const std::string& group, size_t bytes) {
        memory_of(0, bytes, group)->handle();
    };
    left("3 4", 64), left("3 4", 128), left("3 5", 64);
    auto own = memory_of(0, 256, "3 4");
    auto other = opened(0, *own);
    EXPECT(fake_cuda.live.size() == 4 && !other->is_released());
    other->release();
    EXPECT(fake_cuda.live.size() == 4 && other->is_released() && fake_cuda.unmapped == 1);
    own->release();
    EXPECT(fake_cuda.live.size() == 3 && own->is_released());
    own->release_left();
    EXPECT(fake_cuda.live.size() == 1);
    own->release(), other->release(), own->release_left();
    EXPECT(fake_cuda.live.size() == 1 && fake_cuda.unmapped == 1);
}

void test_native_atomics_are_asked_for() {
    fake_cuda = {};
    EXPECT(ep::has_native_atomics(0, 1));
    fake_cuda.native_atomics = false;
    EXPECT(!ep::has_native_atomics(0, 1));
}

void test_memory_is_cleared_again() {
    fake_cuda = {};
    auto memory = memory_of(0, 64, "1 2");
    EXPECT(std::string(memory->data(), 64) == std::string(64, 0));
    memory->data()[63] = 1;  // by a rank that was not done yet
    memory->clear();
    EXPECT(std::string(memory->data(), 64) == std::string(64, 0));
}

void test_memory_is_left_to_the_same_processes() {
    start();
    auto left = [](const std::string& group, size_t bytes = 64) {
        auto memory = memory_of(0, bytes, group);
        memory->handle();
        return memory->data();
    };
    char* const ours = left("1 2");
    EXPECT(left("1 2") == ours);
    EXPECT(left("1 3") != ours);
    EXPECT(left("1 2", 128) != ours);
    EXPECT(left("1 2") == ours);
    const auto in_use = memory_of(0, 64, "1 2");
    EXPECT(in_use->data() == ours);
    EXPECT(left("1 2") != ours);
    const size_t live = fake_cuda.live.size();
    memory_of(0, 256, "1 2");  // which nobody mapped
    ep::run_deferred();
    EXPECT(fake_cuda.live.size() == live);
}

// ---- CUDA virtual memory

constexpr size_t kBytes = 3 << 20;  // no multiple of what the driver allocates

std::vector<ep::MemoryKind> virtual_kinds() {
    start();
    fake_driver.fabric_is_permitted = true;
    return {ep::MemoryKind::Descriptor, ep::MemoryKind::Fabric};
}

void test_virtual_memory_is_one_memory() {
    for (const ep::MemoryKind kind : virtual_kinds()) {
        auto own = memory_of(0, kBytes, "", kind);
        auto other = opened(1, *own, kind);
        EXPECT(own->data() != other->data() && own->bytes() == kBytes);
        EXPECT(std::string(own->data(), kBytes) == std::string(kBytes, 0));
        own->data()[kBytes - 1] = 7;
        EXPECT(other->data()[kBytes - 1] == 7);
        own->release(), own->release();
        EXPECT(own->is_released() && other->data()[kBytes - 1] == 7);  // as long as it is mapped
        other->release();
        EXPECT(fake_driver.has_nothing());
    }
}

// Between processes: the parent reads what its child has stored.
void test_virtual_memory_of_another_process() {
    for (const ep::MemoryKind kind : virtual_kinds()) {
        auto own = memory_of(0, kBytes, "", kind);
        const std::string handle = own->handle();
        const pid_t child = fork();
        if (!child) {
            auto other = ep::DeviceMemory::open(1, handle, kBytes, kind);
            std::memcpy(other->data() + 5, "child", 5);
            _exit(0);
        }
        int status = -1;
        EXPECT(waitpid(child, &status, 0) == child && status == 0);
        EXPECT(std::string(own->data() + 5, 5) == "child");
        if (kind == ep::MemoryKind::Descriptor) close_descriptor(handle);
    }
    ep::run_deferred();
    EXPECT(fake_driver.has_nothing());
}

void test_virtual_memory_is_replaced_in_its_place() {
    for (const ep::MemoryKind kind : virtual_kinds()) {
        auto former = memory_of(0, kBytes, "", kind), next = memory_of(0, kBytes, "", kind);
        auto other = opened(1, *former, kind);
        char* const place = other->data();
        former->release();
        fake_cuda.is_idle = false;
        const std::string handle = next->handle();
        other->replace(handle);
        EXPECT(fake_cuda.is_idle);  // no kernel used the former one
        if (kind == ep::MemoryKind::Descriptor) close_descriptor(handle);
        next->data()[1] = 3;
        EXPECT(other->data() == place && place[1] == 3);
    }
    ep::run_deferred();
    EXPECT(fake_driver.has_nothing());
}

void test_virtual_memory_that_fails_leaves_nothing() {
    for (const ep::MemoryKind kind : virtual_kinds()) {
        for (const char* name :
             {"cuMemGetAllocationGranularity", "cuMemAddressReserve", "cuMemCreate", "cuMemMap",
              "cuMemSetAccess", "cuMemExportToShareableHandle", "cuMemImportFromShareableHandle"}) {
            fake_driver.fails = name;
            const std::string error = error_of([&] {
                auto own = memory_of(0, kBytes, "", kind);
                opened(1, *own, kind);
            });
            fake_driver.fails = "";
            ep::run_deferred();
            EXPECT(error == std::string(name) + ": CUDA_ERROR_INVALID_VALUE");
            EXPECT(fake_driver.has_nothing());
        }
    }
    fake_driver.fabric_is_permitted = false;
    EXPECT(error_of([] { memory_of(0, kBytes, "", ep::MemoryKind::Fabric); }) ==
           "cuMemCreate: CUDA_ERROR_NOT_PERMITTED");
    EXPECT(fake_driver.has_nothing());
}

void test_destructors_of_virtual_memory_call_no_driver() {
    virtual_kinds();
    auto own = memory_of(0, kBytes, "", ep::MemoryKind::Descriptor);
    auto other = opened(1, *own, ep::MemoryKind::Descriptor);
    fake_cuda.is_idle = false;
    const int calls = fake_cuda.calls;
    own.reset(), other.reset();
    EXPECT(fake_driver.mapped.size() == 2 && fake_cuda.calls == calls);
    ep::run_deferred();
    EXPECT(fake_cuda.is_idle && fake_driver.has_nothing());
}

}  // namespace

int main() {
    test_a_group_gives_back_what_it_has();
    test_destructors_call_no_cuda();
    test_kernels_are_loaded_before_they_are_launched();
    test_the_first_reason_stays();
    test_a_wait_for_counts_hears_of_other_ranks();
    test_graphs_count_until_they_are_gone();
    test_branches_of_a_graph_are_ordered();
    test_a_retired_group_leaves_others_alone();
    test_the_current_device_is_left_alone();
    test_another_device_is_made_current_and_back();
    test_memory_is_given_back_at_once();
    test_native_atomics_are_asked_for();
    test_memory_is_cleared_again();
    test_memory_is_left_to_the_same_processes();
    test_virtual_memory_is_one_memory();
    test_virtual_memory_of_another_process();
    test_virtual_memory_is_replaced_in_its_place();
    test_virtual_memory_that_fails_leaves_nothing();
    test_destructors_of_virtual_memory_call_no_driver();
}
