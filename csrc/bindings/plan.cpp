#include "bindings/module.h"
#include "launch/cuda/channels.h"

namespace py = pybind11;
using namespace py::literals;

namespace ep {
namespace {

template <class Roles>
py::object warps_of(const Topology& topology, int warps, int max_self_warps) {
    const auto roles = roles_for<Roles>(topology, warps, max_self_warps);
    if (!fits(roles, warps)) return py::none();
    return py::dict("self_warps"_a = roles.self_warps, "peer_warps"_a = roles.peer_warps,
                    "rdma_warps"_a = roles.rdma_warps, "coordinators"_a = roles.coordinators(),
                    "ranks_per_peer_warp"_a = roles.ranks_per_peer_warp(),
                    "nodes_per_rdma_warp"_a = roles.nodes_per_rdma_warp(),
                    "warps"_a = roles.warps());
}

}  // namespace

void bind_plan(py::module_& m) {
    m.def(
        "cuda_channels",
        [](int nodes, int ranks_per_node, int num_sms, int local_ranks) {
            return cuda_channels({nodes, ranks_per_node}, num_sms, local_ranks);
        },
        py::kw_only(), py::arg("nodes"), py::arg("ranks_per_node"), py::arg("num_sms"),
        py::arg("local_ranks"),
        "Returns the channels of a rank. local_ranks: number of ranks that share the GPU.");
    m.def(
        "cuda_roles",
        [](int nodes, int ranks_per_node, int num_sms, int channels, int ring_rows, bool combine) {
            const Topology topology{nodes, ranks_per_node};
            const int warps = num_sms * kBlockWarps / channels;
            if (!combine) return warps_of<DispatchRoles>(topology, warps, 1);
            return warps_of<CombineRoles>(topology, warps, CombineArgs::max_receivers(ring_rows));
        },
        py::kw_only(), py::arg("nodes"), py::arg("ranks_per_node"), py::arg("num_sms"),
        py::arg("channels"), py::arg("ring_rows"), py::arg("combine"),
        "Returns the warps of each channel by role, see launch/channel_roles.h; None if they do "
        "not fit. ring_rows: rows of the smallest ring that combine's receivers read.");
}

}  // namespace ep
