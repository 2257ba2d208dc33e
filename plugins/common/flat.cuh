// Kernels on elements: a tensor is one flat run of windows, whatever its shape.
#pragma once

#include <cuda_runtime.h>

#include "dispatch.cuh"
#include "launch.cuh"
#include "vector.cuh"

namespace trtfuse {

/// n % divisor for n below 2^31 by one multiplication.
struct FastModulo {
    uint32_t divisor = 1, multiplier = 0, shift = 0;

    FastModulo() = default;
    explicit FastModulo(uint32_t d) : divisor(d) {
        if (d == 1) return;
        uint32_t bits = 0;
        while ((uint64_t{1} << bits) < d) ++bits;
        const uint32_t power = 31 + bits;
        multiplier = static_cast<uint32_t>(((uint64_t{1} << power) + d - 1) / d);
        shift = power - 32;
    }

    __device__ uint32_t operator()(uint32_t n) const {
        if (divisor == 1) return 0;
        return n - (__umulhi(n, multiplier) >> shift) * divisor;
    }
};

inline constexpr int kFlatThreads = 256;
inline constexpr int64_t kManyWindows = int64_t{1} << 20;  // enough that every thread can take several

/// A function takes (pack, element): the window of x that begins at `element`, and gives that of y.
template <typename T, int WINDOWS, typename Function>
__global__ void __launch_bounds__(kFlatThreads)
    flat_kernel(const T* x, T* y, int64_t elements, Function function) {
    constexpr int N = kWindow<T>;
    constexpr int64_t TILE = int64_t{kFlatThreads} * WINDOWS * N;
    for (int64_t base = blockIdx.x * TILE; base < elements; base += gridDim.x * TILE) {
        Pack pack[WINDOWS]{};
        typename Function::More more[WINDOWS]{};
        const auto element = [&](int w) { return base + (int64_t{w} * kFlatThreads + threadIdx.x) * N; };
        const auto left = [&](int w) {
            const int64_t rest = elements - element(w);
            return rest < N ? static_cast<int>(rest) : N;
        };
#pragma unroll
        for (int w = 0; w < WINDOWS; ++w) {
            if (left(w) > 0) pack[w] = load<false, true>(x + element(w), 0, left(w));
        }
#pragma unroll
        for (int w = 0; w < WINDOWS; ++w) {
            if (left(w) > 0) more[w] = function.read(element(w), left(w));
        }
#pragma unroll
        for (int w = 0; w < WINDOWS; ++w) {
            if (left(w) <= 0) continue;
            float values[N];
            widen<T>(pack[w], values);
            function.apply(values, more[w]);
            store<false>(narrow<T>(values), y + element(w), 0, left(w));
        }
    }
}

template <typename T, typename Function>
cudaError_t flat(const T* x, T* y, int64_t elements, const Function& function, cudaStream_t stream) {
    const int64_t windows = (elements + kWindow<T> - 1) / kWindow<T>;
    const int each = windows >= kManyWindows ? 4 : 1;
    const int64_t blocks = (windows + kFlatThreads * each - 1) / (kFlatThreads * each);
    return launch(each == 4 ? flat_kernel<T, 4, Function> : flat_kernel<T, 1, Function>, blocks, kFlatThreads,
                  0, stream, x, y, elements, function);
}

}  // namespace trtfuse
