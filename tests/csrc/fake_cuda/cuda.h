#pragma once

// CUDA's virtual memory as a driver keeps it, over files in memory: what is mapped twice is one
// memory, and lives as long as it is mapped anywhere. A fabric handle is the number of a process
// and of its file, which only works if `fabric_is_permitted`.

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>

enum CUresult { CUDA_SUCCESS = 0, CUDA_ERROR_INVALID_VALUE = 1, CUDA_ERROR_NOT_PERMITTED = 800 };
enum CUmemAllocationHandleType {
    CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR = 1,
    CU_MEM_HANDLE_TYPE_FABRIC = 8
};
enum CUmemAllocationType { CU_MEM_ALLOCATION_TYPE_PINNED = 1 };
enum CUmemLocationType { CU_MEM_LOCATION_TYPE_DEVICE = 1 };
enum CUmemAllocationGranularity_flags { CU_MEM_ALLOC_GRANULARITY_RECOMMENDED = 1 };
enum CUmemAccess_flags { CU_MEM_ACCESS_FLAGS_PROT_READWRITE = 3 };
struct CUmemLocation {
    CUmemLocationType type;
    int id;
};
struct CUmemAllocationProp {
    CUmemAllocationType type;
    CUmemAllocationHandleType requestedHandleTypes;
    CUmemLocation location;
};
struct CUmemAccessDesc {
    CUmemLocation location;
    CUmemAccess_flags flags;
};
struct CUmemFabricHandle {
    unsigned char data[64];
};
using CUdeviceptr = unsigned long long;
using CUmemGenericAllocationHandle = unsigned long long;  // a descriptor of its file, plus one

struct FakeDriver {
    static constexpr size_t kGranularity = 2 << 20;

    bool fabric_is_permitted = false;
    std::map<CUmemGenericAllocationHandle, CUmemAllocationHandleType> memories;  // of open handles
    std::map<CUdeviceptr, size_t> reserved;
    std::map<CUdeviceptr, bool> mapped;  // whether kernels have access
    const char* fails = "";              // name of a function that fails

    CUresult call(const char* name) const {
        return std::strcmp(name, fails) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    }
    bool has_nothing() const { return memories.empty() && reserved.empty() && mapped.empty(); }
};
inline FakeDriver fake_driver;

inline CUresult cuGetErrorName(CUresult result, const char** name) {
    *name = result == CUDA_ERROR_NOT_PERMITTED ? "CUDA_ERROR_NOT_PERMITTED"
                                               : "CUDA_ERROR_INVALID_VALUE";
    return CUDA_SUCCESS;
}
inline CUresult cuMemGetAllocationGranularity(size_t* granularity, const CUmemAllocationProp*,
                                              CUmemAllocationGranularity_flags) {
    *granularity = FakeDriver::kGranularity;
    return fake_driver.call("cuMemGetAllocationGranularity");
}
inline CUresult cuMemAddressReserve(CUdeviceptr* address, size_t bytes, size_t, CUdeviceptr,
                                    unsigned long long) {
    if (const CUresult error = fake_driver.call("cuMemAddressReserve")) return error;
    void* range = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    *address = reinterpret_cast<CUdeviceptr>(range);
    fake_driver.reserved[*address] = bytes;
    return CUDA_SUCCESS;
}
inline CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes) {
    const auto found = fake_driver.reserved.find(address);
    if (found == fake_driver.reserved.end() || found->second != bytes ||
        fake_driver.mapped.count(address))
        std::abort();
    fake_driver.reserved.erase(found);
    munmap(reinterpret_cast<void*>(address), bytes);
    return CUDA_SUCCESS;
}
inline CUresult cuMemCreate(CUmemGenericAllocationHandle* memory, size_t bytes,
                            const CUmemAllocationProp* properties, unsigned long long) {
    const CUmemAllocationHandleType type = properties->requestedHandleTypes;
    if (type == CU_MEM_HANDLE_TYPE_FABRIC && !fake_driver.fabric_is_permitted)
        return CUDA_ERROR_NOT_PERMITTED;
    if (bytes % FakeDriver::kGranularity) return CUDA_ERROR_INVALID_VALUE;
    if (const CUresult error = fake_driver.call("cuMemCreate")) return error;
    const int file = memfd_create("gpu", 0);
    if (ftruncate(file, bytes)) std::abort();
    fake_driver.memories[*memory = file + 1] = type;
    return CUDA_SUCCESS;
}
inline CUresult cuMemRelease(CUmemGenericAllocationHandle memory) {
    if (!fake_driver.memories.erase(memory)) std::abort();
    close(static_cast<int>(memory) - 1);
    return CUDA_SUCCESS;
}
inline CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t,
                         CUmemGenericAllocationHandle memory, unsigned long long) {
    if (!fake_driver.memories.count(memory) || fake_driver.reserved.at(address) != bytes ||
        fake_driver.mapped.count(address))
        std::abort();
    if (const CUresult error = fake_driver.call("cuMemMap")) return error;
    mmap(reinterpret_cast<void*>(address), bytes, PROT_NONE, MAP_SHARED | MAP_FIXED,
         static_cast<int>(memory) - 1, 0);
    fake_driver.mapped[address] = false;
    return CUDA_SUCCESS;
}
inline CUresult cuMemSetAccess(CUdeviceptr address, size_t bytes, const CUmemAccessDesc* access,
                               size_t count) {
    if (count != 1 || access->flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE) std::abort();
    if (const CUresult error = fake_driver.call("cuMemSetAccess")) return error;
    mprotect(reinterpret_cast<void*>(address), bytes, PROT_READ | PROT_WRITE);
    fake_driver.mapped.at(address) = true;
    return CUDA_SUCCESS;
}
inline CUresult cuMemUnmap(CUdeviceptr address, size_t bytes) {
    if (!fake_driver.mapped.erase(address)) std::abort();
    mmap(reinterpret_cast<void*>(address), bytes, PROT_NONE,
         MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    return CUDA_SUCCESS;
}
inline CUresult cuMemExportToShareableHandle(void* handle, CUmemGenericAllocationHandle memory,
                                             CUmemAllocationHandleType type, unsigned long long) {
    if (fake_driver.memories.at(memory) != type) return CUDA_ERROR_INVALID_VALUE;
    if (const CUresult error = fake_driver.call("cuMemExportToShareableHandle")) return error;
    const int file = static_cast<int>(memory) - 1;
    if (type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) {
        *static_cast<int*>(handle) = dup(file);
    } else {
        const int name[2] = {getpid(), file};
        *static_cast<CUmemFabricHandle*>(handle) = {};
        std::memcpy(handle, name, sizeof(name));
    }
    return CUDA_SUCCESS;
}
inline CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* memory, void* handle,
                                               CUmemAllocationHandleType type) {
    if (const CUresult error = fake_driver.call("cuMemImportFromShareableHandle")) return error;
    int file = -1;
    if (type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) {
        file = dup(static_cast<int>(reinterpret_cast<intptr_t>(handle)));
    } else {
        int name[2];
        std::memcpy(name, handle, sizeof(name));
        const std::string path =
            "/proc/" + std::to_string(name[0]) + "/fd/" + std::to_string(name[1]);
        file = open(path.c_str(), O_RDWR);
    }
    if (file < 0) return CUDA_ERROR_INVALID_VALUE;
    fake_driver.memories[*memory = file + 1] = type;
    return CUDA_SUCCESS;
}

inline void* fake_driver_function(const char* name) {
#define EP_FAKE(function) \
    if (!std::strcmp(name, #function)) return reinterpret_cast<void*>(&function);
    EP_FAKE(cuGetErrorName)
    EP_FAKE(cuMemGetAllocationGranularity)
    EP_FAKE(cuMemAddressReserve)
    EP_FAKE(cuMemAddressFree)
    EP_FAKE(cuMemCreate)
    EP_FAKE(cuMemRelease)
    EP_FAKE(cuMemMap)
    EP_FAKE(cuMemSetAccess)
    EP_FAKE(cuMemUnmap)
    EP_FAKE(cuMemExportToShareableHandle)
    EP_FAKE(cuMemImportFromShareableHandle)
#undef EP_FAKE
    return nullptr;
}
