#include "core/cuda/deferred_release.h"

#include <cuda_runtime.h>

#include <mutex>
#include <new>
#include <set>
#include <vector>

#include "core/cuda/runtime.h"

namespace ep {
namespace {

struct List {
    std::mutex mutex;
    std::vector<DeferredRelease> releases;
};

List& list() {
    static List& list = *new List;  // never destroyed: some objects outlive static storage
    return list;
}

}  // namespace

void defer(const DeferredRelease& release) noexcept {
    const std::lock_guard lock(list().mutex);
    list().releases.push_back(release);
}

void run_deferred() {
    std::vector<DeferredRelease> due;
    {
        const std::lock_guard lock(list().mutex);
        due.swap(list().releases);
    }
    std::set<int> idle;
    for (const auto& [device, release, what] : due) {
        const DeviceGuard guard(device, std::nothrow);
        if (idle.insert(device).second) cudaDeviceSynchronize();
        release(what);
    }
}

}  // namespace ep
