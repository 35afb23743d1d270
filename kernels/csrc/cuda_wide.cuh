// Short bags of wide rows: a warp has a row at a time, so that all its threads do the same.
//
// In the ring of the other kernels the threads of a row are as many as it has shares of 16 bytes.
// Where those are not a power of two, a warp has threads of several groups, whose bags end at
// different rows; and where bags have fewer rows than a step of the ring, hardly a step takes the
// way that is unrolled.  Here a warp works on up to 32 neighbouring bags of a feature, the ids of
// which lie side by side: lane k has the k-th of 32 ids, its row and its scale, and a word of 32
// bits says after which of them a bag ends.  The next four or eight rows are on their way into
// registers, whatever bag they belong to.
//
// A lane has eight columns, and eight more that are 256 columns further on where rows are so wide:
// so what neighbouring lanes read and write lies side by side, and stores of 16 bits fill whole
// sectors.  Wider rows take several passes, each a warp's.
//
// Rows of up to 128 columns, which a call may have beside wide ones, are read by as many lanes as
// have columns, several bags side by side until the longest of them ends; so are those whose
// results are not sums of 16 bits in places of four columns.
//
// Sums are those of cuda_stream.cuh, bit for bit.
#pragma once

#include <type_traits>

#include "cuda_few.cuh"

namespace tessera {
namespace {

constexpr int kWideThreads = 128;
constexpr int kWideWarps = kWideThreads / 32;
constexpr int kWideBlocks = 7;   // per multiprocessor
constexpr int kWideBags = 32;    // of a warp, at most
constexpr int kWideColumns = 8;  // of a lane, side by side
constexpr int kWideSlab = 32 * kWideColumns;
constexpr int kWideRows = 8;      // on their way, at most
constexpr int kWideWords = 16;    // of them in a lane
constexpr int kWidePrepare = 16;  // of 32 ids, after which those behind them become rows
static_assert(32 % kWideRows == 0 && kWidePrepare % kWideRows == 0);
constexpr int kWideNarrow = kWideSlab / 2;  // columns up to which a warp has several bags

// A lane's eight columns of a row.
template <int64_t T>
struct WideShare {
  static constexpr int kParts = kWideColumns / FewShare<T>::kColumns;
  static constexpr int kWords = kParts * FewShare<T>::kWords;
  static constexpr int kBytes = 4 * kWords;
  // Slabs of 256 columns of a pass.
  static constexpr int kSlabs = kWords <= 2 ? 2 : 1;
};

template <int Words>
__device__ __forceinline__ void load_words(const uint8_t* from, uint32_t (&words)[Words]) {
  static_assert(Words == 1 || Words == 2 || Words == 4);
  if constexpr (Words == 4) {
    const uint4 four = __ldg(reinterpret_cast<const uint4*>(from));
    words[0] = four.x;
    words[1] = four.y;
    words[2] = four.z;
    words[3] = four.w;
  } else if constexpr (Words == 2) {
    const uint2 two = __ldg(reinterpret_cast<const uint2*>(from));
    words[0] = two.x;
    words[1] = two.y;
  } else {
    words[0] = __ldg(reinterpret_cast<const uint32_t*>(from));
  }
}

// Adds a lane's eight columns of a row.
template <int64_t T, bool Tiny>
__device__ __forceinline__ void add_eight(const uint32_t (&words)[WideShare<T>::kWords],
                                          float scale, float (&acc)[kWideColumns]) {
  constexpr int C = FewShare<T>::kColumns;
#pragma unroll
  for (int p = 0; p < WideShare<T>::kParts; ++p) {
    uint32_t part[FewShare<T>::kWords];
    float values[C];
#pragma unroll
    for (int w = 0; w < FewShare<T>::kWords; ++w) part[w] = words[p * FewShare<T>::kWords + w];
    few_numbers<T, true, Tiny>(part, values);
#pragma unroll
    for (int c = 0; c < C; ++c) acc[p * C + c] = fmaf(scale, values[c], acc[p * C + c]);
  }
}

// What a lane stores of a row's slab, as bits.
enum WideStores : uint32_t {
  kEight = 1,      // eight columns, where they begin on 16 bytes
  kFour = 2,       // or four, at the end of a row
  kFirstFour = 4,  // where they begin between: the first four, of the first lane
  kTakesOver = 8,  // the last four and the first four of the next lane
  kLastFour = 16,  // the last four alone
};

// `columns`: the lane's and those behind them.
__device__ __forceinline__ uint32_t wide_stores(int lane, int columns) {
  const bool takes_over = lane < 31 && columns > kWideColumns;
  return (columns >= kWideColumns ? kEight : 0) |
         (columns > 0 && columns < kWideColumns ? kFour : 0) |
         (columns > 0 && lane == 0 ? kFirstFour : 0) | (takes_over ? kTakesOver : 0) |
         (columns >= kWideColumns && !takes_over ? kLastFour : 0);
}

// Stores without a branch.
__device__ __forceinline__ void store_if(bool wanted, void* at, uint32_t a, uint32_t b, uint32_t c,
                                         uint32_t d) {
  asm volatile(
      "{\n"
      "  .reg .pred wanted;\n"
      "  setp.ne.u32 wanted, %5, 0;\n"
      "  @wanted st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};\n"
      "}" ::"l"(at),
      "r"(a), "r"(b), "r"(c), "r"(d), "r"(static_cast<uint32_t>(wanted))
      : "memory");
}

__device__ __forceinline__ void store_if(bool wanted, void* at, uint32_t a, uint32_t b) {
  asm volatile(
      "{\n"
      "  .reg .pred wanted;\n"
      "  setp.ne.u32 wanted, %3, 0;\n"
      "  @wanted st.global.cs.v2.u32 [%0], {%1, %2};\n"
      "}" ::"l"(at),
      "r"(a), "r"(b), "r"(static_cast<uint32_t>(wanted))
      : "memory");
}

// Writes eight columns, or four where a row ends, as 16 bits each.  Where a row begins between two
// multiples of 16 bytes, a lane takes over the first four of the next lane.  All threads of a warp
// call it, for the same row.
__device__ __forceinline__ void write_eight(const CudaLookup& job, uint8_t* out, uint32_t stores,
                                            const float (&values)[kWideColumns]) {
  uint32_t pairs[4];
  if (job.out_type == OutType::kFloat16) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      pairs[k] = pack_pair(OutType::kFloat16, values[2 * k], values[2 * k + 1]);
    }
  } else {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      pairs[k] = pack_pair(OutType::kBFloat16, values[2 * k], values[2 * k + 1]);
    }
  }
  if (reinterpret_cast<uintptr_t>(out) % 16 == 0) {
    store_if((stores & kEight) != 0, out, pairs[0], pairs[1], pairs[2], pairs[3]);
    store_if((stores & kFour) != 0, out, pairs[0], pairs[1]);
  } else {
    const uint32_t next[2] = {__shfl_down_sync(~0u, pairs[0], 1),
                              __shfl_down_sync(~0u, pairs[1], 1)};
    store_if((stores & kFirstFour) != 0, out, pairs[0], pairs[1]);
    store_if((stores & kTakesOver) != 0, out + 8, pairs[2], pairs[3], next[0], next[1]);
    store_if((stores & kLastFour) != 0, out + 8, pairs[2], pairs[3]);
  }
}

template <int64_t T, Scales S, Ids I, bool Wide>
__global__ void __launch_bounds__(kWideThreads, kWideBlocks)
    lookup_wide_kernel(const __grid_constant__ CudaLookup job, int bags_per_warp) {
  using Part = WideShare<T>;
  constexpr bool kHasBias = express_has_bias(T, S);
  constexpr bool kTiny = S == Scales::kRow && reads_tiny(T);  // half precision: scales_served()
  __shared__ float books[kWideWarps][kBookScales];
  __shared__ BagShape shapes[kWideWarps];
  __shared__ FeaturePlan plans[kWideWarps];
  if (blockIdx.y == job.features) {
    if (blockIdx.z == 0) copy_dense(job);
    return;
  }
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int feature = static_cast<int>(blockIdx.y);
  const int64_t first_bag = (static_cast<int64_t>(blockIdx.x) * kWideWarps + warp) * bags_per_warp;
  const int bags = static_cast<int>(min(job.batch - first_bag, int64_t{bags_per_warp}));
  // Offsets travel beside the plan.
  const int64_t at = feature * job.batch + min(first_bag + lane, job.batch - 1);
  int64_t begin = load_integer(job.offsets, at, job.wide_offsets);
  int64_t end = load_integer(job.offsets, at + 1, job.wide_offsets);
  FeaturePlan& plan = plans[warp];
  fetch_plan(job, feature, &plan);
  const int64_t lanes = (plan.dim + kWideColumns - 1) / kWideColumns;
  const int64_t last = plan.data_offset + (plan.rows - 1) * plan.row_stride + lanes * Part::kBytes;
  // Where no id is left, some row is read all the same.
  if (plan.rows <= 0 || !few_serves<T, S, I>(job, plan) ||
      (plan.data_offset | plan.row_stride) % Part::kBytes != 0 || last > job.weight_bytes) {
    if (blockIdx.z == 0) stream_bags_slowly(job, plan, feature, kWideWarps * bags_per_warp);
    return;
  }
  if (bags <= 0) return;
  begin = inside_ids(job, begin);
  end = inside_ids(job, end);
  const int64_t base = __shfl_sync(~0u, begin, 0);
  const int count = static_cast<int>(max(__shfl_sync(~0u, end, bags - 1) - base, int64_t{0}));
  const int length = lane < bags ? static_cast<int>(max(end - begin, int64_t{0})) : 0;
  // The last id of the lane's bag, counted from the first one; negative where it has none.
  const int bag_last = length > 0 ? static_cast<int>(end - base) - 1 : -1;
  const uint8_t* const ids = static_cast<const uint8_t*>(job.indices) + base * (Wide ? 8 : 4);
  RawId<Wide> id{};
  if (lane < count) id.load(ids, lane);
  BagShape& shape = shapes[warp];
  share_shape(job, plan, kWideColumns, &shape);
  const float* const book = books[warp];
  if constexpr (S == Scales::kBook) load_book(job.weights + plan.scale_offset, books[warp]);
  float2 one_pair = make_float2(1.0f, 0.0f);
  if (S == Scales::kOne && kHasBias && has_bias(plan.scale_type)) {
    one_pair = load_scale(plan, job.weights + plan.scale_offset, 0);
  }
  // What is read once for 32 rows stays in shared memory.
  const volatile FeaturePlan& cold = plan;
  const auto row_of = [&](const RawId<Wide>& raw) {
    return I == Ids::kHashed ? hashed_row(plan, raw.value())
                             : raw.nearest_row(static_cast<uint32_t>(cold.rows));
  };
  [[maybe_unused]] const auto scale_of = [&](uint32_t row) {
    const int shift = min(static_cast<int>(cold.scale_shift), 31);
    return __ldg(reinterpret_cast<const uint32_t*>(job.weights + cold.scale_offset +
                                                   static_cast<uint64_t>(row >> shift) *
                                                       static_cast<uint32_t>(cold.scale_stride)));
  };
  const int dim = static_cast<int>(plan.dim);
  const uint32_t row_stride = static_cast<uint32_t>(plan.row_stride);
  const bool half = job.out_type == OutType::kFloat16 || job.out_type == OutType::kBFloat16;

  // A warp's rows one after the other, columns from `pass` on.  `id` has the first 32.
  const auto stream = [&](auto slabs, int pass) {
    constexpr int kSlabs = decltype(slabs)::value;
    constexpr int kFit = kWideWords / (kSlabs * Part::kWords);
    constexpr int kRows = kFit < kWideRows ? kFit : kWideRows;  // on their way
    const int column = pass + lane * kWideColumns;
    const uint8_t* data = job.weights + plan.data_offset + column / kWideColumns * Part::kBytes;
    uint8_t* out = static_cast<uint8_t*>(job.out) +
                   2 * (first_bag * job.out_width + shape.out_column + column);
    // The compiler would else take these sums apart and add them up again for every row.
    asm("" : "+l"(data), "+l"(out));
    const uint32_t out_stride = 2 * static_cast<uint32_t>(job.out_width);
    uint32_t stores[kSlabs];
#pragma unroll
    for (int s = 0; s < kSlabs; ++s) stores[s] = wide_stores(lane, dim - column - s * kWideSlab);
    // The lane's row and scale of the 32 ids whose rows are asked for now, and of the 32 after
    // them.
    uint32_t row = row_of(id);
    [[maybe_unused]] uint32_t scale = 0;
    uint32_t next_row = row;
    [[maybe_unused]] uint32_t next_scale = 0;
    if constexpr (S == Scales::kRow) {
      if (lane < count) scale = scale_of(row);
    }
    if (32 + lane < count) id.load(ids, 32 + lane);
    uint32_t words[kRows][kSlabs][Part::kWords];
    // Behind the last id it reads some row once more.
    const auto load_row = [&](int u, int place) {
      const uint32_t of = __shfl_sync(~0u, row, place);
      const uint8_t* const from = data + static_cast<uint64_t>(of) * row_stride;
#pragma unroll
      for (int s = 0; s < kSlabs; ++s) {
        if ((stores[s] & (kEight | kFour)) != 0) {
          load_words(from + s * 32 * Part::kBytes, words[u][s]);
        }
      }
    };
    float acc[kSlabs][kWideColumns];
    float bias = 0.0f;
    const auto clear = [&] {
      bias = 0.0f;
#pragma unroll
      for (int s = 0; s < kSlabs; ++s) {
#pragma unroll
        for (int c = 0; c < kWideColumns; ++c) acc[s][c] = 0.0f;
      }
    };
    const auto write = [&](int bag) {
      uint8_t* const to = out + static_cast<uint64_t>(static_cast<uint32_t>(bag)) * out_stride;
#pragma unroll
      for (int s = 0; s < kSlabs; ++s) {
        if constexpr (kTiny) {
#pragma unroll
          for (int c = 0; c < kWideColumns; ++c) acc[s][c] *= kTinySum;
        }
        if constexpr (kHasBias) {
#pragma unroll
          for (int c = 0; c < kWideColumns; ++c) acc[s][c] += bias;
        }
        write_eight(job, to + 2 * s * kWideSlab, stores[s], acc[s]);
      }
      clear();
    };
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
#pragma unroll
      for (int s = 0; s < kSlabs; ++s) {
#pragma unroll
        for (int w = 0; w < Part::kWords; ++w) words[u][s][w] = 0;
      }
      load_row(u, u);
    }
    clear();
    // Bags that have ids and are not written yet.
    unsigned open = __ballot_sync(~0u, bag_last >= 0);
    uint32_t ends = 0;
#pragma unroll 1
    for (int first = 0; first < count; first += kRows) {
      const int place = first % 32;
      if (place == 0) {
        const int from_first = bag_last - first;
        const bool here = from_first >= 0 && from_first < 32;
        ends = __reduce_or_sync(~0u, here ? 1u << (from_first & 31) : 0u);
      }
      [[maybe_unused]] const uint32_t scale_now = scale;
      if (place == kWidePrepare && first + 32 - kWidePrepare < count) {
        next_row = row_of(id);
        if constexpr (S == Scales::kRow) {
          if (first + 32 - kWidePrepare + lane < count) next_scale = scale_of(next_row);
        }
        if (first + 64 - kWidePrepare + lane < count) {
          id.load(ids, first + 64 - kWidePrepare + lane);
        }
      }
      if (place == 32 - kRows) {
        row = next_row;
        scale = next_scale;
      }
#pragma unroll
      for (int u = 0; u < kRows; ++u) {
        float2 pair = one_pair;
        if constexpr (S == Scales::kRow) {
          pair = half_pair(__shfl_sync(~0u, scale_now, place + u));
          if constexpr (kTiny) pair.x *= kTinyScale;
        }
        if constexpr (kHasBias) bias = __fadd_rn(bias, pair.y);
#pragma unroll
        for (int s = 0; s < kSlabs; ++s) {
          if constexpr (S == Scales::kBook) {
            pair.x = book[block_code(__shfl_sync(~0u, words[u][s][0], lane & ~1))];
          }
          add_eight<T, kTiny>(words[u][s], pair.x, acc[s]);
        }
        load_row(u, (place + kRows) % 32 + u);
        if ((ends & 1) != 0 && open != 0) {
          const int bag = __ffs(static_cast<int>(open)) - 1;
          open &= open - 1;
          write(bag);
        }
        ends >>= 1;
      }
    }
    // Bags without ids, and those of wrong offsets.
    for (unsigned left = open | __ballot_sync(~0u, lane < bags && bag_last < 0); left != 0;
         left &= left - 1) {
      clear();
      write(__ffs(static_cast<int>(left)) - 1);
    }
  };

  // Several bags side by side, or results of any kind.
  const auto side_by_side = [&](auto any) {
    constexpr bool kAny = decltype(any)::value;
    constexpr int kSteps = 4;
    const int across = min(static_cast<int>(lanes), 32);
    const int groups = small_quotient(32, across);
    const int group = small_quotient(lane, across);
    const int in_row = lane - group * across;
    for (int slab = static_cast<int>(blockIdx.z) * kWideSlab; slab < dim;
         slab += static_cast<int>(gridDim.z) * kWideSlab) {
      const int column = slab + in_row * kWideColumns;
      const bool inside = group < groups && column < dim;
      const uint8_t* const data =
          job.weights + plan.data_offset + (inside ? column : 0) / kWideColumns * Part::kBytes;
      // The group's bag, and the one that is asked for while its last rows are summed.
      int bag = group;
      int its_count = 0;
      int longest = 0;
      const uint8_t* its_ids = nullptr;
      const auto take = [&] {
        const int64_t its_begin = __shfl_sync(~0u, begin, bag & 31);
        const int its_length = __shfl_sync(~0u, length, bag & 31);
        its_count = inside && bag < bags ? its_length : 0;
        longest = __reduce_max_sync(~0u, its_count);
        its_ids = static_cast<const uint8_t*>(job.indices) + its_begin * (Wide ? 8 : 4);
      };
      RawId<Wide> its_id[kSteps] = {};
      const auto load_ids = [&](int first) {
#pragma unroll
        for (int u = 0; u < kSteps; ++u) {
          if (first + u < its_count) its_id[u].load(its_ids, first + u);
        }
      };
      Sum<kWideColumns> sum;
      sum.clear();
      take();
      load_ids(0);
      int first = 0;
#pragma unroll 1
      while (bag - group < bags) {
        uint32_t words[kSteps][Part::kWords];
        [[maybe_unused]] uint32_t its_scales[kSteps] = {};
        const int left = its_count - first;
#pragma unroll
        for (int u = 0; u < kSteps; ++u) {
#pragma unroll
          for (int w = 0; w < Part::kWords; ++w) words[u][w] = 0;
          if (u < left) {
            const uint32_t row = row_of(its_id[u]);
            load_words(data + static_cast<uint64_t>(row) * row_stride, words[u]);
            if constexpr (S == Scales::kRow) its_scales[u] = scale_of(row);
          }
        }
        const int now = bag;
        const int now_count = its_count;
        first += kSteps;
        const int most = longest - first;
        const bool done = most <= 0;
        if (done) {
          bag += groups;
          first = 0;
          take();
        }
        load_ids(first);
#pragma unroll
        for (int u = 0; u < kSteps; ++u) {
          if (u > 0 && most + kSteps <= u) break;
          float2 pair = one_pair;
          if constexpr (S == Scales::kRow) pair = half_pair(its_scales[u]);
          if constexpr (S == Scales::kBook) {
            pair.x = book[block_code(__shfl_sync(~0u, words[u][0], lane - in_row % 2))];
          }
          if (u < left) {
            if constexpr (kTiny) pair.x *= kTinyScale;
            if constexpr (kHasBias) sum.bias = __fadd_rn(sum.bias, pair.y);
            add_eight<T, kTiny>(words[u], pair.x, sum.acc);
          }
        }
        if (!done) continue;
        if (inside && now < bags) {
          if constexpr (kTiny) {
#pragma unroll
            for (int c = 0; c < kWideColumns; ++c) sum.acc[c] *= kTinySum;
          }
          const int64_t to = (first_bag + now) * job.out_width + shape.out_column + column;
          if constexpr (kAny) {
            const float divisor = shape.mean ? static_cast<float>(now_count) : 1.0f;
            if (shape.stores == Stores::kSingle) {
              sum.write(job, to, dim - column, false, kHasBias, divisor);
            } else {
              sum.write_quads(job, to, dim - column, kHasBias, divisor);
            }
          } else {
            sum.write_half_quads(job, to, dim - column, kHasBias);
          }
        }
      }
    }
  };

  if (!half || shape.stores == Stores::kSingle || shape.mean) {
    return side_by_side(std::true_type{});
  }
  if (dim <= kWideNarrow) return side_by_side(std::false_type{});
  constexpr int kPass = Part::kSlabs * kWideSlab;
  for (int pass = static_cast<int>(blockIdx.z) * kPass; pass < dim;
       pass += static_cast<int>(gridDim.z) * kPass) {
    if (pass > static_cast<int>(blockIdx.z) * kPass && lane < count) id.load(ids, lane);
    if (Part::kSlabs > 1 && dim - pass > kWideSlab) {
      stream(std::integral_constant<int, Part::kSlabs>{}, pass);
    } else {
      stream(std::integral_constant<int, 1>{}, pass);
    }
  }
}

}  // namespace
}  // namespace tessera
