// The same as tsan_normal.cpp where rows for another node are packed in its ring itself.

#include "tsan_normal.h"

int main() { return ep::run_normal<ep::HostWarp, ep::MappedHostFabric>(40); }
