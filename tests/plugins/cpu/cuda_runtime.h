// As much of CUDA as the kernels use, on a CPU: their logic is tested where there is no GPU.
//
// The threads of a block are fibers of one thread. Every shuffle and __syncthreads is a barrier of the whole
// block: a fiber runs up to one, then the next fiber does. Fibers that wait at different ones, or end while
// others wait, abort: on a GPU the result would be undefined.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __launch_bounds__(...)
#define __shared__ thread_local

struct dim3 {
    unsigned x = 1, y = 1, z = 1;
    dim3() = default;
    explicit dim3(unsigned n) : x(n) {}
};
struct float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(8) uint2 {
    unsigned x, y;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1 };
enum { cudaFuncAttributeMaxDynamicSharedMemorySize, cudaDevAttrMaxSharedMemoryPerBlockOptin };
struct cudaLaunchConfig_t {
    dim3 gridDim, blockDim;
    size_t dynamicSmemBytes = 0;
    cudaStream_t stream = nullptr;
};

inline const char* cudaGetErrorString(cudaError_t e) {
    return e == cudaSuccess ? "no error" : "invalid value";
}
inline cudaError_t cudaFuncSetAttribute(const void*, int, int) { return cudaSuccess; }
inline cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
inline cudaError_t cudaDeviceGetAttribute(int* value, int, int) {
    const char* given = std::getenv("TRTFUSE_CPU_SHARED_MEMORY");
    *value = given ? std::atoi(given) : 227 * 1024;
    return cudaSuccess;
}

// --- the block ---

inline dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace cpu {

enum Wait { kNothing, kShuffle, kSyncThreads };

struct Fiber {
    ucontext_t context;
    std::vector<char> stack;
    Wait waits;
    bool done;
    int turn;  // which of the two buffers its next shuffle writes
};

inline std::vector<Fiber> fibers;
inline ucontext_t scheduler;
inline std::function<void()> body;
inline float exchanged[2][1024];

inline void enter() {
    body();
    fibers[threadIdx.x].done = true;
}

inline void wait(Wait at) {
    Fiber& own = fibers[threadIdx.x];
    own.waits = at;
    swapcontext(&own.context, &scheduler);
}

inline void run_block() {
    const unsigned threads = blockDim.x;
    if (fibers.size() < threads) fibers.resize(threads);
    for (unsigned i = 0; i < threads; ++i) {
        Fiber& f = fibers[i];
        f.stack.resize(128 * 1024);
        f.done = false, f.turn = 0, f.waits = kNothing;
        getcontext(&f.context);
        f.context.uc_stack.ss_sp = f.stack.data();
        f.context.uc_stack.ss_size = f.stack.size();
        f.context.uc_link = &scheduler;
        makecontext(&f.context, enter, 0);
    }
    while (!fibers[0].done) {
        for (unsigned i = 0; i < threads; ++i) {
            threadIdx.x = i;
            swapcontext(&scheduler, &fibers[i].context);
        }
        for (unsigned i = 0; i < threads; ++i) {
            if (fibers[i].done == fibers[0].done && (fibers[0].done || fibers[i].waits == fibers[0].waits))
                continue;
            std::fprintf(stderr, "threads 0 and %u of block %u do not wait at the same place\n", i,
                         blockIdx.x);
            std::abort();
        }
    }
}

inline float exchange(float value, unsigned from) {
    const int turn = fibers[threadIdx.x].turn;
    fibers[threadIdx.x].turn ^= 1;
    exchanged[turn][threadIdx.x] = value;
    wait(kShuffle);
    return exchanged[turn][from];
}

}  // namespace cpu

template <typename... P, typename... A>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(P...), A&&... arguments) {
    gridDim = config->gridDim, blockDim = config->blockDim;
    if (blockDim.x > 1024 || gridDim.x == 0) return cudaErrorInvalidValue;
    cpu::body = [&] { kernel(arguments...); };
    for (unsigned i = 0; i < gridDim.x; ++i) {
        blockIdx.x = i;
        cpu::run_block();
    }
    return cudaSuccess;
}

inline void __syncthreads() { cpu::wait(cpu::kSyncThreads); }
inline float __shfl_xor_sync(unsigned, float value, int step) {
    return cpu::exchange(value, threadIdx.x ^ static_cast<unsigned>(step));
}
inline float __shfl_sync(unsigned, float value, int source, int width) {
    return cpu::exchange(value, threadIdx.x / width * width + static_cast<unsigned>(source));
}

// --- arithmetic ---

using std::max;
using std::min;
inline float __fdividef(float a, float b) { return a / b; }
inline float __expf(float x) { return expf(x); }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline float normcdff(float x) { return 0.5f * erfcf(-x * 0.70710678f); }
inline uint32_t __umulhi(uint32_t a, uint32_t b) { return static_cast<uint32_t>(uint64_t{a} * b >> 32); }
