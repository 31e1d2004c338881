// The largest keys on the host: Team::take_top (team.h).
// clang-format off
#include "router/options.h"
// clang-format on

#include <algorithm>

#include "router/host_team.h"
#include "router/number.h"

namespace ep::router {
namespace {

template <class K>
K find_largest(const K* keys, int n) {
    K largest = keys[0];
    for (int i = 1; i < n; ++i) largest = keys[i] > largest ? keys[i] : largest;
    return largest;
}

// The lowest index that holds `key`, as a minimum over all: an early exit does not vectorize.
template <class K>
int find(const K* keys, int n, K key) {
    int lowest = n;
    for (int i = 0; i < n; ++i) {
        const int index = keys[i] == key ? i : n;
        lowest = index < lowest ? index : lowest;
    }
    return lowest;
}

// A tournament: the largest key of each block is kept, so that taking one scans these and one
// block.
template <class K>
void take_top_by_blocks(K* keys, int n, int count, Choice<K>* choices) {
    constexpr int kMaxBlocks = 64;
    int block_size = 32;
    while (n > block_size * kMaxBlocks) block_size *= 2;
    const int blocks = (n + block_size - 1) / block_size;
    const auto size = [=](int block) { return std::min(block_size, n - block * block_size); };

    K largest[kMaxBlocks];
    for (int b = 0; b < blocks; ++b) largest[b] = find_largest(keys + b * block_size, size(b));
    for (int rank = 0; rank < count; ++rank) {
        int b = 0;
        for (int i = 1; i < blocks; ++i) b = largest[i] > largest[b] ? i : b;
        K* const block = keys + b * block_size;
        const int index = find(block, size(b), largest[b]);
        choices[rank] = {largest[b], b * block_size + index};
        block[index] = kNoKey<K>;
        largest[b] = find_largest(block, size(b));
    }
}

// Ranks few keys, such as those of groups, by comparing each with all. The limit is not measured:
// it is the 32-bit keys of one AVX-512 register.
constexpr int kFew = 16;

template <class K>
void take_top_by_rank(K* keys, int n, int count, Choice<K>* choices) {
    K all[kFew];
    int32_t rank[kFew] = {};
    for (int i = 0; i < kFew; ++i) all[i] = i < n ? keys[i] : kNoKey<K>;
    for (int other = 0; other < n; ++other) {
        for (int i = 0; i < kFew; ++i) {
            const bool is_before = other < i;
            rank[i] += (all[other] > all[i]) | ((all[other] == all[i]) & is_before);
        }
    }
    for (int i = 0; i < n; ++i) {
        if (rank[i] >= count) continue;
        choices[rank[i]] = {all[i], i};
        keys[i] = kNoKey<K>;
    }
}

template <class K>
void take_top_of(K* keys, int n, int count, Choice<K>* choices) {
    if (n <= kFew) return take_top_by_rank(keys, n, count, choices);
    take_top_by_blocks(keys, n, count, choices);
}

}  // namespace

EP_ROUTER_CLONES void take_top(int32_t* keys, int n, int count, Choice<int32_t>* choices) {
    take_top_of(keys, n, count, choices);
}

EP_ROUTER_CLONES void take_top(int64_t* keys, int n, int count, Choice<int64_t>* choices) {
    take_top_of(keys, n, count, choices);
}

}  // namespace ep::router
