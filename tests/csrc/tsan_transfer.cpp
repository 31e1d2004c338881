// Notify, dispatch and combine under ThreadSanitizer: no data race, every value right.

#include "tsan_transfer.h"

int main() { return ep::run_transfers<ep::HostWarp, ep::HostFabric>(40); }
