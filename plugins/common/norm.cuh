// LayerNorm and RmsNorm, with what a transformer adds before them:
//
//   s = x (+ preset) (+ skip)
//   LayerNorm   y = (s - mean(s)) / sqrt(var(s) + epsilon) * scale + bias
//   RmsNorm     y = s / sqrt(mean(s * s) + epsilon) * scale
//
// Everything between reading and writing is fp32; s is normalised before it is rounded to the second output.
// Mean and variance are of deviations from a pivot near the mean: a mean of 1000 costs nothing, where sums of
// squares would cancel. With d = s - pivot,
//
//   mean(s) = pivot + mean(d),  var(s) = mean(d * d) - mean(d)^2
#pragma once

#include "dispatch.cuh"
#include "norm.h"
#include "rows.cuh"

namespace trtfuse {

/// NormCall with typed tensors.
template <typename T>
struct NormArguments {
    const T *x, *skip, *preset, *scale, *bias;  // all but x may be null
    T *y, *sum;                                 // sum may be null
    int64_t rows;
    int columns;
    float of_columns;  // 1 / columns
    float epsilon;
    bool preset_is_scalar;
};

/// (s - mean(s)) / sqrt(var(s) + epsilon) = d * factor + term
struct Moments {
    float factor, term;
};

template <bool RMS>
__device__ inline Moments finish(float deviations, float squares, float of_columns, float epsilon) {
    const float mean = RMS ? 0.0f : deviations * of_columns;
    float variance = fmaf(squares, of_columns, -mean * mean);
    if (variance < 0.0f) variance = 0.0f;  // and NaN stays NaN
    const float v = variance + epsilon, r = rsqrtf(v);
    // One step of Newton's takes rsqrtf's two units in the last place to one; 0 and infinity have no step.
    const float better = fmaf(0.5f * r, fmaf(-v * r, r, 1.0f), r);
    const float factor = better - better == 0.0f ? better : r;
    return {factor, -mean * factor};
}

/// s of one window; elements outside the row are 0.
template <bool ALIGNED, int N, typename T>
__device__ inline void add_up(float (&s)[N], const Pack& x, const Pack& skip, const NormArguments<T>& a,
                              int first, float preset) {
    widen<T>(x, s);
    const auto add = [&](const Pack& more) {
        float values[N];
        widen<T>(more, values);
#pragma unroll
        for (int k = 0; k < N; ++k) s[k] += values[k];
    };
    if (a.preset && a.preset_is_scalar) {
#pragma unroll
        for (int k = 0; k < N; ++k) s[k] += preset;
    } else if (a.preset) {
        add(load<ALIGNED>(a.preset, first, a.columns));
    }
    if (a.skip) add(skip);
}

template <typename T>
__device__ inline float scalar_preset(const NormArguments<T>& a) {
    return a.preset && a.preset_is_scalar ? widen_one(a.preset) : 0.0f;
}

/// y of one window from its deviations.
template <int N, typename T>
__device__ inline Pack affine(const float (&d)[N], Moments m, const Pack& scale, const Pack& bias,
                              const NormArguments<T>& a) {
    float y[N];
#pragma unroll
    for (int k = 0; k < N; ++k) y[k] = fmaf(d[k], m.factor, m.term);
    if (a.scale) {
        float factor[N], term[N];
        widen<T>(scale, factor);
        widen<T>(bias, term);  // zeros where there is none
#pragma unroll
        for (int k = 0; k < N; ++k) y[k] = fmaf(y[k], factor[k], term[k]);
    } else if (a.bias) {
        float term[N];
        widen<T>(bias, term);
#pragma unroll
        for (int k = 0; k < N; ++k) y[k] += term[k];
    }
    return narrow<T>(y);
}

/// Rows in registers.
template <typename T, bool RMS, typename L>
__global__ void __launch_bounds__(L::kMostThreads) norm_kernel(const NormArguments<T> a) {
    constexpr int N = kWindow<T>;
    constexpr bool ALIGNED = L::ALIGNED;
    Group<L::LANES> group;
    const float preset = scalar_preset(a);
    const int64_t step = int64_t{gridDim.x} * L::kRows;
    for (int64_t base = int64_t{blockIdx.x} * L::kRows; base < a.rows; base += step) {
        const int64_t row = base + L::row(), start = row * a.columns;
        const int columns =
            row < a.rows ? a.columns : 0;  // a group without a row only takes part in shuffles
        const int shift = ALIGNED ? 0 : shift_of(a.x + start);
        const auto first = [&](int c) { return (L::lane() + c * L::lanes()) * N - shift; };

        // All loads are under way before the first value is used.
        Pack x[L::CHUNKS]{}, skip[L::CHUNKS]{}, scale[L::CHUNKS]{}, bias[L::CHUNKS]{};
#pragma unroll
        for (int c = 0; c < L::CHUNKS; ++c) {
            if (first(c) < columns) x[c] = load<ALIGNED, true>(a.x + start, first(c), columns);
        }
        if (a.skip) {
#pragma unroll
            for (int c = 0; c < L::CHUNKS; ++c) {
                if (first(c) < columns) skip[c] = load<ALIGNED, true>(a.skip + start, first(c), columns);
            }
        }
        if (a.scale) {
#pragma unroll
            for (int c = 0; c < L::CHUNKS; ++c) {
                if (first(c) < columns) scale[c] = load<ALIGNED>(a.scale, first(c), columns);
            }
        }
        if (!RMS && a.bias) {
#pragma unroll
            for (int c = 0; c < L::CHUNKS; ++c) {
                if (first(c) < columns) bias[c] = load<ALIGNED>(a.bias, first(c), columns);
            }
        }

        float s[L::CHUNKS][N];
        float total = 0.0f;
#pragma unroll
        for (int c = 0; c < L::CHUNKS; ++c) {
#pragma unroll
            for (int k = 0; k < N; ++k) s[c][k] = 0.0f;
            if (first(c) >= columns) continue;
            add_up<ALIGNED, N>(s[c], x[c], skip[c], a, first(c), preset);
            if (a.sum) store<ALIGNED>(narrow<T>(s[c]), a.sum + start, first(c), columns);
#pragma unroll
            for (int k = 0; k < N; ++k) {
                if (!inside<ALIGNED>(first(c) + k, columns)) s[c][k] = 0.0f;
                if (!RMS) total += s[c][k];
            }
        }
        float pivot = 0.0f;
        if constexpr (!RMS && L::LANES == kBlock) {
            pivot = group.sum(total) * a.of_columns;  // the mean but for its rounding
        } else if constexpr (!RMS) {
            // The mean of what the first lane has is as good, and needs no sum over lanes: it is at most
            // sqrt(32) standard deviations from the row's, so that var(s) loses at most 5 bits of 24.
            int own = 0;
#pragma unroll
            for (int c = 0; c < L::CHUNKS; ++c) {
                const int from = max(first(c), 0), to = min(first(c) + N, columns);
                own += max(to - from, 0);
            }
            pivot = group.first(own > 0 ? __fdividef(total, static_cast<float>(own)) : 0.0f);
        }
        float deviations = 0.0f, squares = 0.0f;
#pragma unroll
        for (int c = 0; c < L::CHUNKS; ++c) {
            if (first(c) >= columns) continue;
#pragma unroll
            for (int k = 0; k < N; ++k) {
                if (!RMS) s[c][k] = inside<ALIGNED>(first(c) + k, columns) ? s[c][k] - pivot : 0.0f;
                squares = fmaf(s[c][k], s[c][k], squares);
                if (!RMS) deviations += s[c][k];
            }
        }
        if (RMS) {
            squares = group.sum(squares);
        } else {
            float moments[2] = {deviations, squares};
            group.template reduce<Add>(moments);
            deviations = moments[0], squares = moments[1];
        }
        const Moments m = finish<RMS>(deviations, squares, a.of_columns, a.epsilon);
#pragma unroll
        for (int c = 0; c < L::CHUNKS; ++c) {
            if (first(c) >= columns) continue;
            store<ALIGNED>(affine(s[c], m, scale[c], bias[c], a), a.y + start, first(c), columns);
        }
    }
}

/// Long rows: a block a row; s in shared memory with CACHED, else added up again in each pass.
template <typename T, bool RMS, bool CACHED>
__global__ void __launch_bounds__(kLongThreads) norm_long_kernel(const NormArguments<T> a) {
    constexpr int N = kWindow<T>;
    Group<kBlock> group;
    const RowCache<N> cache(long_windows<T>(a.columns));
    const float preset = scalar_preset(a);
    for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
        const int64_t start = row * a.columns;
        const int columns = a.columns, shift = shift_of(a.x + start);
        const int windows = (columns + shift + N - 1) / N;
        const auto add = [&](int window, float (&s)[N]) {
            const int first = window * N - shift;
            const auto x = load<false>(a.x + start, first, columns);
            Pack skip{};
            if (a.skip) skip = load<false>(a.skip + start, first, columns);
            add_up<false, N>(s, x, skip, a, first, preset);
#pragma unroll
            for (int k = 0; k < N; ++k) {
                if (!inside<false>(first + k, columns)) s[k] = 0.0f;
            }
        };
        const auto again = [&](int window, float (&s)[N]) {
            if constexpr (CACHED) {
                cache.get(window, s);
            } else {
                add(window, s);
            }
        };

        float total = 0.0f;
#pragma unroll 2
        for (int w = threadIdx.x; w < windows; w += blockDim.x) {
            float s[N];
            add(w, s);
            if constexpr (CACHED) cache.put(w, s);
            if (a.sum) store<false>(narrow<T>(s), a.sum + start, w * N - shift, columns);
#pragma unroll
            for (int k = 0; k < N; ++k) total += s[k];
        }
        const float pivot = RMS ? 0.0f : group.sum(total) * a.of_columns;
        float moments[2] = {0.0f, 0.0f};  // the sums of deviations and of their squares
#pragma unroll 2
        for (int w = threadIdx.x; w < windows; w += blockDim.x) {
            float s[N];
            again(w, s);
#pragma unroll
            for (int k = 0; k < N; ++k) {
                const float d = inside<false>(w * N - shift + k, columns) ? s[k] - pivot : 0.0f;
                moments[0] += d;
                moments[1] = fmaf(d, d, moments[1]);
            }
        }
        group.template reduce<Add>(moments);
        const Moments m = finish<RMS>(moments[0], moments[1], a.of_columns, a.epsilon);
#pragma unroll 2
        for (int w = threadIdx.x; w < windows; w += blockDim.x) {
            const int first = w * N - shift;
            float s[N];
            again(w, s);
#pragma unroll
            for (int k = 0; k < N; ++k) s[k] -= pivot;
            Pack scale{}, bias{};
            if (a.scale) scale = load<false>(a.scale, first, columns);
            if (a.bias) bias = load<false>(a.bias, first, columns);
            store<false>(affine(s, m, scale, bias, a), a.y + start, first, columns);
        }
    }
}

/// Starts the norm of `call`, whose tensors are of type T, on its stream.
template <typename T, bool RMS>
cudaError_t norm_of(const NormCall& call) {
    const auto in = [](const void* p) { return static_cast<const T*>(p); };
    const auto out = [](void* p) { return static_cast<T*>(p); };
    NormArguments<T> a{};
    a.x = in(call.x), a.skip = in(call.skip), a.preset = in(call.preset);
    a.scale = in(call.scale), a.bias = in(call.bias);
    a.y = out(call.y), a.sum = out(call.sum);
    a.rows = call.rows, a.columns = static_cast<int>(call.columns);
    a.of_columns = static_cast<float>(1.0 / static_cast<double>(call.columns));
    a.epsilon = call.epsilon, a.preset_is_scalar = call.preset_is_scalar;
    bool aligned = call.columns % kWindow<T> == 0;
    for (const void* p : {call.x, call.skip, call.scale, call.bias, static_cast<const void*>(call.y),
                          static_cast<const void*>(call.sum)}) {
        aligned = aligned && is_aligned(p);
    }
    if (!call.preset_is_scalar) aligned = aligned && is_aligned(call.preset);
    return choose_layout<T>(
        a.rows, a.columns, aligned,
        [&](auto layout, int64_t blocks, int threads) {
            return launch(norm_kernel<T, RMS, decltype(layout)>, blocks, threads, 0, call.stream, a);
        },
        [&] {
            const size_t bytes = long_bytes<T>(a.columns);
            const bool cached = bytes + 1024 <= static_cast<size_t>(shared_memory_limit());
            return launch(cached ? norm_long_kernel<T, RMS, true> : norm_long_kernel<T, RMS, false>, a.rows,
                          kLongThreads, cached ? bytes : 0, call.stream, a);
        });
}

template <bool RMS>
cudaError_t norm(const NormCall& call) {
    if (call.rows == 0 || call.columns == 0) return cudaSuccess;
    if (call.rows < 0 || call.columns < 0 || call.columns > kMostColumns) return cudaErrorInvalidValue;
    return by_type(call.type, [&](auto zero) { return norm_of<decltype(zero), RMS>(call); });
}

}  // namespace trtfuse
