// The common case at the speed of memory: every feature has one weight type and one width, ids are
// rows (clamped), bags are summed, and nothing is weighted or counted.
//
// A group of `Lanes` neighbouring threads reads a row, one share each, and streams over the ids of
// up to four neighbouring bags, rows arriving through the ring of cuda_stream.cuh.  What differs
// from the kernels there is what is known when compiling: the width and stride of the group, where
// a bag is written and how.  So nothing spills in 64 registers, eight blocks of 128 threads share a
// multiprocessor, and 128 KB of rows are in flight on it.
//
// A block whose feature is not what the caller's hint promised sums it slowly and correctly.
#pragma once

#include <type_traits>

#include "cuda_bag_order.cuh"
#include "cuda_slow.cuh"

namespace tessera {
namespace {

constexpr int kExpressThreads = kOrderThreads;
constexpr int kExpressBlocks = 8;  // per multiprocessor
constexpr int kExpressBags = 4;    // of a group, at most
constexpr int64_t kLongBags = 12;  // ids of a bag, on average, above which bags are long
constexpr int kAnyWidth = 0;       // instead of a number of lanes: known when the kernel runs

// How rows go by the first cache.
enum class Cache {
  kPast,
  kThrough,
  kAsked,  // as Piece says
};

// How many threads a block has, how many rows each keeps in flight, how many of them it asks for
// together, how many blocks share a multiprocessor, how rows go by its first cache, and how many
// shares of an int4 row a thread reads at once.
template <int Threads, int Ring, int Step, int Blocks, Cache C, int Int4Shares = 1>
struct Pipe {
  static constexpr int kThreads = Threads;
  static constexpr int kRing = Ring;
  static constexpr int kStep = Step;
  static constexpr int kBlocks = Blocks;
  static constexpr Cache kCache = C;
  static constexpr int kInt4Shares = Int4Shares;
};

// What a thread reads of a row.
template <class P, int64_t T>
struct PartOf {
  static constexpr int kShares = T == kInt4 ? P::kInt4Shares : 1;
  static constexpr int kColumns = kShares * Share<T>::kColumns;
  static constexpr int kBytes = kShares * Share<T>::kBytes;
};

using ExpressPipe = Pipe<kExpressThreads, kRing, kStep, kExpressBlocks, Cache::kPast>;

// Where a row's scale is.
enum class Scales {
  kOne,   // one for the table, or none
  kRow,   // fp16, per row or per few rows
  kBook,  // in the row: kBlockInt8
};

// Whether sums have a scale and a bias; where not, a feature that has them is not served.
TESSERA_ANY_DEVICE constexpr bool express_has_bias(int64_t weight_type, Scales scales) {
  return scales != Scales::kBook && scale_rule(weight_type) == kHalfScale;
}

// How ids become rows.
enum class Ids {
  kRows,    // they are rows, clamped
  kHashed,  // by any rule under which every id has a row
};

// The row of a raw id under Ids::kHashed.
__device__ __forceinline__ uint32_t hashed_row(const FeaturePlan& plan, int64_t id) {
  bool outside;
  return static_cast<uint32_t>(resolve_id(id, plan.rows, plan.id_rule, plan.out_of_range,
                                          static_cast<uint64_t>(plan.reciprocal), &outside));
}

template <Ids I>
__device__ __forceinline__ bool ids_served(const FeaturePlan& plan) {
  if (I == Ids::kHashed) return plan.id_rule != kIdIsRow || plan.out_of_range != kZero;
  return plan.id_rule == kIdIsRow && plan.out_of_range == kClamp;
}

// The bits of the thread's group among its warp's, for groups of a power of two up to 32.
template <int Lanes>
__device__ __forceinline__ unsigned lanes_mask() {
  return (Lanes == 32 ? ~0u : (1u << (Lanes % 32)) - 1) << (threadIdx.x % 32 / Lanes * Lanes);
}

// Shared memory of a block's ring, bytes.
template <class P>
constexpr int ring_bytes(Scales scales) {
  return P::kRing * P::kThreads * (scales == Scales::kRow ? 20 : 16);
}

// Whether a feature keeps its scales as S says, where the ring can copy them.
template <int64_t T, Scales S>
__device__ __forceinline__ bool scales_served(const FeaturePlan& plan) {
  if (S == Scales::kOne) {
    return plan.scale_type == kNoScale || (express_has_bias(T, S) && has_bias(plan.scale_type) &&
                                           (plan.rows - 1) >> plan.scale_shift == 0);
  }
  if (S == Scales::kRow) {
    return plan.scale_type == kHalfScale && plan.scale_stride <= 0x7fffffff &&
           (plan.scale_offset | plan.scale_stride) % 4 == 0;
  }
  return plan.scale_type == kScaleBook && plan.scale_offset % 4 == 0;
}

// Whether the plan says of a feature what the kernel was compiled for.
template <int64_t T, Scales S, Ids I, int Lanes>
__device__ __forceinline__ bool express_serves(const CudaLookup& job, const FeaturePlan& plan) {
  constexpr int kBytes = Share<T>::kBytes;
  const int64_t element = element_bytes(job.out_type);
  const int64_t out = static_cast<int64_t>(reinterpret_cast<uintptr_t>(job.out));
  const int64_t last = plan.data_offset + (plan.rows - 1) * plan.row_stride + Lanes * kBytes;
  return scales_served<T, S>(plan) && plan.weight_type == T &&
         plan.dim == Lanes * Share<T>::kColumns && plan.pooling == kSum && ids_served<I>(plan) &&
         (plan.data_offset | plan.row_stride) % kBytes == 0 && plan.row_stride <= 0x7fffffff &&
         last <= job.weight_bytes && plan.out_column + plan.dim <= job.out_width &&
         (out | plan.out_column * element | job.out_width * element) % 16 == 0;
}

// What a thread of a group needs to sum its bags.  The threads of a group that are in one warp are
// a team, which shares out the copies of scales.  All of them need the same 4 bytes, and copies to
// shared memory of so few bytes are written one after the other: 32 of a warp take as long as the
// copies of eight rows of 128 bytes.
struct Piece {
  const uint8_t* data;    // the thread's bytes of row 0
  const uint8_t* scales;  // the scale of row 0, or the table's one
  const uint8_t* ids;     // the first id of the first bag
  int count;              // ids of all bags
  int bags;               // 0 where the thread only takes part in its warp's steps
  uint8_t* ring;          // of the block: ring_bytes<P>(S)
  int leader;             // the first thread of the team, counted in its block
  int team;               // how many it has
  uint32_t keeps;         // under Cache::kAsked: whether rows go through the first cache
  const float* book;      // under Scales::kBook: the table's scales, in shared memory
};

// Streams the thread's columns of the group's bags: rows through the ring, and every finished sum
// to `write`, in the order of the bags.  `end_of(k)` is where bag k ends, counted from the first
// id.  Under Scales::kRow all threads of a warp that have not ended call it; one that has nothing
// to do has no ids and no bags.
//
// Lanes: threads of the group, which then share out the hashing of ids; kAnyWidth: each hashes all.
template <class P, int64_t T, Scales S, Ids I, int Lanes, bool Wide, class EndOf, class Write>
__device__ __forceinline__ void stream_alike(const FeaturePlan& plan, const Piece& piece,
                                             EndOf end_of, Write write) {
  constexpr int C = PartOf<P, T>::kColumns;
  constexpr int kBytes = PartOf<P, T>::kBytes;
  constexpr int kStep = P::kStep;
  constexpr int kRing = P::kRing;
  constexpr int kSlot = P::kThreads * 16;  // bytes of a ring slot
  constexpr bool kHasBias = express_has_bias(T, S);
  constexpr bool kTiny = S == Scales::kRow && reads_tiny(T);  // half precision: scales_served()
  // Lane k hashes the k-th id of a step and tells the others.
  constexpr bool kSharesHashing = I == Ids::kHashed && Lanes >= kStep;
  constexpr int kIds = kSharesHashing ? 1 : kStep;
  const int lane = static_cast<int>(threadIdx.x) % (kSharesHashing ? Lanes : 1);
  const unsigned mask = lanes_mask < kSharesHashing ? Lanes : 32 > ();
  const int count = piece.count;
  const int bags = piece.bags;
  const uint32_t rows = static_cast<uint32_t>(plan.rows);
  const uint32_t row_stride = static_cast<uint32_t>(plan.row_stride);
  const uint32_t scale_stride = static_cast<uint32_t>(plan.scale_stride);
  const int scale_shift = min(static_cast<int>(plan.scale_shift), 31);
  float2 pair = make_float2(1.0f, 0.0f);
  if (S == Scales::kOne && kHasBias && has_bias(plan.scale_type)) {
    pair = load_scale(plan, piece.scales, 0);
  }
  const uint8_t* const slot_pointer = piece.ring + threadIdx.x * 16;
  const uint8_t* const scale_slots = piece.ring + kRing * kSlot + piece.leader * 4;
  const uint32_t slot = shared_address(slot_pointer);
  [[maybe_unused]] const int in_team = static_cast<int>(threadIdx.x) - piece.leader;
  [[maybe_unused]] uint32_t copied = 0;  // bit u: the thread copies the scale of a step's row u
  if constexpr (S == Scales::kRow && Lanes < kStep) {
    for (int u = in_team; u < kStep; u += piece.team) copied |= 1u << u;
  }
  RawId<Wide> id[kIds] = {};

  const auto load_ids = [&](int at) {
    if constexpr (kSharesHashing) {
      if (at + lane % kStep < count) id[0].load(piece.ids, at + lane % kStep);
    } else {
#pragma unroll
      for (int u = 0; u < kStep; ++u) {
        if (at + u < count) id[u].load(piece.ids, at + u);
      }
    }
  };
  const auto issue = [&](int at, int stage) {
    uint32_t my_row = 0;
    if (kSharesHashing && at < count) my_row = hashed_row(plan, id[0].value());
    [[maybe_unused]] const auto copy_scale = [&](int u, uint32_t of, bool wanted) {
      copy_word_async(shared_address(scale_slots) + (stage + u) * (P::kThreads * 4),
                      piece.scales + static_cast<uint64_t>(of >> scale_shift) * scale_stride,
                      wanted);
    };
    [[maybe_unused]] uint32_t scaled_row = 0;  // whose scale the thread copies
    const auto copy_rows = [&](auto keeps) {
#pragma unroll
      for (int u = 0; u < kStep; ++u) {
        uint32_t row = 0;
        if constexpr (kSharesHashing) row = __shfl_sync(mask, my_row, u, Lanes);
        if (at + u < count) {
          if constexpr (I == Ids::kRows) row = id[u].nearest_row(rows);
          if constexpr (I == Ids::kHashed && !kSharesHashing) row = hashed_row(plan, id[u].value());
          copy_async<kBytes, decltype(keeps)::value>(
              slot + (stage + u) * kSlot, piece.data + static_cast<uint64_t>(row) * row_stride);
        }
        if constexpr (S == Scales::kRow && Lanes >= kStep) {
          scaled_row = in_team == u ? row : scaled_row;
        } else if constexpr (S == Scales::kRow) {
          // Right behind its row, which may have brought it along.
          copy_scale(u, row, at + u < count && (copied >> u & 1) != 0);
        }
      }
    };
    if constexpr (P::kCache == Cache::kAsked) {
      if (piece.keeps != 0) {
        copy_rows(std::true_type{});
      } else {
        copy_rows(std::false_type{});
      }
    } else {
      copy_rows(std::bool_constant<P::kCache == Cache::kThrough>{});
    }
    if constexpr (S == Scales::kRow && Lanes >= kStep) {
      copy_scale(in_team, scaled_row, in_team < kStep && at + in_team < count);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  };

  Sum<C> sum;
  sum.clear();
  int bag = 0;
  // The last bag takes what is left, whatever its end.
  int bag_end = bags <= 1 ? INT_MAX : end_of(0);
  const auto finish_bag = [&] {
    if constexpr (kTiny) {
#pragma unroll
      for (int c = 0; c < C; ++c) sum.acc[c] *= kTinySum;
    }
    write(&sum, bag);
    ++bag;
    bag_end = bag + 1 < bags ? end_of(bag) : INT_MAX;
  };
  const auto add_row = [&](int place) {
    uint32_t words[kBytes / 4];
    if constexpr (kBytes == 16) {
      const uint4 four = *reinterpret_cast<const uint4*>(slot_pointer + place * kSlot);
      words[0] = four.x;
      words[1] = four.y;
      words[2] = four.z;
      words[3] = four.w;
    } else {
      const uint2 two = *reinterpret_cast<const uint2*>(slot_pointer + place * kSlot);
      words[0] = two.x;
      words[1] = two.y;
    }
    if constexpr (S == Scales::kBook) pair.x = piece.book[block_code(words[0])];
    if constexpr (S == Scales::kRow) {
      pair = half_pair(*reinterpret_cast<const uint32_t*>(scale_slots + place * (P::kThreads * 4)));
      if constexpr (kTiny) pair.x *= kTinyScale;
    }
    if constexpr (kHasBias) sum.bias = __fadd_rn(sum.bias, pair.y);
#pragma unroll
    for (int first = 0; first < C; first += Share<T>::kColumns) {
      float values[Share<T>::kColumns];
      const uint32_t* const share = words + first / Share<T>::kColumns * (Share<T>::kBytes / 4);
      if constexpr (kTiny) {
        decode_tiny<T>(share, values);
      } else {
        decode_share<T>(share, values);
      }
#pragma unroll
      for (int c = 0; c < Share<T>::kColumns; ++c) {
        sum.acc[first + c] = fmaf(pair.x, values[c], sum.acc[first + c]);
      }
    }
  };

  load_ids(0);
#pragma unroll 2
  for (int s = 0; s < kRing; s += kStep) {
    issue(s, s);
    load_ids(s + kStep);
  }
  int stage = 0;  // row k of the group's ids is in ring slot k % kRing
  // Teams of a warp go on until the longest ends: each waits for scales that others copied.
  int longest = count;
  if constexpr (S == Scales::kRow) longest = __reduce_max_sync(~0u, count);
  for (int i = 0; i < longest; i += kStep) {
    asm volatile("cp.async.wait_group %0;" ::"n"(kRing / kStep - 1) : "memory");
    if constexpr (S == Scales::kRow) __syncwarp();
    const int step_end = min(i + kStep, count);
    int k = i;
    while (true) {
      const int stop = min(bag_end, step_end);
      if (stop - k == kStep) {
#pragma unroll
        for (int u = 0; u < kStep; ++u) add_row(stage + u);
        k = stop;
      } else {
#pragma unroll 1
        for (; k < stop; ++k) add_row(stage + k - i);
      }
      if (k >= step_end) break;
      finish_bag();
    }
    if constexpr (S == Scales::kRow) __syncwarp();  // nobody reads the scales that are replaced
    issue(i + kRing, stage);
    load_ids(i + kRing + kStep);
    stage = stage + kStep == kRing ? 0 : stage + kStep;
  }
  while (bag < bags) finish_bag();
}

// Copies the book of a kBlockInt8 table into the warp's; all its threads call it.
__device__ __forceinline__ void load_book(const uint8_t* scales, float* book) {
  if (threadIdx.x % 32 < kBookScales) {
    book[threadIdx.x % 32] = __ldg(reinterpret_cast<const float*>(scales) + threadIdx.x % 32);
  }
  __syncwarp();
}

template <int64_t T, Scales S, Ids I, int Lanes, bool Wide>
__global__ void __launch_bounds__(kExpressThreads, kExpressBlocks)
    lookup_express_kernel(const __grid_constant__ CudaLookup job, int bags_per_group,
                          bool longest_first, Beside beside) {
  constexpr int C = Share<T>::kColumns;
  constexpr int kGroups = kExpressThreads / Lanes;
  extern __shared__ __align__(kRingAlignment) uint8_t ring[];
  __shared__ float books[kExpressThreads / 32][kBookScales];
  if (blockIdx.y == job.features) {
    copy_dense(job);
    return;
  }
  const int lane = static_cast<int>(threadIdx.x) % Lanes;
  const unsigned mask = lanes_mask<Lanes>();
  const int group = static_cast<int>(threadIdx.x) / Lanes;
  int first_bag = (static_cast<int>(blockIdx.x) * kGroups + group) * bags_per_group;
  int bags = min(static_cast<int>(job.batch) - first_bag, bags_per_group);
  const int feature = longest_first ? longest_feature_of_block(job) : static_cast<int>(blockIdx.y);
  const int of_feature = feature * static_cast<int>(job.batch);
  // Offsets travel while the plan is read.  Lane k keeps where bag k ends, from `begin`.
  int64_t begin = 0;
  int64_t my_end = 0;
  const auto load_ends = [&] {
    if (bags > 0) {
      begin = load_integer(job.offsets, of_feature + first_bag, job.wide_offsets);
      my_end =
          load_integer(job.offsets, of_feature + first_bag + min(lane + 1, bags), job.wide_offsets);
    }
  };
  load_ends();
  const Window window = window_of(job, static_cast<int>(blockIdx.x), kGroups, beside);
  bool differ = false;
  if (beside != Beside::kAsTheyCome) differ = lengths_differ(job, of_feature, window);
  const FeaturePlan& plan = job.plan[feature];
  if (!express_serves<T, S, I, Lanes>(job, plan)) {
    stream_bags_slowly(job, plan, feature, kGroups * bags_per_group);
    return;
  }
  if (differ) {
    __shared__ BagOrder order;
    first_bag = ordered_bag(job, of_feature, window, kGroups, group, &order);
    bags = first_bag < 0 ? 0 : 1;
    load_ends();
  }
  float* const book = books[threadIdx.x / 32];
  if constexpr (S == Scales::kBook) load_book(job.weights + plan.scale_offset, book);
  if (bags <= 0) return;

  Piece piece;
  piece.data = job.weights + plan.data_offset + lane * Share<T>::kBytes;
  piece.scales = job.weights + plan.scale_offset;
  begin = inside_ids(job, begin);
  // Lane k keeps where bag k ends, from `begin`.
  const int my_bag_end = static_cast<int>(inside_ids(job, my_end) - begin);
  piece.ids = static_cast<const uint8_t*>(job.indices) + begin * (Wide ? 8 : 4);
  piece.count = max(__shfl_sync(mask, my_bag_end, bags - 1, Lanes), 0);
  piece.bags = bags;
  piece.ring = ring;
  piece.leader = static_cast<int>(threadIdx.x) - lane;
  piece.team = Lanes;
  piece.keeps = 0;
  piece.book = book;
  int64_t out = first_bag * job.out_width + plan.out_column + lane * C;
  const auto end_of = [&](int bag) { return __shfl_sync(mask, my_bag_end, bag, Lanes); };
  const auto write = [&](Sum<C>* sum, int) {
    constexpr bool kHasBias = express_has_bias(T, S);
    if (job.out_type == OutType::kFloat16) {
      sum->template write_half<OutType::kFloat16>(job, out, kHasBias);
    } else if (job.out_type == OutType::kBFloat16) {
      sum->template write_half<OutType::kBFloat16>(job, out, kHasBias);
    } else {
      sum->write(job, out, C, true, kHasBias, 1.0f);
    }
    out += job.out_width;
  };
  stream_alike<ExpressPipe, T, S, I, Lanes, Wide>(plan, piece, end_of, write);
}

}  // namespace
}  // namespace tessera
