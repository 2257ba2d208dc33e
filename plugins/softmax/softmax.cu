#include "../common/activation.cuh"
#include "../common/dispatch.cuh"
#include "../common/rows.cuh"
#include "softmax.h"

namespace trtfuse {
namespace {

template <typename T>
struct Arguments {
    const T *x, *mask;
    const uint8_t* condition;
    int condition_bytes;
    Broadcast where;
    T* y;
    int64_t rows;
    int columns;
    float scale, fill;
    bool keep;
};

/// Where a row's mask begins.
__device__ inline int64_t offset_of(const Broadcast& b, int64_t row) {
    if (b.axes == 1) return row * b.stride[0];
    int64_t offset = 0;
    for (int i = b.axes - 1; i > 0; --i) {
        // 64-bit division costs as much as the rest of a short row.
        const bool small = ((row | b.size[i]) >> 32) == 0;
        const int64_t quotient =
            small ? static_cast<uint32_t>(row) / static_cast<uint32_t>(b.size[i]) : row / b.size[i];
        offset += (row - quotient * b.size[i]) * b.stride[i];
        row = quotient;
    }
    return offset + row * b.stride[0];
}

// e^(v - top); with no valid score in a row, -inf - -inf makes it NaN, as the formula has it
template <typename T>
__device__ inline float weight(float v, float top) {
    return kExact<T> ? expf(v - top) : power_of_two((v - top) * kLog2E);
}

/// scale * x + mask of one window, `mask` as read_mask gives it; -inf outside the row.
template <bool ALIGNED, typename T, int N>
__device__ inline void score(float (&v)[N], const Pack& x, const Pack& mask, const Arguments<T>& a,
                             int first) {
    widen<T>(x, v);
#pragma unroll
    for (int k = 0; k < N; ++k) v[k] *= a.scale;
    if (a.mask) {
        float added[N];
        widen<T>(mask, added);
#pragma unroll
        for (int k = 0; k < N; ++k) v[k] += added[k];
    } else if (a.condition) {
#pragma unroll
        for (int k = 0; k < N; ++k) {
            if (mask.word[0] >> k & 1) v[k] = a.fill;
        }
    }
#pragma unroll
    for (int k = 0; k < N; ++k) {
        if (!inside<ALIGNED>(first + k, a.columns)) v[k] = -INFINITY;
    }
}

/// The elements of one window that `fill` stands for, a bit each.
template <bool ALIGNED, typename T>
__device__ inline uint32_t read_condition(const Arguments<T>& a, int64_t offset, int first) {
    constexpr int N = kWindow<T>;
    const uint8_t* at = a.condition + (offset + int64_t{first} * a.where.last) * a.condition_bytes;
    uint32_t filled = 0;
    if (ALIGNED && a.condition_bytes == 1 && a.where.last && reinterpret_cast<uintptr_t>(at) % N == 0) {
        uint32_t bytes[N / 4];  // a whole window at once
        if constexpr (N == 8) {
            const uint2 both = *reinterpret_cast<const uint2*>(at);
            bytes[0] = both.x, bytes[1] = both.y;
        } else {
            bytes[0] = *reinterpret_cast<const uint32_t*>(at);
        }
#pragma unroll
        for (int k = 0; k < N; ++k) {
            const bool is_true = bytes[k / 4] >> (k % 4 * 8) & 0xff;
            filled |= uint32_t{is_true != a.keep} << k;
        }
        return filled;
    }
#pragma unroll 1  // rare: keep it short
    for (int k = 0; k < N; ++k) {
        if (!inside<ALIGNED>(first + k, a.columns)) continue;
        const int64_t element = int64_t{k} * a.where.last;
        const bool is_true =
            a.condition_bytes == 1 ? at[element] != 0 : reinterpret_cast<const int32_t*>(at)[element] != 0;
        filled |= uint32_t{is_true != a.keep} << k;
    }
    return filled;
}

/// What masks one window: the values to add, or in the first word the bits of read_condition.
template <bool ALIGNED, typename T>
__device__ inline Pack read_mask(const Arguments<T>& a, int64_t offset, int first) {
    if (!a.mask) return Pack{{read_condition<ALIGNED>(a, offset, first)}};
    if (a.where.last) return load<ALIGNED>(a.mask + offset, first, a.columns);
    float same[kWindow<T>];
    const float value = widen_one(a.mask + offset);
#pragma unroll
    for (int k = 0; k < kWindow<T>; ++k) same[k] = value;
    return narrow<T>(same);
}

// y = softmax(scale * x + mask), rows in registers
template <typename T, typename L>
__global__ void __launch_bounds__(L::kMostThreads) softmax_kernel(const Arguments<T> a) {
    constexpr int N = kWindow<T>;
    constexpr bool ALIGNED = L::ALIGNED;
    Group<L::LANES> group;
    const int64_t step = int64_t{gridDim.x} * L::kRows;
    for (int64_t base = int64_t{blockIdx.x} * L::kRows; base < a.rows; base += step) {
        const int64_t row = base + L::row(), start = row * a.columns;
        const int columns =
            row < a.rows ? a.columns : 0;  // a group without a row only takes part in shuffles
        const int shift = ALIGNED ? 0 : shift_of(a.x + start);
        const auto first = [&](int c) { return (L::lane() + c * L::lanes()) * N - shift; };

        Pack x[L::CHUNKS]{}, mask[L::CHUNKS]{};
#pragma unroll
        for (int c = 0; c < L::CHUNKS; ++c) {
            if (first(c) < columns) x[c] = load<ALIGNED, true>(a.x + start, first(c), columns);
        }
        int64_t offset = 0;
        if ((a.mask || a.condition) && columns > 0) offset = offset_of(a.where, row);
        if (a.mask || a.condition) {
#pragma unroll
            for (int c = 0; c < L::CHUNKS; ++c) {
                if (first(c) < columns) mask[c] = read_mask<ALIGNED>(a, offset, first(c));
            }
        }

        float v[L::CHUNKS][N];
        float top = -INFINITY;
#pragma unroll
        for (int c = 0; c < L::CHUNKS; ++c) {
            if (first(c) >= columns) continue;
            score<ALIGNED>(v[c], x[c], mask[c], a, first(c));
#pragma unroll
            for (int k = 0; k < N; ++k) top = fmaxf(top, v[c][k]);
        }
        top = group.max(top);
        float total = 0.0f;
#pragma unroll
        for (int c = 0; c < L::CHUNKS; ++c) {
            if (first(c) >= columns) continue;
#pragma unroll
            for (int k = 0; k < N; ++k) {
                v[c][k] = weight<T>(v[c][k], top);
                total += v[c][k];
            }
        }
        const float inverse = 1.0f / group.sum(total);
#pragma unroll
        for (int c = 0; c < L::CHUNKS; ++c) {
            if (first(c) >= columns) continue;
#pragma unroll
            for (int k = 0; k < N; ++k) v[c][k] *= inverse;
            store<ALIGNED>(narrow<T>(v[c]), a.y + start, first(c), columns);
        }
    }
}

// The same for long rows: a block a row; the scores in shared memory with CACHED, else made in each pass.
template <typename T, bool CACHED>
__global__ void __launch_bounds__(kLongThreads) softmax_long_kernel(const Arguments<T> a) {
    constexpr int N = kWindow<T>;
    Group<kBlock> group;
    const RowCache<N> cache(long_windows<T>(a.columns));
    for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
        const int64_t start = row * a.columns;
        const int shift = shift_of(a.x + start), windows = (a.columns + shift + N - 1) / N;
        const int64_t offset = a.mask || a.condition ? offset_of(a.where, row) : 0;
        const auto make = [&](int window, float (&v)[N]) {
            const int first = window * N - shift;
            const Pack x = load<false>(a.x + start, first, a.columns);
            Pack mask{};
            if (a.mask || a.condition) mask = read_mask<false>(a, offset, first);
            score<false>(v, x, mask, a, first);
        };
        const auto again = [&](int window, float (&v)[N]) {
            if constexpr (CACHED) {
                cache.get(window, v);
            } else {
                make(window, v);
            }
        };

        float top = -INFINITY;
#pragma unroll 2
        for (int w = threadIdx.x; w < windows; w += blockDim.x) {
            float v[N];
            make(w, v);
            if constexpr (CACHED) cache.put(w, v);
#pragma unroll
            for (int k = 0; k < N; ++k) top = fmaxf(top, v[k]);
        }
        top = group.max(top);
        float total = 0.0f;
#pragma unroll 2
        for (int w = threadIdx.x; w < windows; w += blockDim.x) {
            float v[N];
            again(w, v);
#pragma unroll
            for (int k = 0; k < N; ++k) total += weight<T>(v[k], top);
        }
        const float inverse = 1.0f / group.sum(total);
#pragma unroll 2
        for (int w = threadIdx.x; w < windows; w += blockDim.x) {
            float v[N];
            again(w, v);
#pragma unroll
            for (int k = 0; k < N; ++k) v[k] = weight<T>(v[k], top) * inverse;
            store<false>(narrow<T>(v), a.y + start, w * N - shift, a.columns);
        }
    }
}

template <typename T>
cudaError_t softmax_of(const SoftmaxCall& call) {
    Arguments<T> a{};
    a.x = static_cast<const T*>(call.x), a.y = static_cast<T*>(call.y);
    a.mask = static_cast<const T*>(call.mask), a.condition = static_cast<const uint8_t*>(call.condition);
    a.condition_bytes = call.condition_bytes, a.where = call.where;
    a.rows = call.rows, a.columns = static_cast<int>(call.columns);
    a.scale = call.scale, a.fill = call.fill, a.keep = call.keep;
    const bool aligned =
        call.columns % kWindow<T> == 0 && is_aligned(call.x) && is_aligned(call.y) && is_aligned(call.mask);
    return choose_layout<T>(
        a.rows, a.columns, aligned,
        [&](auto layout, int64_t blocks, int threads) {
            return launch(softmax_kernel<T, decltype(layout)>, blocks, threads, 0, call.stream, a);
        },
        [&] {
            const size_t bytes = long_bytes<T>(a.columns);
            const bool cached = bytes + 1024 <= static_cast<size_t>(shared_memory_limit());
            return launch(cached ? softmax_long_kernel<T, true> : softmax_long_kernel<T, false>, a.rows,
                          kLongThreads, cached ? bytes : 0, call.stream, a);
        });
}

}  // namespace

bool broadcast(const int64_t* own, int own_rank, const int64_t* full, int full_rank, Broadcast& result) {
    result = Broadcast{1, {1}, {0}, 0};
    if (own_rank > full_rank || full_rank < 1) return false;
    const auto own_size = [&](int axis) {
        return axis < full_rank - own_rank ? 1 : own[axis - (full_rank - own_rank)];
    };
    for (int i = 0; i < full_rank; ++i) {
        if (own_size(i) != 1 && own_size(i) != full[i]) return false;
    }
    int64_t stride[64], step = own_size(full_rank - 1);
    if (full_rank > 64) return false;
    result.last = step != 1 || full[full_rank - 1] == 1;
    for (int i = full_rank - 2; i >= 0; --i) {
        stride[i] = own_size(i) == 1 ? 0 : step;
        step *= own_size(i);
    }
    result.axes = 0;
    for (int i = 0; i + 1 < full_rank; ++i) {
        if (full[i] == 1) continue;
        const int n = result.axes;
        if (n > 0 &&
            result.stride[n - 1] == stride[i] * full[i]) {  // the axis before walks on where this ends
            result.size[n - 1] *= full[i];
            result.stride[n - 1] = stride[i];
            continue;
        }
        if (n == kMostAxes) return false;
        result.size[n] = full[i];
        result.stride[n] = stride[i];
        result.axes = n + 1;
    }
    if (result.axes == 0) result.axes = 1, result.size[0] = 1, result.stride[0] = 0;
    return true;
}

cudaError_t softmax(const SoftmaxCall& call) {
    if (call.rows == 0 || call.columns == 0) return cudaSuccess;
    if (call.rows < 0 || call.columns < 0 || call.columns > kMostColumns) return cudaErrorInvalidValue;
    return by_type(call.type, [&](auto zero) { return softmax_of<decltype(zero)>(call); });
}

}  // namespace trtfuse
