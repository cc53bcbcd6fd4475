// Refusals of what does not fit, by name.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace octavo {

[[noreturn]] inline void refuse(const std::string &message) {
    throw std::invalid_argument(message);
}

inline std::string text(int64_t value) {
    return std::to_string(value);
}

inline void check_range(const char *name, int64_t value, int64_t low, int64_t high) {
    if (value < low || value > high) {
        refuse(std::string(name) + " is " + text(value) + ", outside " + text(low) + " to " +
               text(high));
    }
}

} // namespace octavo
