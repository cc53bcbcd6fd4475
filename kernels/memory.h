// Page-aligned anonymous memory on huge pages where the system has them.
#pragma once

#include <cstddef>

namespace octavo {

// Zero until written; pages that are never touched cost nothing.
class Memory {
  public:
    Memory() = default;
    // Throws std::bad_alloc.
    explicit Memory(size_t bytes);
    ~Memory();
    Memory(Memory &&other) noexcept;
    Memory &operator=(Memory &&other) noexcept;

    std::byte *data() const { return data_; }
    size_t size() const { return size_; }

  private:
    std::byte *data_ = nullptr; // aligned to 2 MB
    size_t size_ = 0;
};

} // namespace octavo
