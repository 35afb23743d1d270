// The dense layer with bfloat16 weights by AMX: tiles of 16 rows x 16 outputs, 32 inputs at a time.
//
// The weights are stored as the tiles that tdpbf16ps takes.  Inputs are rounded into such tiles
// first, for all outputs.  Two tiles of rows x two of outputs share what is loaded: four loads for
// four products.  cpu_kernels.h says what is computed; tdpbf16ps sums in that order, ignores the
// modes of floating-point arithmetic, and takes subnormals as zeros.
#include <immintrin.h>

#include <algorithm>
#include <cstring>

#include "cpu_kernels.h"

namespace tessera {
namespace {

constexpr int64_t kRows = 16;  // of a tile
// With fewer rows than this the multiply-adds of AVX-512 are faster; the bits are the same.
constexpr int64_t kLeastRows = 4;

// The operand of ldtilecfg: every tile has 16 rows of 64 bytes.
struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(TileConfig) == 64);

constexpr TileConfig kTiles;

// Tiles in use make a thread's state 8 KiB larger for the system to save; so none are left behind.
class Tiles {
 public:
  Tiles() { _tile_loadconfig(&kTiles); }
  ~Tiles() { _tile_release(); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
};

using Sums = float[kRows * kBf16Outputs];

// Four sums from `bias` on: tiles of rows a0, a1 by tiles of outputs w0, w1.
void two_by_two(const uint16_t* a0, const uint16_t* a1, const uint16_t* w0, const uint16_t* w1,
                int64_t blocks, const float* bias, Sums* sums) {
  // A stride of zero: each row of the tile begins with the biases.
  _tile_loadd(0, bias, 0);
  _tile_loadd(1, bias + kBf16Outputs, 0);
  _tile_loadd(2, bias, 0);
  _tile_loadd(3, bias + kBf16Outputs, 0);
  for (int64_t at = 0; at < blocks * kBf16Tile; at += kBf16Tile) {
    _tile_loadd(4, a0 + at, 64);
    _tile_loadd(6, w0 + at, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, w1 + at, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, a1 + at, 64);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, sums[0], 64);
  _tile_stored(1, sums[1], 64);
  _tile_stored(2, sums[2], 64);
  _tile_stored(3, sums[3], 64);
}

// One tile of rows by four of outputs, which lie `apart` elements from each other.
void one_by_four(const uint16_t* a, const uint16_t* w, int64_t apart, int64_t blocks,
                 const float* bias, Sums* sums) {
  _tile_loadd(0, bias, 0);
  _tile_loadd(1, bias + kBf16Outputs, 0);
  _tile_loadd(2, bias + 2 * kBf16Outputs, 0);
  _tile_loadd(3, bias + 3 * kBf16Outputs, 0);
  for (int64_t at = 0; at < blocks * kBf16Tile; at += kBf16Tile) {
    _tile_loadd(4, a + at, 64);
    _tile_loadd(5, w + at, 64);
    _tile_dpbf16ps(0, 4, 5);
    _tile_loadd(6, w + apart + at, 64);
    _tile_dpbf16ps(1, 4, 6);
    _tile_loadd(7, w + 2 * apart + at, 64);
    _tile_dpbf16ps(2, 4, 7);
    _tile_loadd(5, w + 3 * apart + at, 64);
    _tile_dpbf16ps(3, 4, 5);
  }
  _tile_stored(0, sums[0], 64);
  _tile_stored(1, sums[1], 64);
  _tile_stored(2, sums[2], 64);
  _tile_stored(3, sums[3], 64);
}

// Four tiles of rows, which lie `apart` elements from each other, by one of outputs.
void four_by_one(const uint16_t* a, int64_t apart, const uint16_t* w, int64_t blocks,
                 const float* bias, Sums* sums) {
  _tile_loadd(0, bias, 0);
  _tile_loadd(1, bias, 0);
  _tile_loadd(2, bias, 0);
  _tile_loadd(3, bias, 0);
  for (int64_t at = 0; at < blocks * kBf16Tile; at += kBf16Tile) {
    _tile_loadd(4, w + at, 64);
    _tile_loadd(5, a + at, 64);
    _tile_dpbf16ps(0, 5, 4);
    _tile_loadd(6, a + apart + at, 64);
    _tile_dpbf16ps(1, 6, 4);
    _tile_loadd(7, a + 2 * apart + at, 64);
    _tile_dpbf16ps(2, 7, 4);
    _tile_loadd(5, a + 3 * apart + at, 64);
    _tile_dpbf16ps(3, 5, 4);
  }
  _tile_stored(0, sums[0], 64);
  _tile_stored(1, sums[1], 64);
  _tile_stored(2, sums[2], 64);
  _tile_stored(3, sums[3], 64);
}

void one_by_one(const uint16_t* a, const uint16_t* w, int64_t blocks, const float* bias,
                float* sums) {
  _tile_loadd(0, bias, 0);
  for (int64_t at = 0; at < blocks * kBf16Tile; at += kBf16Tile) {
    _tile_loadd(4, a + at, 64);
    _tile_loadd(5, w + at, 64);
    _tile_dpbf16ps(0, 4, 5);
  }
  _tile_stored(0, sums, 64);
}

// Rounds rows to bfloat16, in tiles: [tiles of rows, blocks, 16, 32].  Rows and inputs beyond the
// last are zeros.
void round_rows(const LinearBf16Job& job, const float* input, int64_t rows, uint16_t* tiles) {
  for (int64_t row = 0; row < (rows + kRows - 1) / kRows * kRows; ++row) {
    uint16_t* to = tiles + (row / kRows * job.blocks * kRows + row % kRows) * kBf16Inputs;
    const float* x = input + row * job.input_stride;
    int64_t left = row < rows ? job.inputs : 0;
    for (int64_t block = 0; block < job.blocks; ++block) {
      __m512 low;
      __m512 high;
      if (left >= kBf16Inputs) {
        low = _mm512_loadu_ps(x);
        high = _mm512_loadu_ps(x + 16);
      } else {
        const uint32_t mask = (uint32_t{1} << left) - 1;
        low = _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask), x);
        high = _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask >> 16), x + 16);
      }
      const __m512bh both = _mm512_cvtne2ps_pbh(high, low);
      std::memcpy(to + block * kBf16Tile, &both, sizeof(both));
      x += kBf16Inputs;
      left = std::max<int64_t>(left - kBf16Inputs, 0);
    }
  }
}

// One tile's sums to their place: rows [row, row + 16) below `rows`, outputs [column, column + 16).
void put(const LinearBf16Job& job, const float* sums, int64_t row, int64_t rows, int64_t column,
         float* out) {
  const int64_t columns = std::min(kBf16Outputs, job.outputs - column);
  const auto mask = static_cast<__mmask16>((uint32_t{1} << columns) - 1);
  const __m512 zero = _mm512_setzero_ps();
  for (int64_t r = 0; r < std::min(kRows, rows - row); ++r) {
    __m512 y = _mm512_loadu_ps(sums + r * kBf16Outputs);
    if (job.relu) y = _mm512_max_ps(zero, y);  // the second where either is NaN
    _mm512_mask_storeu_ps(out + (row + r) * job.outputs + column, mask, y);
  }
}

// All outputs of at most kBf16RowsTogether rows.
void products(const LinearBf16Job& job, const uint16_t* tiles, int64_t rows, float* out) {
  const int64_t groups = (job.outputs + kBf16Outputs - 1) / kBf16Outputs;
  const int64_t row_tiles = (rows + kRows - 1) / kRows;
  const int64_t apart = job.blocks * kBf16Tile;
  alignas(64) Sums sums[4];
  int64_t group = 0;
  const auto weights = [&](int64_t g) { return job.weights + g * apart; };
  const auto bias = [&](int64_t g) { return job.bias + g * kBf16Outputs; };
  const auto put_tile = [&](int which, int64_t tile, int64_t g) {
    put(job, sums[which], tile * kRows, rows, g * kBf16Outputs, out);
  };
  if (row_tiles == 1) {
    for (; group + 4 <= groups; group += 4) {
      one_by_four(tiles, weights(group), apart, job.blocks, bias(group), sums);
      for (int k = 0; k < 4; ++k) put_tile(k, 0, group + k);
    }
  } else {
    for (; group + 2 <= groups; group += 2) {
      for (int64_t tile = 0; tile < row_tiles; tile += 2) {
        // An odd last tile goes with the one before, which is computed twice.
        const int64_t first = std::min(tile, row_tiles - 2);
        two_by_two(tiles + first * apart, tiles + (first + 1) * apart, weights(group),
                   weights(group + 1), job.blocks, bias(group), sums);
        for (int k = 0; k < 4; ++k) put_tile(k, first + k / 2, group + k % 2);
      }
    }
  }
  for (; group < groups; ++group) {
    int64_t tile = 0;
    for (; tile + 4 <= row_tiles; tile += 4) {
      four_by_one(tiles + tile * apart, apart, weights(group), job.blocks, bias(group), sums);
      for (int k = 0; k < 4; ++k) put_tile(k, tile + k, group);
    }
    for (; tile < row_tiles; ++tile) {
      one_by_one(tiles + tile * apart, weights(group), job.blocks, bias(group), sums[0]);
      put_tile(0, tile, group);
    }
  }
}

}  // namespace

void linear_bf16_amx(const LinearBf16Job& job, int64_t row_begin, int64_t row_end, float* scratch) {
  if (row_end - row_begin < kLeastRows) {
    kAvx512Kernels.linear_bf16(job, row_begin, row_end, scratch);
    return;
  }
  auto* tiles = reinterpret_cast<uint16_t*>(scratch);
  const Tiles configured;
  for (int64_t begin = row_begin; begin < row_end; begin += kBf16RowsTogether) {
    const int64_t rows = std::min(kBf16RowsTogether, row_end - begin);
    round_rows(job, job.input + begin * job.input_stride, rows, tiles);
    // GCC's tile loads do not say that they read memory.
    __asm__ volatile("" ::: "memory");
    products(job, tiles, rows, job.out + begin * job.outputs);
  }
}

}  // namespace tessera
