#include "router/launch/cuda/launch_rows.h"
#include "router/launch/router.h"

namespace ep {
namespace router {
namespace {

template <class Storage>
void launch(const RouterConfig& config, const RouterForward& args, cudaStream_t stream) {
    launch_rows(router_forward<Storage>, config, args, forward_bytes<Real<Storage>>(config),
                stream);
}

}  // namespace
}  // namespace router

void router_forward_cuda(const RouterConfig& config, const RouterForward& args,
                         void* stream_handle) {
    const auto stream = static_cast<cudaStream_t>(stream_handle);
    check_cuda(cudaMemsetAsync(args.tokens_per_expert, 0, config.experts * sizeof(int64_t), stream),
               "cudaMemsetAsync");
    with_type(args.dtype, [&]<class T>() { router::launch<T>(config, args, stream); });
}

}  // namespace ep
