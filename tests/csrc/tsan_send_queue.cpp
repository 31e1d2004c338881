// Two ranks under ThreadSanitizer: what a queue's warps and the network's thread share.
//
//     tsan_send_queue [relaxed]   relaxed: the release of bells, which must be reported
//     tsan_send_queue LIBRARY     over cards of the tests' own (fake_ibverbs.cpp), in this process;
//                                 of the last ones ranks post in the queues by themselves

#include <cstdlib>

#include "send_queue.h"

namespace ep {
namespace {

// A failure is told of while the network stops and starts.
void tell_while_stopping() {
    TestRank a(0);
    std::jthread tells([&](const std::stop_token& stop) {
        while (!stop.stop_requested()) a.nic.flush_reports();
    });
    for (int i = 0; i < 50; ++i) {
        const Wire wire(std::nullopt);
        std::atomic_ref<uint64_t>(a.controls[0].abort)
            .store(ControlBlock::abort_word(Outcome::Failed, 0));
        a.nic.start({-1, wire.end(0)});
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
        a.nic.stop(std::chrono::seconds(0));
        close(wire.end(1));
    }
}

void run_over_cards(const std::string& file) {
    setenv("FAKE_IBVERBS", "seed=1", 1);
    const auto library = verbs::Library::load(file);
    const auto mlx5 = verbs::Mlx5::load(file);
    const verbs::Port port = verbs::find_ports(*library).at(0);
    const auto with = [&](const auto&... direct) {
        return SoftwareNic::Cards{std::make_shared<verbs::Card>(library, port, direct...)};
    };
    run_rounds(300, std::nullopt, {with(), with()});
    run_rounds(150, std::nullopt, {with(mlx5), with(mlx5)});
}

}  // namespace
}  // namespace ep

int main(int argc, char** argv) {
    const std::string mode = argc == 2 ? argv[1] : "";
    if (mode == "relaxed") return ep::run_rounds(100, std::nullopt, {}, true), EXIT_SUCCESS;
    if (!mode.empty()) return ep::run_over_cards(mode), EXIT_SUCCESS;
    ep::tell_while_stopping();
    ep::run_rounds(1'000);
}
