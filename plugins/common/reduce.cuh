// Sums and maxima over the threads that share a row: 8 or 32 lanes of a warp, or a whole block.
#pragma once

namespace trtfuse {

inline constexpr int kBlock = 0;  // LANES of a group that is the whole block
inline constexpr int kWarp = 32;

struct Add {
    static constexpr float kIdentity = 0.0f;
    __device__ float operator()(float a, float b) const { return a + b; }
};

struct Max {
    static constexpr float kIdentity = -INFINITY;
    __device__ float operator()(float a, float b) const { return fmaxf(a, b); }
};

/// Threads that share a row. Every thread of the block must make the same calls.
template <int LANES>
class Group {
 public:
    static constexpr int kWidth = LANES == kBlock ? kWarp : LANES;

    /// The reduction of each of COUNT values over the group, in every thread of it.
    template <typename Op, int COUNT>
    __device__ void reduce(float (&values)[COUNT], Op op = {}) {
        shuffle(values, op);
        if constexpr (LANES == kBlock) across(values, op);
    }

    /// What the first thread of the group has; of a warp's group.
    __device__ float first(float value) {
        static_assert(LANES != kBlock, "one shuffle");
        return __shfl_sync(0xffffffffu, value, 0, kWidth);
    }

    __device__ float sum(float value) { return one<Add>(value); }
    __device__ float max(float value) { return one<Max>(value); }

 private:
    static constexpr int kMost = 2, kSlots = 2;  // values reduced together; buffers in turn

    template <typename Op>
    __device__ float one(float value) {
        float values[1] = {value};
        reduce<Op>(values);
        return values[0];
    }

    template <typename Op, int COUNT>
    __device__ static void shuffle(float (&values)[COUNT], Op op) {
#pragma unroll
        for (int step = kWidth / 2; step > 0; step /= 2) {
#pragma unroll
            for (int i = 0; i < COUNT; ++i) {
                values[i] = op(values[i], __shfl_xor_sync(0xffffffffu, values[i], step));
            }
        }
    }

    // One barrier a reduction: a buffer is written again only behind the barrier of the reduction between,
    // which every thread reaches after it has read that buffer.
    template <typename Op, int COUNT>
    __device__ void across(float (&values)[COUNT], Op op) {
        static_assert(COUNT <= kMost, "the buffers hold kMost values of each warp");
        __shared__ float partial[kSlots][kMost][kWarp];
        const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, warps = blockDim.x / kWarp;
        if (lane == 0) {
            for (int i = 0; i < COUNT; ++i) partial[slot_][i][warp] = values[i];
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            values[i] = lane < warps ? partial[slot_][i][lane] : Op::kIdentity;
        }
        slot_ ^= 1;
        shuffle(values, op);
    }

    int slot_ = 0;
};

}  // namespace trtfuse
