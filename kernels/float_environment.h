// Rounding to nearest and denormals kept, whatever the calling thread has set: an item's bits must
// not depend on the thread that does it.
#pragma once

#include <cfenv>

namespace octavo {

class DefaultFloats {
  public:
    DefaultFloats() {
        std::fegetenv(&before_);
        std::fesetenv(FE_DFL_ENV);
    }
    ~DefaultFloats() { std::fesetenv(&before_); }
    DefaultFloats(const DefaultFloats &) = delete;
    DefaultFloats &operator=(const DefaultFloats &) = delete;

  private:
    std::fenv_t before_;
};

} // namespace octavo
