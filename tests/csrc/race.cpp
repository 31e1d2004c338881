// Two threads that count: a race, unless COUNTER is atomic. test_run_tsan.py runs it.

#include <atomic>
#include <thread>

COUNTER counter{0};

int main() {
    std::thread other([] { counter += 1; });
    counter += 1;
    other.join();
}
