#include "router/launch/cuda/launch_rows.h"
#include "router/launch/router.h"
#include "router/row/forward_row.h"

namespace ep {
namespace router {
namespace {

template <class R>
size_t forward_bytes(const RouterConfig& config) {
    const size_t wide = 2 * size_t(config.experts) + config.groups + kMaxTopk;  // reals and keys
    return align_up(wide * sizeof(R) + kMaxTopk * sizeof(int32_t), 16);
}

template <class Storage>
__global__ void __launch_bounds__(kMaxThreads)
    router_forward(const RouterConfig config, const RouterForward args, const int bytes_per_warp) {
    using R = Real<Storage>;
    extern __shared__ __align__(16) unsigned char memory[];
    const int64_t row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
    if (row >= args.tokens) return;
    ScratchArrays arrays(memory + threadIdx.y * bytes_per_warp);
    ForwardScratch<R> scratch;
    scratch.score = arrays.take<R>(config.experts);
    scratch.key = arrays.take<Key<R>>(config.experts);
    scratch.group_key = arrays.take<Key<R>>(config.groups);
    scratch.weight = arrays.take<R>(kMaxTopk);
    scratch.id = arrays.take<int32_t>(kMaxTopk);
    WarpTeam team{static_cast<int>(threadIdx.x)};
    forward_row<Storage>(team, config, args, row, scratch);
}

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
