// The element types of every kernel, as launchers and the C interface name them. No CUDA, no TensorRT.
#pragma once

#include <cstdint>

namespace trtfuse {

enum class Type : int32_t { kF32 = 0, kF16 = 1, kBF16 = 2 };

inline constexpr int64_t kMostColumns = 0x7fff0000;  // of a row: positions in a row are 32 bits wide

}  // namespace trtfuse
