// Numbers of calls that begin anew: nothing of the calls around takes one for another.

#include <set>

#include "expect.h"
#include "protocol/combine.h"

int main() {
    constexpr uint64_t kMaxRows = (uint64_t{1} << 31) - 1;
    for (const uint64_t wrap : {uint64_t{0}, uint64_t{1} << 32, uint64_t{1} << 33}) {
        std::set<uint32_t> epochs;
        const uint64_t first = wrap ? wrap - 4 : 1;
        for (uint64_t number = first; number < first + 8; ++number) {
            ep::NotifyArgs notify{};
            notify.epoch = number;
            EXPECT(notify.layout_epoch() != 0);
            EXPECT(epochs.insert(notify.layout_epoch()).second);

            ep::TransferArgs call{}, before{};
            call.call = number;
            before.call = number - 1;
            for (const uint64_t rows : {uint64_t{0}, uint64_t{1}, kMaxRows}) {
                EXPECT(ep::summed_in_call(call, ep::sums_of_call(call, rows)) == rows);
                if (number > 1)
                    EXPECT(ep::summed_in_call(call, ep::sums_of_call(before, rows)) == 0);
            }
            // where no intra-rank pass has ever been
            EXPECT(ep::summed_in_call(call, 0) == 0);
        }
    }
}
