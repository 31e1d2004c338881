#include "send_queue.h"

int main() {
    ep::run_rounds(1'500);
    ep::run_rounds(1'500, std::nullopt, 4);
}
