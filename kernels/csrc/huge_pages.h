// Huge pages for tables on the CPU: what ../memory.py does, without being asked.
#pragma once

#include <cstdint>

namespace tessera {

// Asks the system, the first time that it sees these bytes, to hold them in 2 MiB pages, and moves
// what is there (about a second for 2 GB; a server's warm-up calls pay it).  A random row of a
// table larger than the caches then costs a miss instead of a page walk and a miss.  Does nothing
// for less than 32 MiB, on other systems than Linux, where the system's setting is "never", and
// where the environment variable TESSERA_HUGE_PAGES is "0".  Never fails; values never depend on
// it.  Any thread may call it.
void use_huge_pages_once(const void* begin, int64_t bytes);

}  // namespace tessera
