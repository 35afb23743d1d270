// The table plan: one record per feature, shared by the CPU and CUDA kernels.
//
// A plan is an int64 tensor [F, kPlanColumns]; its rows are FeaturePlan records.  Everything a
// kernel has to know about a feature is here, so features with different widths, weight types
// and rules go through one call, and two features may name the same table.
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

#include <cstdint>

#if defined(__CUDACC__)
#define TESSERA_ANY_DEVICE __host__ __device__
#else
#define TESSERA_ANY_DEVICE
#endif

namespace tessera {

// Weight types.  The numbers are part of the package format.
enum WeightType : int64_t {
  kFloat32 = 0,
  kFloat16 = 1,
  kBFloat16 = 2,
  kFloat8 = 3,  // e4m3fn
  kInt8 = 4,    // unsigned byte q: value = scale * q + bias
  kInt4 = 5,    // two per byte, even column in the low half
  kBlockInt8 = 6,  // unsigned bytes in blocks of 16: value = book[code of the block] * (q - 128)
  kWeightTypes = 7,
};

// How scale and bias of a row are stored: both absent, both fp16 (4 bytes), both fp32 (8 bytes), or
// as a book of 16 float32 scales per table without biases (kBlockInt8 and nothing else).
enum ScaleType : int64_t {
  kNoScale = 0,
  kHalfScale = 1,
  kFloatScale = 2,
  kScaleBook = 3,
  kScaleTypes = 4,
};

// Whether rows (or groups of rows) have a scale and a bias of their own.
TESSERA_ANY_DEVICE constexpr bool has_bias(int64_t scale_type) {
  return scale_type == kHalfScale || scale_type == kFloatScale;
}

constexpr int64_t kBlockColumns = 16;  // columns, and bytes, of a kBlockInt8 block
constexpr int64_t kBookScales = 16;    // scales of a book

enum Pooling : int64_t { kSum = 0, kMean = 1, kPoolings = 2 };

// How a raw id becomes a row.
enum IdRule : int64_t { kIdIsRow = 0, kModulo = 1, kMurmur3 = 2, kIdRules = 3 };

// What becomes of an id outside [0, rows) under kIdIsRow: nearest row, no contribution,
// murmur3(id) mod rows.  All three are counted where the caller asks for counts.
enum OutOfRange : int64_t { kClamp = 0, kZero = 1, kHash = 2, kOutOfRanges = 3 };

// Type of an output element.
enum class OutType : int32_t { kFloat32, kFloat16, kBFloat16 };

struct FeaturePlan {
  int64_t data_offset;   // bytes
  int64_t row_stride;    // bytes
  int64_t rows;          // 1 to 2^31 - 1
  int64_t dim;           // columns, >= 1
  int64_t weight_type;   // WeightType
  int64_t scale_offset;  // bytes; unused under kNoScale
  int64_t scale_stride;  // bytes
  int64_t scale_type;    // ScaleType
  int64_t out_column;    // first output column, elements
  int64_t pooling;       // Pooling
  int64_t id_rule;       // IdRule
  int64_t out_of_range;  // OutOfRange
  int64_t reciprocal;    // floor((2^64 - 1) / rows), its bits as int64
  int64_t scale_shift;   // row r uses scale number r >> scale_shift; 0: a scale per row
  int64_t launch_order;  // of plan row k: the feature that a GPU starts k-th; a permutation
};

constexpr int64_t kPlanColumns = 15;
static_assert(sizeof(FeaturePlan) == kPlanColumns * sizeof(int64_t), "a plan row is a record");

// Bytes that the data of one row takes, without scale and padding.
TESSERA_ANY_DEVICE constexpr int64_t row_data_bytes(int64_t weight_type, int64_t dim) {
  switch (weight_type) {
    case kFloat32:
      return 4 * dim;
    case kFloat16:
    case kBFloat16:
      return 2 * dim;
    case kInt4:
      return (dim + 1) / 2;
    case kBlockInt8:
      return (dim + kBlockColumns - 1) / kBlockColumns * kBlockColumns;
    default:
      return dim;
  }
}

constexpr int64_t kMaxRows = 0x7fffffff;

// Bytes of one scale and bias, or of a book.
TESSERA_ANY_DEVICE constexpr int64_t scale_bytes(int64_t scale_type) {
  return scale_type == kScaleBook ? 4 * kBookScales : 4 * scale_type;
}

// The code of a block whose first four bytes, read as a little-endian word, are `word`: the
// multiplication brings their lowest bits side by side.
TESSERA_ANY_DEVICE constexpr uint32_t block_code(uint32_t word) { return ((word & 0x01010101u) * 0x10204080u) >> 28; }

}  // namespace tessera
