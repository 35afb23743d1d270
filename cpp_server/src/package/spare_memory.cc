#include "package/spare_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <new>
#include <stop_token>
#include <system_error>
#include <thread>
#include <utility>

#include "common/thread_name.h"
#include "csrc/idle_thread.h"

namespace tessera {
namespace {

// What is given back, or left to the system, at once: 0.2 ms of work for the kernel at most.
constexpr std::uint64_t kPiece = 4U << 20;
// For each huge page the kernel interrupts the CPUs that run other threads of this process, whose
// translations of its addresses it ends. With 0.2 ms between pieces, calls that were answered
// meanwhile took a millisecond more on the average.
constexpr std::chrono::milliseconds kPause{1};

// Piece by piece, with pauses, while a CPU has nothing else to do, where there is such a time;
// whether the system takes the advice. Pieces end where huge pages do: the kernel cuts one that is
// only partly meant into small pages.
bool advise(const Mapping& mapping, int advice) {
  const std::uint64_t before = reinterpret_cast<std::uintptr_t>(mapping.at) % kPiece;
  std::uint64_t done = 0;  // where another thread goes on
  bool taken = true;
  const auto work = [&](const std::stop_token& stop) {
    while (taken && done < mapping.bytes && !stop.stop_requested()) {
      if (done > 0) std::this_thread::sleep_for(kPause);
      const std::uint64_t whole = done == 0 ? kPiece - before : kPiece;
      const std::uint64_t bytes = std::min(whole, mapping.bytes - done);
      taken = ::madvise(mapping.at + done, bytes, advice) == 0;
      done += bytes;
    }
  };
  try {
    run_when_idle(work);
  } catch (const std::bad_alloc&) {  // memory is given back all the more
    work(std::stop_token());
  }
  return taken;
}

}  // namespace

bool leave_to_system(const Mapping& mapping) {
  return advise(mapping, MADV_FREE);  // Linux 4.5
}

void give_back(const Mapping& mapping, bool at_once) {
  // munmap of all of it would hold the address space's lock while every page is freed, and threads
  // that map memory or start another thread would wait. MADV_DONTNEED frees pages with the lock
  // shared, and leaves munmap nothing but the page tables.
  if (!at_once) advise(mapping, MADV_DONTNEED);
  ::munmap(mapping.at, mapping.bytes);
}

SpareMemory& SpareMemory::shared() {
  // Tables may be let go of while the process ends.
  static auto* const spare = new SpareMemory;
  return *spare;
}

SpareMemory::SpareMemory(Duration keep_for)
    : kept_(
          keep_for, [] { name_thread("spare-memory"); },
          [](const KeptTable& table) { give_back(table.mapping, false); }) {}

SpareMemory::~SpareMemory() {
  while (const auto table = kept_.take()) give_back(table->mapping, true);
}

Mapping SpareMemory::take(std::uint64_t bytes) {
  const auto found =
      kept_.take([bytes](const KeptTable& table) { return table.mapping.bytes == bytes; });
  if (found.has_value()) return found->mapping;
  for (std::uint64_t gone = 0; gone < bytes;) {
    const auto oldest = kept_.take();
    if (!oldest.has_value()) break;
    gone += oldest->mapping.bytes;
    give_back(oldest->mapping, false);
  }
  return {};
}

KeptTable SpareMemory::find(const std::string& key) {
  return kept_.take([&](const KeptTable& table) { return table.key == key; }, /*late=*/false)
      .value_or(KeptTable{});
}

void SpareMemory::keep(KeptTable table) {
  const Mapping mapping = table.mapping;
  try {
    if (leave_to_system(mapping)) return kept_.add(std::move(table));
  } catch (const std::bad_alloc&) {
  } catch (const std::system_error&) {
  }
  give_back(mapping, false);
}

}  // namespace tessera
