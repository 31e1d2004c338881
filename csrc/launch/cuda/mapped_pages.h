#pragma once

#include <cstddef>
#include <memory>

namespace ep {

// Pages of host memory or of a device's registers that are mapped for all GPUs while the object
// lives. Requests for the same pages share one object.
class MappedPages {
  public:
    enum class Of { Host, Registers };

    // Maps all pages in which these bytes lie. Throws std::runtime_error if CUDA refuses.
    static std::shared_ptr<const MappedPages> around(const void* address, size_t bytes, Of what);
    ~MappedPages();
    MappedPages(const MappedPages&) = delete;

    // Returns the address on the current device.
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
