#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bindings/exclusive_call.h"
#include "bindings/incidents.h"
#include "bindings/launch_args.h"
#include "core/cuda/put_off.h"
#include "core/notify_args.h"
#include "launch/cuda/group.h"

namespace ep {

// What destructors of this module, which has a list of its own, have put off.
inline void bind_catch_up(pybind11::module_& m) {
    m.def("catch_up", &catch_up, pybind11::call_guard<pybind11::gil_scoped_release>(),
          "Gives back what belonged to objects that are gone, which call no CUDA when they go. "
          "Waits for the GPU if there is anything.");
}

// A CudaGroup as Python sees it: the same methods as the host's Group, plus a stream. Each fabric
// adds its constructor.
template <class FabricParams>
class PyCudaGroup {
  public:
    PyCudaGroup(const Heap& heap, const FabricParams& fabric, std::vector<int> ranks,
                const std::vector<char*>& own_heaps, const std::vector<char*>& heaps, int device,
                int num_sms, double timeout)
        : group_(std::make_unique<CudaGroup<FabricParams>>(
              heap, fabric, std::move(ranks), own_heaps, heaps, device, num_sms, timeout)) {}

    // Waits until the totals are there, which it returns.
    std::vector<Layout::Totals> notify(const std::vector<RankTensors>& tensors, int topk,
                                       int index_bytes, int expert_alignment, int expert_capacity,
                                       bool allows_repeats, Address stream) {
        const auto lock = exclusive_call_.enter();
        std::vector<NotifyArgs> args;
        for (size_t i = 0; i < tensors.size(); ++i) {
            args.push_back({group_->ranks()[i], group_->heap(),
                            layout_of(group_->heap(), tensors[i], topk),
                            at<void>(tensors[i].topk_idx), index_bytes, expert_alignment,
                            expert_capacity, 0, at<int64_t>(tensors[i].tokens_per_expert)});
            args.back().allows_repeats = allows_repeats;
        }
        return group_->notify_and_wait(args, at<void>(stream), [&] { look_around(); });
    }

    // The same, with a dispatch launched behind it, before the totals are known. Returns them, and
    // whether that dispatch had the right room. If not it did nothing, and `dispatch` makes the
    // same call `again`. Only for a process with one rank: of several each would decide for itself.
    std::pair<std::vector<Layout::Totals>, bool> dispatch_ahead(
        const std::vector<RankTensors>& tensors, const RowFormat& format, int nvl_batch,
        int rdma_chunk, int index_bytes, int expert_alignment, int expert_capacity,
        bool allows_repeats, Address stream) {
        const auto lock = exclusive_call_.enter();
        if (tensors.size() > 1) throw std::invalid_argument("dispatch_ahead is for one rank");
        const auto args = fused_args(tensors, format, nvl_batch, rdma_chunk, index_bytes,
                                     expert_alignment, expert_capacity, allows_repeats);
        auto totals = group_->notify_and_wait(notify_args(args), at<void>(stream),
                                              [&] { look_around(); }, {args.begin(), args.end()});
        const bool is_done = args.empty() || args.front().guessed_right(totals.front());
        return {std::move(totals), is_done};
    }

    // again: after a launch ahead that did nothing.
    void dispatch(const std::vector<RankTensors>& tensors, const RowFormat& format, int nvl_batch,
                  int rdma_chunk, bool again, Address stream) {
        const auto lock = exclusive_call_.enter();
        std::vector<DispatchArgs> args;
        call_ += !again;
        for (size_t i = 0; i < tensors.size(); ++i) {
            args.push_back(dispatch_args(group_->heap(), group_->ranks()[i], tensors[i], format,
                                         call_, nvl_batch, rdma_chunk));
        }
        group_->dispatch(args, at<void>(stream));
    }

    // With the exchange of counts that comes before it, of which the host learns nothing.
    void fused_dispatch(const std::vector<RankTensors>& tensors, const RowFormat& format,
                        int nvl_batch, int rdma_chunk, int index_bytes, int expert_alignment,
                        int expert_capacity, bool allows_repeats, Address stream) {
        const auto lock = exclusive_call_.enter();
        group_->fused_dispatch(fused_args(tensors, format, nvl_batch, rdma_chunk, index_bytes,
                                          expert_alignment, expert_capacity, allows_repeats),
                               at<void>(stream));
    }

    void combine(const std::vector<RankTensors>& tensors, const RowFormat& format, int nvl_batch,
                 int rdma_chunk, int dtype, Address stream) {
        const auto lock = exclusive_call_.enter();
        std::vector<CombineArgs> args;
        ++call_;
        for (size_t i = 0; i < tensors.size(); ++i) {
            args.push_back(combine_args(group_->heap(), group_->ranks()[i], tensors[i], format,
                                        call_, nvl_batch, rdma_chunk));
        }
        group_->combine(args, static_cast<DType>(dtype), at<void>(stream));
    }

    pybind11::object watch = pybind11::none();  // called while counts are waited for, may raise

    std::optional<std::pair<const char*, int>> aborted() const {
        return first_reason(group_->aborted());
    }

    std::vector<pybind11::dict> incidents() const {
        std::vector<pybind11::dict> all;
        for (size_t i = 0; i < group_->ranks().size(); ++i) {
            const auto own = incidents_of(group_->report(i));
            all.insert(all.end(), own.begin(), own.end());
        }
        return all;
    }

    // Of all ranks in reach.
    std::vector<pybind11::dict> rank_statuses() {
        std::vector<ControlBlock> blocks;
        {
            const pybind11::gil_scoped_release release;
            blocks = group_->control_blocks();
        }
        std::vector<pybind11::dict> all;
        for (size_t i = 0; i < blocks.size(); ++i)
            all.push_back(
                rank_status_of(group_->first_in_reach() + static_cast<int>(i), blocks[i]));
        return all;
    }

    std::vector<std::pair<std::vector<uint64_t>, std::vector<uint64_t>>> waited() const {
        std::vector<std::pair<std::vector<uint64_t>, std::vector<uint64_t>>> all;
        for (size_t i = 0; i < group_->ranks().size(); ++i) all.push_back(group_->waited(i));
        return all;
    }

    void abort(bool interrupted, bool failed, const std::string& reason) {
        group_->abort(outcome_of(interrupted, failed), reason);
    }

    void listen() { group_->listen(); }

    void drain() const { group_->drain(); }

    void note_capture(Address stream) { group_->note_capture(at<void>(stream)); }

    int graphs() const { return group_->graphs(); }
    bool orders_graphs() const { return group_->orders_graphs(); }

    void retire() { group_->retire(); }

    void reset() {
        const auto lock = exclusive_call_.enter();
        group_->reset();
        call_ = 0;
    }

    const CudaGroup<FabricParams>& group() const { return *group_; }

    static pybind11::class_<PyCudaGroup> bind(pybind11::module_& m, const char* name,
                                              const char* doc) {
        namespace py = pybind11;
        const auto release = py::call_guard<py::gil_scoped_release>();
        return py::class_<PyCudaGroup>(m, name, doc)
            .def("notify", &PyCudaGroup::notify, py::arg("tensors"), py::arg("topk"),
                 py::arg("index_bytes"), py::arg("expert_alignment"), py::arg("expert_capacity"),
                 py::arg("allows_repeats"), py::arg("stream"), release)
            .def("dispatch_ahead", &PyCudaGroup::dispatch_ahead, py::arg("tensors"),
                 py::arg("format"), py::arg("nvl_batch"), py::arg("rdma_chunk"),
                 py::arg("index_bytes"), py::arg("expert_alignment"), py::arg("expert_capacity"),
                 py::arg("allows_repeats"), py::arg("stream"), release)
            .def("dispatch", &PyCudaGroup::dispatch, py::arg("tensors"), py::arg("format"),
                 py::arg("nvl_batch"), py::arg("rdma_chunk"), py::arg("again"), py::arg("stream"),
                 release)
            .def("fused_dispatch", &PyCudaGroup::fused_dispatch, py::arg("tensors"),
                 py::arg("format"), py::arg("nvl_batch"), py::arg("rdma_chunk"),
                 py::arg("index_bytes"), py::arg("expert_alignment"), py::arg("expert_capacity"),
                 py::arg("allows_repeats"), py::arg("stream"), release)
            .def("combine", &PyCudaGroup::combine, py::arg("tensors"), py::arg("format"),
                 py::arg("nvl_batch"), py::arg("rdma_chunk"), py::arg("dtype"), py::arg("stream"),
                 release)
            .def_readwrite(
                "watch", &PyCudaGroup::watch,
                "Called now and then while counts are waited for: what it raises ends the wait.")
            .def("aborted", &PyCudaGroup::aborted,
                 "(outcome, rank) of the rank that gave up first, as far as this process has been "
                 "told, "
                 "or None.")
            .def("incidents", &PyCudaGroup::incidents)
            .def("rank_statuses", &PyCudaGroup::rank_statuses)
            .def("waited", &PyCudaGroup::waited, release)
            .def("abort", &PyCudaGroup::abort, py::kw_only(), py::arg("interrupted"),
                 py::arg("failed"), py::arg("reason"), release)
            .def("listen", &PyCudaGroup::listen, release,
                 "Afterwards aborted() knows also of those who gave up while no kernel of this "
                 "process ran.")
            .def("note_capture", &PyCudaGroup::note_capture, py::arg("stream"),
                 "Before launches on a stream that is being captured.")
            .def("graphs", &PyCudaGroup::graphs,
                 "How many CUDA graphs may replay launches of this group, which must stay as long.")
            .def("orders_graphs", &PyCudaGroup::orders_graphs,
                 "Whether combine may have an intra-rank pass in a graph: drivers before CUDA 12.3 "
                 "do not know the event that it needs.")
            .def("retire", &PyCudaGroup::retire, release,
                 "Once all launches are done: those that are replayed from now on only fill their "
                 "outputs with what nobody can take for data.")
            .def("drain", &PyCudaGroup::drain, release)
            .def("reset", &PyCudaGroup::reset, release);
    }

  private:
    // While it waits for counts.
    void look_around() {
        const pybind11::gil_scoped_acquire gil;
        if (PyErr_CheckSignals() != 0) {
            group_->abort(Outcome::Interrupted, "");
            throw pybind11::error_already_set();
        }
        if (!watch.is_none()) watch();
    }

    // Of the next call.
    std::vector<FusedDispatchArgs> fused_args(const std::vector<RankTensors>& tensors,
                                              const RowFormat& format, int nvl_batch,
                                              int rdma_chunk, int index_bytes, int expert_alignment,
                                              int expert_capacity, bool allows_repeats) {
        std::vector<FusedDispatchArgs> args;
        ++call_;
        for (size_t i = 0; i < tensors.size(); ++i) {
            args.push_back({dispatch_args(group_->heap(), group_->ranks()[i], tensors[i], format,
                                          call_, nvl_batch, rdma_chunk),
                            at<void>(tensors[i].topk_idx), index_bytes, expert_alignment,
                            expert_capacity, at<int64_t>(tensors[i].tokens_per_expert),
                            allows_repeats});
        }
        return args;
    }

    std::unique_ptr<CudaGroup<FabricParams>> group_;
    ExclusiveCall exclusive_call_;
    uint64_t call_ = 0;
};

}  // namespace ep
