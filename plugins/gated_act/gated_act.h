#pragma once

#include <cuda_runtime_api.h>

#include "../common/activation.h"
#include "../common/type.h"

namespace trtfuse {

/// Tensors of `type` and `elements` on the device. y may be gate. alpha: LeakyRelu's slope.
struct GatedActCall {
    Type type;
    Activation activation;
    float alpha;
    const void *gate, *up;
    void* y;
    int64_t elements;
    cudaStream_t stream;
};

/// y = act(gate) * up
cudaError_t gated_act(const GatedActCall& call);

}  // namespace trtfuse
