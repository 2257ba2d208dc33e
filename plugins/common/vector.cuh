// 16-byte accesses, and the conversion of their elements to and from fp32.
//
// A row is read as windows: aligned groups of 16 bytes. Where rows start at 16-byte boundaries (`ALIGNED`),
// every window is one access. Where they do not, the first window begins before its row and the last may end
// behind it: these two are read element by element, the others still in one access.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>

namespace trtfuse {

inline constexpr int kAccess = 16;  // bytes of the widest load and store

template <typename T>
inline constexpr int kWindow = kAccess / sizeof(T);  // elements of a window

/// The elements of one access, as they lie in memory. Kept as words: as single 16-bit values the compiler
/// would give each a register of its own.
struct alignas(kAccess) Pack {
    uint32_t word[4];
};

__device__ inline float as_float(uint32_t word) {
    float value;
    memcpy(&value, &word, sizeof(value));
    return value;
}
__device__ inline uint32_t as_word(float value) {
    uint32_t word;
    memcpy(&word, &value, sizeof(word));
    return word;
}

// From memory to fp32 and back, one word at a time. bf16 is the upper half of fp32.
__device__ inline void widen_word(uint32_t word, float* to, float) { to[0] = as_float(word); }
__device__ inline void widen_word(uint32_t word, float* to, __half) {
    __half2 pair;
    memcpy(&pair, &word, sizeof(pair));
    const float2 values = __half22float2(pair);
    to[0] = values.x;
    to[1] = values.y;
}
__device__ inline void widen_word(uint32_t word, float* to, __nv_bfloat16) {
    to[0] = as_float(word << 16);
    to[1] = as_float(word & 0xffff0000u);
}

__device__ inline uint32_t narrow_word(const float* from, float) { return as_word(from[0]); }
__device__ inline uint32_t narrow_word(const float* from, __half) {
    const __half2 pair = __floats2half2_rn(from[0], from[1]);
    uint32_t word;
    memcpy(&word, &pair, sizeof(word));
    return word;
}
__device__ inline uint32_t narrow_word(const float* from, __nv_bfloat16) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(from[0], from[1]);
    uint32_t word;
    memcpy(&word, &pair, sizeof(word));
    return word;
}

/// The elements of a window in fp32.
template <typename T, int N>
__device__ inline void widen(const Pack& pack, float (&values)[N]) {
    static_assert(N == kWindow<T>, "a window");
#pragma unroll
    for (int w = 0; w < 4; ++w) widen_word(pack.word[w], values + w * (N / 4), T{});
}

/// fp32 values rounded to T.
template <typename T, int N>
__device__ inline Pack narrow(const float (&values)[N]) {
    static_assert(N == kWindow<T>, "a window");
    Pack pack;
#pragma unroll
    for (int w = 0; w < 4; ++w) pack.word[w] = narrow_word(values + w * (N / 4), T{});
    return pack;
}

/// One value in fp32.
template <typename T>
__device__ inline float widen_one(const T* at) {
    if constexpr (sizeof(T) == 4) {
        return *at;
    } else {
        float values[2];
        widen_word(*reinterpret_cast<const uint16_t*>(at), values, T{});
        return values[0];
    }
}

__device__ __host__ inline bool is_aligned(const void* at) {
    return reinterpret_cast<uintptr_t>(at) % kAccess == 0;
}

/// Elements between the 16-byte boundary at or before `at`, and `at`.
template <typename T>
__device__ inline int shift_of(const T* at) {
    return static_cast<int>(reinterpret_cast<uintptr_t>(at) % kAccess / sizeof(T));
}

/// One access to data that is read once: it does not push out of L1 what all rows read (scale, bias).
__device__ inline Pack read_once(const void* at) {
#ifdef __CUDA_ARCH__
    Pack pack;
    asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(pack.word[0]), "=r"(pack.word[1]), "=r"(pack.word[2]), "=r"(pack.word[3])
        : "l"(at));
    return pack;
#else
    return *static_cast<const Pack*>(at);
#endif
}

/// Whether a window from element `first` on is one access of a row of `length`.
template <typename T>
__device__ inline bool is_whole(const T* at, int first, int length) {
    return first >= 0 && length - first >= kWindow<T> && is_aligned(at);
}

/// Whether an element of a window is one of the row's; always so with ALIGNED.
template <bool ALIGNED>
__device__ inline bool inside(int element, int length) {
    return ALIGNED || (element >= 0 && element < length);
}

/// The window from element `first` of a row of `length` on; elements outside the row are zero bits.
/// With ALIGNED the window must lie inside and at a boundary. ONCE: nothing else reads them.
template <bool ALIGNED, bool ONCE = false, typename T>
__device__ inline Pack load(const T* row, int first, int length) {
    const T* at = row + first;
    if (ALIGNED || is_whole(at, first, length))
        return ONCE ? read_once(at) : *reinterpret_cast<const Pack*>(at);
    Pack pack{};
    if constexpr (!ALIGNED) {
#pragma unroll
        for (int k = 0; k < kWindow<T>; ++k) {
            if (!inside<false>(first + k, length)) continue;
            if constexpr (sizeof(T) == 4) {
                pack.word[k] = reinterpret_cast<const uint32_t*>(at)[k];
            } else {
                pack.word[k / 2] |= uint32_t{reinterpret_cast<const uint16_t*>(at)[k]} << (k % 2 * 16);
            }
        }
    }
    return pack;
}

/// Writes what of a window lies inside the row.
template <bool ALIGNED, typename T>
__device__ inline void store(const Pack& pack, T* row, int first, int length) {
    T* at = row + first;
    if (ALIGNED || is_whole(at, first, length)) {
        *reinterpret_cast<Pack*>(at) = pack;
        return;
    }
    if constexpr (!ALIGNED) {
#pragma unroll
        for (int k = 0; k < kWindow<T>; ++k) {
            if (!inside<false>(first + k, length)) continue;
            if constexpr (sizeof(T) == 4) {
                reinterpret_cast<uint32_t*>(at)[k] = pack.word[k];
            } else {
                reinterpret_cast<uint16_t*>(at)[k] = static_cast<uint16_t>(pack.word[k / 2] >> (k % 2 * 16));
            }
        }
    }
}

}  // namespace trtfuse
