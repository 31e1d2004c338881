#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <map>

#include "order.h"
#include "simt.h"

#define NVSHMEM_VENDOR_MAJOR_VERSION 3

// What NVSHMEM does with the puts and signals of a kernel, for the ranks of one process, over a
// network that takes any time. With IBGDA those of one queue pair to one rank are carried out one
// after the other, and a block's place in the grid, or a warp's, chooses the queue pair; without it
// only a fence orders them.
namespace simt {

class Nvshmem {
  public:
    static constexpr unsigned kQueuePairs = 5;
    static constexpr uint64_t kMaxDelay = 4000;  // of a queue pair's first operation, in steps

    enum class QueuePairsOf { Blocks, Warps };

    Nvshmem(const std::vector<char*>& heaps, size_t bytes, bool ibgda, QueuePairsOf owners,
            uint64_t seed)
        : heaps_(heaps), bytes_(bytes), ibgda_(ibgda), owners_(owners), random_(seed) {}

    void put(void* dst, const void* src, size_t bytes, int rank) {
        Queue& queue = own_queue(dst, rank);
        if (owner_of(src) != owner_of(dst)) die("a put of what is not symmetric");
        order::Actor& puts = order::actor(queue.name);
        order::read_by(puts, puts.steps, src, bytes, order::Fence::System);
        order::write_by(puts, puts.steps, at(rank, dst), bytes, order::Fence::System);
        ++puts.steps;
        queue.messages.push_back({at(rank, dst), static_cast<const char*>(src), bytes});
    }
    void add(uint64_t* flag, uint64_t increment, int rank) {
        Queue& queue = own_queue(flag, rank);
        auto* to = reinterpret_cast<uint64_t*>(at(rank, flag));
        order::Actor before = order::actor(queue.name);
        if (!ibgda_) before.steps = queue.fenced;
        order::signal(before, to, sent_[to] += increment);
        queue.messages.push_back({at(rank, flag), nullptr, increment});
    }
    void fence() {
        if (ibgda_) die("a fence, which waits for all queue pairs");
        const auto self = rank_of_block_.find(block_of_all());
        if (self == rank_of_block_.end()) return;  // nothing that it has put to put in order
        for (auto& [key, queue] : queues_) {
            if (key[0] != self->second) continue;
            queue.messages.push_back({});
            queue.fenced = order::actor(queue.name).steps;
        }
    }
    // Blocks may be those of other ranks from now on.
    void begin_launch() { rank_of_block_.clear(); }
    // Some time passes, and an operation may be carried out.
    void step() {
        ++now_;
        if (queues_.empty()) return;
        Queue& queue = std::next(queues_.begin(), random_() % queues_.size())->second;
        auto& messages = queue.messages;
        if (messages.empty() || now_ < queue.held_until) return;
        size_t choices = 1;
        if (!ibgda_)
            choices = std::find_if(messages.begin(), messages.end(), is_fence) - messages.begin();
        const auto chosen = messages.begin() + (choices > 1 ? random_() % choices : 0);
        if (chosen->src) std::memcpy(chosen->dst, chosen->src, chosen->bytes_or_increment);
        if (!chosen->src && !is_fence(*chosen))
            *reinterpret_cast<uint64_t*>(chosen->dst) += chosen->bytes_or_increment;
        messages.erase(chosen);
    }

  private:
    struct Message {
        char* dst;        // null: a fence
        const char* src;  // null: a signal
        uint64_t bytes_or_increment;
    };
    struct Queue {
        order::Name name;
        std::deque<Message> messages;
        uint64_t held_until = 0;
        uint32_t fenced = 0;  // puts before the last fence, in this launch
    };
    static bool is_fence(const Message& message) { return !message.dst; }

    Queue& own_queue(const void* own, int rank) {
        const int self = owner_of(own);
        if (rank == self) die("a put to itself");
        rank_of_block_[block_of_all()] = self;
        const unsigned warp = block_index().x * (block_size().x / 32) + thread_index().x / 32;
        const unsigned pair =
            (owners_ == QueuePairsOf::Warps ? warp : block_index().x) % kQueuePairs;
        Queue& queue = queues_[{self, static_cast<int>(pair), rank}];
        queue.name = {static_cast<uintptr_t>(self), pair, static_cast<uintptr_t>(rank)};
        if (order::actor(queue.name).steps == 0) queue.fenced = 0;  // of an earlier launch
        if (queue.messages.empty() && random_() % 4 == 0)
            queue.held_until = now_ + random_() % kMaxDelay;
        return queue;
    }
    static unsigned block_of_all() { return warp_index() / (block_size().x / 32); }
    int owner_of(const void* address) const {
        for (size_t rank = 0; rank < heaps_.size(); ++rank) {
            const auto offset = static_cast<const char*>(address) - heaps_[rank];
            if (offset >= 0 && offset < static_cast<ptrdiff_t>(bytes_))
                return static_cast<int>(rank);
        }
        die("an address outside of the symmetric heaps");
    }
    char* at(int rank, const void* own) const {
        return heaps_[rank] + (static_cast<const char*>(own) - heaps_[owner_of(own)]);
    }

    std::vector<char*> heaps_;
    size_t bytes_;
    bool ibgda_;
    QueuePairsOf owners_;
    std::mt19937_64 random_;
    uint64_t now_ = 0;
    std::map<std::array<int, 3>, Queue> queues_;  // source, queue pair, destination
    std::map<const uint64_t*, uint64_t> sent_;    // to each flag in all
    std::map<unsigned, int> rank_of_block_;
};

inline Nvshmem* nvshmem;

}  // namespace simt

enum { NVSHMEM_SIGNAL_ADD = 10 };

inline void nvshmemx_putmem_nbi_warp(void* dst, const void* src, size_t bytes, int rank) {
    simt::order::fence(simt::order::Fence::System);  // the library's own
    __syncwarp();
    if (simt::lane() == 0) simt::nvshmem->put(dst, src, bytes, rank);
    __syncwarp();
}
inline void nvshmem_fence() { simt::nvshmem->fence(); }
inline void nvshmemx_signal_op(uint64_t* flag, uint64_t value, int operation, int rank) {
    if (operation != NVSHMEM_SIGNAL_ADD) simt::die("a signal that does not add");
    simt::nvshmem->add(flag, value, rank);
}
