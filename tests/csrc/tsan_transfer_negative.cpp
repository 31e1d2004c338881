// The same with every publish relaxed instead of release: ThreadSanitizer must report the race.

#include "transfer_threads.h"

int main() { return ep::run_transfers<ep::BasicHostWarp<std::memory_order_relaxed>>(20); }
