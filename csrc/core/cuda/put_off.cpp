#include "core/cuda/put_off.h"

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
    std::vector<PutOff> releases;
};

List& list() {
    static List& list = *new List;  // never destroyed: some objects outlive static storage
    return list;
}

}  // namespace

void put_off(const PutOff& release) noexcept {
    const std::lock_guard lock(list().mutex);
    list().releases.push_back(release);
}

void catch_up() {
    std::vector<PutOff> due;
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
