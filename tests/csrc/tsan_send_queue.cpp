#include "send_queue.h"

int main() {
    ep::run_rounds(1'500);
    ep::run_rounds(1'500, std::nullopt, 4);
    ep::run_rounds(500, std::nullopt, 2, {}, 1);  // over a network that keeps no order
}
