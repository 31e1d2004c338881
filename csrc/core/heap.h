#pragma once

#include <cstddef>
#include <cstdint>

#include "core/function.h"
#include "core/incident.h"
#include "core/row.h"
#include "core/topology.h"

namespace ep {

// Where everything lies in a rank's symmetric heap: the same offsets on every rank, so that an address is an offset.
//
// Rings are named by (channel, node, peer). For an NVLink ring `node` is the node that the token comes from and `peer` the local
// rank at the other end; data and tail lie with the consumer (peer = producer), head with the producer (peer = consumer).
// A network ring runs along the rail: data and tail lie with the consumer (node = source), staging and head with the producer.
//
// All flags and cursors only ever grow and are cleared by nobody but reset.
struct Heap {
    static constexpr size_t kLine = 128;  // one cache line a flag: flags of different writers never share one

    Topology topology;
    int num_experts;
    int channels;
    size_t nvl_ring_bytes;
    size_t rdma_ring_bytes;

    EP_HD int local_experts() const { return num_experts / topology.world(); }

    // --- sizes of the parts, in the order in which they lie ---
    EP_HD size_t nvl_rings() const { return static_cast<size_t>(channels) * topology.world(); }
    EP_HD size_t rdma_rings() const { return topology.nodes > 1 ? static_cast<size_t>(channels) * topology.nodes : 0; }
    // counts of one source rank for one destination rank: rows per expert, rows per channel
    EP_HD size_t rank_counts() const { return local_experts() + channels; }
    // counts of one source rank for one destination node: those of its ranks, tokens per channel
    EP_HD size_t node_counts() const { return rank_counts() * topology.ranks_per_node + channels; }
    EP_HD size_t node_block_bytes() const { return align_up(node_counts() * sizeof(int32_t), kLine); }
    EP_HD size_t rank_block_bytes() const { return align_up(rank_counts() * sizeof(int32_t), kLine); }

    EP_HD size_t control() const { return 0; }
    EP_HD size_t flags() const { return align_up(sizeof(ControlBlock), kLine); }
    EP_HD size_t notify_rail_flag(int node) const { return flags() + node * kLine; }
    EP_HD size_t notify_node_flag(int local) const { return notify_rail_flag(topology.nodes) + local * kLine; }
    EP_HD size_t nvl_tail(int channel, int node, int peer) const {
        return notify_node_flag(topology.ranks_per_node) + nvl_ring(channel, node, peer) * kLine;
    }
    EP_HD size_t nvl_head(int channel, int node, int peer) const {
        return nvl_tail(channels, 0, 0) + nvl_ring(channel, node, peer) * kLine;
    }
    EP_HD size_t rdma_tail(int channel, int node) const {
        return nvl_head(channels, 0, 0) + rdma_ring(channel, node) * kLine;
    }
    EP_HD size_t rdma_head(int channel, int node) const {
        return rdma_tail(0, 0) + (rdma_rings() + rdma_ring(channel, node)) * kLine;
    }

    // --- cursors of this rank's own roles ---
    EP_HD size_t nvl_out(int channel, int node, int peer) const {
        return rdma_tail(0, 0) + 2 * rdma_rings() * kLine + nvl_ring(channel, node, peer) * kLine;
    }
    EP_HD size_t nvl_in(int channel, int node, int peer) const {
        return nvl_out(channels, 0, 0) + nvl_ring(channel, node, peer) * kLine;
    }
    EP_HD size_t rdma_out(int channel, int node) const {
        return nvl_in(channels, 0, 0) + rdma_ring(channel, node) * kLine;
    }
    EP_HD size_t rdma_in(int channel, int node) const {
        return rdma_out(0, 0) + (rdma_rings() + rdma_ring(channel, node)) * kLine;
    }
    EP_HD size_t flags_end() const { return rdma_out(0, 0) + 2 * rdma_rings() * kLine; }

    // --- the flags that other nodes write, numbered without gaps: for fabrics that keep them outside of the heap ---
    EP_HD size_t network_flags() const { return topology.nodes > 1 ? topology.nodes + 2 * rdma_rings() : 0; }
    EP_HD size_t network_flag(size_t flag) const {
        return flag < rdma_tail(0, 0) ? (flag - flags()) / kLine : topology.nodes + (flag - rdma_tail(0, 0)) / kLine;
    }

    // --- counts that notify exchanges, double-buffered by the parity of its epoch ---
    EP_HD size_t notify_staging(int parity, int node) const {
        return flags_end() + (static_cast<size_t>(parity) * topology.nodes + node) * node_block_bytes();
    }
    EP_HD size_t notify_rail(int parity, int node) const {
        return notify_staging(2, 0) + notify_staging(parity, node) - flags_end();
    }
    EP_HD size_t notify_node(int parity, int rank) const {
        return notify_rail(2, 0) + (static_cast<size_t>(parity) * topology.world() + rank) * rank_block_bytes();
    }

    // --- rings ---
    EP_HD size_t nvl_data(int channel, int node, int peer) const {
        return notify_node(2, 0) + nvl_ring(channel, node, peer) * nvl_ring_bytes;
    }
    EP_HD size_t rdma_staging(int channel, int node) const {
        return nvl_data(channels, 0, 0) + rdma_ring(channel, node) * rdma_ring_bytes;
    }
    EP_HD size_t rdma_data(int channel, int node) const {
        return nvl_data(channels, 0, 0) + (rdma_rings() + rdma_ring(channel, node)) * rdma_ring_bytes;
    }
    EP_HD size_t bytes() const { return nvl_data(channels, 0, 0) + 2 * rdma_rings() * rdma_ring_bytes; }

  private:
    EP_HD size_t nvl_ring(int channel, int node, int peer) const {
        return (static_cast<size_t>(channel) * topology.nodes + node) * topology.ranks_per_node + peer;
    }
    EP_HD size_t rdma_ring(int channel, int node) const { return static_cast<size_t>(channel) * topology.nodes + node; }
};

}  // namespace ep
