#pragma once
#include "cuda_runtime.h"

struct __half {
    _Float16 value;
};
struct __half2 {
    __half x, y;
};
inline float2 __half22float2(__half2 h) {
    return {static_cast<float>(h.x.value), static_cast<float>(h.y.value)};
}
inline __half2 __floats2half2_rn(float x, float y) {
    return {{static_cast<_Float16>(x)}, {static_cast<_Float16>(y)}};
}
