// Calls of few bags that are longer than those of cuda_quick.cuh, of any width: a warp works on one
// bag, so that a long bag ends early and a short one waits for as little as possible.  Where that
// takes more warps than there are at once, two or four bags of narrow rows share one, and of rows
// of at most 32 bytes there may be some times as many as there is room for at once.  In the ring of
// the other kernels every copy of such a row is a load of its own, and the ring leaves the first
// cache little room for them.
//
// Each lane has four columns (eight of int4), and a wide row is shared out among several warps. The
// lanes read the ids of a step's rows side by side, turn them into rows and load their scales;
// every lane then loads its columns of those rows, whose numbers the others tell it.  The rows of
// the next two steps are on their way while those of this one are summed, all in registers: there
// is no ring whose copies had to be waited for.
//
// Sums are those of cuda_stream.cuh, bit for bit.
#pragma once

#include "cuda_express.cuh"

namespace tessera {
namespace {

constexpr int kFewThreads = 128;
constexpr int kFewWarps = kFewThreads / 32;
// Rows that are asked for together.  More than eight loads of pages that are far apart wait for
// each other, but for rows that the load of their scales has brought along.
constexpr int kFewStep = 8;
constexpr int kFewLongest = 16;
constexpr int kFewTogether = 4;  // rows that are summed without a branch between
// Warps for each multiprocessor up to which bags are few: as many as it holds at once.
constexpr int64_t kFewMost = 16;
// How often bags of narrow rows may fill these places.
constexpr int64_t kFewRounds = 4;

// A lane's part of a row.
template <int64_t T>
struct FewShare {
  static constexpr int kColumns = T == kInt4 ? 8 : 4;
  static constexpr int kBytes = kColumns * Share<T>::kBits / 8;
  static constexpr int kWords = kBytes / 4;
};

// Together: bytes of e4m3 two at a time, which takes more registers for a moment.  Tiny: numbers
// times 2^-133, where reads_tiny(T).
template <int64_t T, bool Together = true, bool Tiny = false>
__device__ __forceinline__ void few_numbers(const uint32_t (&words)[FewShare<T>::kWords],
                                            float (&out)[FewShare<T>::kColumns]) {
  static_assert(!Tiny || reads_tiny(T));
  if constexpr (T == kInt8 && Tiny) {
    bytes_to_tiny(words[0], out);
  } else if constexpr (T == kInt8 || T == kBlockInt8) {
    bytes_to_floats<T == kBlockInt8 ? 128 : 0>(words[0], out);
  } else if constexpr (T == kFloat8) {
    if constexpr (Together) {
      float8s_to_floats(words[0], out);
    } else {
#pragma unroll
      for (int k = 0; k < 4; ++k) out[k] = float8_to_float((words[0] >> (8 * k)) & 0xffu);
    }
  } else if constexpr (T == kInt4) {
    float even[4];
    float odd[4];
    if constexpr (Tiny) {
      bytes_to_tiny(words[0] & 0x0f0f0f0fu, even);
      bytes_to_tiny((words[0] >> 4) & 0x0f0f0f0fu, odd);
    } else {
      bytes_to_floats(words[0] & 0x0f0f0f0fu, even);
      bytes_to_floats((words[0] >> 4) & 0x0f0f0f0fu, odd);
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      out[2 * k] = even[k];
      out[2 * k + 1] = odd[k];
    }
  } else if constexpr (T == kFloat16) {
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      out[2 * k] = half_bits_to_float(words[k] & 0xffffu);
      out[2 * k + 1] = half_bits_to_float(words[k] >> 16);
    }
  } else {
    static_assert(T == kBFloat16);
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      out[2 * k] = __uint_as_float(words[k] << 16);
      out[2 * k + 1] = __uint_as_float(words[k] & 0xffff0000u);
    }
  }
}

// Blocks that share a multiprocessor, as far as registers go.
constexpr int few_blocks(int lanes) { return lanes == 8 ? 6 : 4; }

// The widest row of the call, in lanes.
inline int64_t few_lanes(const CudaLookup& job) {
  const bool half = job.weight_type == kFloat16 || job.weight_type == kBFloat16;
  const int64_t share = half ? 8 : 16;
  const int64_t part = job.weight_type == kInt4 ? 8 : 4;
  return job.widest_shares * (share / part);
}

// Lanes of a bag where bags of narrow rows share a warp.
inline int few_bag_lanes(int64_t widest) { return widest <= 8 ? 8 : widest <= 16 ? 16 : 32; }

// Whether the plan says of a feature what the kernel was compiled for.
template <int64_t T, Scales S, Ids I>
__device__ __forceinline__ bool few_serves(const CudaLookup& job, const FeaturePlan& plan) {
  using Part = FewShare<T>;
  const int64_t parts = (plan.dim + Part::kColumns - 1) / Part::kColumns;
  const int64_t last = plan.data_offset + (plan.rows - 1) * plan.row_stride + parts * Part::kBytes;
  return plan.weight_type == T && scales_served<T, S>(plan) && ids_served<I>(plan) &&
         (plan.data_offset | plan.row_stride) % Part::kBytes == 0 && plan.row_stride > 0 &&
         plan.row_stride <= 0x7fffffff && last <= job.weight_bytes &&
         plan.out_column + plan.dim <= job.out_width;
}

// Step: rows of a bag that are asked for together; twice as many are on their way.  Lanes: of a
// bag, at least Step; bags of narrow rows share a warp, which goes on until the longest of them
// ends.  `ordered`: features in launch order, which is read first; where there may be more bags
// than the machine holds at once.
template <int Step, int Lanes, int64_t T, Scales S, Ids I, bool Wide>
__global__ void __launch_bounds__(kFewThreads, few_blocks(Lanes))
    lookup_few_kernel(const __grid_constant__ CudaLookup job, bool ordered) {
  using Part = FewShare<T>;
  constexpr int C = Part::kColumns;
  constexpr bool kHasBias = express_has_bias(T, S);
  constexpr int kGroups = 32 / Lanes;
  constexpr bool kTiny = S == Scales::kRow && reads_tiny(T);  // half precision: scales_served()
  constexpr bool kTakesRounds = Step == kFewStep && Lanes == 8;
  static_assert(Step <= Lanes, "a lane reads one id of a step");
  __shared__ float books[kFewWarps][kBookScales];
  __shared__ BagShape shapes[kFewWarps];
  __shared__ FeaturePlan plans[kFewWarps];
  if (blockIdx.y == job.features) {
    if (blockIdx.z == 0) copy_dense(job);
    return;
  }
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % Lanes;
  int feature = static_cast<int>(blockIdx.y);
  if constexpr (kTakesRounds) {
    if (ordered) feature = feature_of_block(job);
  }
  const int64_t first_bag = (static_cast<int64_t>(blockIdx.x) * kFewWarps + warp) * kGroups;
  const int64_t bag = first_bag + static_cast<int>(threadIdx.x) % 32 / Lanes;
  // Offsets travel beside the plan.
  const int64_t at = feature * job.batch + min(bag, job.batch - 1);
  int64_t begin = load_integer(job.offsets, at, job.wide_offsets);
  int64_t end = load_integer(job.offsets, at + 1, job.wide_offsets);
  FeaturePlan& plan = plans[warp];
  fetch_plan(job, feature, &plan);
  if (!few_serves<T, S, I>(job, plan)) {
    if (blockIdx.z == 0) stream_bags_slowly(job, plan, feature, kFewWarps * kGroups);
    return;
  }
  if (first_bag >= job.batch) return;
  begin = inside_ids(job, begin);
  end = inside_ids(job, end);
  const int count = bag < job.batch ? static_cast<int>(max(end - begin, int64_t{0})) : 0;
  const int longest = Lanes == 32 ? count : __reduce_max_sync(~0u, count);
  const uint8_t* const ids = static_cast<const uint8_t*>(job.indices) + begin * (Wide ? 8 : 4);
  RawId<Wide> id{};
  const int step_lane = lane % Step;
  const auto load_id = [&](int first) {
    if (first + step_lane < count) id.load(ids, first + step_lane);
  };
  load_id(0);
  BagShape& shape = shapes[warp];
  share_shape(job, plan, C, &shape);
  const uint8_t* const scales = job.weights + plan.scale_offset;
  float* const book = books[warp];
  if constexpr (S == Scales::kBook) load_book(scales, book);
  float2 pair = make_float2(1.0f, 0.0f);
  if (S == Scales::kOne && kHasBias && has_bias(plan.scale_type)) {
    pair = load_scale(plan, scales, 0);
  }
  const uint32_t rows = static_cast<uint32_t>(plan.rows);
  const uint32_t row_stride = static_cast<uint32_t>(plan.row_stride);
  const uint32_t scale_stride = static_cast<uint32_t>(plan.scale_stride);
  const int scale_shift = min(static_cast<int>(plan.scale_shift), 31);
  const int dim = static_cast<int>(plan.dim);

  for (int column = (static_cast<int>(blockIdx.z) * Lanes + lane) * C; column - lane * C < dim;
       column += static_cast<int>(gridDim.z) * Lanes * C) {
    const uint8_t* const data =
        job.weights + plan.data_offset + (column < dim ? column / C : 0) * Part::kBytes;
    if (column - lane * C >= static_cast<int>(gridDim.z) * Lanes * C) load_id(0);  // a later pass
    uint32_t coming[2][Step][Part::kWords];
    uint32_t coming_scales[2] = {};
    // Loads rows [first, first + Step), whose ids are in `id`, and the ids of the step after.
    const auto load_rows = [&](int half, int first) {
      if (first >= longest) return;
      const uint32_t row = I == Ids::kHashed ? hashed_row(plan, id.value()) : id.nearest_row(rows);
      if constexpr (S == Scales::kRow) {
        if (first + step_lane < count) {
          coming_scales[half] = __ldg(reinterpret_cast<const uint32_t*>(
              scales + static_cast<uint64_t>(row >> scale_shift) * scale_stride));
        }
      }
#pragma unroll
      for (int u = 0; u < Step; ++u) {
#pragma unroll
        for (int w = 0; w < Part::kWords; ++w) coming[half][u][w] = 0;
        const uint32_t of = __shfl_sync(~0u, row, u, Lanes);
        if (first + u < count) {
          const uint8_t* const from = data + static_cast<uint64_t>(of) * row_stride;
          if constexpr (Part::kWords == 2) {
            const uint2 two = __ldg(reinterpret_cast<const uint2*>(from));
            coming[half][u][0] = two.x;
            coming[half][u][1] = two.y;
          } else {
            coming[half][u][0] = __ldg(reinterpret_cast<const uint32_t*>(from));
          }
        }
      }
      load_id(first + Step);
    };
    Sum<C> sum;
    sum.clear();
    const auto add_rows = [&](int half, int first) {
      uint32_t words[Step][Part::kWords];
      const uint32_t scale = coming_scales[half];
#pragma unroll
      for (int u = 0; u < Step; ++u) {
#pragma unroll
        for (int w = 0; w < Part::kWords; ++w) words[u][w] = coming[half][u][w];
      }
      load_rows(half, first + 2 * Step);
#pragma unroll
      for (int begun = 0; begun < Step; begun += kFewTogether) {
        if (first + begun >= longest) break;
#pragma unroll
        for (int u = begun; u < begun + kFewTogether; ++u) {
          if constexpr (S == Scales::kRow) pair = half_pair(__shfl_sync(~0u, scale, u, Lanes));
          if constexpr (kTiny) pair.x *= kTinyScale;
          if constexpr (S == Scales::kBook) {
            pair.x = book[block_code(__shfl_sync(~0u, words[u][0], lane & ~3, Lanes))];
          }
          // A row that is not there adds +0, which changes no sum but the -0 of products too small
          // for a float.
          const bool there = first + u < count;
          const float factor = there ? pair.x : 0.0f;
          if constexpr (kHasBias) sum.bias = __fadd_rn(sum.bias, there ? pair.y : 0.0f);
          float values[C];
          few_numbers<T, true, kTiny>(words[u], values);
#pragma unroll
          for (int c = 0; c < C; ++c) sum.acc[c] = fmaf(factor, values[c], sum.acc[c]);
        }
      }
    };
    load_rows(0, 0);
    load_rows(1, Step);
    for (int first = 0; first < longest; first += 2 * Step) {
      add_rows(0, first);
      if (first + Step < longest) add_rows(1, first + Step);
    }
    if constexpr (kTiny) {
#pragma unroll
      for (int c = 0; c < C; ++c) sum.acc[c] *= kTinySum;
    }
    if (column < dim && bag < job.batch) {
      const int64_t out = bag * job.out_width + shape.out_column + column;
      const float divisor = shape.mean ? static_cast<float>(count) : 1.0f;
      if (shape.stores == Stores::kSingle) {
        sum.write(job, out, dim - column, false, kHasBias, divisor);
      } else {
        sum.write_quads(job, out, dim - column, kHasBias, divisor);
      }
    }
  }
}

}  // namespace
}  // namespace tessera
