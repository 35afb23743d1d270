#include "huge_pages.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <mutex>
#include <set>
#include <string>
#include <utility>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace tessera {
namespace {

constexpr int64_t kLeastBytes = int64_t{32} << 20;
constexpr uintptr_t kHugePage = uintptr_t{2} << 20;
constexpr uintptr_t kPiece = uintptr_t{32} << 20;  // one that cannot be moved stops no other

using Region = std::pair<const void*, int64_t>;

#if defined(__linux__)
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25  // Linux 6.1; older systems refuse it and use MADV_HUGEPAGE alone
#endif

bool wanted() {
  const char* asked = std::getenv("TESSERA_HUGE_PAGES");
  if (asked != nullptr && std::strcmp(asked, "0") == 0) return false;
  std::ifstream setting("/sys/kernel/mm/transparent_hugepage/enabled");
  std::string line;
  std::getline(setting, line);
  return line.find("[never]") == std::string::npos;
}

void move_to_huge_pages(const void* start, int64_t bytes) {
  static const bool kWanted = wanted();
  if (!kWanted) return;
  const uintptr_t address = reinterpret_cast<uintptr_t>(start);
  const uintptr_t begin = (address + kHugePage - 1) / kHugePage * kHugePage;
  const uintptr_t end = (address + static_cast<uintptr_t>(bytes)) / kHugePage * kHugePage;
  if (end <= begin || madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE) != 0) {
    return;
  }
  for (uintptr_t at = begin; at < end; at += kPiece) {
    madvise(reinterpret_cast<void*>(at), std::min(kPiece, end - at), MADV_COLLAPSE);
  }
}
#else
void move_to_huge_pages(const void*, int64_t) {}
#endif

}  // namespace

void use_huge_pages_once(const void* begin, int64_t bytes) {
  if (bytes < kLeastBytes) return;
  // What this thread saw last: most threads serve one model.
  static thread_local Region seen_last{nullptr, 0};
  const Region region{begin, bytes};
  if (seen_last == region) return;
  seen_last = region;
  static std::mutex mutex;
  static std::set<Region> seen;
  // Others wait: a call during the move would be slow in any case.
  const std::lock_guard<std::mutex> lock(mutex);
  if (seen.insert(region).second) move_to_huge_pages(begin, bytes);
}

}  // namespace tessera
