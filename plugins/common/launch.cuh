// Starting kernels: grids of any size, and what the device allows.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <utility>

namespace trtfuse {

inline constexpr int64_t kMaxBlocks = INT32_MAX;  // of a grid's first axis; kernels loop over what is left

/// Starts `kernel` on up to kMaxBlocks blocks; its error is returned, and no other work's is cleared.
template <typename... P, typename... A>
cudaError_t launch(void (*kernel)(P...), int64_t blocks, int threads, size_t shared, cudaStream_t stream,
                   A&&... arguments) {
    if (shared > 48 * 1024) {  // more than every device gives unasked
        const cudaError_t status =
            cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                 cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared));
        if (status != cudaSuccess) return status;
    }
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(std::min(blocks, kMaxBlocks)));
    config.blockDim = dim3(static_cast<unsigned>(threads));
    config.dynamicSmemBytes = shared;
    config.stream = stream;
    return cudaLaunchKernelEx(&config, kernel, std::forward<A>(arguments)...);
}

/// Bytes of shared memory that one block of the current device may have; 0 if the device does not say.
inline int shared_memory_limit() {
    int device = 0, bytes = 0;
    if (cudaGetDevice(&device) != cudaSuccess) return 0;
    if (cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) != cudaSuccess)
        return 0;
    return bytes;
}

/// The shared memory whose size the launch gives.
__device__ inline float4* dynamic_shared() {
    extern __shared__ float4 memory[];
    return memory;
}

}  // namespace trtfuse
