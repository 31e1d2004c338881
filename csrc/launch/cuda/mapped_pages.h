#pragma once

#include <cstddef>
#include <memory>

namespace ep {

// Pages of this process, of the host's memory or of a device's registers, that GPUs reach while
// this is there. Who wants pages that another one has already shares them.
class MappedPages {
  public:
    enum class Of { Host, Registers };

    // All pages in which these bytes lie. Throws std::runtime_error where CUDA refuses.
    static std::shared_ptr<const MappedPages> around(const void* address, size_t bytes, Of what);
    ~MappedPages();
    MappedPages(const MappedPages&) = delete;

    // Where the current device has it.
    template <class T>
    T* on_gpu(T* address) const {
        return reinterpret_cast<T*>(place_of(reinterpret_cast<char*>(address)));
    }

  private:
    MappedPages(char* begin, size_t bytes, Of what);
    char* place_of(char* address) const;

    char* begin_;
    size_t bytes_;
};

}  // namespace ep
