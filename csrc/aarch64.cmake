# Cross-compiles for 64-bit Arm on another machine, where qemu runs the tests (make aarch64).
# Debian, Ubuntu: apt install g++-aarch64-linux-gnu qemu-user
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(ENV{CXX} aarch64-linux-gnu-g++)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64 -L /usr/aarch64-linux-gnu)
