#include "send_queue.h"

int main() { ep::run_rounds(1'500); }
