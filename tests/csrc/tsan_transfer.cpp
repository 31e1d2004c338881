// Dispatch and combine under ThreadSanitizer: no data race, every value right.

#include "transfer_threads.h"

int main() { return ep::run_transfers<ep::HostWarp>(20); }
