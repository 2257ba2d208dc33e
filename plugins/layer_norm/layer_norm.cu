#include "../common/norm.cuh"
#include "layer_norm.h"

namespace trtfuse {

// y = (s - mean(s)) / sqrt(var(s) + epsilon) * scale + bias, s = x (+ preset) (+ skip)
cudaError_t layer_norm(const NormCall& call) { return norm<false>(call); }

}  // namespace trtfuse
