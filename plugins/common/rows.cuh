// Kernels on rows: which threads take a row, by its length.
//
//   short rows    8 lanes of a warp a row        up to 256 bytes
//   usual rows    a warp a row                   up to 2 KB
//   wide rows     a block a row                  up to 32 KB
//   long rows     a block a row, its values in shared memory as fp32, or read again in each pass
//
// All but the long ones hold their row in registers: it is read once and written once.
#pragma once

#include <cuda_runtime.h>

#include "launch.cuh"
#include "reduce.cuh"
#include "vector.cuh"

namespace trtfuse {

inline constexpr int kSmallBlock = 128;   // threads of a block of several rows
inline constexpr int kRowThreads = 512;   // most threads of a row in registers: 128 registers each
inline constexpr int kLongThreads = 512;  // of a long row

/// How a kernel in registers is laid out: LANES share a row, each has CHUNKS windows of it.
template <int LANES_, int CHUNKS_, bool ALIGNED_>
struct Layout {
    static constexpr int LANES = LANES_, CHUNKS = CHUNKS_;
    static constexpr bool ALIGNED = ALIGNED_;
    static constexpr int kMostThreads = LANES == kBlock ? kRowThreads : kSmallBlock;
    static constexpr int kRows =
        LANES == kBlock ? 1 : kSmallBlock / (LANES == kBlock ? 1 : LANES);  // a block

    __device__ static int lanes() { return LANES == kBlock ? blockDim.x : LANES; }
    __device__ static int lane() { return LANES == kBlock ? threadIdx.x : threadIdx.x % lanes(); }
    __device__ static int row() { return LANES == kBlock ? 0 : threadIdx.x / lanes(); }
};

/// Calls go(Layout, blocks, threads) for rows in registers, or returns go_long() for longer ones.
/// Few layouts, since each is a kernel of every type and architecture; unaligned rows need one window more.
template <typename T, typename Go, typename Long>
cudaError_t choose_layout(int64_t rows, int columns, bool aligned, Go go, Long go_long) {
    const int windows = (columns + kWindow<T> - 1) / kWindow<T> + (aligned ? 0 : 1);
    const auto several = [&](auto layout) {
        return go(layout, (rows + layout.kRows - 1) / layout.kRows, kSmallBlock);
    };
    const auto whole = [&](auto layout) {
        const int lanes = (windows + layout.CHUNKS - 1) / layout.CHUNKS;
        return go(layout, rows, (lanes + kWarp - 1) / kWarp * kWarp);
    };
    if (windows > 4 * kRowThreads) return go_long();
    if (!aligned) {
        if (windows <= 16) return several(Layout<8, 2, false>{});
        if (windows <= 4 * kWarp) return several(Layout<kWarp, 4, false>{});
        return whole(Layout<kBlock, 4, false>{});
    }
    if (windows <= 16) return several(Layout<8, 2, true>{});
    if (windows <= 2 * kWarp) return several(Layout<kWarp, 2, true>{});
    if (windows <= 3 * kWarp) return several(Layout<kWarp, 3, true>{});
    if (windows <= 4 * kWarp) return several(Layout<kWarp, 4, true>{});
    if (windows <= 2 * kRowThreads) return whole(Layout<kBlock, 2, true>{});
    return whole(Layout<kBlock, 4, true>{});
}

/// A long row's values in shared memory. Each thread reads back only what it wrote: no barrier, and any
/// order will do, so every float4 of a window has a plane of its own and no two lanes meet in a bank.
template <int N>
class RowCache {
 public:
    __device__ explicit RowCache(int windows) : windows_(windows) {}

    __device__ void put(int window, const float (&values)[N]) const {
#pragma unroll
        for (int q = 0; q < N / 4; ++q) {
            const float* v = values + 4 * q;
            dynamic_shared()[q * windows_ + window] = make_float4(v[0], v[1], v[2], v[3]);
        }
    }

    __device__ void get(int window, float (&values)[N]) const {
#pragma unroll
        for (int q = 0; q < N / 4; ++q) {
            const float4 v = dynamic_shared()[q * windows_ + window];
            values[4 * q] = v.x;
            values[4 * q + 1] = v.y;
            values[4 * q + 2] = v.z;
            values[4 * q + 3] = v.w;
        }
    }

 private:
    int windows_;
};

/// Windows of a long row wherever it starts, and the shared memory that they take as fp32.
template <typename T>
__host__ __device__ int long_windows(int columns) {
    return columns / kWindow<T> + 2;
}
template <typename T>
size_t long_bytes(int columns) {
    return size_t{4} * kWindow<T> * long_windows<T>(columns);
}

}  // namespace trtfuse
