#include "fabric/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

namespace ep {
namespace {

[[noreturn]] void fail(int error, const std::string& what) {
    throw std::system_error(error, std::generic_category(), what);
}

int unnamed_file() {
    static std::atomic<int> count = 0;
    std::string name;
    int descriptor;
    do {  // a name is taken only where a process was killed between the next two calls
        name = "/megatron_ep-" + std::to_string(getpid()) + "-" + std::to_string(count++);
        descriptor = shm_open(name.c_str(), O_CREAT | O_EXCL | O_RDWR, 0600);
    } while (descriptor < 0 && errno == EEXIST);
    if (descriptor < 0) fail(errno, "making shared memory " + name);
    shm_unlink(name.c_str());
    return descriptor;
}

int descriptor_of(const SegmentAddress& address, size_t bytes) {
    const auto [process, remote, device, inode] = address;
    const std::string path = "/proc/" + std::to_string(process) + "/fd/" + std::to_string(remote);
    const int descriptor = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
    if (descriptor < 0) fail(errno, "opening the shared memory of another rank, " + path);
    struct stat file;
    if (fstat(descriptor, &file) != 0 || file.st_dev != device || file.st_ino != inode) {
        close(descriptor);
        throw std::runtime_error(path +
                                 " is not another rank's shared memory: do the ranks of this "
                                 "machine run in separate containers?");
    }
    if (!S_ISREG(file.st_mode) || file.st_size < static_cast<off_t>(bytes)) {  // or a SIGBUS later
        close(descriptor);
        throw std::runtime_error(path + " has less than " + std::to_string(bytes) + " bytes");
    }
    return descriptor;
}

}  // namespace

Segment::Segment(size_t bytes, int flags, int descriptor) : bytes_(bytes), descriptor_(descriptor) {
    void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, descriptor, 0);
    if (data == MAP_FAILED) {
        const int error = errno;
        close_descriptor();
        fail(error, "mapping " + std::to_string(bytes) + " bytes of symmetric heap");
    }
    data_ = static_cast<char*>(data);
}

Segment Segment::anonymous(size_t bytes) { return {bytes, MAP_PRIVATE | MAP_ANONYMOUS, -1}; }
Segment Segment::sparse(size_t bytes) {
    return {bytes, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1};
}

Segment Segment::shared(size_t bytes) {
    const int descriptor = unnamed_file();
    int error;
    do {
        error = posix_fallocate(descriptor, 0, static_cast<off_t>(bytes));
    } while (error == EINTR);
    if (error) {
        close(descriptor);
        fail(error, "reserving " + std::to_string(bytes) +
                        " bytes of shared memory in /dev/shm (in a container, see --shm-size)");
    }
    return {bytes, MAP_SHARED, descriptor};
}

Segment Segment::open(const SegmentAddress& address, size_t bytes) {
    Segment segment(bytes, MAP_SHARED, descriptor_of(address, bytes));
    segment.close_descriptor();
    return segment;
}

void Segment::replace(const SegmentAddress& address) {
    const int descriptor = descriptor_of(address, bytes_);
    void* data = mmap(data_, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, descriptor, 0);
    const int error = errno;
    close(descriptor);
    if (data == MAP_FAILED) fail(error, "mapping the shared memory of another rank anew");
}

SegmentAddress Segment::address() const {
    struct stat file;
    if (fstat(descriptor_, &file) != 0) fail(errno, "looking at shared memory");
    return {getpid(), descriptor_, file.st_dev, file.st_ino};
}

void Segment::close_descriptor() {
    if (descriptor_ >= 0) close(std::exchange(descriptor_, -1));
}

Segment::Segment(Segment&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      bytes_(other.bytes_),
      descriptor_(std::exchange(other.descriptor_, -1)) {}

void Segment::release() {
    if (data_) munmap(std::exchange(data_, nullptr), bytes_);
    close_descriptor();
}

Segment::~Segment() { release(); }

}  // namespace ep
