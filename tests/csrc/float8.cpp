// What a GPU without instructions for e4m3 computes has the bits of the host's vectors, and what it
// computes for e5m2 is the nearest, or the even one of two.

#include "core/float8.h"

#include <bit>
#include <cmath>
#include <initializer_list>

#include "exec/host/rows.h"
#include "expect.h"

int main() {
    for (uint64_t bits = 0; bits <= 0xffffffff; bits += 251) {  // odd: all low bits, too
        const float value = std::bit_cast<float>(static_cast<uint32_t>(bits));
        EXPECT(ep::e4m3_of(value) == ep::to_e4m3(value));
    }
    for (int byte = 0; byte < 256; ++byte) {
        const float value = ep::value_of_e4m3(static_cast<uint8_t>(byte));
        if ((byte & 0x7f) == ep::kNanE4m3) {
            EXPECT(std::isnan(value));
            continue;
        }
        EXPECT(ep::to_e4m3(value) == byte);
        const float next = ep::value_of_e4m3(static_cast<uint8_t>(byte + 1));
        if ((byte & 0x7f) == 0x7e) continue;
        // between two of them, where ties are
        const float middle = (value + next) / 2;
        for (float x : {middle, std::nextafter(middle, value), std::nextafter(middle, next)})
            EXPECT(ep::e4m3_of(x) == ep::to_e4m3(x));
    }

    auto e5m2 = [](int byte) {
        const int exponent = byte >> 2, fraction = byte & 3;
        return exponent ? std::ldexp(4.0f + fraction, exponent - 17)
                        : std::ldexp(1.0f * fraction, -16);
    };
    constexpr int kLargest = 0x7b;
    for (int byte = 0; byte < kLargest; ++byte) {
        const float value = e5m2(byte), next = e5m2(byte + 1), middle = (value + next) / 2;
        EXPECT(ep::e5m2_of(value) == byte && ep::e5m2_of(-value) == (byte | 0x80));
        EXPECT(ep::e5m2_of(middle) == byte + (byte & 1));
        EXPECT(ep::e5m2_of(std::nextafter(middle, value)) == byte);
        EXPECT(ep::e5m2_of(std::nextafter(middle, next)) == byte + 1);
    }
    for (float x : {57344.0f, 1e30f, std::bit_cast<float>(ep::kInfinityBits)})
        EXPECT(ep::e5m2_of(x) == kLargest);
    EXPECT(ep::e5m2_of(std::bit_cast<float>(0x7fc00000u)) == 0x7f);
}
