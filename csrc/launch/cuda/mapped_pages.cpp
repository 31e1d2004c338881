#include "launch/cuda/mapped_pages.h"

#include <unistd.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>

#include "core/cuda/runtime.h"

namespace ep {
namespace {

struct Known {
    std::mutex mutex;
    std::map<uintptr_t, std::weak_ptr<const MappedPages>> by_begin;
};

Known& known() {
    static auto* all = new Known;  // pages may outlive this file's destructors
    return *all;
}

}  // namespace

std::shared_ptr<const MappedPages> MappedPages::around(const void* address, size_t bytes, Of what) {
    const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    const auto place = reinterpret_cast<uintptr_t>(address);
    const uintptr_t begin = place / page * page, end = (place + bytes + page - 1) / page * page;
    const std::lock_guard lock(known().mutex);
    std::weak_ptr<const MappedPages>& there = known().by_begin[begin];
    if (const auto pages = there.lock()) {
        if (pages->bytes_ < end - begin)
            throw std::runtime_error("a driver's queues lie in pages that overlap");
        return pages;
    }
    const std::shared_ptr<const MappedPages> made(
        new MappedPages(reinterpret_cast<char*>(begin), end - begin, what));
    there = made;
    return made;
}

MappedPages::MappedPages(char* begin, size_t bytes, Of what) : begin_(begin), bytes_(bytes) {
    const bool is_host = what == Of::Host;
    const cudaError_t error = cudaHostRegister(begin, bytes,
                                               cudaHostRegisterPortable | cudaHostRegisterMapped |
                                                   (is_host ? 0 : cudaHostRegisterIoMemory));
    if (error == cudaSuccess) return;
    cudaGetLastError();
    throw std::runtime_error(
        std::string(is_host ? "the queues of a network card cannot be given to the GPU"
                            : "the bell of a network card cannot be given to the GPU, which "
                              "takes the option PeerMappingOverride=1 of NVIDIA's driver") +
        " (cudaHostRegister: " + cudaGetErrorString(error) + ")");
}

MappedPages::~MappedPages() { cudaHostUnregister(begin_); }

char* MappedPages::place_of(char* address) const { return ep::on_gpu(begin_) + (address - begin_); }

}  // namespace ep
