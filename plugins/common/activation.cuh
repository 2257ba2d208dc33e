// act(x) in fp32, formula above each. T is the type of the tensor: of fp32 exact to its last places, of 16
// bits shorter, since their rounding hides errors of 1e-5 and a memory-bound kernel has about 25 instructions
// for an element that it reads and writes, and time for one and a half of reciprocals and powers. Infinities
// and NaN come out as the formula has them.
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <type_traits>

#include "activation.h"

namespace trtfuse {

/// Whether the result is to be as exact as fp32 is.
template <typename T>
inline constexpr bool kExact = sizeof(T) == 4;

inline constexpr float kLog2E = 1.44269504f;

template <int N, typename Function>
__device__ inline void each(float (&values)[N], Function function) {
#pragma unroll
    for (int k = 0; k < N; ++k) values[k] = function(values[k]);
}

// e^x
template <typename T>
__device__ inline float exponential(float x) {
    return kExact<T> ? expf(x) : __expf(x);
}

// 2^x, 0 below 2^-126; the whole of it is one instruction, where exp2f has five
__device__ inline float power_of_two(float x) {
#ifdef __CUDA_ARCH__
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
#else
    return exp2f(x);
#endif
}

// 1 / (1 + e^-x)
template <typename T>
__device__ inline float sigmoid(float x) {
    return kExact<T> ? 1.0f / (1.0f + expf(-x)) : __fdividef(1.0f, 1.0f + power_of_two(-kLog2E * x));
}

// x / (1 + 2^-u) of each x and its u
//
// Of fp16 two share a reciprocal, since the unit for those and for powers is what a kernel waits for:
// 1 / a = b / (a b). A product that overflows, infinities and NaN would spoil both: such a window takes the
// usual way.
template <typename T, int N>
__device__ inline void gate(float (&x)[N], const float (&u)[N]) {
    bool shares = std::is_same_v<T, __half>;
#pragma unroll
    for (int k = 0; k < N; ++k) shares = shares && u[k] > -60.0f;
    if (shares) {
#pragma unroll
        for (int k = 0; k < N; k += 2) {
            const float a = 1.0f + power_of_two(-u[k]), b = 1.0f + power_of_two(-u[k + 1]);
            const float r = __fdividef(1.0f, a * b);
            x[k] *= r * b;
            x[k + 1] *= r * a;
        }
    } else {
#pragma unroll
        for (int k = 0; k < N; ++k) x[k] *= __fdividef(1.0f, 1.0f + power_of_two(-u[k]));
    }
}

// x / 2 * (1 + erf(x / sqrt(2))) = x Phi(x)
//
// Of 16 bits: Phi(x) = 1 / (1 + 2^-u), u = x P(x^2). P is fitted to the logit of Phi over 2, to |x| of 6,
// with the error of y within a fifth of half a unit in fp16's last place (scripts/fit_gelu.py). Its leading
// coefficient is positive, so that u goes on to infinity.
template <typename T, int N>
__device__ inline void gelu(float (&x)[N]) {
    if constexpr (kExact<T>) {
        each(x, [](float v) { return v * normcdff(v); });
    } else {
        float u[N];
#pragma unroll
        for (int k = 0; k < N; ++k) {
            const float t = x[k] * x[k];
            float p = fmaf(t, 2.47127126e-09f, -2.21861031e-07f);
            p = fmaf(t, p, 7.7978647e-06f);
            p = fmaf(t, p, -0.000120844615f);
            p = fmaf(t, p, -0.000290288639f);
            p = fmaf(t, p, 0.105255631f);
            u[k] = x[k] * fmaf(t, p, 2.30195237f);
        }
        gate<T>(x, u);
    }
}

// x sigmoid(slope x)
template <typename T, int N>
__device__ inline void swish(float (&x)[N], float slope) {
    if constexpr (kExact<T>) {
        each(x, [=](float v) { return v * sigmoid<T>(slope * v); });
    } else {
        float u[N];
#pragma unroll
        for (int k = 0; k < N; ++k) u[k] = kLog2E * slope * x[k];
        gate<T>(x, u);
    }
}

// x / 2 * (1 + tanh(v)) = x sigmoid(2 v), v = sqrt(2 / pi) (x + 0.044715 x^3)
template <typename T, int N>
__device__ inline void gelu_tanh(float (&x)[N]) {
    constexpr float kTwice = 2.0f * 0.79788456f;
    if constexpr (kExact<T>) {
        each(x, [](float v) { return v * sigmoid<T>(kTwice * v * fmaf(0.044715f * v, v, 1.0f)); });
    } else {
        float u[N];
#pragma unroll
        for (int k = 0; k < N; ++k) {
            u[k] = x[k] * fmaf(kLog2E * kTwice * 0.044715f, x[k] * x[k], kLog2E * kTwice);
        }
        gate<T>(x, u);
    }
}

// x * clip(x + 3, 0, 6) / 6
__device__ inline float hardswish(float x) { return x * fminf(fmaxf(x + 3.0f, 0.0f), 6.0f) * (1.0f / 6.0f); }

// x tanh(log(1 + e^x)) = x n / (n + 2), n = e^x (e^x + 2); past 20 the factor rounds to 1
template <typename T>
__device__ inline float mish(float x) {
    if (x > 20.0f) return x;
    const float e = exponential<T>(x), n = e * (e + 2.0f);
    return x * (kExact<T> ? n / (n + 2.0f) : __fdividef(n, n + 2.0f));
}

/// act of N values. The choice is the same in every thread, so one kernel serves all activations.
/// alpha: LeakyRelu's slope below zero.
template <typename T, int N>
__device__ inline void activate(float (&v)[N], Activation activation, float alpha) {
    switch (activation) {
        case Activation::kRelu:
            return each(v, [](float x) { return x < 0.0f ? 0.0f : x; });
        case Activation::kSigmoid:
            return each(v, [](float x) { return sigmoid<T>(x); });
        case Activation::kTanh:
            return each(v, [](float x) { return tanhf(x); });
        case Activation::kGelu:
            return gelu<T>(v);
        case Activation::kGeluTanh:
            return gelu_tanh<T>(v);
        case Activation::kQuickGelu:
            return swish<T>(v, 1.702f);
        case Activation::kSilu:
            return swish<T>(v, 1.0f);
        case Activation::kHardswish:
            return each(v, [](float x) { return hardswish(x); });
        case Activation::kMish:
            return each(v, [](float x) { return mish<T>(x); });
        case Activation::kLeakyRelu:
            return each(v, [=](float x) { return x < 0.0f ? alpha * x : x; });
    }
}

}  // namespace trtfuse
