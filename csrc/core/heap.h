#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "core/function.h"
#include "core/incident.h"
#include "core/network_flags.h"
#include "core/row.h"
#include "core/topology.h"

namespace ep {

// Layout of a rank's symmetric heap: every part has the same offset on every rank.
//
// Rings are named by (channel, node, peer). For an NVLink ring `node` is the node that the token
// comes from, and `peer` the local rank at the other end. Data and tail lie with the consumer (its
// peer is the producer), the head lies with the producer (its peer is the consumer).
//
// A network ring runs along the rail. Data and tail lie with the consumer (node = source), staging
// and head with the producer. Where a fabric maps the rail the staging is unused. There are rings
// for other nodes only, so where a ring lies depends on the node whose heap it is in. What crosses
// the network comes last, so that it may lie in other memory than the rest.
//
// Flags and cursors only grow, until a reset clears them.
struct Heap {
    // One cache line for each flag that another rank reads or writes, and for each cursor.
    static constexpr size_t kLine = NetworkFlags::kLine;

    Topology topology;
    int num_experts;
    int channels;
    size_t nvl_ring_bytes;
    size_t rdma_ring_bytes;

    Heap() = default;
    Heap(const Topology& ranks, int experts, int num_channels, size_t nvl_bytes, size_t rdma_bytes)
        : topology(ranks),
          num_experts(experts),
          channels(num_channels),
          nvl_ring_bytes(nvl_bytes),
          rdma_ring_bytes(rdma_bytes) {
        size_t end = align_up(sizeof(ControlBlock), kLine);  // the control block comes first
        auto part = [&](size_t bytes) { return std::exchange(end, end + bytes); };
        waited_ = part(2 * waited_bytes(topology.world()));
        const size_t nvl_rings = static_cast<size_t>(channels) * topology.world();
        notify_node_flags_ = part(relays() * topology.ranks_per_node * kLine);
        nvl_tails_ = part(nvl_rings * kLine);
        nvl_heads_ = part(nvl_rings * kLine);
        nvl_outs_ = part(nvl_rings * kLine);
        nvl_ins_ = part(nvl_rings * kLine);
        rdma_outs_ = part(rdma_rings() * kLine);
        rdma_ins_ = part(rdma_rings() * kLine);
        receiver_order_ = part(channels * kLine);
        notify_node_ = part(2 * topology.world() * rank_block_bytes());
        nvl_data_ = part(nvl_rings * nvl_ring_bytes);
        notify_rail_flags_ = part(topology.nodes * kLine);
        rdma_tails_ = part(rdma_rings() * kLine);
        rdma_heads_ = part(rdma_rings() * kLine);
        notify_staging_ = part(2 * topology.nodes * node_block_bytes());
        notify_rail_ = part(2 * topology.nodes * node_block_bytes());
        const size_t other_nodes = static_cast<size_t>(channels) * (topology.nodes - 1);
        rdma_staging_ = part(other_nodes * rdma_ring_bytes);
        rdma_data_ = part(other_nodes * rdma_ring_bytes);
        bytes_ = end;
    }

    EP_HD int local_experts() const { return num_experts / topology.world(); }
    EP_HD size_t bytes() const { return bytes_; }

    // Bytes by purpose.
    struct Part {
        const char* name;
        size_t bytes;
    };
    std::array<Part, 5> parts() const {
        return {{{"flags and cursors", notify_node_ + (notify_staging_ - notify_rail_flags_)},
                 {"counts", (nvl_data_ - notify_node_) + (rdma_staging_ - notify_staging_)},
                 {"NVLink rings", notify_rail_flags_ - nvl_data_},
                 {"network rings, to send", rdma_data_ - rdma_staging_},
                 {"network rings, to receive", bytes_ - rdma_data_}}};
    }

    // --- flags ---
    EP_HD size_t control() const { return 0; }
    // [W], nanoseconds that this rank's roles have waited for each rank; waited_before has the
    // values at the beginning of the last call.
    EP_HD size_t waited() const { return waited_; }
    EP_HD size_t waited_before() const { return waited_ + waited_bytes(topology.world()); }
    static EP_HD size_t waited_bytes(int world) {
        return align_up(world * sizeof(uint64_t), kLine);
    }
    EP_HD size_t notify_rail_flag(int node) const { return notify_rail_flags_ + node * kLine; }
    // The flag of a rank of this node that relays the counts of a group of nodes.
    EP_HD size_t notify_node_flag(int local, int group) const {
        return notify_node_flags_ + (group * topology.ranks_per_node + local) * kLine;
    }
    EP_HD size_t nvl_tail(int channel, int node, int peer) const {
        return nvl_line(nvl_tails_, channel, node, peer);
    }
    EP_HD size_t nvl_head(int channel, int node, int peer) const {
        return nvl_line(nvl_heads_, channel, node, peer);
    }
    EP_HD size_t rdma_tail(int channel, int node) const {
        return rdma_line(rdma_tails_, channel, node);
    }
    EP_HD size_t rdma_head(int channel, int node) const {
        return rdma_line(rdma_heads_, channel, node);
    }

    // --- cursors of this rank's own roles ---
    EP_HD size_t nvl_out(int channel, int node, int peer) const {
        return nvl_line(nvl_outs_, channel, node, peer);
    }
    EP_HD size_t nvl_in(int channel, int node, int peer) const {
        return nvl_line(nvl_ins_, channel, node, peer);
    }
    EP_HD size_t rdma_out(int channel, int node) const {
        return rdma_line(rdma_outs_, channel, node);
    }
    EP_HD size_t rdma_in(int channel, int node) const {
        return rdma_line(rdma_ins_, channel, node);
    }
    EP_HD size_t receiver_order(int channel) const { return receiver_order_ + channel * kLine; }

    // The network reads and writes all that follows, and nothing before.
    EP_HD size_t network_begin() const { return notify_rail_flags_; }
    size_t network_bytes() const { return bytes_ - network_begin(); }
    size_t bytes_without_network() const { return network_begin(); }

    // Flags of the network: one for notify, and a tail and a head for each channel.
    EP_HD NetworkFlags network_flags() const {
        return {notify_rail_flags_, topology.nodes > 1 ? 1 + 2 * channels : 0, topology.nodes, 1,
                channels};
    }

    // --- counts that notify exchanges, double-buffered by the parity of its epoch ---
    // Nodes whose counts a rank relays together: a warp has one lane to wait for each.
    static constexpr int kRelayedNodes = 32;
    EP_HD int relays() const { return (topology.nodes + kRelayedNodes - 1) / kRelayedNodes; }
    // from one source rank to one destination rank: rows per expert, rows per channel
    EP_HD size_t rank_counts() const { return local_experts() + channels; }
    // from one source rank to one destination node: the counts for its ranks, tokens per channel
    EP_HD size_t node_counts() const { return rank_counts() * topology.ranks_per_node + channels; }
    EP_HD size_t rank_block_bytes() const {
        return align_up(rank_counts() * sizeof(int32_t), kLine);
    }
    EP_HD size_t node_block_bytes() const {
        return align_up(node_counts() * sizeof(int32_t), kLine);
    }
    EP_HD size_t notify_staging(int parity, int node) const {
        return notify_staging_ + (parity * topology.nodes + node) * node_block_bytes();
    }
    EP_HD size_t notify_rail(int parity, int node) const {
        return notify_rail_ + (parity * topology.nodes + node) * node_block_bytes();
    }
    EP_HD size_t notify_node(int parity, int rank) const {
        return notify_node_ + (parity * topology.world() + rank) * rank_block_bytes();
    }

    // --- rings ---
    EP_HD size_t nvl_data(int channel, int node, int peer) const {
        return nvl_data_ + nvl_ring(channel, node, peer) * nvl_ring_bytes;
    }
    // `heap_node`: the node of the rank whose heap it is in
    EP_HD size_t rdma_staging(int channel, int node, int heap_node) const {
        return rdma_staging_ + rdma_ring(channel, node, heap_node) * rdma_ring_bytes;
    }
    EP_HD size_t rdma_data(int channel, int node, int heap_node) const {
        return rdma_data_ + rdma_ring(channel, node, heap_node) * rdma_ring_bytes;
    }

  private:
    EP_HD size_t nvl_ring(int channel, int node, int peer) const {
        return (channel * topology.nodes + node) * topology.ranks_per_node + peer;
    }
    EP_HD size_t rdma_ring(int channel, int node, int heap_node) const {
        return static_cast<size_t>(channel) * (topology.nodes - 1) + node - (node > heap_node);
    }
    EP_HD size_t nvl_line(size_t first, int channel, int node, int peer) const {
        return first + nvl_ring(channel, node, peer) * kLine;
    }
    EP_HD size_t rdma_line(size_t first, int channel, int node) const {
        return first + (static_cast<size_t>(channel) * topology.nodes + node) * kLine;
    }

    EP_HD size_t rdma_rings() const {
        return topology.nodes > 1 ? static_cast<size_t>(channels) * topology.nodes : 0;
    }

    // Offsets of the parts, precomputed because kernels need them for every row.
    size_t waited_, notify_node_flags_, nvl_tails_, nvl_heads_, notify_rail_flags_, rdma_tails_,
        rdma_heads_, nvl_outs_, nvl_ins_, rdma_outs_, rdma_ins_, receiver_order_, notify_staging_,
        notify_rail_, notify_node_, nvl_data_, rdma_staging_, rdma_data_, bytes_;
};

}  // namespace ep
