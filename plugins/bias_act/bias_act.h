#pragma once

#include <cuda_runtime_api.h>

#include "../common/activation.h"
#include "../common/type.h"

namespace trtfuse {

/// Tensors of `type` on the device: x and y of rows x columns, bias of columns (of one element with
/// bias_is_scalar) or null. y may be x. alpha: LeakyRelu's slope.
struct BiasActCall {
    Type type;
    Activation activation;
    float alpha;
    const void *x, *bias;
    void* y;
    int64_t rows, columns;
    bool bias_is_scalar;
    cudaStream_t stream;
};

/// y = act(x + bias)
cudaError_t bias_act(const BiasActCall& call);

}  // namespace trtfuse
