#include "send_queue.h"

// A failure is told of while the network stops and starts.
void tell_while_stopping() {
    ep::TestRank a(0);
    std::jthread tells([&](const std::stop_token& stop) {
        while (!stop.stop_requested()) a.nic->flush_reports();
    });
    for (int i = 0; i < 50; ++i) {
        const ep::Wire wire(std::nullopt);
        std::atomic_ref<uint64_t>(a.controls[0].abort)
            .store(ep::ControlBlock::abort_word(ep::Outcome::Failed, 0));
        a.nic->start({-1, wire.end(0)});
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
        a.nic->stop(std::chrono::seconds(0));
        close(wire.end(1));
    }
}

int main() {
    tell_while_stopping();
    ep::run_rounds(1'000);
}
