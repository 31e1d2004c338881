// What a GPU is given that posts in a network card's queues by itself, over a CUDA runtime that
// this test makes up, and cards of the tests' own (fake_ibverbs.cpp), whose file is the argument.
// A thread of the host posts in the GPU's place.

#include <cuda_runtime.h>

#include "core/cuda/deferred_release.h"
#include "expect.h"
#include "launch/queue/queue_heap.cu"  // which has no kernel
#include "send_queue.h"

namespace {

const ep::Heap kHeap{{2, 1}, 2, 20, 4096, 4096};  // more queues than queue pairs

ep::verbs::Port port_of(const std::string& file) {
    const auto mlx5 = ep::verbs::Mlx5::load(file);
    return ep::verbs::find_ports(*ep::verbs::Library::load(file), mlx5.get()).at(0);
}

std::shared_ptr<ep::verbs::Card> card_of(const std::string& file) {
    return std::make_shared<ep::verbs::Card>(ep::verbs::Library::load(file), port_of(file),
                                             ep::verbs::Mlx5::load(file));
}

struct Rank {
    Rank(int rank, const std::string& file)
        : nic(rank, controls(rank), {card_of(file)}), heap(nic, report, kHeap, rank, 0) {}

    std::vector<ep::ControlBlock*> controls(int rank) {
        std::vector<ep::ControlBlock*> all{&mirror, &mirror};
        all[rank] = report.data();
        return all;
    }
    ep::QueueFabricParams params() const { return heap.fabric({nullptr}); }
    uint64_t word(size_t offset) const {
        return ep::load(*reinterpret_cast<const uint64_t*>(params().network + offset));
    }

    ep::PinnedReport report{0};
    ep::ControlBlock mirror{};
    ep::SoftwareNic nic;
    ep::QueueHeap heap;
};

size_t registers() {
    size_t count = 0;
    for (const auto& [begin, pages] : fake_cuda.registered) count += pages.are_registers;
    return count;
}

void test_a_gpu_posts(const std::string& file) {
    fake_cuda = {};
    {
        Rank a(0, file), b(1, file);
        for (uint64_t round = 1; round <= 3; ++round) {  // with a reset between them
            a.params().reset_signals(0, 0);
            b.params().reset_signals(1, 0);
            const ep::Wire wire(std::nullopt);
            join(a.nic, b.nic);
            // rings, records and completions of 16 queue pairs a rank, and a bell each
            EXPECT(fake_cuda.registered.size() == 2 * 16 * 4 && registers() == 2 * 16);
            a.nic.start({-1, wire.end(0)});
            b.nic.start({wire.end(1), -1});
            for (int channel = 0; channel <= kHeap.channels; ++channel) {
                const auto queue = a.params().queues.puts(channel, 1);
                EXPECT(queue.card && !queue.sleeper);
                a.params().network[64] = static_cast<char>(channel + 1);
                ep::post_write(queue, 128, 64, 1);
                ep::post_add(queue, 8);
                ep::await([&] { return b.word(8); }, static_cast<uint64_t>(channel) + 1, "no flag");
                EXPECT(b.params().network[128] == static_cast<char>(channel + 1));
            }
            a.nic.stop(std::chrono::seconds(1));
            b.nic.stop(std::chrono::seconds(1));
        }
    }
    ep::run_deferred();
    EXPECT(fake_cuda.registered.empty());
}

// CUDA may have a card's registers elsewhere than the process.
void test_the_bell_is_where_the_gpu_has_it(const std::string& file) {
    fake_cuda = {};
    fake_cuda.registers_at = ptrdiff_t{1} << 44;
    {
        Rank a(0, file), b(1, file);
        join(a.nic, b.nic);
        const auto queues = a.params().queues;
        for (int channel = 0; channel <= kHeap.channels; ++channel) {
            const ep::CardQueue& card = *queues.puts(channel, 1).card;
            char* bell = reinterpret_cast<char*>(card.bell) - fake_cuda.registers_at;
            const auto pages = --fake_cuda.registered.upper_bound(bell);
            EXPECT(pages->second.are_registers && bell < pages->first + pages->second.bytes);
            for (void* memory :
                 {static_cast<void*>(card.entries), static_cast<void*>(card.doorbell),
                  static_cast<void*>(card.completions)}) {
                const auto ring = --fake_cuda.registered.upper_bound(static_cast<char*>(memory));
                EXPECT(!ring->second.are_registers &&
                       static_cast<char*>(memory) < ring->first + ring->second.bytes);
            }
        }
    }
    ep::run_deferred();
}

void test_destructors_call_no_cuda(const std::string& file) {
    fake_cuda = {};
    int calls;
    {
        Rank a(0, file), b(1, file);
        join(a.nic, b.nic);
        fake_cuda.is_idle = false;
        calls = fake_cuda.calls;
    }
    EXPECT(fake_cuda.calls == calls && !fake_cuda.registered.empty());
    ep::run_deferred();
    EXPECT(fake_cuda.registered.empty() && fake_cuda.live.empty());
}

void test_what_cuda_refuses_is_said(const std::string& file) {
    fake_cuda = {};
    fake_cuda.refuses_registers = true;
    {
        Rank a(0, file), b(1, file);
        EXPECT(error_of([&] { join(a.nic, b.nic); }).find("PeerMappingOverride=1") !=
               std::string::npos);
    }
    ep::run_deferred();
    EXPECT(error_of([&] { ep::try_card(card_of(file), 0); }).find("the bell of a network card") ==
           0);
    EXPECT(fake_cuda.registered.empty());
    fake_cuda.refuses_registers = false;
    ep::try_card(card_of(file), 0);
    ep::run_deferred();
    EXPECT(fake_cuda.registered.empty() && fake_cuda.live.empty());
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 2) return 2;
    test_a_gpu_posts(argv[1]);
    test_the_bell_is_where_the_gpu_has_it(argv[1]);
    test_destructors_call_no_cuda(argv[1]);
    test_what_cuda_refuses_is_said(argv[1]);
}
