// The same as tsan_transfer.cpp where rows for another node are packed in its ring itself.

#include "tsan_transfer.h"

int main() { return ep::run_transfers<ep::HostWarp, ep::MappedHostFabric>(40); }
