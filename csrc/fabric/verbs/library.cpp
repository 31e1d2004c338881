#include "fabric/verbs/library.h"

#include <cstring>

#include "fabric/verbs/load.h"
#include "fabric/verbs/mlx5.h"

namespace ep::verbs {

constexpr char kNeeds[] = "rdma-core 32 (2020) or later";

std::shared_ptr<const Library> Library::load(const std::string& name) {
    const Symbols symbols(name, kNeeds);
    const auto library = std::make_shared<Library>();
    symbols.find(library->get_device_list, "ibv_get_device_list");
    symbols.find(library->free_device_list, "ibv_free_device_list");
    symbols.find(library->open_device, "ibv_open_device");
    symbols.find(library->close_device, "ibv_close_device");
    symbols.find(library->query_device, "ibv_query_device");
    symbols.find(library->query_port, "ibv_query_port");
    symbols.find(library->query_gid, "_ibv_query_gid_ex");
    symbols.find(library->alloc_pd, "ibv_alloc_pd");
    symbols.find(library->dealloc_pd, "ibv_dealloc_pd");
    symbols.find(library->reg_mr, "ibv_reg_mr_iova2");  // the one that takes relaxed ordering
    symbols.find(library->dereg_mr, "ibv_dereg_mr");
    symbols.find(library->create_cq, "ibv_create_cq");
    symbols.find(library->destroy_cq, "ibv_destroy_cq");
    symbols.find(library->create_qp, "ibv_create_qp");
    symbols.find(library->modify_qp, "ibv_modify_qp");
    symbols.find(library->destroy_qp, "ibv_destroy_qp");
    int (*fork_init)();
    symbols.find(fork_init, "ibv_fork_init");
    // since rdma-core 35: 2 if the kernel copies for the child what cards know
    const auto fork_status = symbols.find_if_any<int (*)()>("ibv_is_fork_initialized");
    if (const int error = fork_init(); error && !(fork_status && fork_status() == 2))
        library->fork_error = std::strerror(error);
    return library;
}

std::shared_ptr<const Mlx5> Mlx5::load(const std::string& name) {
    const Symbols symbols(name, kNeeds);
    const auto library = std::make_shared<Mlx5>();
    symbols.find(library->is_supported, "mlx5dv_is_supported");
    symbols.find(library->create_cq, "mlx5dv_create_cq");
    symbols.find(library->init_objects, "mlx5dv_init_obj");
    return library;
}

}  // namespace ep::verbs
