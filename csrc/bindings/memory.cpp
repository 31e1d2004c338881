#include <cstdint>

#include "bindings/module.h"
#include "launch/host/memory_pool.h"

namespace py = pybind11;

namespace ep {
namespace {

// The C structures of DLPack 0.8 (dlpack.h, DLManagedTensor), through which torch takes over memory
// together with its deleter.
struct DLTensor {
    void* data;
    int32_t device_type;
    int32_t device_id;
    int32_t ndim;
    uint8_t type_code;
    uint8_t type_bits;
    uint16_t type_lanes;
    int64_t* shape;
    int64_t* strides;
    uint64_t byte_offset;
};
struct DLManagedTensor {
    DLTensor tensor;
    void* context;
    void (*deleter)(DLManagedTensor*);
};
constexpr int32_t kCpu = 1;
constexpr uint8_t kUnsigned = 1;

struct Bytes {
    DLManagedTensor managed;
    int64_t size;
};

void release(DLManagedTensor* managed) {
    MemoryPool::instance().release(managed->tensor.data);
    delete static_cast<Bytes*>(managed->context);
}

// Frees the memory of a capsule that was not consumed: a consumer renames it and owns the memory.
void release_capsule(PyObject* capsule) {
    if (!PyCapsule_IsValid(capsule, "dltensor")) return;
    release(static_cast<DLManagedTensor*>(PyCapsule_GetPointer(capsule, "dltensor")));
}

py::capsule pooled_bytes(int64_t size) {
    auto* bytes = new Bytes{
        {{MemoryPool::instance().allocate(size), kCpu, 0, 1, kUnsigned, 8, 1, nullptr, nullptr, 0},
         nullptr,
         release},
        size};
    bytes->managed.tensor.shape = &bytes->size;
    bytes->managed.context = bytes;
    return py::capsule(&bytes->managed, "dltensor", release_capsule);
}

}  // namespace

void bind_memory(py::module_& m) {
    m.def(
        "release_pooled_memory", [] { MemoryPool::instance().trim(); },
        "Returns unused pooled memory to the system.");
    m.def("pooled_bytes", &pooled_bytes, py::arg("size"),
          "Returns a DLPack capsule of uninitialised uint8 [size], which a pool takes back.");
}

}  // namespace ep
