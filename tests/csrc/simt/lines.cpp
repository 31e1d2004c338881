#include "core/lines.h"

#include <array>
#include <deque>
#include <map>
#include <random>

#include "exec/device/ptx.h"

// A line that eight neighbouring lanes store between two collectives arrives whole, at any time
// later, and in no order with other lines. One that they store in parts would not, so these end the
// program, as do lanes of which some load a line without the others.
namespace ep::ptx {
namespace {

struct Stored {
    char* to;
    alignas(16) std::array<char, Line::kBytes> bytes;
    unsigned warp;
    uint64_t meetings;
    unsigned units = 0;  // bits
};

constexpr unsigned kAllUnits = (1u << Line::kUnits) - 1;

std::map<char*, Stored> begun;
std::deque<Stored> under_way;
std::map<std::pair<unsigned, const char*>, std::pair<uint64_t, unsigned>> loads;
std::mt19937_64 random;

char* line_at(const char* address) {
    const auto at = reinterpret_cast<uintptr_t>(address);
    if (at % Line::kBytes / Line::kUnit != simt::lane() % Line::kUnits || at % Line::kUnit)
        simt::die("a lane stores or loads another lane's unit of a line");
    return reinterpret_cast<char*>(at - at % Line::kBytes);
}

void deliver(size_t i) {
    std::memcpy(under_way[i].to, under_way[i].bytes.data(), Line::kBytes);
    under_way.erase(under_way.begin() + i);
}

}  // namespace

// What arrives does so between what a warp does at once.
void deliver_lines() {
    static std::pair<unsigned, uint64_t> last;
    const std::pair now{simt::warp_index(), simt::meetings()};
    if (std::exchange(last, now) == now) return;
    while (!under_way.empty() && random() % 4) deliver(random() % under_way.size());
}

void store_line(char* address, uint4 value) {
    deliver_lines();
    char* to = line_at(address);
    const unsigned unit = simt::lane() % Line::kUnits;
    Stored& line =
        begun.try_emplace(to, Stored{to, {}, simt::warp_index(), simt::meetings()}).first->second;
    if (line.warp != simt::warp_index() || line.meetings != simt::meetings())
        simt::die("a line is stored in parts");
    std::memcpy(line.bytes.data() + unit * Line::kUnit, &value, sizeof(value));
    line.units |= 1u << unit;
    if (line.units != kAllUnits) return;
    for (size_t i = under_way.size(); i--;) {
        if (under_way[i].to == to) deliver(i);  // stores of one place keep their order
    }
    under_way.push_back(line);
    begun.erase(to);
}

uint4 load_line(const char* address) {
    simt::may_wait_for_others();
    deliver_lines();
    const char* from = line_at(address);
    const unsigned unit = simt::lane() % Line::kUnits;
    auto& [meetings, units] = loads[{simt::warp_index(), from}];
    if (units == kAllUnits || !units) {
        meetings = simt::meetings();
        units = 0;
    }
    if (meetings != simt::meetings()) simt::die("a line is loaded in parts");
    units |= 1u << unit;
    uint4 value;
    std::memcpy(&value, address, sizeof(value));
    return value;
}

void end_of_lines() {
    if (!begun.empty()) simt::die("a line is stored in parts");
    while (!under_way.empty()) deliver(0);
    loads.clear();
}

}  // namespace ep::ptx
