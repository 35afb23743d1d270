// The table plan: one record per feature, shared by the CPU and CUDA kernels.
//
// A plan is an int64 tensor [F, kPlanColumns]; its rows are FeaturePlan records (row_types.h,
// generated from Python's names of the columns).  Everything a kernel has to know about a feature
// is here, so features with different widths, weight types and rules go through one call, and two
// features may name the same table.
//
// Row r of a table lives at `data_offset + r * row_stride` (bytes from the start of the weight
// buffer) and its scale and bias at `scale_offset + (r >> scale_shift) * scale_stride`.  So the
// same kernels read rows with the scale beside the data (FBGEMM: scale_offset = row start,
// data_offset = row start + 4), rows with the scales in an array of their own, one scale for every
// 2^k neighbouring rows, and one for the table (scale_stride 0).
//
// kBlockInt8 keeps its scales inside the row.  Columns lie in blocks of 16 bytes (the last one is
// filled up), and the lowest bits of a block's first four bytes, the first byte's bit being the
// lowest, are a code into the table's book of 16 float32 scales at `scale_offset`:
//   value = book[code] * (q - 128),  q the whole byte, the code's bit included.
// So a row of D = 128 columns is 128 bytes, whole DRAM accesses, with a scale for every 16 columns.
//
// Plain C++: no torch header, usable in device code.
#pragma once

#include "row_types.h"

namespace tessera {

// Whether rows (or groups of rows) have a scale and a bias of their own.
TESSERA_ANY_DEVICE constexpr bool has_bias(int64_t scale_type) {
  return scale_type == kHalfScale || scale_type == kFloatScale;
}

constexpr int64_t kBlockColumns = 16;  // columns, and bytes, of a kBlockInt8 block
constexpr int64_t kBookScales = 16;    // scales of a book

// Type of an output element.
enum class OutType : int32_t { kFloat32, kFloat16, kBFloat16, kFloat8 };

TESSERA_ANY_DEVICE constexpr int64_t element_bytes(OutType type) {
  return type == OutType::kFloat32 ? 4 : type == OutType::kFloat8 ? 1 : 2;
}

constexpr int64_t kMaxRows = 0x7fffffff;

// Bytes of one scale and bias, or of a book.
TESSERA_ANY_DEVICE constexpr int64_t scale_bytes(int64_t scale_type) {
  return scale_type == kScaleBook ? 4 * kBookScales : 4 * scale_type;
}

// The code of a block whose first four bytes, read as a little-endian word, are `word`: the
// multiplication brings their lowest bits side by side.
TESSERA_ANY_DEVICE constexpr uint32_t block_code(uint32_t word) {
  return ((word & 0x01010101u) * 0x10204080u) >> 28;
}

}  // namespace tessera
