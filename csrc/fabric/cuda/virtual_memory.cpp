#include "fabric/cuda/virtual_memory.h"

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <utility>

#include "core/cuda/deferred_release.h"
#include "core/cuda/runtime.h"

namespace ep {
namespace {

// Returns a function of the driver. The runtime finds it, so that nothing links with libcuda.
template <class F>
F* driver_function(const char* name) {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result{};
#if CUDART_VERSION >= 12050
    constexpr unsigned kCuda12 = 12000;
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion(name, &found, kCuda12, cudaEnableDefault, &result);
#else
    const cudaError_t error = cudaGetDriverEntryPoint(name, &found, cudaEnableDefault, &result);
#endif
    check_cuda(error, name);
    if (!found) throw std::runtime_error(std::string(name) + ": this driver does not have it");
    return reinterpret_cast<F*>(found);
}

// The functions that are used here, found once: a destructor can call them without an error.
struct Driver {
#define EP_FUNCTION(name) decltype(::name)* name = driver_function<decltype(::name)>(#name);
    EP_FUNCTION(cuGetErrorName)
    EP_FUNCTION(cuMemAddressFree)
    EP_FUNCTION(cuMemAddressReserve)
    EP_FUNCTION(cuMemCreate)
    EP_FUNCTION(cuMemExportToShareableHandle)
    EP_FUNCTION(cuMemGetAllocationGranularity)
    EP_FUNCTION(cuMemImportFromShareableHandle)
    EP_FUNCTION(cuMemMap)
    EP_FUNCTION(cuMemRelease)
    EP_FUNCTION(cuMemSetAccess)
    EP_FUNCTION(cuMemUnmap)
#undef EP_FUNCTION
};

const Driver& driver() {
    static const Driver functions;
    return functions;
}

void check_driver(CUresult result, const char* what) {
    if (result == CUDA_SUCCESS) return;
    const char* name = nullptr;
    driver().cuGetErrorName(result, &name);
    throw std::runtime_error(std::string(what) + ": " + (name ? name : std::to_string(result)));
}

CUmemAllocationHandleType handle_type(MemoryKind kind) {
    return kind == MemoryKind::Fabric ? CU_MEM_HANDLE_TYPE_FABRIC
                                      : CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
}

CUmemAllocationProp properties(int device, MemoryKind kind) {
    CUmemAllocationProp found{};
    found.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    found.location = {CU_MEM_LOCATION_TYPE_DEVICE, device};
    found.requestedHandleTypes = handle_type(kind);
    return found;
}

CUmemGenericAllocationHandle import_memory(const std::string& handle, MemoryKind kind) {
    CUmemGenericAllocationHandle memory = 0;
    auto take = [&](void* from) {
        check_driver(driver().cuMemImportFromShareableHandle(&memory, from, handle_type(kind)),
                     "cuMemImportFromShareableHandle");
    };
    if (kind == MemoryKind::Fabric) {
        auto fabric = handle_of<CUmemFabricHandle>(handle);
        take(&fabric);
    } else {
        take(reinterpret_cast<void*>(intptr_t{handle_of<int>(handle)}));
    }
    return memory;
}

template <class T>
std::string export_memory(CUmemGenericAllocationHandle memory, MemoryKind kind) {
    T handle{};
    check_driver(driver().cuMemExportToShareableHandle(&handle, memory, handle_type(kind), 0),
                 "cuMemExportToShareableHandle");
    return bytes_of(handle);
}

}  // namespace

// Frees what it has of these, in the order that the driver asks for. Throws nothing.
struct VirtualMemory::Mapping {
    int device;
    size_t bytes;  // a multiple of the driver's granularity
    CUdeviceptr address = 0;
    bool is_mapped = false;
    CUmemGenericAllocationHandle own = 0;  // of memory that this process created

    Mapping(int device, size_t least, MemoryKind kind) : device(device), bytes(0) {
        const CUmemAllocationProp memory = properties(device, kind);
        size_t granularity = 0;
        check_driver(driver().cuMemGetAllocationGranularity(&granularity, &memory,
                                                            CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
                     "cuMemGetAllocationGranularity");
        bytes = (least + granularity - 1) / granularity * granularity;
        check_driver(driver().cuMemAddressReserve(&address, bytes, 0, 0, 0), "cuMemAddressReserve");
    }
    Mapping(const Mapping&) = delete;
    ~Mapping() {
        unmap();
        if (address) driver().cuMemAddressFree(address, bytes);
        if (own) driver().cuMemRelease(own);
    }

    void map(CUmemGenericAllocationHandle memory) {
        check_driver(driver().cuMemMap(address, bytes, 0, memory, 0), "cuMemMap");
        is_mapped = true;
        CUmemAccessDesc access{};
        access.location = {CU_MEM_LOCATION_TYPE_DEVICE, device};
        access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        check_driver(driver().cuMemSetAccess(address, bytes, &access, 1), "cuMemSetAccess");
    }
    // Maps another process's memory, which lives as long as it is mapped.
    void map_other(const std::string& handle, MemoryKind kind) {
        const CUmemGenericAllocationHandle memory = import_memory(handle, kind);
        unmap();
        try {
            map(memory);
        } catch (...) {
            driver().cuMemRelease(memory);
            throw;
        }
        check_driver(driver().cuMemRelease(memory), "cuMemRelease");
    }
    void unmap() {
        if (std::exchange(is_mapped, false)) driver().cuMemUnmap(address, bytes);
    }
};

VirtualMemory::VirtualMemory(int device, size_t bytes, MemoryKind kind,
                             std::unique_ptr<Mapping> mapping)
    : DeviceMemory(device, reinterpret_cast<char*>(mapping->address), bytes),
      kind_(kind),
      mapping_(std::move(mapping)) {}

std::unique_ptr<VirtualMemory> VirtualMemory::create(int device, size_t bytes, MemoryKind kind) {
    auto mapping = std::make_unique<Mapping>(device, bytes, kind);
    const CUmemAllocationProp memory = properties(device, kind);
    check_driver(driver().cuMemCreate(&mapping->own, mapping->bytes, &memory, 0), "cuMemCreate");
    mapping->map(mapping->own);
    return std::unique_ptr<VirtualMemory>(
        new VirtualMemory(device, bytes, kind, std::move(mapping)));
}

std::unique_ptr<VirtualMemory> VirtualMemory::open(int device, const std::string& handle,
                                                   size_t bytes, MemoryKind kind) {
    auto mapping = std::make_unique<Mapping>(device, bytes, kind);
    mapping->map_other(handle, kind);
    return std::unique_ptr<VirtualMemory>(
        new VirtualMemory(device, bytes, kind, std::move(mapping)));
}

void VirtualMemory::replace(const std::string& handle) {
    const DeviceGuard guard(device_);
    synchronize_device();
    mapping_->map_other(handle, kind_);
}

void VirtualMemory::release() {
    if (!data_) return;
    const DeviceGuard guard(device_);
    synchronize_device();  // as cudaFree does
    data_ = nullptr;
    mapping_.reset();
}

VirtualMemory::~VirtualMemory() {
    if (mapping_)
        defer({device_, [](void* mapping) { delete static_cast<Mapping*>(mapping); },
               mapping_.release()});
}

std::string VirtualMemory::handle() {
    return kind_ == MemoryKind::Fabric ? export_memory<CUmemFabricHandle>(mapping_->own, kind_)
                                       : export_memory<int>(mapping_->own, kind_);
}

}  // namespace ep
