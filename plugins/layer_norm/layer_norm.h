#pragma once

#include "../common/norm.h"

namespace trtfuse {

/// y = (s - mean(s)) / sqrt(var(s) + epsilon) * scale + bias, s = x (+ preset) (+ skip); second output: s.
cudaError_t layer_norm(const NormCall& call);

}  // namespace trtfuse
