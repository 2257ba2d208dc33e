// What the launchers of LayerNorm and RmsNorm take. No TensorRT.
#pragma once

#include <cuda_runtime_api.h>

#include "type.h"

namespace trtfuse {

/// Tensors of `type` on the device: x, skip, y and sum of rows x columns; scale, bias and preset of columns
/// (preset of one element with preset_is_scalar). All but x and y may be null. y and sum may not overlap
/// inputs.
struct NormCall {
    Type type;
    const void *x, *skip, *preset, *scale, *bias;
    void *y, *sum;
    int64_t rows, columns;
    float epsilon;
    bool preset_is_scalar;
    cudaStream_t stream;
};

}  // namespace trtfuse
