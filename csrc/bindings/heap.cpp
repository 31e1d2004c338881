#include "core/heap.h"

#include <pybind11/stl.h>

#include <chrono>
#include <cstdint>
#include <string>

#include "bindings/members.h"
#include "bindings/module.h"
#include "core/layout.h"
#include "core/planned_layout.h"
#include "core/row.h"
#include "fabric/queue/software_nic.h"
#include "fabric/shared_memory.h"

namespace py = pybind11;
using namespace py::literals;

namespace ep {
namespace {

void bind_segment(py::module_& m) {
    py::class_<Segment>(m, "Segment", "Memory that holds the symmetric heap of one rank.")
        .def_static("anonymous", &Segment::anonymous, py::arg("bytes"))
        .def_static("shared", &Segment::shared, py::arg("bytes"))
        .def_static("open", &Segment::open, py::arg("address"), py::arg("bytes"))
        .def("address", &Segment::address,
             "Returns what `open` in another process needs: (process, descriptor, device, inode).")
        .def("replace", &Segment::replace, py::arg("address"),
             "Maps another segment of the same size in this one's place.")
        .def("release", &Segment::release, "Unmaps it, after its last use.")
        .def_property_readonly("bytes", &Segment::bytes);
}

void bind_software_nic(py::module_& m) {
    using Seconds = std::chrono::duration<double>;
    py::class_<SoftwareNic>(m, "SoftwareNic",
                            "A thread that carries what a rank sends to other nodes, over TCP or "
                            "by a network card.")
        .def(py::init([](int rank, const std::vector<Segment*>& segments,
                         const SoftwareNic::Cards& cards) {
                 std::vector<ControlBlock*> controls;
                 for (const Segment* segment : segments)
                     controls.push_back(reinterpret_cast<ControlBlock*>(segment->data()));
                 return std::make_unique<SoftwareNic>(rank, std::move(controls), cards);
             }),
             py::kw_only(), py::arg("rank"), py::arg("segments"),
             py::arg("cards") = SoftwareNic::Cards(), py::keep_alive<1, 3>())
        .def("start", &SoftwareNic::start, py::arg("sockets"),
             py::arg("pairs") = SoftwareNic::QueuePairs(), py::arg("limit") = 10.0,
             "Takes connected sockets by rank, -1 where memory is mapped, and with a card a "
             "connected queue pair for each.")
        .def(
            "invite", [](SoftwareNic& nic, int rank) { return py::bytes(nic.invite(rank)); },
            py::arg("rank"),
            "With a direct card: makes queues towards a rank of another machine, and returns what "
            "that rank needs to know of them.")
        .def(
            "join",
            [](SoftwareNic& nic, int rank, const py::bytes& told) {
                nic.join(rank, std::string(told));
            },
            py::arg("rank"), py::arg("told"), "Takes what `invite` returned on that rank.")
        .def(
            "stop", [](SoftwareNic& nic, double most) { nic.stop(Seconds(most)); },
            py::arg("seconds"), py::call_guard<py::gil_scoped_release>(),
            "Stops when everything has been sent, or after this time.")
        .def("ranks_that_left", &SoftwareNic::ranks_that_left,
             "Returns the ranks of other machines that have announced that they send nothing more.")
        .def(
            "silence", &SoftwareNic::silence, py::arg("rank"),
            py::call_guard<py::gil_scoped_release>(),
            "Returns the seconds since the rank's process has sent anything, and since its machine "
            "has answered; 0, 0 for a rank of this machine.")
        .def("flush_reports", &SoftwareNic::flush_reports, py::call_guard<py::gil_scoped_release>(),
             "Sends what this rank knows of failures, and waits briefly for its arrival.")
        .def("tolerate_loss", &SoftwareNic::tolerate_loss,
             "Lets a broken connection end only the waits of the normal mode from now on.")
        .def_property_readonly_static("mirror_bytes",
                                      [](py::object) { return sizeof(ControlBlock); });
}

Layout layout_in(const Heap& heap, int num_tokens, int topk, int32_t* data = nullptr) {
    return {heap.topology, num_tokens, topk, heap.num_experts, heap.channels, data};
}

// Binds a handle's layout: its size and the offsets of its parts in int32, and the plan's filling.
void bind_layout(py::class_<Heap>& bound) {
    bound.def_property_readonly_static("overflow_offset", [](py::object) {
        return offsetof(Layout::Totals, overflow) / sizeof(int32_t);
    });
    bound.def(
        "layout",
        [](const Heap& heap, int num_tokens, int topk) {
            const Layout layout = layout_in(heap, num_tokens, topk);
            return py::dict("size"_a = layout.size(),
                            "expert_start"_a = &layout.expert_start(0) - layout.data,
                            "received"_a = &layout.received(0, 0) - layout.data,
                            "expert_count"_a = &layout.expert_count(0) - layout.data);
        },
        py::arg("num_tokens"), py::arg("topk"),
        "Returns the size of a handle's layout, and where the prefix sums [L + 1] of the rows per "
        "local expert with padding, the received rows [C, W] by channel and source rank, and the "
        "rows [L] of each local expert without padding are, in int32.");
    bound.def(
        "lay_out",
        [](const Heap& heap, int rank, int topk, uintptr_t moves, size_t count, uintptr_t tokens,
           uint32_t epoch, int leaving, uintptr_t layout) {
            static_assert(sizeof(Move) == 6 * sizeof(int32_t));
            const auto* tokens_of = as<int32_t*>(tokens);
            Layout to_fill = layout_in(heap, tokens_of[rank], topk, as<int32_t*>(layout));
            to_fill.is_planned = true;
            lay_out(to_fill, rank, as<Move*>(moves), count, tokens_of, epoch, leaving);
            return to_fill.totals();
        },
        py::kw_only(), py::arg("rank"), py::arg("topk"), py::arg("moves"), py::arg("count"),
        py::arg("tokens"), py::arg("epoch"), py::arg("leaving"), py::arg("layout"),
        "Fills a layout in host memory, and returns its totals. moves: int32 [count, 6], see "
        "core/planned_layout.h. tokens: int32 [W].");
}

void bind_totals(py::module_& m) {
    py::class_<Layout::Totals>(m, "Totals", "Counts of one rank that notify reports to the host.")
        .def_readonly("received_rows", &Layout::Totals::received_rows)
        .def_readonly("expert_rows", &Layout::Totals::expert_rows)
        .def_readonly("rail_rows", &Layout::Totals::rail_rows)
        .def_property_readonly("bad_token",
                               [](const Layout::Totals& totals) { return totals.bad_token - 1; });
}

void bind_heap(py::module_& m) {
    py::class_<Heap> heap(m, "Heap", "Layout of the symmetric heap.");
    heap.def(py::init([](int nodes, int ranks_per_node, int num_experts, int channels,
                         size_t nvl_ring_bytes, size_t rdma_ring_bytes) {
                 return Heap{{nodes, ranks_per_node},
                             num_experts,
                             channels,
                             align_up(nvl_ring_bytes, Heap::kLine),
                             align_up(rdma_ring_bytes, Heap::kLine)};
             }),
             py::kw_only(), py::arg("nodes"), py::arg("ranks_per_node"), py::arg("num_experts"),
             py::arg("channels"), py::arg("nvl_ring_bytes"), py::arg("rdma_ring_bytes"))
        .def_property_readonly("bytes", &Heap::bytes)
        .def_property_readonly("bytes_without_network", &Heap::bytes_without_network)
        .def_property_readonly("ranks_per_node",
                               [](const Heap& heap) { return heap.topology.ranks_per_node; })
        .def_property_readonly("parts",
                               [](const Heap& heap) {
                                   py::dict parts;
                                   for (const Heap::Part& part : heap.parts())
                                       parts[part.name] = part.bytes;
                                   return parts;
                               })
        .def_property_readonly("local_experts", &Heap::local_experts)
        .def_readonly("channels", &Heap::channels)
        .def_readonly("nvl_ring_bytes", &Heap::nvl_ring_bytes)
        .def_readonly("rdma_ring_bytes", &Heap::rdma_ring_bytes);
    bind_layout(heap);
}

void bind_row_format(py::module_& m) {
    py::class_<RowFormat>(m, "RowFormat", "The parts of a row in a ring.")
        .def(py::init([](int payload_bytes, int scale_bytes, int weight_bytes, int topk,
                         int payload_type) {
                 return RowFormat{payload_bytes, scale_bytes, weight_bytes, topk, payload_type};
             }),
             py::kw_only(), py::arg("payload_bytes"), py::arg("scale_bytes"),
             py::arg("weight_bytes"), py::arg("topk"), py::arg("payload_type"))
        .def_readonly("payload_bytes", &RowFormat::payload_bytes)
        .def_readonly("topk", &RowFormat::topk)
        .def_property_readonly("slot_bytes", &RowFormat::slot_bytes)
        .def("slots", &RowFormat::slots, py::arg("ring_bytes"), "Returns the rows of a ring.");
}

}  // namespace

void bind_heaps(py::module_& m) {
    bind_segment(m);
    bind_software_nic(m);
    bind_totals(m);
    bind_heap(m);
    bind_row_format(m);
}

}  // namespace ep
