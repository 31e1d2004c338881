// What a queue's warps and the network's thread share, with a doorbell whose publish is relaxed
// instead of release: ThreadSanitizer must report the race.

#include "send_queue.h"

namespace ep {
namespace {

struct RelaxedBell : SpinningWarp {
    static constexpr bool kWakes = false;  // to wake the thread puts in order what was before it

    template <Scope scope>
    void publish(uint64_t* word, uint64_t value) {
        if constexpr (scope == Scope::System) {
            std::atomic_ref<uint64_t>(*word).store(value, std::memory_order_relaxed);
        } else {
            SpinningWarp::publish<scope>(word, value);
        }
    }
};

}  // namespace
}  // namespace ep

int main() { ep::run_rounds<ep::RelaxedBell>(100); }
