#pragma once

#include "protocol/ring.h"

namespace ep {

// Polls `count` queues of rows, a lane each, and serves those that are ready, at most `batch` rows
// of a queue at a time.
//   need(lane)       the condition under which the lane's queue has more rows, or more room, than
//                    its position; may first switch to another of the lane's queues
//   left             rows left in the lane's current queue
//   has_more(lane)   whether any queue of the lane has rows left
//   serve(lane, position, rows)   returns false to stop
template <WarpLike W, class More, class ConditionOf, class Serve>
EP_FN void poll_queues(W& warp, int count, Wait wait, int batch, PerLane<W, int>& left,
                       More&& has_more, ConditionOf&& need, Serve&& serve) {
    PerLane<W, uint64_t> limit, position;
    while (warp.ballot(count, has_more)) {
        const uint32_t ready = warp.wait_any(wait, count, [&](int lane) {
            if (!has_more(lane)) return never();
            const WaitCondition mine = need(lane);
            limit[lane] = mine.observed;
            position[lane] = mine.required - 1;
            return mine;
        });
        if (!ready) return;
        bool go_on = true;
        for_each_lane(ready, [&](int lane) {
            const int rows_left = warp.broadcast(left, lane);
            const uint64_t from = warp.broadcast(position, lane),
                           seen = warp.broadcast(limit, lane) - from;
            const int max_rows = rows_left < batch ? rows_left : batch;
            const int rows =
                seen < static_cast<uint64_t>(max_rows) ? static_cast<int>(seen) : max_rows;
            go_on = go_on && serve(lane, from, rows);
            warp.lanes(count, [&](int other) {
                if (other == lane) left[other] -= rows;
            });
        });
        if (!go_on) return;
    }
}

// Rows of one source rank that are ready to be served.
struct ReadyBatch {
    int rank;  // the source
    int node, peer;
    int first;          // index among all rows that arrive at this rank
    int rows;           // at least one, at most a batch
    uint64_t position;  // of the first row in its ring
};

// Polls the rings of `count` source ranks, from other_rank(first) on, and serves the ready ones:
// blocking on one ring could close a cycle of full rings. A lane polls every 32nd of them, one at a
// time.
//   cursor(node, peer)        a ring's position
//   need(rings, node, peer)   the condition under which the ring has more rows, or more room
//   serve(batch)              moves the position on; returns false to stop
template <WarpLike W, class F, class CursorOf, class ConditionOf, class Serve>
EP_FN void poll_rings(W& warp, const Rings<F>& rings, int first, int count, Wait wait,
                      CursorOf&& cursor, ConditionOf&& need, Serve&& serve) {
    const Layout& layout = rings.args.layout;
    const Topology& topology = rings.args.topology();
    const int lanes = lanes_from(0, count);
    PerLane<W, int> at, rank_of, left, end, all_left, node_of, peer_of;
    auto serve_ring = [&](int lane, int which) {
        at[lane] = which < count ? which : lane;
        const int rank = rank_of[lane] = rings.args.other_rank(first + at[lane]);
        node_of[lane] = topology.node_of(rank);
        peer_of[lane] = topology.local_of(rank);
        end[lane] =
            layout.received_start(rings.channel, rank) + layout.received(rings.channel, rank);
    };
    auto read_left = [&](int lane) {
        const auto& ring = cursor(node_of[lane], peer_of[lane]);
        left[lane] = static_cast<int>(ring.end - ring.next);
    };
    warp.lanes(lanes, [&](int lane) {
        all_left[lane] = 0;
        for (int which = lane; which < count; which += 32) {
            serve_ring(lane, which);
            const int rows = layout.received(rings.channel, rank_of[lane]);
            auto& ring = cursor(node_of[lane], peer_of[lane]);
            ring.end = ring.next + rows;
            all_left[lane] += rows;
        }
        serve_ring(lane, lane);
        read_left(lane);
    });
    auto has_more = [&](int lane) { return all_left[lane] > 0; };
    auto look = [&](int lane) {
        WaitCondition mine = never();
        for (int which = lane; which < count; which += 32) {
            if (left[lane]) {
                mine = need(rings, node_of[lane], peer_of[lane]);
                if (is_met(mine)) break;
            }
            if (count > 32) {
                serve_ring(lane, at[lane] + 32);
                read_left(lane);
            }
        }
        return mine;
    };
    auto serve_rows = [&](int lane, uint64_t position, int rows) {
        const bool go_on = serve(
            ReadyBatch{warp.broadcast(rank_of, lane), warp.broadcast(node_of, lane),
                       warp.broadcast(peer_of, lane),
                       warp.broadcast(end, lane) - warp.broadcast(left, lane), rows, position});
        warp.lanes(lanes, [&](int other) {
            if (other == lane) all_left[other] -= rows;
        });
        return go_on;
    };
    poll_queues(warp, lanes, wait, rings.args.nvl_batch, left, has_more, look, serve_rows);
}

}  // namespace ep
