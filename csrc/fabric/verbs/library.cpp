#include "fabric/verbs/library.h"

#include <dlfcn.h>

#include <stdexcept>

namespace ep::verbs {

std::shared_ptr<const Library> Library::load(const std::string& name) {
    void* handle = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!handle) throw std::runtime_error(dlerror());
    const auto library = std::make_shared<Library>();
    const auto find = [&](auto& function, const char* symbol) {
        void* found = dlsym(handle, symbol);
        if (!found)
            throw std::runtime_error(name + " has no " + symbol +
                                     ": it needs rdma-core 32 (2020) or later");
        function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(found);
    };
    find(library->get_device_list, "ibv_get_device_list");
    find(library->free_device_list, "ibv_free_device_list");
    find(library->open_device, "ibv_open_device");
    find(library->close_device, "ibv_close_device");
    find(library->query_device, "ibv_query_device");
    find(library->query_port, "ibv_query_port");
    find(library->query_gid, "_ibv_query_gid_ex");
    find(library->alloc_pd, "ibv_alloc_pd");
    find(library->dealloc_pd, "ibv_dealloc_pd");
    find(library->reg_mr, "ibv_reg_mr_iova2");  // the one that takes relaxed ordering
    find(library->dereg_mr, "ibv_dereg_mr");
    find(library->create_cq, "ibv_create_cq");
    find(library->destroy_cq, "ibv_destroy_cq");
    find(library->create_qp, "ibv_create_qp");
    find(library->modify_qp, "ibv_modify_qp");
    find(library->destroy_qp, "ibv_destroy_qp");
    return library;
}

}  // namespace ep::verbs
