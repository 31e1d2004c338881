// Stands in for NVML's library: one GPU whose fabric is as the environment says. The structure is
// laid out as NVML's API reference says.

#include <cstdlib>
#include <cstring>

namespace {

struct FabricInfo {
    unsigned int version;
    unsigned char cluster_uuid[16];
    int status;
    unsigned int clique_id;
    unsigned char state;
    unsigned int health_mask;
};

int number(const char* name) {
    const char* text = std::getenv(name);
    return text ? std::atoi(text) : 0;
}

int initialised;
char gpu;

}  // namespace

extern "C" {

int nvmlInit_v2() {
    ++initialised;
    return number("FAKE_NVML_INIT");
}

int nvmlShutdown() {
    --initialised;
    return 0;
}

int nvmlDeviceGetHandleByUUID(const char* uuid, void** device) {
    if (!initialised) return 1;
    if (std::strcmp(uuid, "GPU-01234567-89ab-cdef-0123-456789abcdef")) return 6;  // not found
    *device = &gpu;
    return 0;
}

#if !defined(OLD)
int nvmlDeviceGetGpuFabricInfoV(void* device, FabricInfo* info) {
    if (!initialised) return 1;
    if (device != &gpu) return 2;
    if (info->version != 0x02000024) return 25;  // another version of the structure
    std::memset(info->cluster_uuid, number("FAKE_NVML_CLUSTER"), sizeof(info->cluster_uuid));
    info->status = number("FAKE_NVML_STATUS");
    info->clique_id = 32766;
    info->state = number("FAKE_NVML_STATE");
    info->health_mask = 0xffffffff;
    return 0;
}
#endif

}  // extern "C"
