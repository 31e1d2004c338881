// Notify, dispatch and combine under ThreadSanitizer: no data race, every value right.

#include "tsan_normal.h"

int main() { return ep::run_normal<ep::HostWarp, ep::HostFabric>(40); }
