// The same with every publish relaxed instead of release: ThreadSanitizer must report the race.

#include "tsan_normal.h"

int main() {
    return ep::run_normal<ep::BasicHostWarp<std::memory_order_relaxed>, ep::HostFabric>(40);
}
