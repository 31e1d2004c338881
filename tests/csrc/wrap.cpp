// Numbers of calls that begin anew: nothing of the calls around takes one for another.

#include <set>

#include "core/args.h"
#include "expect.h"

int main() {
    for (const uint64_t wrap : {uint64_t{0}, uint64_t{1} << 32}) {
        std::set<uint32_t> epochs;
        const uint64_t first = wrap ? wrap - 4 : 1;
        for (uint64_t number = first; number < first + 8; ++number) {
            ep::NotifyArgs notify{};
            notify.epoch = number;
            EXPECT(notify.layout_epoch() != 0);
            EXPECT(epochs.insert(notify.layout_epoch()).second);
        }
    }
}
