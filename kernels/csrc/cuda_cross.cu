// The cross layer on Hopper: one kernel for product, bias, factor and sum, on the tensor cores.
//
// A block has 128 rows of `v`, which stay in shared memory (kDepth columns a piece), and a run of
// tiles of 128 columns of the result.  Pieces of `weight`, 128 by kDepth, pass through a ring.  One
// warp asks for them (and asks for the tiles of x0 and x to be brought to L2); two warpgroups take
// turns at the tiles, so that one multiplies while the other adds up and stores.  Two blocks of a
// cluster have different rows and the same columns: each fetches half of a piece for both.
//
// A thread of a wgmma holds columns 8 j + 2 q and the next of a row, q = lane % 4.  The rows of
// `weight` are fetched in such an order (`weight_map`) that these are columns 8 q + 2 j and the
// next of every 32: eight neighbours, 16 bytes, and the four lanes of a row have 64 in a line.  So
// x0, x and the result go between registers and memory without a detour.
//
// Elsewhere, and for sizes that do not fit, the product is torch's and cuda_cross_elements.cu does
// the rest.
#include "cuda_cross.h"

#include "cuda_cross.cuh"
#include "hopper.cuh"
#include "hopper_launch.cuh"

namespace tessera {
namespace {

constexpr int kRows = 128;      // of a block
constexpr int kColumns = 128;   // of a tile
constexpr int kDepth = 64;      // columns of v and weight in a piece: the 128 bytes of a swizzle
constexpr int kMostPieces = 8;  // of v
constexpr int kStages = 5;      // of the ring
constexpr int kGroup = 32;      // columns that are fetched in their own order
constexpr int kCluster = 2;     // blocks
constexpr int kMostTiles = 60;  // of a block, whose bias it keeps
constexpr int kPieceBytes = kRows * kDepth * 2;
constexpr int kWarpgroup = 128;  // threads
constexpr int kThreads = 3 * kWarpgroup;

struct Shared {
  alignas(1024) uint8_t v[kMostPieces][kPieceBytes];
  alignas(1024) uint8_t weight[kStages][kPieceBytes];
  alignas(16) uint16_t bias[kMostTiles * kColumns];
  uint64_t v_full[kMostPieces];
  uint64_t full[kStages];
  uint64_t empty[kStages];
};
constexpr int kSharedBytes = sizeof(Shared) + 1024;  // to begin on a multiple of 1,024

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

constexpr int kTurnBarrier = 1;  // and the next: a warpgroup's turn has come

// A block starts with 168 for each thread, of which the warpgroups' new numbers are made: with more
// a warpgroup would wait for registers for ever.
constexpr int kProducerRegisters = 56;
constexpr int kConsumerRegisters = 224;
static_assert(kProducerRegisters + 2 * kConsumerRegisters <= 3 * 168, "more than a block has");

// The tile's lines of x0 and x, 256 bytes a row, to L2.
__device__ __forceinline__ void prefetch_tile(const CudaCross& job, int64_t row, int column,
                                              int lane) {
  constexpr int kLine = 64;  // elements
  const auto* x0 = static_cast<const uint16_t*>(job.x0);
  const auto* x = static_cast<const uint16_t*>(job.x);
#pragma unroll 4
  for (int line = lane; line < kRows * (kColumns / kLine); line += 32) {
    const int64_t r = row + line / (kColumns / kLine);
    const int64_t c = column + line % (kColumns / kLine) * kLine;
    if (r >= job.rows || c >= job.width) continue;
    asm volatile("prefetch.global.L2 [%0];" ::"l"(x0 + r * job.x0_stride + c));
    if (x != x0) asm volatile("prefetch.global.L2 [%0];" ::"l"(x + r * job.x_stride + c));
  }
}

__device__ void produce(const CudaCross& job, const CUtensorMap* v_map,
                        const CUtensorMap* weight_map, Shared& shared, int64_t row,
                        hopper::Tiles tiles, int pieces, uint32_t rank) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  int step = 0;
  for (int tile = 0; tile < tiles.count; ++tile) {
    const int column = (tiles.begin + tile) * kColumns;
    prefetch_tile(job, row, column, lane);
    __syncwarp();
    for (int piece = 0; piece < pieces; ++piece, ++step) {
      if (lane == 0) {
        if (tile == 0) {
          hopper::barrier_expect(&shared.v_full[piece], kPieceBytes);
          hopper::copy_box(shared.v[piece], v_map, &shared.v_full[piece], piece * kDepth,
                           static_cast<int>(row));
        }
        const int stage = step % kStages;
        // The first round finds every stage empty: the parity before the first phase.
        hopper::barrier_wait(&shared.empty[stage], static_cast<uint32_t>((step / kStages & 1) ^ 1));
        hopper::barrier_expect(&shared.full[stage], kPieceBytes);
        constexpr int kHalf = kPieceBytes / kCluster;
        constexpr int kGroups = kColumns / kGroup / kCluster;
        hopper::copy_box_to(shared.weight[stage] + rank * kHalf, weight_map, &shared.full[stage],
                            piece * kDepth, column / kGroup + static_cast<int>(rank) * kGroups,
                            (1 << kCluster) - 1);
      }
    }
    __syncwarp();
  }
}

// Adds up and stores what a thread holds of 64 rows: `row` and the one 8 below it.
__device__ __forceinline__ void store_rows(const CudaCross& job, const uint16_t* biases,
                                           const float (&sums)[64], int64_t row, int column) {
  constexpr int kGroups = kColumns / kGroup;
  uint4 factors[2][kGroups];
  uint4 added[2][kGroups];
  bool wanted[2][kGroups];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t r = row + half * 8;
    const auto* x0 = static_cast<const uint16_t*>(job.x0) + r * job.x0_stride + column;
    const auto* x = static_cast<const uint16_t*>(job.x) + r * job.x_stride + column;
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      wanted[half][group] = r < job.rows && column + group * kGroup < job.width;
      if (!wanted[half][group]) continue;
      factors[half][group] = __ldg(reinterpret_cast<const uint4*>(x0 + group * kGroup));
      added[half][group] = __ldg(reinterpret_cast<const uint4*>(x + group * kGroup));
    }
  }
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
    if (column + group * kGroup >= job.width) continue;
    const uint4 bias = *reinterpret_cast<const uint4*>(biases + group * kGroup);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (!wanted[half][group]) continue;
      const auto* sum = sums + group * 16 + half * 2;
      const auto pair = [&](uint32_t x0_pair, uint32_t x_pair, uint32_t bias_pair, int j) {
        const float2 b = widen(bias_pair);
        return crossed(x0_pair, x_pair, sum[j * 4] + b.x, sum[j * 4 + 1] + b.y);
      };
      const uint4& x0 = factors[half][group];
      const uint4& x = added[half][group];
      uint4 result;
      result.x = pair(x0.x, x.x, bias.x, 0);
      result.y = pair(x0.y, x.y, bias.y, 1);
      result.z = pair(x0.z, x.z, bias.z, 2);
      result.w = pair(x0.w, x.w, bias.w, 3);
      auto* out = static_cast<uint16_t*>(job.out) + (row + half * 8) * job.width + column;
      *reinterpret_cast<uint4*>(out + group * kGroup) = result;
    }
  }
}

__device__ void consume(const CudaCross& job, Shared& shared, int64_t first_row,
                        hopper::Tiles tiles, int pieces, int turn) {
  const int thread = static_cast<int>(threadIdx.x % kWarpgroup);
  const int lane = thread % 32;
  const uint32_t v_address = hopper::shared_address(shared.v);
  const uint32_t weight_address = hopper::shared_address(shared.weight);
  const auto release = [&](int stage) {
    if (lane < kCluster) hopper::barrier_arrive(&shared.empty[stage], static_cast<uint32_t>(lane));
  };
  for (int tile = turn; tile < tiles.count; tile += 2) {
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
      for (int k = 0; k < kDepth / 16; ++k) {
        const bool keep = piece > 0 || k > 0;
        constexpr int kHalfRows = kPieceBytes / 2 >> 4;
        hopper::mma_64x128x16(upper, a + k * 2, b + k * 2, keep);
        hopper::mma_64x128x16(lower, a + k * 2 + kHalfRows, b + k * 2, keep);
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
    const int column = (tiles.begin + tile) * kColumns + lane % 4 * 8;
    const uint16_t* const biases = shared.bias + tile * kColumns + lane % 4 * 8;
    const int64_t row = first_row + thread / 32 * 16 + lane / 4;
    store_rows(job, biases, upper, row, column);
    store_rows(job, biases, lower, row + 64, column);
  }
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

__global__ void __launch_bounds__(kThreads, 1)
    cross_kernel(const __grid_constant__ CudaCross job, const __grid_constant__ CUtensorMap v_map,
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
    shared.bias[k] = column < job.width ? __ldg(static_cast<const uint16_t*>(job.bias) + column)
                                        : static_cast<uint16_t>(0);
  }
  __syncthreads();
  hopper::cluster_sync();
  // The same for a whole warp, and through the shuffle known to be, which keeps addresses in
  // uniform registers.
  const int warpgroup = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
  if (warpgroup == 0) {
    hopper::fewer_registers<kProducerRegisters>();
    if (threadIdx.x < 32) produce(job, &v_map, &weight_map, shared, row, tiles, pieces, rank);
  } else {
    hopper::more_registers<kConsumerRegisters>();
    consume(job, shared, row, tiles, pieces, warpgroup - 1);
  }
  // A block that ended would take its barriers and its ring from its neighbour's copies.
  __syncthreads();
  hopper::cluster_sync();
#endif
}

constexpr CUtensorMapDataType kType = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;

bool make_v_map(const CudaCross& job, CUtensorMap* map) {
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(job.inner),
                              static_cast<cuuint64_t>(job.rows)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(job.v_stride) * 2};
  const cuuint32_t box[] = {kDepth, kRows};
  return hopper::make_map(map, kType, job.v, 2, sizes, strides, box);
}

// Rows 8 q + 2 j + e of every 32 in the order (j, q, e), e changing fastest.
bool make_weight_map(const CudaCross& job, CUtensorMap* map) {
  const auto row = static_cast<cuuint64_t>(job.inner) * 2;
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(job.inner), 2, 4, 4,
                              static_cast<cuuint64_t>(job.width / kGroup)};
  const cuuint64_t strides[] = {row, row * 8, row * 2, row * kGroup};
  const cuuint32_t box[] = {kDepth, 2, 4, 4, kColumns / kGroup / kCluster};
  return hopper::make_map(map, kType, job.weight, 5, sizes, strides, box);
}

bool fits(const CudaCross& job) {
  constexpr int64_t kMost = 1 << 30;
  return job.inner % kDepth == 0 && job.inner <= kMostPieces * kDepth && job.width % kGroup == 0 &&
         job.width < kMost && job.rows < kMost && in_sixteens(job.x0, job.x0_stride) &&
         in_sixteens(job.x, job.x_stride) && in_sixteens(job.v, job.v_stride) &&
         in_sixteens(job.weight, job.inner) && in_sixteens(job.bias, 0) &&
         in_sixteens(job.out, job.width);
}

}  // namespace

bool launch_cross(const CudaCross& job, int device, cudaStream_t stream, cudaError_t* status) {
  if (!fits(job)) return false;
  const int multiprocessors = hopper::multiprocessors<cross_kernel, kSharedBytes>(device);
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
  *status = cudaLaunchKernelEx(&launch, cross_kernel, job, v_map, weight_map);
  return true;
}

}  // namespace tessera
