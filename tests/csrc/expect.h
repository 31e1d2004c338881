#pragma once

#include <cstdio>
#include <cstdlib>

#define EXPECT(condition)                                                                \
    do {                                                                                 \
        if (!(condition)) {                                                              \
            std::fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
            std::exit(EXIT_FAILURE);                                                     \
        }                                                                                \
    } while (false)
