// The same with the signals of the rail relaxed, and nothing else: ThreadSanitizer must report the
// race of what was written to the other node.

#include "tsan_normal.h"

namespace ep {
namespace {

struct RelaxedSignals : MappedHostFabric {
    using MappedHostFabric::MappedHostFabric;
    template <class W>
    void signal_to(W&, int, int rank, size_t flag, uint64_t, uint64_t to) {
        std::atomic_ref<uint64_t>(*at<uint64_t>(rank, flag)).store(to, std::memory_order_relaxed);
    }
};

}  // namespace
}  // namespace ep

int main() { return ep::run_normal<ep::HostWarp, ep::RelaxedSignals>(40); }
