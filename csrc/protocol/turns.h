#pragma once

#include "protocol/ring.h"

namespace ep {

// Rows of one source rank that can be served now.
struct Turn {
    int rank;  // the source
    int node, peer;
    int first;          // of the rows that arrive at this rank in all
    int rows;           // at least one, at most a batch
    uint64_t position;  // of the first in its ring
};

// Serves the rows of `count` source ranks from the first-th other rank on, a lane each, whichever
// is ready: blocking on one could close a circle of full rings. `need(rings, node, peer)` is what a
// lane waits for: to see more rows, or more room, than its ring's position. `serve(turn)`: false
// ends it all.
template <WarpLike W, class F, class NeedOf, class Serve>
EP_FN void serve_in_turn(W& warp, const Rings<F>& rings, int first, int count, Wait wait,
                         NeedOf&& need, Serve&& serve) {
    const Layout& layout = rings.args.layout;
    const Topology& topology = rings.args.topology();
    typename W::template PerLane<int> rank_of, left, end, node_of, peer_of;
    typename W::template PerLane<uint64_t> limit, position;
    warp.lanes(count, [&](int lane) {
        const int rank = rank_of[lane] = rings.args.other_rank(first + lane);
        left[lane] = layout.received(rings.channel, rank);
        end[lane] = layout.received_start(rings.channel, rank) + left[lane];
        node_of[lane] = topology.node_of(rank);
        peer_of[lane] = topology.local_of(rank);
    });
    while (warp.ballot(count, [&](int lane) { return left[lane] > 0; })) {
        const uint32_t ready = warp.wait_any(wait, count, [&](int lane) {
            if (!left[lane]) return never();
            const Need mine = need(rings, node_of[lane], peer_of[lane]);
            limit[lane] = mine.seen;
            position[lane] = mine.expected - 1;
            return mine;
        });
        if (!ready) return;
        bool go_on = true;
        for_each_lane(ready, [&](int lane) {
            const int rows_left = warp.broadcast(left, lane);
            const uint64_t from = warp.broadcast(position, lane),
                           seen = warp.broadcast(limit, lane) - from;
            const int most = rows_left < rings.args.nvl_batch ? rows_left : rings.args.nvl_batch;
            const int rows = seen < static_cast<uint64_t>(most) ? static_cast<int>(seen) : most;
            go_on =
                go_on && serve(Turn{warp.broadcast(rank_of, lane), warp.broadcast(node_of, lane),
                                    warp.broadcast(peer_of, lane),
                                    warp.broadcast(end, lane) - rows_left, rows, from});
            warp.lanes(count, [&](int other) {
                if (other == lane) left[other] -= rows;
            });
        });
        if (!go_on) return;
    }
}

}  // namespace ep
