// From a raw id to a row: hashing, and what happens outside the table.
//
// The same arithmetic runs on the CPU and on the GPU and in reference.py; the tests hold all
// three against Python integers.
#pragma once

#include "plan.h"

#if defined(__CUDACC__)
#define TESSERA_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define TESSERA_HOST_DEVICE inline
#endif

namespace tessera {

// The 64-bit finaliser of MurmurHash3 (Austin Appleby, public domain).
TESSERA_HOST_DEVICE uint64_t fmix64(uint64_t h) {
  h ^= h >> 33;
  h *= 0xff51afd7ed558ccdULL;
  h ^= h >> 33;
  h *= 0xc4ceb9fe1a85ec53ULL;
  h ^= h >> 33;
  return h;
}

TESSERA_HOST_DEVICE uint64_t multiply_high(uint64_t a, uint64_t b) {
#if defined(__CUDA_ARCH__)
  return __umul64hi(a, b);
#else
  __extension__ using uint128 = unsigned __int128;
  return static_cast<uint64_t>((static_cast<uint128>(a) * b) >> 64);
#endif
}

// h mod rows without a division.  `reciprocal` = floor((2^64 - 1) / rows), so the estimated
// quotient is the true one or one less, and one correction makes the remainder exact.
TESSERA_HOST_DEVICE uint64_t fast_mod(uint64_t h, uint64_t rows, uint64_t reciprocal) {
  const uint64_t remainder = h - multiply_high(h, reciprocal) * rows;
  return remainder >= rows ? remainder - rows : remainder;
}

// The row of `id`: in [0, rows), or -1 where the id contributes nothing.  Sets *outside when the
// id is not a row under kIdIsRow.
TESSERA_HOST_DEVICE int64_t resolve_id(int64_t id, int64_t rows, int64_t id_rule,
                                       int64_t out_of_range, uint64_t reciprocal, bool* outside) {
  const uint64_t unsigned_rows = static_cast<uint64_t>(rows);
  *outside = false;
  if (id_rule == kIdIsRow) {
    if (static_cast<uint64_t>(id) < unsigned_rows) return id;
    *outside = true;
    if (out_of_range == kClamp) return id < 0 ? 0 : rows - 1;
    if (out_of_range == kZero) return -1;
  } else if (id_rule == kModulo) {
    // The remainder is never negative: -1 is the last row.
    if (id >= 0) {
      return static_cast<int64_t>(fast_mod(static_cast<uint64_t>(id), unsigned_rows, reciprocal));
    }
    const uint64_t mirrored = fast_mod(static_cast<uint64_t>(-(id + 1)), unsigned_rows, reciprocal);
    return rows - 1 - static_cast<int64_t>(mirrored);
  }
  return static_cast<int64_t>(
      fast_mod(fmix64(static_cast<uint64_t>(id)), unsigned_rows, reciprocal));
}

}  // namespace tessera
