#include "router/launch/cuda/launch_rows.h"
#include "router/launch/router.h"

namespace ep {
namespace router {
namespace {

template <class Storage>
void launch(const RouterConfig& config, const RouterBackward& args, cudaStream_t stream) {
    launch_rows(router_backward<Storage>, config, args, backward_bytes<Real<Storage>>(config),
                stream);
}

}  // namespace
}  // namespace router

void router_backward_cuda(const RouterConfig& config, const RouterBackward& args,
                          void* stream_handle) {
    const auto stream = static_cast<cudaStream_t>(stream_handle);
    with_type(args.dtype, [&]<class T>() { router::launch<T>(config, args, stream); });
}

}  // namespace ep
