// Memory that runs out at a chosen moment, for tests of what is left behind then.
//
// Contract: of the calling thread alone; the program's operator new looks at it.
#pragma once

namespace tessera::test {

// Lets `more` allocations of this thread succeed and the next one throw std::bad_alloc; those after
// it succeed again.
void fail_allocation_after(int more);

// Lets all of them succeed; whether the one that was to fail has.
bool has_allocation_failed();

}  // namespace tessera::test
