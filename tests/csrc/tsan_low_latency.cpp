// The low-latency mode under ThreadSanitizer: no data race, every value right.

#include "tsan_low_latency.h"

int main() { return ep::run_low_latency<ep::HostWarp>(30); }
