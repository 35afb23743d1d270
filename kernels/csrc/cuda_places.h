// Rows for new ids of a hash-based map, on a GPU: plain pointers and a stream.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "id_places.h"

namespace tessera {

// One call of place_ids.  All pointers are the device's.
struct CudaPlaces {
  IdTable table;          // changed
  const int64_t* ids;     // [count]
  const int64_t* sizes;   // [count]
  const int64_t* firsts;  // [count]
  const int32_t* hours;   // [count]; nullptr with last_hours
  int64_t count;          // at most kMostPlacedIds

  // Room, place_slots(count) entries of each:
  int32_t* slot_ids;     // filled with -1
  int32_t* slot_firsts;  // filled with kUnclaimed
  int32_t* slot_hours;   // filled with the least int32
  int64_t* slot_rows;
  int32_t* claims;  // [rows], filled with kUnclaimed

  int32_t* slots;    // [count], room
  int64_t* found;    // [count]: the row of each id, or -1
  int64_t* evicted;  // [count]: the row, where another id had it before, or -1
};

inline constexpr int32_t kUnclaimed = 0x7FFFFFFF;
inline constexpr int64_t kMostPlacedIds = int64_t{1} << 29;

cudaError_t launch_places(const CudaPlaces& job, cudaStream_t stream);

}  // namespace tessera
