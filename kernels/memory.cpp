#include "memory.h"

#include <cstdint>
#include <new>
#include <utility>

#include <sys/mman.h>

namespace octavo {
namespace {

constexpr size_t kHugePage = size_t(1) << 21;

} // namespace

Memory::Memory(size_t bytes) : size_(bytes) {
    if (bytes == 0)
        return;
    if (bytes > SIZE_MAX - 2 * kHugePage)
        throw std::bad_alloc();
    const size_t rounded = (bytes + kHugePage - 1) / kHugePage * kHugePage;
    const size_t reserved = rounded + kHugePage;
    void *base = mmap(nullptr, reserved, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED)
        throw std::bad_alloc();
    // Give back what lies before and after the aligned part.
    const auto address = reinterpret_cast<size_t>(base);
    const size_t before = (kHugePage - address % kHugePage) % kHugePage;
    if (before > 0)
        munmap(base, before);
    data_ = static_cast<std::byte *>(base) + before;
    if (before < kHugePage)
        munmap(data_ + rounded, kHugePage - before);
    size_ = bytes;
#ifdef MADV_HUGEPAGE
    madvise(data_, rounded, MADV_HUGEPAGE); // a wish: small pages do as well
#endif
}

Memory::~Memory() {
    if (data_ != nullptr)
        munmap(data_, (size_ + kHugePage - 1) / kHugePage * kHugePage);
}

Memory::Memory(Memory &&other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

Memory &Memory::operator=(Memory &&other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
}

} // namespace octavo
