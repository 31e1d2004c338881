// The same with every publish relaxed instead of release: ThreadSanitizer must report the race.

#include "tsan_low_latency.h"

int main() { return ep::run_low_latency<ep::BasicHostWarp<std::memory_order_relaxed>>(30); }
