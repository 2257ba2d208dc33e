#pragma once

#include "../common/norm.h"

namespace trtfuse {

/// y = s / sqrt(mean(s * s) + epsilon) * scale, s = x (+ preset) (+ skip); second output: s. No bias.
cudaError_t rms_norm(const NormCall& call);

}  // namespace trtfuse
