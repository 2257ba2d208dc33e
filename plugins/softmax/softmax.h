#pragma once

#include <cuda_runtime_api.h>

#include "../common/type.h"

namespace trtfuse {

inline constexpr int kMostAxes = 8;

/// How a tensor broadcasts to the rows of another: axes before the last, outermost first, with the strides
/// (in elements, 0 where it repeats) of the broadcast tensor; `last`: its stride along a row, 0 or 1.
struct Broadcast {
    int axes;
    int64_t size[kMostAxes], stride[kMostAxes];
    int last;
};

/// The broadcast of a tensor of shape `own` (rank `own_rank`, right-aligned) to `full`; false if it does not
/// fit. Axes that can be walked as one are merged.
bool broadcast(const int64_t* own, int own_rank, const int64_t* full, int full_rank, Broadcast& result);

/// x and y of `type`, rows x columns; mask of `type`, or condition of bool (1 byte) or int32, or neither.
/// Where condition is not `keep`, `fill` stands in place of the scaled x. y may be x.
struct SoftmaxCall {
    Type type;
    const void *x, *mask, *condition;
    int condition_bytes;
    Broadcast where;  // of mask or condition
    void* y;
    int64_t rows, columns;
    float scale, fill;
    bool keep;
    cudaStream_t stream;
};

/// y = softmax(scale * x + mask) over each row
cudaError_t softmax(const SoftmaxCall& call);

}  // namespace trtfuse
