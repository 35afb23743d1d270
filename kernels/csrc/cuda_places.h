// Rows of ids in a hash-based map, on a GPU: plain pointers and a stream.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "id_places.h"

namespace tessera {

// Room of a call of learn_ids, every byte of it 0xFF: -1, or the largest unsigned number.
struct CudaPlaceRoom {
  // One entry for each slot of a hash table of the new ids, place_slots(count):
  int64_t* slot_rows;     // what the id gets
  int32_t* slot_ids;      // the place in the call of one of its occurrences
  uint32_t* slot_firsts;  // that of the first
  int32_t* slot_hours;    // its latest hour
  int32_t* slot_let_in;   // 0: it may have a row; nullptr: each may
  // One entry for each slot of a hash table of the rows that are claimed, place_slots(count):
  int64_t* claimed;    // the row
  uint32_t* claimers;  // the id that has it, by the place in the call where it came first
};

struct CudaPlaces {
  IdTable table;  // changed where ids are learned
  NewIds given;   // at most kMostPlacedIds
  CudaPlaceRoom room;
  int32_t* slots;  // [count], room: the slot of each new id
  int64_t* rows;  // [count]: the row of each id in the whole table, or -1 if its bucket is not here
  int64_t* evicted;  // [count]: the row that an id got, where another had it before, or -1
};

inline constexpr int64_t kMostPlacedIds = int64_t{1} << 29;

// Fills `rows` alone, of the given ids.
cudaError_t launch_find(const CudaPlaces& job, cudaStream_t stream);

// Fills `rows` and `evicted`.
cudaError_t launch_learn(const CudaPlaces& job, cudaStream_t stream);

}  // namespace tessera
