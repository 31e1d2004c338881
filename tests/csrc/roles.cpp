// Which warp of a GPU does what: every role of every channel belongs to one warp, on no more SMs
// than there are, and roles of notify share warps only where SMs are short.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "launch/channel_roles.h"
#include "protocol/notify.h"

namespace {

constexpr int kBlockWarps = 16;

void check_notify(const ep::Topology& topology, int sms, int channels) {
    auto require = [&](bool holds, const char* what) {
        if (holds) return;
        std::fprintf(stderr, "notify, %d x %d, %d SMs, %d channels: %s\n", topology.nodes,
                     topology.ranks_per_node, sms, channels, what);
        std::exit(EXIT_FAILURE);
    };
    const int roles = ep::num_exchange_roles({topology, topology.world(), channels, 1024, 1024});
    require(roles >= topology.nodes - 1 + topology.ranks_per_node, "roles of the exchange");
    const int blocks = ep::notify_blocks(channels, roles, sms), warps = blocks * kBlockWarps;
    const int exchangers = ep::notify_exchangers(warps, roles);
    require(blocks >= 1 && blocks <= sms, "blocks");
    require(exchangers >= 1 && exchangers <= roles && 2 * exchangers <= warps, "warps");
    require(blocks == sms || exchangers == roles, "a warp has several roles");
    require(blocks == sms || warps > channels, "too few warps for channels");
    require((blocks - 1) * kBlockWarps < std::max(channels + 1, 2 * roles), "too many blocks");
}

template <class Roles>
void check(const ep::Topology& topology, int sms, int channels, int max_self_warps) {
    auto require = [&](bool holds, const char* what) {
        if (holds) return;
        std::fprintf(stderr, "%d x %d, %d SMs, %d channels: %s\n", topology.nodes,
                     topology.ranks_per_node, sms, channels, what);
        std::exit(EXIT_FAILURE);
    };
    const int world = topology.world();
    const int warps_of_channel = sms * kBlockWarps / channels;
    const Roles fewest{topology.nodes, world, ep::min_peer_warps(topology),
                       ep::min_rdma_warps(topology)};
    const Roles roles = ep::roles_for<Roles>(topology, warps_of_channel, max_self_warps);
    require(ep::fits(roles, warps_of_channel) == (fewest.warps() <= warps_of_channel),
            "fits, or does not");
    if (!ep::fits(roles, warps_of_channel)) return;

    require(roles.self_warps >= 1 && roles.self_warps <= max_self_warps, "warps for own tokens");
    auto is_divided = [](int count, int warps, int share) {
        return warps ? (warps - 1) * share < count && warps * share >= count : count == 0;
    };
    require(roles.nodes_per_rdma_warp() <= 32, "an RDMA warp has more nodes than lanes");
    require(is_divided(world - 1, roles.peer_warps, roles.ranks_per_peer_warp()),
            "ranks of peer warps");
    require(is_divided(topology.nodes - 1, roles.rdma_warps, roles.nodes_per_rdma_warp()),
            "nodes of RDMA warps");

    const int count = roles.warps() * channels, blocks = std::min(sms, count);
    std::vector<int> warps(count);
    for (int block = 0; block < blocks; ++block) {
        require(ep::role_of_warp(count, block, blocks, 0) >= 0, "a block has nothing to do");
        for (int warp = 0; warp < kBlockWarps; ++warp) {
            const int number = ep::role_of_warp(count, block, blocks, warp);
            if (number >= 0) ++warps.at(number);
        }
    }
    require(std::count(warps.begin(), warps.end(), 1) == count, "a role does not have one warp");
}

}  // namespace

int main() {
    for (int nodes : {1, 2, 3, 8, 32, 33, 65}) {
        for (int ranks : {1, 2, 3, 4, 7, 8, 33, 72}) {
            for (int sms : {1, 2, 3, 12, 24, 132}) {
                for (int channels : {1, 2, 3, 5, 16, 18, 38, 76, 128, 700}) {
                    check_notify({nodes, ranks}, sms, channels);
                    check<ep::DispatchRoles>({nodes, ranks}, sms, channels, 1);
                    for (int receivers : {1, 2, 6})
                        check<ep::CombineRoles>({nodes, ranks}, sms, channels, receivers);
                }
            }
        }
    }
    return EXIT_SUCCESS;
}
