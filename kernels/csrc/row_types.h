// Generated from kernels/row_types.py and kernels/plan.py by
// `make row-types`; not to be edited.
//
// Plain C++: no torch header, usable in device code.
// clang-format off
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define TESSERA_ANY_DEVICE __host__ __device__
#else
// Files for several instruction sets include this: no copy may be shared by them.
#define TESSERA_ANY_DEVICE [[gnu::always_inline]]
#endif

// X(type) for every weight type, in the order of their numbers.
#define TESSERA_WEIGHT_TYPES(X) X(kFloat32) X(kFloat16) X(kBFloat16) X(kFloat8) X(kInt8) X(kInt4) X(kBlockInt8)

namespace tessera {

// How a row's numbers are stored.  The values are part of the package format.
enum WeightType : int64_t {
  kFloat32 = 0,  // IEEE binary32
  kFloat16 = 1,  // IEEE binary16
  kBFloat16 = 2,  // bfloat16
  kFloat8 = 3,  // e4m3fn under a scale that maps the row's largest magnitude to 448
  kInt8 = 4,  // unsigned byte q: value = scale * q + bias
  kInt4 = 5,  // two unsigned numbers per byte, the even column in the low half
  kBlockInt8 = 6,  // unsigned bytes in blocks of 16: value = book[code of the block] * (q - 128)
};
constexpr int64_t kWeightTypes = 7;

// How scale and bias of a row are stored: both absent, both fp16 (4 bytes), both fp32 (8 bytes), or
// as a book of 16 float32 scales per table without biases (rows in blocks and nothing else).
enum ScaleType : int64_t { kNoScale = 0, kHalfScale = 1, kFloatScale = 2, kScaleBook = 3 };
constexpr int64_t kScaleTypes = 4;

enum Pooling : int64_t { kSum = 0, kMean = 1 };
constexpr int64_t kPoolings = 2;

// How a raw id becomes a row.
enum IdRule : int64_t { kIdIsRow = 0, kModulo = 1, kMurmur3 = 2 };
constexpr int64_t kIdRules = 3;

// What becomes of an id outside [0, rows) under kIdIsRow: nearest row, no contribution,
// murmur3(id) mod rows.  All three are counted where the caller asks for counts.
enum OutOfRange : int64_t { kClamp = 0, kZero = 1, kHash = 2 };
constexpr int64_t kOutOfRanges = 3;

// Bits of one number.
TESSERA_ANY_DEVICE constexpr int64_t number_bits(int64_t weight_type) {
  switch (static_cast<WeightType>(weight_type)) {
    case kFloat32: return 32;
    case kFloat16: return 16;
    case kBFloat16: return 16;
    case kFloat8: return 8;
    case kInt8: return 8;
    case kInt4: return 4;
    case kBlockInt8: return 8;
  }
  return 0;  // not a weight type
}

// Bytes that the data of one row takes, without scale and padding.
TESSERA_ANY_DEVICE constexpr int64_t row_data_bytes(int64_t weight_type, int64_t dim) {
  switch (static_cast<WeightType>(weight_type)) {
    case kFloat32: return dim * 4;
    case kFloat16: return dim * 2;
    case kBFloat16: return dim * 2;
    case kFloat8: return dim;
    case kInt8: return dim;
    case kInt4: return (dim + 1) / 2;
    case kBlockInt8: return (dim + 15) / 16 * 16;
  }
  return 0;  // not a weight type
}

// The scales that a type's rows have in a package.
TESSERA_ANY_DEVICE constexpr ScaleType scale_rule(int64_t weight_type) {
  switch (static_cast<WeightType>(weight_type)) {
    case kFloat32: return kNoScale;
    case kFloat16: return kNoScale;
    case kBFloat16: return kNoScale;
    case kFloat8: return kHalfScale;
    case kInt8: return kHalfScale;
    case kInt4: return kHalfScale;
    case kBlockInt8: return kScaleBook;
  }
  return kNoScale;  // not a weight type
}

// One row of a plan.
struct FeaturePlan {
  int64_t data_offset;  // bytes
  int64_t row_stride;  // bytes
  int64_t rows;  // 1 to 2^31 - 1
  int64_t dim;  // columns, >= 1
  int64_t weight_type;  // WeightType
  int64_t scale_offset;  // bytes; unused under kNoScale
  int64_t scale_stride;  // bytes
  int64_t scale_type;  // ScaleType
  int64_t out_column;  // first output column, elements
  int64_t pooling;  // Pooling
  int64_t id_rule;  // IdRule
  int64_t out_of_range;  // OutOfRange
  int64_t reciprocal;  // floor((2^64 - 1) / rows), its bits as int64
  int64_t scale_shift;  // row r uses scale number r >> scale_shift; 0: a scale per row
  int64_t launch_order;  // of plan row k: the feature that a GPU starts k-th; a permutation
};

constexpr int64_t kPlanColumns = 15;
static_assert(sizeof(FeaturePlan) == kPlanColumns * sizeof(int64_t), "a plan row is a record");

}  // namespace tessera
