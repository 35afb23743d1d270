// Memory of tables that nobody uses any more, kept for a while for the tables of the next version.
//
// Versions that follow each other have tables of the same sizes. Pages that are new to a process
// are cleared by the kernel, and a virtual machine's host may have to find them first: where the
// guest gives free memory back to its host (free page reporting), the first write to a huge page
// was measured to take 4.5 ms, in one piece in the kernel, and 2.3 s a gigabyte. Calls that are
// answered beside a load wait for that. Memory that was not given back has its pages.
//
// A version that comes again within that time, as where somebody goes back to the one before, has
// its tables there as they were: they are found by their content and are not read again.
//
// What is kept is the system's all the same: its pages are marked with MADV_FREE, so the kernel
// counts them as available and takes them as soon as anybody needs memory. Until then they count as
// resident. What is kept never adds to what is in use: memory that is not taken from here is made
// only once as much of what is kept, or all of it, has gone back.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "common/clock.h"
#include "common/kept_for.h"

namespace tessera {

// A private, anonymous mapping of the address space.
struct Mapping {
  std::byte* at = nullptr;
  std::uint64_t bytes = 0;
};

// Memory with what it has, as far as the system has not taken it meanwhile.
struct KeptTable {
  Mapping mapping;
  // What the content is, and the file that it is of (TableStore); empty: nothing of use.
  std::string key;
  std::vector<std::uint16_t> marks;  // of the content's pages (csrc/page_marks.h)
};

// Lets the system take its pages from now on, piece by piece with pauses; false: this system does
// not do that.
bool leave_to_system(const Mapping& mapping);

// Gives it back to the system: piece by piece with pauses, so that no other thread waits for long
// for the address space or for a CPU, for some 100 ms a gigabyte; or where `at_once`, in one call.
void give_back(const Mapping& mapping, bool at_once);

// Contract: any thread. `take` and `find` block for microseconds, `take` for as long as give_back
// where it makes room; `keep` takes that long, too. A thread of nice 10 gives back what nobody has
// taken for `keep_for`. The destructor gives all of it back.
class SpareMemory {
 public:
  static constexpr Duration kKeepFor = std::chrono::seconds(120);

  // The one of this process, which has no end.
  static SpareMemory& shared();

  explicit SpareMemory(Duration keep_for = kKeepFor);
  ~SpareMemory();
  SpareMemory(const SpareMemory&) = delete;
  SpareMemory& operator=(const SpareMemory&) = delete;

  // A mapping of exactly so many bytes, with any content; {} where none is kept, and then as many
  // bytes of those that are kept have gone back to the system.
  Mapping take(std::uint64_t bytes);

  // The memory that was kept with the content of `key`, for the caller, who looks whether it is
  // whole; {}: there is none.
  KeptTable find(const std::string& key);

  // Keeps what nobody uses any more.
  void keep(KeptTable table);

 private:
  KeptFor<KeptTable> kept_;
};

}  // namespace tessera
