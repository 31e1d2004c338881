// Stands in for GDRCopy's library, which lets the host reach a GPU's memory and needs a driver of
// its own: here the memory that is asked for is the host's, and where it is already.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

struct Handle {
    unsigned long number;  // from 1
};

struct Info {
    uint64_t address;
    uint64_t mapped_size;
    uint32_t page_size;
    uint64_t cycles;
    uint32_t cycles_per_ms;
    unsigned is_mapped : 1;
    unsigned is_write_combined : 1;
};

struct Pinned {
    unsigned long address;
    size_t bytes;
};

std::vector<Pinned> pinned;
char library;

}  // namespace

extern "C" {

void gdr_runtime_get_version(int* major, int* minor) { *major = 2, *minor = 4; }

int gdr_driver_get_version(void*, int* major, int* minor) {
    gdr_runtime_get_version(major, minor);
    return 0;
}

void* gdr_open() { return &library; }
int gdr_close(void*) { return 0; }

int gdr_pin_buffer(void*, unsigned long address, size_t bytes, uint64_t, uint32_t, Handle* handle) {
    pinned.push_back({address, bytes});
    handle->number = pinned.size();
    return 0;
}

int gdr_unpin_buffer(void*, Handle) { return 0; }

int gdr_map(void*, Handle handle, void** where, size_t) {
    *where = reinterpret_cast<void*>(pinned[handle.number - 1].address);
    return 0;
}

int gdr_unmap(void*, Handle, void*, size_t) { return 0; }

int gdr_get_info(void*, Handle handle, Info* info) {
    const Pinned& memory = pinned[handle.number - 1];
    *info = {memory.address, memory.bytes, 1 << 16, 0, 0, 1, 0};
    return 0;
}

int gdr_copy_from_mapping(Handle, void* to, const void* from, size_t bytes) {
    std::memcpy(to, from, bytes);
    return 0;
}

int gdr_copy_to_mapping(Handle, void* to, const void* from, size_t bytes) {
    std::memcpy(to, from, bytes);
    return 0;
}

}  // extern "C"
