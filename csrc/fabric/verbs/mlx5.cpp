#include "fabric/verbs/mlx5.h"

#include "fabric/verbs/load.h"

namespace ep::verbs {

std::shared_ptr<const Mlx5> Mlx5::load(const std::string& name) {
    const Symbols symbols(name, "rdma-core 32 (2020) or later");
    const auto library = std::make_shared<Mlx5>();
    symbols.find(library->is_supported, "mlx5dv_is_supported");
    symbols.find(library->create_cq, "mlx5dv_create_cq");
    symbols.find(library->init_objects, "mlx5dv_init_obj");
    return library;
}

}  // namespace ep::verbs
