// act(x) in fp32, formula above each. EXACT is for fp32 tensors; the others are for tensors of 16 bits, whose
// rounding hides errors of 1e-6: shorter, since a memory-bound kernel has about 15 instructions an element.
// Infinities and NaN come out as the formula has them.
#pragma once

#include <cuda_runtime.h>

#include "activation.h"

namespace trtfuse {

// e^x
template <bool EXACT>
__device__ inline float exponential(float x) {
    return EXACT ? expf(x) : __expf(x);
}

// 1 / (1 + e^-x)
template <bool EXACT>
__device__ inline float sigmoid(float x) {
    const float e = 1.0f + exponential<EXACT>(-x);
    return EXACT ? 1.0f / e : __fdividef(1.0f, e);
}

// x / 2 * (1 + erf(x / sqrt(2))) = x Phi(x)
template <bool EXACT>
__device__ inline float gelu(float x) {
    if (EXACT) return x * normcdff(x);
    // The tail Phi(-|x|) = erfc(|x| / sqrt(2)) / 2 after Abramowitz and Stegun 7.1.26, off by less than 1e-7.
    const float a = fabsf(x);
    const float t = __fdividef(1.0f, fmaf(0.23164190f, a, 1.0f));
    float p = fmaf(t, 0.530702715f, -0.726576014f);
    p = fmaf(t, p, 0.710706871f);
    p = fmaf(t, p, -0.142248368f);
    p = fmaf(t, p, 0.127414796f);
    const float tail = t * p * __expf(-0.5f * x * x);
    return x * (x > 0.0f ? 1.0f - tail : tail);
}

// x / 2 * (1 + tanh(u)) = x sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3)
template <bool EXACT>
__device__ inline float gelu_tanh(float x) {
    const float u = 0.79788456f * x * fmaf(0.044715f * x, x, 1.0f);
    return x * sigmoid<EXACT>(2.0f * u);
}

// x * clip(x + 3, 0, 6) / 6
__device__ inline float hardswish(float x) { return x * fminf(fmaxf(x + 3.0f, 0.0f), 6.0f) * (1.0f / 6.0f); }

// x tanh(log(1 + e^x)) = x n / (n + 2), n = e^x (e^x + 2); past 20 the factor rounds to 1
template <bool EXACT>
__device__ inline float mish(float x) {
    if (x > 20.0f) return x;
    const float e = exponential<EXACT>(x), n = e * (e + 2.0f);
    return x * (EXACT ? n / (n + 2.0f) : __fdividef(n, n + 2.0f));
}

template <int N, typename Function>
__device__ inline void each(float (&values)[N], Function function) {
#pragma unroll
    for (int k = 0; k < N; ++k) values[k] = function(values[k]);
}

/// act of N values. The choice is the same in every thread, so one kernel serves all activations.
/// alpha: LeakyRelu's slope below zero.
template <bool EXACT, int N>
__device__ inline void activate(float (&v)[N], Activation activation, float alpha) {
    switch (activation) {
        case Activation::kRelu:
            return each(v, [](float x) { return x < 0.0f ? 0.0f : x; });
        case Activation::kSigmoid:
            return each(v, [](float x) { return sigmoid<EXACT>(x); });
        case Activation::kTanh:
            return each(v, [](float x) { return tanhf(x); });
        case Activation::kGelu:
            return each(v, [](float x) { return gelu<EXACT>(x); });
        case Activation::kGeluTanh:
            return each(v, [](float x) { return gelu_tanh<EXACT>(x); });
        case Activation::kQuickGelu:
            return each(v, [](float x) { return x * sigmoid<EXACT>(1.702f * x); });
        case Activation::kSilu:
            return each(v, [](float x) { return x * sigmoid<EXACT>(x); });
        case Activation::kHardswish:
            return each(v, [](float x) { return hardswish(x); });
        case Activation::kMish:
            return each(v, [](float x) { return mish<EXACT>(x); });
        case Activation::kLeakyRelu:
            return each(v, [=](float x) { return x < 0.0f ? alpha * x : x; });
    }
}

}  // namespace trtfuse
