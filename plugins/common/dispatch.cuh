// From a type's number to the type.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "type.h"

namespace trtfuse {

/// Calls go with a value of the element type that `type` names.
template <typename Go>
cudaError_t by_type(Type type, Go go) {
    switch (type) {
        case Type::kF32:
            return go(float{});
        case Type::kF16:
            return go(__half{});
        case Type::kBF16:
            return go(__nv_bfloat16{});
    }
    return cudaErrorInvalidValue;
}

}  // namespace trtfuse
