#pragma once
#include "cuda_runtime.h"

struct __nv_bfloat16 {
    uint16_t bits;
};
struct __nv_bfloat162 {
    __nv_bfloat16 x, y;
};
inline __nv_bfloat16 cpu_round_to_bf16(float x) {
    uint32_t word;
    std::memcpy(&word, &x, sizeof(word));
    if (x != x) return {0x7fff};
    word += 0x7fff + (word >> 16 & 1);  // to the nearest, ties to even
    return {static_cast<uint16_t>(word >> 16)};
}
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
    return {cpu_round_to_bf16(x), cpu_round_to_bf16(y)};
}
