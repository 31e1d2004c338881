// Which warp of a GPU does what: every role of every channel belongs to one warp, on no more SMs
// than there are.

#include "launch/cuda/roles.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

namespace {

constexpr int kBlockWarps = 16;

template <class Roles>
void check(const ep::Topology& topology, int sms, int channels) {
    auto require = [&](bool holds, const char* what) {
        if (holds) return;
        std::fprintf(stderr, "%d x %d, %d SMs, %d channels: %s\n", topology.nodes,
                     topology.ranks_per_node, sms, channels, what);
        std::exit(EXIT_FAILURE);
    };
    const int world = topology.world();
    const int servers = ep::servers_for<Roles>(topology, sms * kBlockWarps / channels);
    const int fewest = ep::fewest_servers(topology);
    const int needed = Roles{topology.nodes, world, fewest}.warps() * channels;
    require((servers >= fewest) == (needed <= sms * kBlockWarps), "fits, or does not");
    if (servers < fewest) return;

    const Roles roles{topology.nodes, world, servers};
    require(roles.ranks_per_server() <= 32, "a server has more ranks than lanes");
    const int share = roles.ranks_per_server();
    require(!servers || (servers - 1) * share < world - 1, "a server has no ranks");
    require(servers * share >= world - 1, "a rank has no server");

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
                    check<ep::DispatchRoles>({nodes, ranks}, sms, channels);
                    check<ep::CombineRoles>({nodes, ranks}, sms, channels);
                }
            }
        }
    }
    return EXIT_SUCCESS;
}
