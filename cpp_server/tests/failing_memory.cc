#include "failing_memory.h"

#include <cstdlib>
#include <new>

namespace {

constexpr int kNever = -1;
constexpr int kFailed = -2;

thread_local int more_allocations = kNever;

void* allocate(std::size_t bytes) {
  if (more_allocations == 0) {
    more_allocations = kFailed;
    throw std::bad_alloc();
  }
  if (more_allocations > 0) --more_allocations;
  void* const memory = std::malloc(bytes == 0 ? 1 : bytes);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace

#ifdef TESSERA_WRAPPED_NEW
// ThreadSanitizer's library has operators of its own, which another definition cannot replace, and
// which end the program where there is no memory: the linker leads the calls of this program's own
// objects here (ld, --wrap).
extern "C" void* __wrap__Znwm(std::size_t bytes) { return allocate(bytes); }
extern "C" void* __wrap__Znam(std::size_t bytes) { return allocate(bytes); }
#else
void* operator new(std::size_t bytes) { return allocate(bytes); }
void* operator new[](std::size_t bytes) { return allocate(bytes); }
// As std::stable_sort asks for memory.
void* operator new(std::size_t bytes, const std::nothrow_t& /*unused*/) noexcept {
  try {
    return allocate(bytes);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }
#endif

namespace tessera::test {

void fail_allocation_after(int more) { more_allocations = more; }

bool has_allocation_failed() {
  const bool failed = more_allocations == kFailed;
  more_allocations = kNever;
  return failed;
}

}  // namespace tessera::test
