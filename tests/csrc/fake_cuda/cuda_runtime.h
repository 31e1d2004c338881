#pragma once

// As much of the CUDA runtime as the host code of the CUDA backend calls, for two GPUs that run
// nothing: which contexts there are, what is allocated, and the call that is to fail.

#include <sys/mman.h>

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "cuda.h"

#define CUDART_VERSION 13000

enum cudaError_t {
    cudaSuccess,
    cudaErrorMemoryAllocation,
    cudaErrorNotReady,
    cudaErrorNotSupported,
    cudaErrorHostMemoryAlreadyRegistered
};
enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDefault };
enum cudaDeviceAttr {
    cudaDevAttrMultiProcessorCount,
    cudaDevAttrComputeCapabilityMajor,
    cudaDevAttrComputeCapabilityMinor
};
enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess };
enum { cudaEnableDefault };
enum cudaDeviceP2PAttr { cudaDevP2PAttrNativeAtomicSupported };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
enum {
    cudaHostAllocMapped = 1,
    cudaHostAllocPortable = 2,
    cudaHostRegisterPortable = 1,
    cudaHostRegisterMapped = 2,
    cudaHostRegisterIoMemory = 4,
    cudaStreamNonBlocking = 1,
    cudaEventDisableTiming = 2,
    cudaIpcMemLazyEnablePeerAccess = 1
};
enum { cudaLaunchAttributeCooperative, cudaLaunchAttributeLaunchCompletionEvent };

enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone, cudaStreamCaptureStatusActive };
enum { cudaUserObjectNoDestructorSync = 1, cudaGraphUserObjectMove = 1 };

using cudaStream_t = struct FakeStream*;
using cudaEvent_t = struct FakeEvent*;
using cudaHostFn_t = void (*)(void*);
struct FakeObject {
    void* data;
    cudaHostFn_t destroy;
};
using cudaUserObject_t = FakeObject*;
struct FakeGraph {
    std::vector<FakeObject*> objects;

    ~FakeGraph() {
        for (FakeObject* object : objects) {
            object->destroy(object->data);
            delete object;
        }
    }
};
using cudaGraph_t = FakeGraph*;
struct cudaIpcMemHandle_t {
    void* memory;
};
struct cudaLaunchAttribute {
    int id;
    struct {
        int cooperative;
        struct {
            cudaEvent_t event;
        } launchCompletionEvent;
    } val;
};
struct dim3 {
    unsigned x;
};
struct cudaLaunchConfig_t {
    dim3 gridDim, blockDim;
    size_t dynamicSmemBytes;
    cudaStream_t stream;
    cudaLaunchAttribute* attrs;
    int numAttrs;
};

struct FakeCuda {
    int current = 0;
    int switches = 0;
    bool is_idle = true;        // as far as the host knows
    bool streams_wait = false;  // whether no stream gets to its end
    int unmapped = 0;           // memory of other processes
    std::set<int> contexts;
    std::set<void*> live;
    std::set<void*> loaded;         // kernels
    FakeGraph* captured = nullptr;  // by every stream
    unsigned long long capture = 0;
    std::vector<cudaEvent_t> waited_for;  // by streams
    int driver = 13000;
    int calls = 0;
    int fails_in = -1;  // calls of those that can fail; never
    bool native_atomics = true;
    std::function<void(void*)> before_copy;  // what a kernel does in the meantime
    struct Pages {
        size_t bytes;
        bool are_registers;
    };
    std::map<char*, Pages> registered;
    bool refuses_registers = false;
    ptrdiff_t registers_at = 0;  // how far from their place in the process the GPUs have them

    cudaError_t call() {
        ++calls;
        contexts.insert(current);
        return fails_in >= 0 && fails_in-- == 0 ? cudaErrorMemoryAllocation : cudaSuccess;
    }
    cudaError_t take(void** out, size_t bytes) {
        if (const cudaError_t error = call()) return error;
        live.insert(*out = std::calloc(1, bytes));
        return cudaSuccess;
    }
    cudaError_t give(void* what) {
        ++calls;
        contexts.insert(current);
        if (!is_idle || live.erase(what) != 1) std::abort();
        std::free(what);
        return cudaSuccess;
    }
};
inline FakeCuda fake_cuda;

inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t) { return "as the test wants it"; }
inline cudaError_t cudaGetDevice(int* device) {
    ++fake_cuda.calls;
    *device = fake_cuda.current;
    return cudaSuccess;
}
inline cudaError_t cudaSetDevice(int device) {
    fake_cuda.current = device;
    ++fake_cuda.switches;
    return fake_cuda.call();
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
    *value = attribute == cudaDevAttrMultiProcessorCount ? 132 : 9;
    return cudaSuccess;
}
inline cudaError_t cudaDeviceGetP2PAttribute(int* value, cudaDeviceP2PAttr, int, int) {
    *value = fake_cuda.native_atomics;
    return fake_cuda.call();
}
inline cudaError_t cudaDeviceSynchronize() {
    fake_cuda.is_idle = true;
    return fake_cuda.call();
}

template <class T>
cudaError_t cudaMalloc(T** out, size_t bytes) {
    return fake_cuda.take(reinterpret_cast<void**>(out), bytes);
}
template <class T>
cudaError_t cudaHostAlloc(T** out, size_t bytes, unsigned) {
    return fake_cuda.take(reinterpret_cast<void**>(out), bytes);
}
inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t* out, unsigned) {
    return fake_cuda.take(reinterpret_cast<void**>(out), 1);
}
inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t* out, unsigned) {
    return fake_cuda.take(reinterpret_cast<void**>(out), 1);
}
inline cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return fake_cuda.call(); }
inline cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t event, unsigned) {
    fake_cuda.waited_for.push_back(event);
    return fake_cuda.call();
}
inline cudaError_t cudaDriverGetVersion(int* version) {
    *version = fake_cuda.driver;
    return fake_cuda.call();
}
inline cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned,
                                                    unsigned long long,
                                                    cudaDriverEntryPointQueryResult*) {
    *function = fake_driver_function(name);
    return fake_cuda.call();
}
inline cudaError_t cudaFree(void* memory) { return fake_cuda.give(memory); }
inline cudaError_t cudaFreeHost(void* memory) { return fake_cuda.give(memory); }
inline cudaError_t cudaEventDestroy(cudaEvent_t event) { return fake_cuda.give(event); }
inline cudaError_t cudaStreamDestroy(cudaStream_t stream) { return fake_cuda.give(stream); }
inline cudaError_t cudaHostGetDevicePointer(void** out, void* memory, unsigned) {
    const auto found = fake_cuda.registered.find(static_cast<char*>(memory));
    const bool is_moved = found != fake_cuda.registered.end() && found->second.are_registers;
    *out = static_cast<char*>(memory) + (is_moved ? fake_cuda.registers_at : 0);
    return fake_cuda.call();
}
// Whole pages that the process has, each once.
inline cudaError_t cudaHostRegister(void* memory, size_t bytes, unsigned flags) {
    unsigned char there[1024];
    char* begin = static_cast<char*>(memory);
    if (bytes > sizeof there * 4096 || mincore(memory, bytes, there)) std::abort();
    const bool are_registers = flags & cudaHostRegisterIoMemory;
    if (are_registers && fake_cuda.refuses_registers) return cudaErrorNotSupported;
    for (const auto& [other, pages] : fake_cuda.registered) {
        if (begin < other + pages.bytes && other < begin + bytes)
            return cudaErrorHostMemoryAlreadyRegistered;
    }
    if (const cudaError_t error = fake_cuda.call()) return error;
    fake_cuda.registered[begin] = {bytes, are_registers};
    return cudaSuccess;
}
inline cudaError_t cudaHostUnregister(void* memory) {
    unsigned char there[1024];
    const auto found = fake_cuda.registered.find(static_cast<char*>(memory));
    if (found == fake_cuda.registered.end() || mincore(memory, found->second.bytes, there))
        std::abort();  // it must be there still
    fake_cuda.registered.erase(found);
    return fake_cuda.call();
}
inline cudaError_t cudaMemset(void* memory, int value, size_t bytes) {
    std::memset(memory, value, bytes);
    return fake_cuda.call();
}
inline cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t) {
    return cudaMemset(memory, value, bytes);
}
inline cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
    if (fake_cuda.before_copy) fake_cuda.before_copy(to);
    std::memcpy(to, from, bytes);
    return fake_cuda.call();
}
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                                   cudaStream_t) {
    return cudaMemcpy(to, from, bytes, kind);
}
inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return fake_cuda.call(); }
inline cudaError_t cudaStreamQuery(cudaStream_t) {
    return fake_cuda.streams_wait ? cudaErrorNotReady : fake_cuda.call();
}

inline cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* memory) {
    handle->memory = memory;
    return fake_cuda.call();
}
inline cudaError_t cudaIpcOpenMemHandle(void** out, cudaIpcMemHandle_t handle, unsigned) {
    *out = handle.memory;
    return fake_cuda.call();
}
inline cudaError_t cudaIpcCloseMemHandle(void*) {
    if (!fake_cuda.is_idle) std::abort();
    ++fake_cuda.unmapped;
    return fake_cuda.call();
}

struct cudaFuncAttributes {};
template <class L>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, void (*kernel)(L)) {
    fake_cuda.loaded.insert(reinterpret_cast<void*>(kernel));
    return fake_cuda.call();
}
template <class L>
cudaError_t cudaFuncSetAttribute(void (*)(L), cudaFuncAttribute, size_t) {
    return fake_cuda.call();
}
template <class L>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t*, void (*kernel)(L), const L&) {
    if (!fake_cuda.loaded.count(reinterpret_cast<void*>(kernel))) std::abort();  // CUDA may wait
    return fake_cuda.call();
}

inline cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
    *status = fake_cuda.captured ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return fake_cuda.call();
}
inline cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status,
                                            unsigned long long* capture, cudaGraph_t* graph, void*,
                                            void*, void*) {
    *status = fake_cuda.captured ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    *capture = fake_cuda.capture;
    *graph = fake_cuda.captured;
    return fake_cuda.call();
}
inline cudaError_t cudaUserObjectCreate(cudaUserObject_t* object, void* data, cudaHostFn_t destroy,
                                        unsigned, unsigned) {
    if (const cudaError_t error = fake_cuda.call()) return error;
    *object = new FakeObject{data, destroy};
    return cudaSuccess;
}
inline cudaError_t cudaUserObjectRelease(cudaUserObject_t object, unsigned) {
    FakeGraph{{object}};
    return cudaSuccess;
}
inline cudaError_t cudaGraphRetainUserObject(cudaGraph_t graph, cudaUserObject_t object, unsigned,
                                             unsigned) {
    if (const cudaError_t error = fake_cuda.call()) return error;
    graph->objects.push_back(object);
    return cudaSuccess;
}
