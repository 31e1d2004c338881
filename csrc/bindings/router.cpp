#include "router/router.h"

#include <cstdint>

#include "bindings/address.h"
#include "bindings/module.h"

namespace py = pybind11;

namespace ep {
namespace {

RouterConfig make_config(int experts, int topk, int groups, int group_topk, ScoreFunction score,
                         bool renormalize, double scaling_factor) {
    return {experts, topk, groups, group_topk, score, renormalize, scaling_factor};
}

RouterForward make_forward(int64_t tokens, int dtype, Address logits, Address bias, Address padding,
                           Address replay_ids, Address ids, Address weights,
                           Address tokens_per_expert, Address probs, Address routing_map,
                           Address aux_scores, Address aux_map) {
    return {tokens,           static_cast<DType>(dtype), at<void>(logits),
            at<float>(bias),  at<bool>(padding),         at<int64_t>(replay_ids),
            at<int64_t>(ids), at<void>(weights),         at<int64_t>(tokens_per_expert),
            at<void>(probs),  at<bool>(routing_map),     at<void>(aux_scores),
            at<bool>(aux_map)};
}

RouterBackward make_backward(int64_t tokens, int dtype, Address logits, Address padding,
                             Address ids, bool is_replayed, Address grad_weights,
                             Address grad_probs, Address grad_aux_scores, Address grad_logits) {
    return {tokens,
            static_cast<DType>(dtype),
            at<void>(logits),
            at<bool>(padding),
            at<int64_t>(ids),
            is_replayed,
            at<void>(grad_weights),
            at<void>(grad_probs),
            at<void>(grad_aux_scores),
            at<void>(grad_logits)};
}

}  // namespace

void bind_router(py::module_& m) {
    py::enum_<ScoreFunction>(m, "ScoreFunction")
        .value("SIGMOID", ScoreFunction::Sigmoid)
        .value("PRE_SOFTMAX", ScoreFunction::PreSoftmax)
        .value("POST_SOFTMAX", ScoreFunction::PostSoftmax);

    py::class_<RouterConfig>(m, "RouterConfig", "What the router computes.")
        .def(py::init(&make_config), py::kw_only(), py::arg("experts"), py::arg("topk"),
             py::arg("groups"), py::arg("group_topk"), py::arg("score"), py::arg("renormalize"),
             py::arg("scaling_factor"))
        .def_readonly("topk", &RouterConfig::topk);

    py::class_<RouterForward>(m, "RouterForward",
                              "Addresses of the forward pass's tensors; 0 where there is none.")
        .def(py::init(&make_forward), py::kw_only(), py::arg("tokens"), py::arg("dtype"),
             py::arg("logits"), py::arg("bias"), py::arg("padding"), py::arg("replay_ids"),
             py::arg("ids"), py::arg("weights"), py::arg("tokens_per_expert"), py::arg("probs"),
             py::arg("routing_map"), py::arg("aux_scores"), py::arg("aux_map"));

    py::class_<RouterBackward>(m, "RouterBackward",
                               "Addresses of the backward pass's tensors; 0 where there is none.")
        .def(py::init(&make_backward), py::kw_only(), py::arg("tokens"), py::arg("dtype"),
             py::arg("logits"), py::arg("padding"), py::arg("ids"), py::arg("is_replayed"),
             py::arg("grad_weights"), py::arg("grad_probs"), py::arg("grad_aux_scores"),
             py::arg("grad_logits"));

    const auto release = py::call_guard<py::gil_scoped_release>();
    m.def("router_forward_host", &router_forward_host, py::arg("config"), py::arg("tensors"),
          py::kw_only(), py::arg("max_threads"), release);
    m.def("router_backward_host", &router_backward_host, py::arg("config"), py::arg("tensors"),
          py::kw_only(), py::arg("max_threads"), release);
#if defined(MEGATRON_EP_CUDA)
    m.def(
        "router_forward_cuda",
        [](const RouterConfig& config, const RouterForward& tensors, Address stream) {
            router_forward_cuda(config, tensors, at<void>(stream));
        },
        py::arg("config"), py::arg("tensors"), py::kw_only(), py::arg("stream"), release);
    m.def(
        "router_backward_cuda",
        [](const RouterConfig& config, const RouterBackward& tensors, Address stream) {
            router_backward_cuda(config, tensors, at<void>(stream));
        },
        py::arg("config"), py::arg("tensors"), py::kw_only(), py::arg("stream"), release);
#endif
}

}  // namespace ep
