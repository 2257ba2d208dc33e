#include "../common/norm.cuh"
#include "rms_norm.h"

namespace trtfuse {

// y = s / sqrt(mean(s * s) + epsilon) * scale, s = x (+ preset) (+ skip)
cudaError_t rms_norm(const NormCall& call) { return norm<true>(call); }

}  // namespace trtfuse
