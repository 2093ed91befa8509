// The routines of one instruction set, written over Vec (simd_*.hpp). Each optim_<set>.cpp defines ZEROPLAN_SIMD and
// ZEROPLAN_TABLE and includes this file once. All is in an unnamed namespace, so that the linker keeps every copy apart.
#include <cmath>
#include <cstring>
#include <type_traits>

#include "optim.hpp"

namespace {

using std::size_t;
struct Bf16 {
    std::uint16_t bits;
};
struct Fp16 {
    std::uint16_t bits;
};
struct None {};

} // namespace

#include ZEROPLAN_SIMD

namespace {

constexpr size_t W = Vec::width;

// Loads a vector from `count` elements at p: all W of them (Full), or fewer, followed by zeros.
template <bool Full, class T>
inline Vec get(const T* p, size_t count) {
    if constexpr (Full) {
        return load(p);
    } else {
        T padded[W] = {};
        std::memcpy(padded, p, count * sizeof(T));
        return load(padded);
    }
}
template <bool Full, class T>
inline void set(T* p, size_t count, Vec x) {
    if constexpr (std::is_same_v<T, None>) {
    } else if constexpr (Full) {
        store(p, x);
    } else {
        T padded[W];
        store(padded, x);
        std::memcpy(p, padded, count * sizeof(T));
    }
}
// Returns x with zeros in the lanes from `count` on, whose values came from padding.
template <bool Full>
inline Vec only(Vec x, size_t count) {
    if constexpr (Full) {
        return x;
    } else {
        float lanes[W];
        store(lanes, x);
        return get<false>(lanes, count);
    }
}
// Like set. With Stream it bypasses the caches, for output that a copy engine reads, or that is read much later.
template <bool Full, bool Stream, class T>
inline void emit(T* p, size_t count, Vec x) {
    if constexpr (Full && Stream && !std::is_same_v<T, None>) {
        stream(p, x);
    } else {
        set<Full>(p, count, x);
    }
}

// Calls body(full, i, count) for each vector of [begin, end). The last one may be short.
template <class Body>
inline void for_vectors(size_t begin, size_t end, Body&& body) {
    size_t i = begin;
    for (; i + W <= end; i += W) body(std::true_type{}, i, W);
    if (i < end) body(std::false_type{}, i, end - i);
}

// Calls run(grad, out, streams) with typed pointers.
template <class Run>
inline void with_types(const void* grad, std::int32_t grad_type, void* out, std::int32_t out_type, size_t begin, std::int64_t n, Run&& run) {
    // Streaming pays where the caches could not keep the output, and needs aligned vectors.
    constexpr std::int64_t beyond_caches = 1 << 20;
    auto with_out = [&](auto* g) {
        auto with = [&](auto* o) {
            const bool aligned = (reinterpret_cast<std::uintptr_t>(o + begin) % (W * sizeof(*o))) == 0;
            if (W > 1 && aligned && n >= beyond_caches) {
                run(g, o, std::true_type{});
                fence();
            } else {
                run(g, o, std::false_type{});
            }
        };
        switch (out_type) {
        case ZEROPLAN_BF16: return with(static_cast<Bf16*>(out));
        case ZEROPLAN_FP16: return with(static_cast<Fp16*>(out));
        case ZEROPLAN_FP32: return with(static_cast<float*>(out));
        default: return run(g, static_cast<None*>(nullptr), std::false_type{});
        }
    };
    switch (grad_type) {
    case ZEROPLAN_BF16: return with_out(static_cast<const Bf16*>(grad));
    case ZEROPLAN_FP16: return with_out(static_cast<const Fp16*>(grad));
    default: return with_out(static_cast<const float*>(grad));
    }
}
template <class Run>
inline void with_types(const ZeroplanStep& a, size_t begin, Run&& run) {
    with_types(a.grad, a.grad_type, a.out, a.out_type, begin, a.n, run);
}

void adam(const ZeroplanStep& a, size_t begin, size_t end) {
    with_types(a, begin, [&](auto* __restrict__ grad, auto* __restrict__ out, auto streams) {
        float *__restrict__ param = a.param, *__restrict__ exp_avg = a.first, *__restrict__ exp_avg_sq = a.second;
        const Vec scale = splat(a.scale), l2 = splat(a.l2), keep = splat(a.keep), rate = splat(a.rate), eps = splat(a.eps);
        const Vec beta1 = splat(a.beta1), one_minus_beta1 = splat(a.one_minus_beta1), root2 = splat(a.root2);
        const Vec beta2 = splat(a.beta2), one_minus_beta2 = splat(a.one_minus_beta2);
        for_vectors(begin, end, [&](auto full, size_t i, size_t count) {
            Vec p = get<full>(param + i, count), m = get<full>(exp_avg + i, count), v = get<full>(exp_avg_sq + i, count);
            const Vec g = get<full>(grad + i, count) * scale + l2 * p;
            m = beta1 * m + one_minus_beta1 * g;
            v = beta2 * v + one_minus_beta2 * g * g;
            p = keep * p - rate * (m / (root(v) * root2 + eps));
            set<full>(param + i, count, p);
            set<full>(exp_avg + i, count, m);
            set<full>(exp_avg_sq + i, count, v);
            emit<full, streams>(out + i, count, p);
        });
    });
}

void lion(const ZeroplanStep& a, size_t begin, size_t end) {
    with_types(a, begin, [&](auto* __restrict__ grad, auto* __restrict__ out, auto streams) {
        float *__restrict__ param = a.param, *__restrict__ momentum = a.first;
        const Vec scale = splat(a.scale), keep = splat(a.keep), rate = splat(a.rate);
        const Vec beta1 = splat(a.beta1), one_minus_beta1 = splat(a.one_minus_beta1);
        const Vec beta2 = splat(a.beta2), one_minus_beta2 = splat(a.one_minus_beta2);
        for_vectors(begin, end, [&](auto full, size_t i, size_t count) {
            Vec p = get<full>(param + i, count), m = get<full>(momentum + i, count);
            const Vec g = get<full>(grad + i, count) * scale;
            p = keep * p - rate * sign(beta1 * m + one_minus_beta1 * g);
            m = beta2 * m + one_minus_beta2 * g;
            set<full>(param + i, count, p);
            set<full>(momentum + i, count, m);
            emit<full, streams>(out + i, count, p);
        });
    });
}

// beta1: momentum; one_minus_beta1: 1 - dampening, 1 on the first step; first null: no momentum.
void sgd(const ZeroplanStep& a, size_t begin, size_t end) {
    with_types(a, begin, [&](auto* __restrict__ grad, auto* __restrict__ out, auto streams) {
        float *__restrict__ param = a.param, *__restrict__ buffer = a.first;
        const Vec scale = splat(a.scale), l2 = splat(a.l2), rate = splat(a.rate);
        const Vec momentum = splat(a.beta1), gain = splat(a.one_minus_beta1);
        for_vectors(begin, end, [&](auto full, size_t i, size_t count) {
            Vec p = get<full>(param + i, count);
            Vec g = get<full>(grad + i, count) * scale + l2 * p;
            if (buffer) {
                const Vec b = momentum * get<full>(buffer + i, count) + gain * g;
                set<full>(buffer + i, count, b);
                g = a.nesterov ? g + momentum * b : b;
            }
            p = p - rate * g;
            set<full>(param + i, count, p);
            emit<full, streams>(out + i, count, p);
        });
    });
}

// Adds up the lanes of a vector, in lane order.
inline double total(Vec x) {
    float lanes[W];
    store(lanes, x);
    double sum = 0.0;
    for (size_t k = 0; k < W; ++k) sum += lanes[k];
    return sum;
}

inline Vec lamb_direction(const ZeroplanStep& a, Vec p, Vec m, Vec v) {
    return m / (root(v) + splat(a.eps)) + splat(a.l2) * p;
}

void lamb_moments(const ZeroplanStep& a, size_t begin, size_t end, double sums[2]) {
    with_types(a.grad, a.grad_type, nullptr, ZEROPLAN_NONE, begin, a.n, [&](auto* __restrict__ grad, auto*, auto) {
        const float* __restrict__ param = a.param;
        float *__restrict__ exp_avg = a.first, *__restrict__ exp_avg_sq = a.second;
        const Vec scale = splat(a.scale), beta1 = splat(a.beta1), one_minus_beta1 = splat(a.one_minus_beta1);
        const Vec beta2 = splat(a.beta2), one_minus_beta2 = splat(a.one_minus_beta2);
        Vec weight = splat(0.0f), update = splat(0.0f);
        for_vectors(begin, end, [&](auto full, size_t i, size_t count) {
            const Vec p = get<full>(param + i, count), g = get<full>(grad + i, count) * scale;
            const Vec m = beta1 * get<full>(exp_avg + i, count) + one_minus_beta1 * g;
            const Vec v = beta2 * get<full>(exp_avg_sq + i, count) + one_minus_beta2 * g * g;
            const Vec u = only<full>(lamb_direction(a, p, m, v), count);
            set<full>(exp_avg + i, count, m);
            set<full>(exp_avg_sq + i, count, v);
            weight = weight + p * p;
            update = update + u * u;
        });
        sums[0] += total(weight);
        sums[1] += total(update);
    });
}

void lamb_apply(const ZeroplanStep& a, size_t begin, size_t end) {
    with_types(nullptr, ZEROPLAN_FP32, a.out, a.out_type, begin, a.n, [&](auto*, auto* __restrict__ out, auto streams) {
        float* __restrict__ param = a.param;
        const float *__restrict__ exp_avg = a.first, *__restrict__ exp_avg_sq = a.second;
        const Vec rate = splat(a.rate);
        for_vectors(begin, end, [&](auto full, size_t i, size_t count) {
            Vec p = get<full>(param + i, count);
            p = p - rate * lamb_direction(a, p, get<full>(exp_avg + i, count), get<full>(exp_avg_sq + i, count));
            set<full>(param + i, count, p);
            emit<full, streams>(out + i, count, p);
        });
    });
}

void cast(const ZeroplanCast& a, size_t begin, size_t end) {
    with_types(a.source, a.source_type, a.out, a.out_type, begin, a.n,
               [&](auto* __restrict__ source, auto* __restrict__ out, auto streams) {
        const Vec scale = splat(a.scale);
        for_vectors(begin, end, [&](auto full, size_t i, size_t count) {
            emit<full, streams>(out + i, count, get<full>(source + i, count) * scale);
        });
    });
}

// Sums squares in 64 lanes whatever the vector's width: element i belongs to lane i mod 64. A lane sums in fp32 over at most
// 16384 elements; then the lanes are added in order, in fp64. So every instruction set gives the same bits.
template <class T>
double squares(const T* __restrict__ values, size_t begin, size_t end) {
    constexpr size_t lanes = 64, block = 16384, vectors = lanes / W;
    double sum = 0.0;
    for (size_t first = begin; first < end; first += block) {
        const size_t stop = first + block < end ? first + block : end;
        Vec lane[vectors];
        for (size_t k = 0; k < vectors; ++k) lane[k] = splat(0.0f);
        size_t i = first;
        for (; i + lanes <= stop; i += lanes) {
            for (size_t k = 0; k < vectors; ++k) {
                const Vec x = load(values + i + k * W);
                lane[k] = lane[k] + x * x;
            }
        }
        for (size_t k = 0; i < stop; ++k, i += W) {
            const size_t count = stop - i < W ? stop - i : W;
            const Vec x = get<false>(values + i, count);
            lane[k] = lane[k] + x * x;
        }
        for (size_t k = 0; k < vectors; ++k) {
            float part[W];
            store(part, lane[k]);
            for (size_t j = 0; j < W; ++j) sum += part[j];
        }
    }
    return sum;
}

double sum_of_squares(const void* values, std::int32_t type, size_t begin, size_t end) {
    switch (type) {
    case ZEROPLAN_BF16: return squares(static_cast<const Bf16*>(values), begin, end);
    case ZEROPLAN_FP16: return squares(static_cast<const Fp16*>(values), begin, end);
    default: return squares(static_cast<const float*>(values), begin, end);
    }
}

} // namespace

#include "optim_blockwise.hpp"

#define ZEROPLAN_TEXT_(x) #x
#define ZEROPLAN_TEXT(x) ZEROPLAN_TEXT_(x)
#define ZEROPLAN_JOIN_(a, b) a##b
#define ZEROPLAN_JOIN(a, b) ZEROPLAN_JOIN_(a, b)

namespace zeroplan {

const Kernels ZEROPLAN_JOIN(kernels_, ZEROPLAN_SET){
    ZEROPLAN_TEXT(ZEROPLAN_SET), adam, adam_blockwise, lion, sgd, lamb_moments, lamb_apply, cast, sum_of_squares,
};

} // namespace zeroplan
