// Calls of about one id a bag, of any width: there is next to nothing to sum, and what counts is
// how soon rows are asked for and how results are written.
//
// A warp works on up to 32 neighbouring bags of a feature: lane k has the offsets, the first two
// ids, their rows and scales of the k-th.  Then the warp reads the rows of several bags at a time
// into registers, narrow rows side by side.  A lane has as many columns as become 16 bytes of the
// result (of 16 bits each).  Where results do not begin on multiples of that, wide rows' lanes
// exchange halves, and narrow rows' have half as many columns: so neighbouring lanes write
// neighbouring bytes, and every store fills whole sectors.  A thread that has 16 columns writes
// half a sector at a time, which takes the second cache as long as a whole one.  Rows go through
// all of the first cache, since nothing lies in shared memory.
//
// Other results, and bags of three ids and more, are served as well, a bag after the other.
//
// Sums are those of cuda_stream.cuh, bit for bit.
#pragma once

#include <type_traits>

#include "cuda_few.cuh"

namespace tessera {
namespace {

constexpr int kShortThreads = 128;
constexpr int kShortWarps = kShortThreads / 32;
constexpr int kShortBlocks = 8;  // per multiprocessor
constexpr int kShortBags = 32;   // of a warp, at most
constexpr int kShortWords = 16;  // of rows that a lane has on their way, at most
constexpr int kShortSteps = 8;   // the same in rows

// What lane k knows of bag k.
struct ShortBag {
  int64_t begin;
  int count;
  uint32_t rows[2];    // of its first ids
  uint32_t scales[2];  // under Scales::kRow
};

// Writes a lane's eight columns, or four where a row ends, as 16 bits each.  Where they begin
// between two multiples of 16 bytes, a lane takes over the first four of the next lane: what lanes
// write lies on such multiples, but for the first and the last four columns.  All threads of a warp
// call it; `writes`: the lane has columns, and `first` and `last` say where it is among those that
// have the row's.
__device__ __forceinline__ void write_between(const CudaLookup& job, int64_t at, int columns,
                                              bool writes, bool first, bool last, bool quantized,
                                              Sum<8>* sum) {
  uint32_t pairs[4];
  const float add = quantized ? sum->bias : 0.0f;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    pairs[k] = pack_pair(job.out_type, sum->acc[2 * k] + add, sum->acc[2 * k + 1] + add);
  }
  sum->clear();
  const uint32_t next[2] = {__shfl_down_sync(~0u, pairs[0], 1), __shfl_down_sync(~0u, pairs[1], 1)};
  if (!writes) return;
  uint16_t* const out = static_cast<uint16_t*>(job.out) + at;
  if (reinterpret_cast<uintptr_t>(out) % 16 == 0) {
    if (columns >= 8) {
      store_streaming(out, pairs[0], pairs[1], pairs[2], pairs[3]);
    } else {
      store_streaming(out, pairs[0], pairs[1]);
    }
    return;
  }
  if (first) store_streaming(out, pairs[0], pairs[1]);
  if (!last && columns > 8) {
    store_streaming(out + 4, pairs[2], pairs[3], next[0], next[1]);
  } else if (columns >= 8) {
    store_streaming(out + 4, pairs[2], pairs[3]);
  }
}

// Between: results of some feature begin or end between multiples of eight columns.  That takes
// more registers than are left where none does.
template <int64_t T, Scales S, Ids I, bool Wide, bool Between>
__global__ void __launch_bounds__(kShortThreads, kShortBlocks)
    lookup_short_kernel(const __grid_constant__ CudaLookup job, int bags_per_warp,
                        bool widest_first) {
  using Part = FewShare<T>;
  constexpr int C = Part::kColumns;
  constexpr bool kHasBias = express_has_bias(T, S);
  __shared__ float books[kShortWarps][kBookScales];
  __shared__ BagShape shapes[kShortWarps];
  __shared__ FeaturePlan plans[kShortWarps];
  if (blockIdx.y == job.features) {
    if (blockIdx.z == 0) copy_dense(job);
    return;
  }
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int feature = widest_first ? widest_feature_of_block(job) : static_cast<int>(blockIdx.y);
  const int64_t first_bag = (static_cast<int64_t>(blockIdx.x) * kShortWarps + warp) * bags_per_warp;
  const int bags = static_cast<int>(min(job.batch - first_bag, int64_t{bags_per_warp}));
  // Offsets travel beside the plan.
  const int64_t at = feature * job.batch + min(first_bag + lane, job.batch - 1);
  ShortBag mine;
  mine.begin = load_integer(job.offsets, at, job.wide_offsets);
  int64_t end = load_integer(job.offsets, at + 1, job.wide_offsets);
  FeaturePlan& plan = plans[warp];
  fetch_plan(job, feature, &plan);
  if (!few_serves<T, S, I>(job, plan)) {
    if (blockIdx.z == 0) stream_bags_slowly(job, plan, feature, kShortWarps * bags_per_warp);
    return;
  }
  if (bags <= 0) return;
  mine.begin = inside_ids(job, mine.begin);
  end = inside_ids(job, end);
  mine.count = lane < bags ? static_cast<int>(max(end - mine.begin, int64_t{0})) : 0;
  const auto ids_from = [&](int64_t first) {
    return static_cast<const uint8_t*>(job.indices) + first * (Wide ? 8 : 4);
  };
  RawId<Wide> ids[2] = {};
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    if (k < mine.count) ids[k].load(ids_from(mine.begin), k);
  }
  BagShape& shape = shapes[warp];
  share_shape(job, plan, C, &shape);
  const uint8_t* const scales = job.weights + plan.scale_offset;
  const float* const book = books[warp];
  if constexpr (S == Scales::kBook) load_book(scales, books[warp]);
  float2 one_pair = make_float2(1.0f, 0.0f);
  if (S == Scales::kOne && kHasBias && has_bias(plan.scale_type)) {
    one_pair = load_scale(plan, scales, 0);
  }
  const uint32_t rows = static_cast<uint32_t>(plan.rows);
  const uint32_t row_stride = static_cast<uint32_t>(plan.row_stride);
  const uint32_t scale_stride = static_cast<uint32_t>(plan.scale_stride);
  const int scale_shift = min(static_cast<int>(plan.scale_shift), 31);
  const auto row_of = [&](const RawId<Wide>& raw) {
    return I == Ids::kHashed ? hashed_row(plan, raw.value()) : raw.nearest_row(rows);
  };
  [[maybe_unused]] const auto scale_of = [&](uint32_t row) {
    return __ldg(reinterpret_cast<const uint32_t*>(
        scales + static_cast<uint64_t>(row >> scale_shift) * scale_stride));
  };
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    mine.rows[k] = row_of(ids[k]);
    mine.scales[k] = 0;
    if constexpr (S == Scales::kRow) {
      if (k < mine.count) mine.scales[k] = scale_of(mine.rows[k]);
    }
  }
  // Bit k: bag k has so many ids.
  const unsigned some = __ballot_sync(~0u, mine.count > 0);
  const unsigned several = __ballot_sync(~0u, mine.count > 1);
  const unsigned many = __ballot_sync(~0u, mine.count > 2);
  const int dim = static_cast<int>(plan.dim);
  const bool whole = shape.stores == Stores::kWhole && dim % (Between ? 8 : C) == 0;

  // Parts: of a lane.  Ids: that a bag has at most; 0: any number, and results of any kind, where
  // else they are sums of 16 bits in places of four columns.
  const auto work = [&](auto parts, auto most_ids) {
    constexpr int kParts = decltype(parts)::value;
    constexpr bool kAny = decltype(most_ids)::value == 0;
    constexpr int kColumns = kParts * C;
    constexpr int kWords = kParts * Part::kWords;
    constexpr int kIds = kAny ? 2 : decltype(most_ids)::value;
    constexpr int kFit = kShortWords / kWords / kIds;
    constexpr int kSteps = kAny ? 1 : kFit < kShortSteps ? kFit : kShortSteps;
    // Lanes of a block that has one scale.
    [[maybe_unused]] constexpr int kBlock = kColumns < kBlockColumns ? kBlockColumns / kColumns : 1;
    const int across = min((dim + kColumns - 1) / kColumns, 32);  // lanes of a row
    const int groups = small_quotient(32, across);                // rows side by side
    const int group = small_quotient(lane, across);
    const int in_row = lane - group * across;
    const auto load = [](const uint8_t* from, uint32_t(&words)[kWords]) {
      if constexpr (kWords == 4) {
        const uint4 four = __ldg(reinterpret_cast<const uint4*>(from));
        words[0] = four.x;
        words[1] = four.y;
        words[2] = four.z;
        words[3] = four.w;
      } else if constexpr (kWords == 2) {
        const uint2 two = __ldg(reinterpret_cast<const uint2*>(from));
        words[0] = two.x;
        words[1] = two.y;
      } else {
        words[0] = __ldg(reinterpret_cast<const uint32_t*>(from));
      }
    };
    for (int slab = static_cast<int>(blockIdx.z) * 32 * kColumns; slab < dim;
         slab += static_cast<int>(gridDim.z) * 32 * kColumns) {
      const int column = slab + in_row * kColumns;
      const bool inside = group < groups && column < dim;
      const uint8_t* const data =
          job.weights + plan.data_offset + (inside ? column / C : 0) * Part::kBytes;
      const int64_t out = first_bag * job.out_width + shape.out_column + column;
      Sum<kColumns> sum;
      sum.clear();
      // Adds a row that has the scale `pair`, or whose block begins with the word `code`.
      const auto add = [&](const uint32_t(&words)[kWords], float2 pair, uint32_t code) {
        if constexpr (S == Scales::kBook) pair.x = book[block_code(code)];
        if constexpr (kHasBias) sum.bias = __fadd_rn(sum.bias, pair.y);
#pragma unroll
        for (int p = 0; p < kParts; ++p) {
          uint32_t part[Part::kWords];
          float values[C];
#pragma unroll
          for (int w = 0; w < Part::kWords; ++w) part[w] = words[p * Part::kWords + w];
          few_numbers<T, false>(part, values);
#pragma unroll
          for (int c = 0; c < C; ++c) {
            sum.acc[p * C + c] = fmaf(pair.x, values[c], sum.acc[p * C + c]);
          }
        }
      };
      for (int first = 0; first < bags; first += kSteps * groups) {
        uint32_t words[kSteps][kIds][kWords];
        // A step ends with the warp's last bag: where bags are few, that is most of it.
#pragma unroll
        for (int u = 0; u < kSteps; ++u) {
          if (u > 0 && first + u * groups >= bags) break;
          const int bag = first + u * groups + group;
#pragma unroll
          for (int k = 0; k < kIds; ++k) {
            const uint32_t row = __shfl_sync(~0u, mine.rows[k], bag);
#pragma unroll
            for (int w = 0; w < kWords; ++w) words[u][k][w] = 0;
            if (inside && bag < bags && ((k == 0 ? some : several) >> (bag & 31) & 1) != 0) {
              load(data + static_cast<uint64_t>(row) * row_stride, words[u][k]);
            }
          }
        }
#pragma unroll
        for (int u = 0; u < kSteps; ++u) {
          if (u > 0 && first + u * groups >= bags) break;
          const int bag = first + u * groups + group;
#pragma unroll
          for (int k = 0; k < kIds; ++k) {
            float2 pair = one_pair;
            [[maybe_unused]] uint32_t code = 0;
            if constexpr (S == Scales::kRow) {
              pair = half_pair(__shfl_sync(~0u, mine.scales[k], bag));
            }
            if constexpr (S == Scales::kBook) {
              code = __shfl_sync(~0u, words[u][k][0], lane - in_row % kBlock);
            }
            if (((k == 0 ? some : several) >> (bag & 31) & 1) != 0) add(words[u][k], pair, code);
          }
          [[maybe_unused]] float divisor = 1.0f;
          if constexpr (kAny) {
            const int count = __shfl_sync(~0u, mine.count, bag);
            const int64_t begin = __shfl_sync(~0u, mine.begin, bag);
            if (shape.mean) divisor = static_cast<float>(count);
            if (inside && bag < bags) {
#pragma unroll 1
              for (int i = 2; i < count; ++i) {
                RawId<Wide> id{};
                id.load(ids_from(begin), i);
                const uint32_t row = row_of(id);
                const uint8_t* const from = data + static_cast<uint64_t>(row) * row_stride;
                uint32_t its[kWords];
                load(from, its);
                float2 pair = one_pair;
                [[maybe_unused]] uint32_t code = 0;
                if constexpr (S == Scales::kRow) pair = half_pair(scale_of(row));
                if constexpr (S == Scales::kBook) {
                  code = __ldg(reinterpret_cast<const uint32_t*>(from) - in_row % kBlock * kWords);
                }
                add(its, pair, code);
              }
            }
          }
          const int64_t to = out + bag * job.out_width;
          if constexpr (Between && !kAny && kColumns == 8) {
            if (!whole) {
              write_between(job, to, dim - column, inside && bag < bags, in_row == 0,
                            in_row == across - 1, kHasBias, &sum);
              continue;
            }
          }
          if (!inside || bag >= bags) {
            sum.clear();
            continue;
          }
          if constexpr (kAny) {
            if (shape.stores == Stores::kSingle) {
              sum.write(job, to, dim - column, false, kHasBias, divisor);
            } else {
              sum.write_quads(job, to, dim - column, kHasBias, divisor);
            }
          } else if (!Between && kParts == 1 && kColumns > 4 && !whole) {
            sum.write_half_quads(job, to, dim - column, kHasBias);
          } else if (job.out_type == OutType::kFloat16) {
            sum.template write_half<OutType::kFloat16>(job, to, kHasBias);
          } else {
            sum.template write_half<OutType::kBFloat16>(job, to, kHasBias);
          }
        }
      }
    }
  };
  using Zero = std::integral_constant<int, 0>;
  using One = std::integral_constant<int, 1>;
  using Two = std::integral_constant<int, 2>;
  const bool half = job.out_type == OutType::kFloat16 || job.out_type == OutType::kBFloat16;
  if (!half || shape.stores == Stores::kSingle || many != 0 || (shape.mean && several != 0)) {
    return work(One{}, Zero{});
  }
  if constexpr (C == 4) {
    // A last lane that has half as many columns reads what lies behind them as well.
    const int64_t last = plan.data_offset + (plan.rows - 1) * plan.row_stride +
                         (dim + 2 * C - 1) / (2 * C) * (2 * Part::kBytes);
    if ((Between || (whole && dim % (2 * C) == 0)) && last <= job.weight_bytes &&
        (plan.data_offset | plan.row_stride) % (2 * Part::kBytes) == 0) {
      return several == 0 ? work(Two{}, One{}) : work(Two{}, Two{});
    }
  }
  return several == 0 ? work(One{}, One{}) : work(One{}, Two{});
}

}  // namespace
}  // namespace tessera
