#include <cstdlib>
#include <filesystem>

#include "send_queue.h"

// Over cards of the tests' own (fake_ibverbs.cpp), in this process; of the last ones ranks post in
// the queues by themselves.
int main() {
    setenv("FAKE_IBVERBS", "seed=1", 1);
    const auto folder = std::filesystem::read_symlink("/proc/self/exe").parent_path();
    const auto library = ep::verbs::Library::load(folder / "libfake_ibverbs_tsan.so");
    const auto mlx5 = ep::verbs::Mlx5::load(folder / "libfake_ibverbs_tsan.so");
    const ep::verbs::Port port = ep::verbs::find_ports(*library).at(0);
    const auto card = [&] { return std::make_shared<ep::verbs::Card>(library, port); };
    const auto direct = [&] { return std::make_shared<ep::verbs::Card>(library, port, mlx5); };
    ep::run_rounds(300, std::nullopt, {card(), card()});
    ep::run_rounds(150, std::nullopt, {direct(), direct()});
}
