// Subnormal numbers as zeros, while an object of this class lives; x86 only, elsewhere it does
// nothing.
//
// The compiler does not know that arithmetic depends on it: let the arithmetic be in a function of
// its own that is not inlined.
#pragma once

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace {

#if defined(__x86_64__)
class FlushSubnormals {
 public:
  FlushSubnormals() : before_(_mm_getcsr()) {
    // Rounding to nearest, results and operands flushed (bits 15 and 6), no traps.
    _mm_setcsr(_MM_ROUND_NEAREST | _MM_MASK_MASK | 0x8000u | 0x0040u);
  }
  ~FlushSubnormals() { _mm_setcsr(before_); }
  FlushSubnormals(const FlushSubnormals&) = delete;
  FlushSubnormals& operator=(const FlushSubnormals&) = delete;

 private:
  unsigned before_;
};
#else
class FlushSubnormals {
 public:
  FlushSubnormals() {}
  ~FlushSubnormals() {}
};
#endif

}  // namespace
