#pragma once

#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>

#define EXPECT(condition)                                                                \
    do {                                                                                 \
        if (!(condition)) {                                                              \
            std::fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
            std::exit(EXIT_FAILURE);                                                     \
        }                                                                                \
    } while (false)

// What the error says that f throws; "" if it throws none.
template <class F>
std::string error_of(F&& f) {
    try {
        f();
    } catch (const std::runtime_error& error) {
        return error.what();
    }
    return "";
}
