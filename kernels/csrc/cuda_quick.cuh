// Calls of few short bags, where next to nothing is computed: their time is that of loads that wait
// for each other (offsets, ids, rows) and of the instructions between them, of which a lone warp
// issues one in several cycles.
//
// A group of lanes works on one bag.  All its lanes read the same offsets and scales, which costs a
// load no more than one lane's would.  Shared out among a warp are the record of the plan, of which
// each lane reads a field, and its first ids.  What does not depend on a load's result stands
// behind that load: the plan is checked while rows are on their way.
//
// Ids are read before it is known where those of a bag begin: a warp reads the ones that lie where
// its bags would begin if all bags of the call were of one length.  Where they are, or nearly so,
// ids are there together with the offsets; elsewhere they are read again.
//
// Sums are those of cuda_stream.cuh, bit for bit.
#pragma once

#include <cstddef>

#include "cuda_few.cuh"

namespace tessera {
namespace {

constexpr int kQuickThreads = 128;
constexpr int kQuickNear = 2;       // ids that a lane reads before offsets are known
constexpr int kQuickMeanBits = 16;  // of QuickForm::mean, behind the point

// Blocks that share a multiprocessor, as far as registers go.
constexpr int quick_blocks(int passes) { return passes == 1 ? 8 : 6; }

// How bags lie on lanes, and where their ids begin if all are of one length.
struct QuickForm {
  int lane_bits;  // a group has 2^lane_bits lanes, up to a warp
  uint32_t mean;  // ids of a bag, times 2^kQuickMeanBits
  int before;     // ids that a warp reads in front of where those of its bags would begin
  int offset_bytes;
};

// Loads that are all asked for before any of them is waited for: the compiler would move a load
// that is used late behind the wait for another, but keeps these in front of a __syncwarp().
__device__ __forceinline__ int load_now(const int* from) {
  int value;
  asm volatile("ld.global.b32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}

__device__ __forceinline__ int64_t load_now(const int64_t* from) {
  int64_t value;
  asm volatile("ld.global.b64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
  return value;
}

// An offset of either width as it was loaded.
struct RawOffset {
  int low;
  int high = 0;  // of 64 bits

  __device__ __forceinline__ RawOffset(const uint8_t* from, bool wide) {
    low = load_now(reinterpret_cast<const int*>(from));
    if (wide) high = load_now(reinterpret_cast<const int*>(from) + 1);
  }

  // Kept inside the ids.
  __device__ __forceinline__ int inside(int ids, bool wide) const {
    int value = low;
    if (wide && high != low >> 31) value = high < 0 ? 0 : ids;
    return min(max(value, 0), ids);
  }
};

// A feature's record in registers, in 32 bits what no plan has more of.
struct QuickPlan {
  int64_t data_offset;
  int64_t row_stride;
  int64_t scale_offset;
  int64_t scale_stride;
  int64_t reciprocal;
  int rows;
  int dim;
  int weight_type;
  int scale_type;
  int out_column;
  int pooling;
  int id_rule;
  int out_of_range;
  int scale_shift;

  // `mine`: the record's field of the lane's number.  All threads of a warp call it.
  __device__ __forceinline__ explicit QuickPlan(int64_t mine) {
    const auto wide = [&](size_t at) {
      return __shfl_sync(~0u, mine, static_cast<int>(at / sizeof(int64_t)));
    };
    const auto narrow = [&](size_t at) {  // its lower half
      return __shfl_sync(~0u, static_cast<int>(mine), static_cast<int>(at / sizeof(int64_t)));
    };
    data_offset = wide(offsetof(FeaturePlan, data_offset));
    row_stride = wide(offsetof(FeaturePlan, row_stride));
    scale_offset = wide(offsetof(FeaturePlan, scale_offset));
    scale_stride = wide(offsetof(FeaturePlan, scale_stride));
    reciprocal = wide(offsetof(FeaturePlan, reciprocal));
    rows = narrow(offsetof(FeaturePlan, rows));
    dim = narrow(offsetof(FeaturePlan, dim));
    weight_type = narrow(offsetof(FeaturePlan, weight_type));
    scale_type = narrow(offsetof(FeaturePlan, scale_type));
    out_column = narrow(offsetof(FeaturePlan, out_column));
    pooling = narrow(offsetof(FeaturePlan, pooling));
    id_rule = narrow(offsetof(FeaturePlan, id_rule));
    out_of_range = narrow(offsetof(FeaturePlan, out_of_range));
    scale_shift = min(narrow(offsetof(FeaturePlan, scale_shift)), 31);
  }

  // A row of the table in any case, and what the id says where serves() holds.
  template <Ids I, class Id>
  __device__ __forceinline__ uint32_t row(const Id& id) const {
    if constexpr (I == Ids::kHashed) {
      bool outside;
      const int64_t its = resolve_id(id.value(), rows, id_rule, out_of_range,
                                     static_cast<uint64_t>(reciprocal), &outside);
      return min(static_cast<uint32_t>(its), static_cast<uint32_t>(rows) - 1);
    } else {
      return id.nearest_row(static_cast<uint32_t>(rows));
    }
  }

  __device__ __forceinline__ uint64_t place_of(uint32_t row) const {
    return data_offset + static_cast<uint64_t>(row) * static_cast<uint32_t>(row_stride);
  }

  __device__ __forceinline__ uint64_t place_of_scale(uint32_t row) const {
    return scale_offset +
           static_cast<uint64_t>(row >> scale_shift) * static_cast<uint32_t>(scale_stride);
  }

  // Whether all rows can be read share by share, whatever they hold, and their scales.
  template <int64_t T, Scales S>
  __device__ __forceinline__ bool readable(uint64_t weight_bytes) const {
    using Part = FewShare<T>;
    const uint32_t last = static_cast<uint32_t>(rows) - 1;
    const int row_bytes = (dim + Part::kColumns - 1) / Part::kColumns * Part::kBytes;
    // No `&&`: these are few instructions, and a branch takes longer.
    bool is = ((data_offset | row_stride) % Part::kBytes == 0) &
              (place_of(last) + row_bytes <= weight_bytes);
    if constexpr (S == Scales::kRow) {
      is = is & ((scale_offset | scale_stride) % 4 == 0) &
           (place_of_scale(last) + 4 <= weight_bytes);
    }
    return is;
  }

  // Whether a feature that is readable is what the kernel was compiled for.
  template <int64_t T, Scales S, Ids I>
  __device__ __forceinline__ bool serves(const CudaLookup& job) const {
    FeaturePlan plan;
    plan.rows = rows;
    plan.scale_offset = scale_offset;
    plan.scale_stride = scale_stride;
    plan.scale_type = scale_type;
    plan.scale_shift = scale_shift;
    plan.id_rule = id_rule;
    plan.out_of_range = out_of_range;
    return weight_type == T && scales_served<T, S>(plan) && ids_served<I>(plan) && row_stride > 0 &&
           row_stride <= 0x7fffffff && int64_t{out_column} + dim <= job.out_width;
  }
};

// Together: ids of a bag that are read, and rows that are asked for, side by side.  Passes: shares
// of a row that a lane has, as many lanes of a group apart.
template <int Together, int Passes, int64_t T, Scales S, Ids I, bool Wide>
__global__ void __launch_bounds__(kQuickThreads, quick_blocks(Passes))
    lookup_quick_kernel(const QuickForm form, const __grid_constant__ CudaLookup job) {
  using Part = FewShare<T>;
  constexpr int C = Part::kColumns;
  constexpr bool kHasBias = express_has_bias(T, S);
  const int batch = static_cast<int>(job.batch);
  const int feature = min(static_cast<int>(blockIdx.y), static_cast<int>(job.features) - 1);
  const int in_block = static_cast<int>(blockDim.x) >> form.lane_bits;
  const int thread = static_cast<int>(threadIdx.x);
  const int first_bag = static_cast<int>(blockIdx.x) * in_block;
  const int bag = first_bag + (thread >> form.lane_bits);
  const int at = feature * batch + min(bag, batch - 1);
  const uint8_t* const all_ids = static_cast<const uint8_t*>(job.indices);
  const uint8_t* const weights = job.weights;
  const uint8_t* const offsets =
      static_cast<const uint8_t*>(job.offsets) + int64_t{at} * form.offset_bytes;
  const bool wide_offsets = form.offset_bytes == 8;
  const RawOffset begins(offsets, wide_offsets);
  const RawOffset ends(offsets + form.offset_bytes, wide_offsets);
  const int64_t my_field = load_now(reinterpret_cast<const int64_t*>(job.plan + feature) +
                                    min(thread % 32, static_cast<int>(kPlanColumns) - 1));
  __syncwarp();
  const int ids = static_cast<int>(job.ids);
  const uint32_t first_of_warp =
      static_cast<uint32_t>(feature * batch + first_bag + (thread / 32 * 32 >> form.lane_bits));
  const uint64_t ids_before = static_cast<uint64_t>(first_of_warp) * form.mean >> kQuickMeanBits;
  const int base = static_cast<int>(ids_before) - form.before;
  RawId<Wide> near[kQuickNear] = {};
#pragma unroll
  for (int k = 0; k < kQuickNear; ++k) {
    const int place = base + k * 32 + thread % 32;
    if (static_cast<uint32_t>(place) < static_cast<uint32_t>(ids)) {
      near[k].bits = load_now(reinterpret_cast<const decltype(near[k].bits)*>(all_ids) + place);
    }
  }
  __syncwarp();
  const QuickPlan plan(my_field);
  const int lane = thread & ((1 << form.lane_bits) - 1);
  const int part = ((static_cast<int>(blockIdx.z) * Passes) << form.lane_bits) + lane;
  const auto part_of = [&](int p) { return part + (p << form.lane_bits); };
  const auto has_part = [&](int p) { return part_of(p) * C < plan.dim; };
  const int begin = begins.inside(ids, wide_offsets);
  const int end = ends.inside(ids, wide_offsets);
  const int count = bag < batch ? max(end - begin, 0) : 0;
  RawId<Wide> id[Together] = {};
  const auto load_id = [&](int u, int k) {
    if (k < count) id[u].load(all_ids, begin + k);
  };
#pragma unroll
  for (int u = 0; u < Together; ++u) {
    static_assert(kQuickNear == 2);
    const uint32_t place = static_cast<uint32_t>(begin + u - base);
    const auto low = __shfl_sync(~0u, near[0].bits, place % 32);
    const auto high = __shfl_sync(~0u, near[1].bits, place % 32);
    id[u].bits = place < 32 ? low : high;
    if (place >= kQuickNear * 32) load_id(u, u);
  }
  const uint64_t weight_bytes = static_cast<uint64_t>(job.weight_bytes);
  const bool readable = plan.readable<T, S>(weight_bytes);
  uint32_t words[Together][Passes][Part::kWords];
  [[maybe_unused]] uint32_t scale[Together];
  [[maybe_unused]] uint32_t code[Together][Passes];
  // Asks for rows [first, first + Together), whose ids are in `id`.  Whether the plan is what the
  // kernel was compiled for is asked behind it.
  const auto ask_rows = [&](int first) {
#pragma unroll
    for (int u = 0; u < Together; ++u) {
      scale[u] = 0;
#pragma unroll
      for (int p = 0; p < Passes; ++p) {
        code[u][p] = 0;
#pragma unroll
        for (int w = 0; w < Part::kWords; ++w) words[u][p][w] = 0;
      }
      if (first + u < count && readable && has_part(0)) {
        const uint32_t row = plan.row<I>(id[u]);
        const uint8_t* const from = weights + plan.place_of(row);
#pragma unroll
        for (int p = 0; p < Passes; ++p) {
          if (p > 0 && !has_part(p)) continue;
          const uint8_t* const share = from + part_of(p) * Part::kBytes;
          if constexpr (Part::kWords == 2) {
            const uint2 two = __ldg(reinterpret_cast<const uint2*>(share));
            words[u][p][0] = two.x;
            words[u][p][1] = two.y;
          } else {
            words[u][p][0] = __ldg(reinterpret_cast<const uint32_t*>(share));
          }
          if (S == Scales::kRow && p == 0) {
            scale[u] = __ldg(reinterpret_cast<const uint32_t*>(weights + plan.place_of_scale(row)));
          }
          if constexpr (S == Scales::kBook) {
            code[u][p] =
                __ldg(reinterpret_cast<const uint32_t*>(share) - part_of(p) % (kBlockColumns / C));
          }
        }
      }
    }
  };
  const auto load_ids = [&](int first) {
#pragma unroll
    for (int u = 0; u < Together; ++u) load_id(u, first + u);
  };
  ask_rows(0);
  [[maybe_unused]] float my_scale = 0.0f;  // of the book's
  if constexpr (S == Scales::kBook) {
    const uint64_t its = plan.scale_offset + 4 * (thread % kBookScales);
    if (its % 4 == 0 && its + 4 <= weight_bytes) {
      my_scale = __ldg(reinterpret_cast<const float*>(weights + its));
    }
  }
  if (count > Together) load_ids(Together);
  if (blockIdx.y == job.features) {
    if (blockIdx.z == 0) copy_dense(job);
    return;
  }
  // Rows that are wider than the caller said have columns that nobody has.
  const int covered = ((static_cast<int>(gridDim.z) * Passes) << form.lane_bits) * C;
  if (!readable || plan.dim > covered || !plan.serves<T, S, I>(job)) {
    if (blockIdx.z == 0) stream_bags_slowly(job, job.plan[feature], feature, in_block);
    return;
  }
  [[maybe_unused]] const float* book = nullptr;
  if constexpr (S == Scales::kBook) {
    __shared__ float books[kQuickThreads / 32][32];
    books[thread / 32][thread % 32] = my_scale;
    __syncwarp();
    book = books[thread / 32];
  }
  if (bag >= batch || !has_part(0)) return;
  float2 one_pair = make_float2(1.0f, 0.0f);
  if (S == Scales::kOne && kHasBias && has_bias(plan.scale_type)) {
    one_pair = load_scale(job.plan[feature], weights + plan.scale_offset, 0);
  }
  // Sums of 16 bits in places of four columns: what follows the last load is to be short.
  const int64_t out = bag * job.out_width + plan.out_column;
  const bool half = job.out_type == OutType::kFloat16 || job.out_type == OutType::kBFloat16;
  const bool plain = half && plan.pooling == kSum &&
                     reinterpret_cast<uintptr_t>(job.out) % 8 == 0 &&
                     ((plan.dim | plan.out_column | static_cast<int>(job.out_width)) & 3) == 0;
  Sum<C> sums[Passes];
#pragma unroll
  for (int p = 0; p < Passes; ++p) sums[p].clear();
  const auto add_rows = [&](int first) {
#pragma unroll
    for (int u = 0; u < Together; ++u) {
      if (first + u >= count) break;
      float2 pair = one_pair;
      if constexpr (S == Scales::kRow) pair = half_pair(scale[u]);
#pragma unroll
      for (int p = 0; p < Passes; ++p) {
        if constexpr (S == Scales::kBook) pair.x = book[block_code(code[u][p])];
        if constexpr (kHasBias) sums[p].bias = __fadd_rn(sums[p].bias, pair.y);
        float values[C];
        few_numbers<T>(words[u][p], values);
#pragma unroll
        for (int c = 0; c < C; ++c) sums[p].acc[c] = fmaf(pair.x, values[c], sums[p].acc[c]);
      }
    }
  };
  add_rows(0);
  if (count > Together) {
#pragma unroll 1
    for (int k = Together; k < count; k += Together) {
      ask_rows(k);
      if (k + Together < count) load_ids(k + Together);
      add_rows(k);
    }
  }
#pragma unroll
  for (int p = 0; p < Passes; ++p) {
    if (p > 0 && !has_part(p)) continue;
    const int column = part_of(p) * C;
    if (plain) {
      sums[p].write_sixteens(job, out + column, plan.dim - column, kHasBias);
      continue;
    }
    const int64_t element = element_bytes(job.out_type);
    const float divisor = plan.pooling == kMean ? static_cast<float>(count) : 1.0f;
    const int64_t places = static_cast<int64_t>(reinterpret_cast<uintptr_t>(job.out)) |
                           plan.out_column * element | job.out_width * element;
    if (plan.dim % 4 != 0 || (places & (4 * element - 1)) != 0) {
      sums[p].write(job, out + column, plan.dim - column, false, kHasBias, divisor);
    } else {
      sums[p].write_quads(job, out + column, plan.dim - column, kHasBias, divisor);
    }
  }
}

}  // namespace
}  // namespace tessera
