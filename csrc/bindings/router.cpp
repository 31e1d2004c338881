#include "router/router.h"

#include <cstdint>

#include "bindings/members.h"
#include "bindings/module.h"

namespace py = pybind11;

namespace ep {
namespace {

RouterConfig make_config(int experts, int topk, int groups, int group_topk, ScoreFunction score,
                         bool renormalize, double scaling_factor) {
    return {experts, topk, groups, group_topk, score, renormalize, scaling_factor};
}

const auto& setters_of(const RouterForward&) {
    using A = RouterForward;
    static const Setters<A> setters{
        EP_MEMBER(tokens), EP_MEMBER(dtype),       EP_MEMBER(logits),
        EP_MEMBER(bias),   EP_MEMBER(padding),     EP_MEMBER(replay_ids),
        EP_MEMBER(ids),    EP_MEMBER(weights),     EP_MEMBER(tokens_per_expert),
        EP_MEMBER(probs),  EP_MEMBER(routing_map), EP_MEMBER(aux_scores),
        EP_MEMBER(aux_map)};
    return setters;
}
const auto& setters_of(const RouterBackward&) {
    using A = RouterBackward;
    static const Setters<A> setters{
        EP_MEMBER(tokens),       EP_MEMBER(dtype),      EP_MEMBER(logits),
        EP_MEMBER(padding),      EP_MEMBER(ids),        EP_MEMBER(is_replayed),
        EP_MEMBER(grad_weights), EP_MEMBER(grad_probs), EP_MEMBER(grad_aux_scores),
        EP_MEMBER(grad_logits)};
    return setters;
}

// Binds a pass of the router. On: a number of threads, or a stream.
template <class Args, class On>
void bind_pass(py::module_& m, const char* name,
               void (*run)(const RouterConfig&, const Args&, On)) {
    m.def(
        name,
        [run](const RouterConfig& config, const py::dict& members, uint64_t on) {
            Args args{};
            fill(args, setters_of(args), members);
            const py::gil_scoped_release release;
            run(config, args, as<On>(on));
        },
        py::arg("config"), py::arg("members"), py::arg("on"),
        "members: numbers, and tensors or None, by their names in router/router.h. on: the largest "
        "number of threads, or a stream.");
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

    bind_pass(m, "router_forward_host", router_forward_host);
    bind_pass(m, "router_backward_host", router_backward_host);
#if defined(MEGATRON_EP_CUDA)
    bind_pass(m, "router_forward_cuda", router_forward_cuda);
    bind_pass(m, "router_backward_cuda", router_backward_cuda);
#endif
}

}  // namespace ep
