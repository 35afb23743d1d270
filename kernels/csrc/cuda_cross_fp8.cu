// The cross layer of e4m3 numbers on Hopper: cuda_cross.cu's kernel with half the bytes.
//
// A block has 128 rows of `v`, which stay in shared memory, and a run of tiles of 128 columns of
// the result; pieces of `weight`, 128 by kDepth, pass through a ring.  Two warpgroups take turns at
// the tiles.  A thread asks for its x0 and x of a tile before it multiplies, so that they arrive
// behind the products, and keeps them in registers: 64 beside the 128 of its sums.
//
// A thread of a wgmma holds columns 8 j + 2 q and the next of a row, q = lane % 4.  The rows of
// `weight` are fetched in such an order (`weight_map`) that these are columns 16 q + 2 j and the
// next of every 64: sixteen neighbours, 16 bytes, and the four lanes of a row have 64 in a line.
#include <cuda_bf16.h>

#include "cuda_layers_fp8.h"
#include "float8.cuh"
#include "hopper.cuh"
#include "hopper_launch.cuh"

namespace tessera {
namespace {

constexpr int kRows = 128;      // of a block
constexpr int kColumns = 128;   // of a tile
constexpr int kDepth = 128;     // columns of v and weight in a piece: the 128 bytes of a swizzle
constexpr int kMostPieces = 4;  // of v
constexpr int kStages = 8;      // of the ring
constexpr int kGroup = 64;      // columns that are fetched in their own order
constexpr int kGroups = kColumns / kGroup;
constexpr int kCluster = 2;     // blocks
constexpr int kMostTiles = 60;  // of a block, whose bias it keeps
constexpr int kPieceBytes = kRows * kDepth;
constexpr int kWarpgroup = 128;  // threads
constexpr int kThreads = 3 * kWarpgroup;

struct Shared {
  alignas(1024) uint8_t v[kMostPieces][kPieceBytes];
  alignas(1024) uint8_t weight[kStages][kPieceBytes];
  alignas(16) float bias[kMostTiles * kColumns];
  uint64_t v_full[kMostPieces];
  uint64_t full[kStages];
  uint64_t empty[kStages];
};
constexpr int kSharedBytes = sizeof(Shared) + 1024;  // to begin on a multiple of 1,024

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

constexpr int kTurnBarrier = 1;  // and the next: a warpgroup's turn has come

// A block starts with 168 for each thread, of which the warpgroups' new numbers are made.
constexpr int kProducerRegisters = 40;
constexpr int kConsumerRegisters = 232;
static_assert(kProducerRegisters + 2 * kConsumerRegisters <= 3 * 168, "more than a block has");

// The tile's lines of x0 and x, 128 bytes a row, to L2.
template <bool Same>
__device__ __forceinline__ void prefetch_tile(const CudaCrossFp8& job, int64_t row, int column,
                                              int lane) {
#pragma unroll 1
  for (int line = lane; line < kRows; line += 32) {
    const int64_t r = row + line;
    if (r >= job.rows || column >= job.width) continue;
    asm volatile("prefetch.global.L2 [%0];" ::"l"(job.x0 + r * job.x0_stride + column));
    if constexpr (!Same) {
      asm volatile("prefetch.global.L2 [%0];" ::"l"(job.x + r * job.x_stride + column));
    }
  }
}

// What a warp does: its first thread fetches, and all ask for what the tile will be added to.
template <bool Same>
__device__ __forceinline__ void produce(const CudaCrossFp8& job, const CUtensorMap* v_map,
                                        const CUtensorMap* weight_map, Shared& shared, int64_t row,
                                        hopper::Tiles tiles, int pieces, uint32_t rank) {
  constexpr int kHalf = kPieceBytes / kCluster;
  const int lane = static_cast<int>(threadIdx.x);
  int step = 0;
  for (int tile = 0; tile < tiles.count; ++tile) {
    prefetch_tile<Same>(job, row, (tiles.begin + tile) * kColumns, lane);
    __syncwarp();
    const int group = (tiles.begin + tile) * kGroups + static_cast<int>(rank);
    for (int piece = 0; piece < pieces; ++piece, ++step) {
      if (lane > 0) continue;
      if (tile == 0) {
        hopper::barrier_expect(&shared.v_full[piece], kPieceBytes);
        hopper::copy_box(shared.v[piece], v_map, &shared.v_full[piece], piece * kDepth,
                         static_cast<int>(row));
      }
      const int stage = step % kStages;
      // The first round finds every stage empty: the parity before the first phase.
      hopper::barrier_wait(&shared.empty[stage], static_cast<uint32_t>((step / kStages & 1) ^ 1));
      hopper::barrier_expect(&shared.full[stage], kPieceBytes);
      hopper::copy_box_to(shared.weight[stage] + rank * kHalf, weight_map, &shared.full[stage],
                          piece * kDepth, group, (1 << kCluster) - 1);
    }
    __syncwarp();
  }
}

__device__ __forceinline__ uint4 load_sixteen(const uint8_t* from) {
  uint4 found;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(found.x), "=r"(found.y), "=r"(found.z), "=r"(found.w)
               : "l"(from));
  return found;
}

// A thread's part of a tile of x0 and x: sixteen columns of each group of four rows, 8 apart in
// each half of 64.  Same: x is x0, and is not loaded.  That is known when compiling, for a choice
// between registers would wait for what they are to hold.
template <bool Same>
struct Operands {
  uint4 x0[4][kGroups];
  uint4 x[Same ? 1 : 4][kGroups];

  __device__ __forceinline__ void load(const CudaCrossFp8& job, int64_t row, int column) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int64_t r = row + k / 2 * 64 + k % 2 * 8;
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        const int c = column + group * kGroup;
        if (r >= job.rows || c >= job.width) continue;
        x0[k][group] = load_sixteen(job.x0 + r * job.x0_stride + c);
        if constexpr (!Same) x[k][group] = load_sixteen(job.x + r * job.x_stride + c);
      }
    }
  }

  __device__ __forceinline__ const uint4& added(int k, int group) const {
    if constexpr (Same) return x0[k][group];
    return x[Same ? 0 : k][group];
  }
};

__device__ __forceinline__ uint32_t crossed_pair(uint32_t x0, uint32_t x, float first, float second,
                                                 float2 bias, float2 scales) {
  const float2 factor = widen_fp8(x0);
  const float2 added = widen_fp8(x);
  return narrow_fp8(fmaf(factor.x, fmaf(scales.x, first, bias.x), __fmul_rn(scales.y, added.x)),
                    fmaf(factor.y, fmaf(scales.x, second, bias.y), __fmul_rn(scales.y, added.y)));
}

// Adds up and stores what a thread holds of 64 rows, two of them 8 apart: `sums` of `half`.
template <int Half, bool Same>
__device__ __forceinline__ void store_rows(const CudaCrossFp8& job, const float* biases,
                                           float2 scales, const Operands<Same>& given,
                                           const float (&sums)[64], int64_t row, int column) {
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
    const int c = column + group * kGroup;
    if (c >= job.width) continue;
    uint32_t result[2][4];
#pragma unroll
    for (int four = 0; four < 4; ++four) {
      const float4 bias = *reinterpret_cast<const float4*>(biases + group * kGroup + four * 4);
#pragma unroll
      for (int lower = 0; lower < 2; ++lower) {
        const uint4& x0 = given.x0[Half * 2 + lower][group];
        const uint4& x = given.added(Half * 2 + lower, group);
        const uint32_t a = four == 0 ? x0.x : four == 1 ? x0.y : four == 2 ? x0.z : x0.w;
        const uint32_t b = four == 0 ? x.x : four == 1 ? x.y : four == 2 ? x.z : x.w;
        const auto* sum = sums + group * 32 + four * 8 + lower * 2;
        const uint32_t low =
            crossed_pair(a, b, sum[0], sum[1], make_float2(bias.x, bias.y), scales);
        const uint32_t high =
            crossed_pair(a >> 16, b >> 16, sum[4], sum[5], make_float2(bias.z, bias.w), scales);
        result[lower][four] = low | high << 16;
      }
    }
#pragma unroll
    for (int lower = 0; lower < 2; ++lower) {
      const int64_t r = row + lower * 8;
      if (r >= job.rows) continue;
      *reinterpret_cast<uint4*>(job.out + r * job.width + c) =
          make_uint4(result[lower][0], result[lower][1], result[lower][2], result[lower][3]);
    }
  }
}

template <bool Same>
__device__ __forceinline__ void consume(const CudaCrossFp8& job, Shared& shared, int64_t first_row,
                                        hopper::Tiles tiles, int pieces, int turn) {
  const int thread = static_cast<int>(threadIdx.x % kWarpgroup);
  const int lane = thread % 32;
  const int64_t row = first_row + thread / 32 * 16 + lane / 4;
  const uint32_t v_address = hopper::shared_address(shared.v);
  const uint32_t weight_address = hopper::shared_address(shared.weight);
  const float2 scales = make_float2(__ldg(job.scales[0]), __ldg(job.scales[1]));
  const auto release = [&](int stage) {
    if (lane < kCluster) hopper::barrier_arrive(&shared.empty[stage], static_cast<uint32_t>(lane));
  };
  for (int tile = turn; tile < tiles.count; tile += 2) {
    const int column = (tiles.begin + tile) * kColumns + lane % 4 * 16;
    Operands<Same> given;
    given.load(job, row, column);
    // A parity tells a phase from its neighbours only: this tile's pieces are waited for when all
    // of the tile before it have come.
    if (tile > 0) hopper::named_sync(kTurnBarrier + turn, 2 * kWarpgroup);
    float upper[64];
    float lower[64];
    for (int piece = 0; piece < pieces; ++piece) {
      const int step = tile * pieces + piece;
      const int stage = step % kStages;
      if (tile == turn) hopper::barrier_wait(&shared.v_full[piece], 0);
      hopper::barrier_wait(&shared.full[stage], static_cast<uint32_t>(step / kStages & 1));
      const uint64_t a = hopper::descriptor(v_address + piece * kPieceBytes);
      const uint64_t b = hopper::descriptor(weight_address + stage * kPieceBytes);
      hopper::mma_begin();
#pragma unroll
      for (int k = 0; k < kDepth / 32; ++k) {
        const bool keep = piece > 0 || k > 0;
        constexpr int kHalfRows = kPieceBytes / 2 >> 4;
        hopper::mma_64x128x32(upper, a + k * 2, b + k * 2, keep);
        hopper::mma_64x128x32(lower, a + k * 2 + kHalfRows, b + k * 2, keep);
      }
      hopper::mma_commit();
      if (piece > 0) {
        hopper::mma_wait<1>();
        release((step - 1) % kStages);
      }
    }
    if (tile + 1 < tiles.count) {
      hopper::named_arrive(kTurnBarrier + (turn ^ 1), 2 * kWarpgroup);
    }
    hopper::mma_wait<0>();
    release((tile * pieces + pieces - 1) % kStages);
    const float* const biases = shared.bias + tile * kColumns + lane % 4 * 16;
    store_rows<0, Same>(job, biases, scales, given, upper, row, column);
    store_rows<1, Same>(job, biases, scales, given, lower, row + 64, column);
  }
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

template <bool Same>
__global__ void __launch_bounds__(kThreads, 1)
    cross_fp8_kernel(const __grid_constant__ CudaCrossFp8 job,
                     const __grid_constant__ CUtensorMap v_map,
                     const __grid_constant__ CUtensorMap weight_map) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ uint8_t memory[];
  const uint32_t misplaced = hopper::shared_address(memory) % 1024;
  Shared& shared = *reinterpret_cast<Shared*>(memory + (misplaced == 0 ? 0 : 1024 - misplaced));
  const int pieces = static_cast<int>(job.inner / kDepth);
  const uint32_t rank = blockIdx.x % kCluster;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kRows;
  const hopper::Tiles tiles =
      hopper::tiles_of(static_cast<int>((job.width + kColumns - 1) / kColumns),
                       static_cast<int>(blockIdx.y), static_cast<int>(gridDim.y));
  if (threadIdx.x == 0) {
    for (uint64_t& barrier : shared.v_full) hopper::barrier_init(&barrier, 1);
    for (uint64_t& barrier : shared.full) hopper::barrier_init(&barrier, 1);
    for (uint64_t& barrier : shared.empty) {
      hopper::barrier_init(&barrier, kCluster * kWarpgroup / 32);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  for (int k = static_cast<int>(threadIdx.x); k < tiles.count * kColumns; k += kThreads) {
    const int column = tiles.begin * kColumns + k;
    const auto* bias = static_cast<const __nv_bfloat16*>(job.bias);
    shared.bias[k] = column < job.width ? __bfloat162float(bias[column]) : 0.0f;
  }
  __syncthreads();
  hopper::cluster_sync();
  // The same for a whole warp, and through the shuffle known to be, which keeps addresses in
  // uniform registers.
  const int warpgroup = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
  if (warpgroup == 0) {
    hopper::fewer_registers<kProducerRegisters>();
    if (threadIdx.x < 32) produce<Same>(job, &v_map, &weight_map, shared, row, tiles, pieces, rank);
  } else {
    hopper::more_registers<kConsumerRegisters>();
    consume<Same>(job, shared, row, tiles, pieces, warpgroup - 1);
  }
  // A block that ended would take its barriers and its ring from its neighbour's copies.
  __syncthreads();
  hopper::cluster_sync();
#endif
}

constexpr CUtensorMapDataType kType = CU_TENSOR_MAP_DATA_TYPE_UINT8;

bool make_v_map(const CudaCrossFp8& job, CUtensorMap* map) {
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(job.inner),
                              static_cast<cuuint64_t>(job.rows)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(job.v_stride)};
  const cuuint32_t box[] = {kDepth, kRows};
  return hopper::make_map(map, kType, job.v, 2, sizes, strides, box);
}

// Rows 16 q + 2 j + e of every 64 in the order (j, q, e), e changing fastest.
bool make_weight_map(const CudaCrossFp8& job, CUtensorMap* map) {
  const auto row = static_cast<cuuint64_t>(job.inner);
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(job.inner), 2, 4, 8,
                              static_cast<cuuint64_t>(job.width / kGroup)};
  const cuuint64_t strides[] = {row, row * 16, row * 2, row * kGroup};
  const cuuint32_t box[] = {kDepth, 2, 4, 8, kGroups / kCluster};
  return hopper::make_map(map, kType, job.weight, 5, sizes, strides, box);
}

bool in_sixteens(const void* pointer, int64_t stride) {
  return (reinterpret_cast<uintptr_t>(pointer) | static_cast<uintptr_t>(stride)) % 16 == 0;
}

bool fits(const CudaCrossFp8& job) {
  constexpr int64_t kMost = 1 << 30;
  return job.inner % kDepth == 0 && job.inner <= kMostPieces * kDepth && job.width % kGroup == 0 &&
         job.width < kMost && job.rows < kMost && in_sixteens(job.x0, job.x0_stride) &&
         in_sixteens(job.x, job.x_stride) && in_sixteens(job.v, job.v_stride) &&
         in_sixteens(job.weight, job.inner) && in_sixteens(job.out, job.width);
}

template <bool Same>
bool launch(const CudaCrossFp8& job, int device, cudaStream_t stream, cudaError_t* status) {
  const int multiprocessors = hopper::multiprocessors<cross_fp8_kernel<Same>, kSharedBytes>(device);
  CUtensorMap v_map;
  CUtensorMap weight_map;
  if (multiprocessors == 0 || !make_v_map(job, &v_map) || !make_weight_map(job, &weight_map)) {
    return false;
  }
  constexpr int64_t kPairRows = kRows * kCluster;
  const int64_t blocks = (job.rows + kPairRows - 1) / kPairRows * kCluster;
  const int64_t tiles = (job.width + kColumns - 1) / kColumns;
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(hopper::best_parts(
                                                     blocks, tiles, multiprocessors, kMostTiles)));
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {kCluster, 1, 1};
  cudaLaunchConfig_t launch{};
  launch.gridDim = grid;
  launch.blockDim = kThreads;
  launch.dynamicSmemBytes = kSharedBytes;
  launch.stream = stream;
  launch.attrs = &cluster;
  launch.numAttrs = 1;
  *status = cudaLaunchKernelEx(&launch, cross_fp8_kernel<Same>, job, v_map, weight_map);
  return true;
}

}  // namespace

bool launch_cross_fp8(const CudaCrossFp8& job, int device, cudaStream_t stream,
                      cudaError_t* status) {
  if (!fits(job)) return false;
  const bool same = job.x == job.x0 && job.x_stride == job.x0_stride;
  return same ? launch<true>(job, device, stream, status)
              : launch<false>(job, device, stream, status);
}

}  // namespace tessera
