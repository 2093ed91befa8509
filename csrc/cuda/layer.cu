// A transformer layer's operations between its products: bias, dropout, residual and layer norm; bias and GELU; their backwards.
//
// A row is one token. Each thread holds eight neighbouring columns, which share one counter of Philox, so columns are a multiple
// of eight and rows begin aligned. Dropout masks are never stored: they follow from the seed. The backwards add up the gradients
// of biases and norms over the rows that a block passes; zp_column_sums adds up the blocks'. All sums have a fixed order.
#include "common.cuh"

namespace zp {

using T = ZP_GRAD;

struct Dropping {
    const unsigned long long* seed;
    u32 stream, salt, threshold; // a threshold of 0 drops nothing
    float scale;
};

// Philox4x32-10 (Salmon et al. 2011); zeroplan_runtime/kernels/philox.py has the same.
__device__ inline uint4 philox(uint4 c, uint2 k) {
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const u32 upper0 = __umulhi(0xD2511F53u, c.x), lower0 = 0xD2511F53u * c.x;
        const u32 upper1 = __umulhi(0xCD9E8D57u, c.z), lower1 = 0xCD9E8D57u * c.z;
        c = make_uint4(upper1 ^ c.y ^ k.x, lower1, upper0 ^ c.w ^ k.y, lower0);
        k.x += 0x9E3779B9u, k.y += 0xBB67AE85u;
    }
    return c;
}

// Drops some of the elements 8 group .. 8 group + 7.
__device__ inline void drop(float (&x)[8], i64 group, const Dropping& how, unsigned long long seed) {
    const uint4 counter = make_uint4(static_cast<u32>(group), static_cast<u32>(group >> 32), how.stream, how.salt);
    const uint4 words = philox(counter, make_uint2(static_cast<u32>(seed), static_cast<u32>(seed >> 32)));
    const u32 word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int k = 0; k < 8; ++k) {
        const u32 bits = (word[k / 2] >> (16 * (k % 2))) & 0xffffu;
        x[k] = bits >= how.threshold ? x[k] * how.scale : 0.0f;
    }
}

__device__ inline void round_to_type(float (&x)[8]) {
#pragma unroll
    for (int k = 0; k < 8; ++k) x[k] = widen(narrow<T>(x[k]));
}

// Sums of N numbers over the block; every thread gets them. All threads call it.
template <int N>
__device__ inline void block_totals(float (&x)[N]) {
    __shared__ float warps[32][N];
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2)
#pragma unroll
        for (int n = 0; n < N; ++n) x[n] += __shfl_xor_sync(0xffffffffu, x[n], offset);
    const int count = static_cast<int>(blockDim.x / 32);
    if (count == 1) return;
    __syncthreads(); // a previous call may still be reading
    if (threadIdx.x % 32 == 0)
#pragma unroll
        for (int n = 0; n < N; ++n) warps[threadIdx.x / 32][n] = x[n];
    __syncthreads();
#pragma unroll
    for (int n = 0; n < N; ++n) x[n] = 0.0f;
    for (int w = 0; w < count; ++w)
#pragma unroll
        for (int n = 0; n < N; ++n) x[n] += warps[w][n];
}

// 16-bit results need no more than fast exponentials and quotients, which err by 2^-21 or so; without, GELU would wait for
// arithmetic and not for memory.
constexpr bool FAST = sizeof(T) == 2;

__device__ inline float exponential(float x) { return FAST ? __expf(x) : expf(x); }
__device__ inline float quotient(float x, float y) { return FAST ? __fdividef(x, y) : x / y; }

// The normal distribution's integral up to x, and its density. In 16 bits by Hastings' polynomial (Abramowitz and Stegun
// 7.1.26), off by up to 7.5e-8, whose exponential is the density's.
__device__ inline float2 normal(float x) {
    const float density = exponential(-0.5f * x * x);
    float below;
    if constexpr (FAST) {
        const float t = quotient(1.0f, fmaf(0.3275911f * 0.7071067811865476f, fabsf(x), 1.0f));
        float p = fmaf(1.061405429f, t, -1.453152027f);
        p = fmaf(p, t, 1.421413741f);
        p = fmaf(p, t, -0.284496736f);
        p = fmaf(p, t, 0.254829592f);
        const float beyond = 0.5f * p * t * density;
        below = x < 0.0f ? beyond : 1.0f - beyond;
    } else {
        below = 0.5f * (1.0f + erff(x * 0.7071067811865476f));
    }
    return make_float2(below, density * 0.3989422804014327f);
}

// 0.5 (1 + tanh(z)) = 1 / (1 + exp(-2 z)) for z of GELU's tanh form.
__device__ inline float sigmoid(float x) {
    const float z = 0.7978845608028654f * x * fmaf(0.044715f * x, x, 1.0f);
    return quotient(1.0f, 1.0f + exponential(-2.0f * z));
}

__device__ inline float gelu(float x, int tanh_form) { return x * (tanh_form ? sigmoid(x) : normal(x).x); }

__device__ inline float gelu_slope(float x, int tanh_form) {
    if (tanh_form) {
        const float s = sigmoid(x), inner = 0.7978845608028654f * fmaf(3.0f * 0.044715f * x, x, 1.0f);
        return fmaf(2.0f * x * s * (1.0f - s), inner, s);
    }
    const float2 found = normal(x);
    return fmaf(x, found.y, found.x);
}

} // namespace zp

// out = dropout(x), which may be in place; `groups` of eight elements.
extern "C" __global__ void __launch_bounds__(256)
    zp_drop(const zp::T* x, zp::T* out, long long groups, const unsigned long long* seed, unsigned stream, unsigned salt,
            unsigned threshold, float scale) {
    const zp::Dropping how{seed, stream, salt, threshold, scale};
    const unsigned long long key = *seed;
    const long long step = static_cast<long long>(gridDim.x) * blockDim.x;
    for (long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; i < groups; i += step) {
        float v[8];
        zp::read<8>(x + i * 8, v);
        zp::drop(v, i, how, key);
        zp::write<8>(out + i * 8, v);
    }
}

// summed = residual + dropout(x + bias); out = norm(summed), mean and rstd of its rows. A block is a row. Null: bias or residual
// of zeros; `summed` or `out` that nobody asks for. `x` may be the memory of `summed` or of `out`.
extern "C" __global__ void __launch_bounds__(ZP_THREADS)
    zp_add_norm(const zp::T* x, const zp::T* bias, const zp::T* residual, const zp::T* weight, const zp::T* shift,
                zp::T* summed, zp::T* out, float* mean, float* rstd, const unsigned long long* seed, unsigned stream,
                unsigned salt, unsigned threshold, float scale, float eps, long long columns) {
    const long long column = threadIdx.x * 8LL, at = blockIdx.x * columns + column;
    const bool active = column < columns;
    float v[8] = {};
    if (active) {
        float more[8];
        zp::read<8>(x + at, v);
        if (bias) {
            zp::read<8>(bias + column, more);
#pragma unroll
            for (int k = 0; k < 8; ++k) v[k] += more[k];
        }
        if (threshold) zp::drop(v, at / 8, zp::Dropping{seed, stream, salt, threshold, scale}, *seed);
        if (residual) {
            zp::read<8>(residual + at, more);
#pragma unroll
            for (int k = 0; k < 8; ++k) v[k] += more[k];
        }
        zp::round_to_type(v); // the norm is that of the sum as it is stored
        if (summed) zp::write<8>(summed + at, v);
    }
    if (!out) return;
    float total[1] = {0.0f};
#pragma unroll
    for (int k = 0; k < 8; ++k) total[0] += v[k];
    zp::block_totals(total);
    const float centre = total[0] / static_cast<float>(columns);
    float squares[1] = {0.0f};
#pragma unroll
    for (int k = 0; k < 8; ++k) {
        v[k] = active ? v[k] - centre : 0.0f;
        squares[0] += v[k] * v[k];
    }
    zp::block_totals(squares);
    const float factor = 1.0f / sqrtf(squares[0] / static_cast<float>(columns) + eps);
    if (threadIdx.x == 0) mean[blockIdx.x] = centre, rstd[blockIdx.x] = factor;
    if (active) {
        float w[8], s[8];
        zp::read<8>(weight + column, w);
        zp::read<8>(shift + column, s);
#pragma unroll
        for (int k = 0; k < 8; ++k) v[k] = v[k] * factor * w[k] + s[k];
        zp::write<8>(out + at, v);
    }
}

// Gradients of zp_add_norm: of the sum (plus `extra`), and of x. With `mean`, `saved` is the norm's input; without, its output.
// `partial` [grid][sums][columns]: this block's sums of the gradients of weight, shift and, for three sums, bias. `grad_x` may
// be null, where nothing was dropped. `grad_sum` may be the memory of `grad` or of `extra`.
extern "C" __global__ void __launch_bounds__(ZP_THREADS)
    zp_norm_backward(const zp::T* grad, const zp::T* extra, const zp::T* saved, const float* mean, const float* rstd,
                     const zp::T* weight, const zp::T* shift, zp::T* grad_sum, zp::T* grad_x, float* partial,
                     const unsigned long long* seed, unsigned stream, unsigned salt, unsigned threshold, float scale,
                     long long rows, long long columns, int sums) {
    constexpr int R = 2; // rows whose loads are in flight together
    const long long column = threadIdx.x * 8LL;
    const bool active = column < columns;
    float w[8] = {}, s[8] = {}, of_weight[8] = {}, of_shift[8] = {}, of_bias[8] = {};
    if (active) {
        zp::read<8>(weight + column, w);
        if (!mean) zp::read<8>(shift + column, s);
    }
    const unsigned long long key = threshold ? *seed : 0;
    for (long long first = static_cast<long long>(blockIdx.x) * R; first < rows; first += static_cast<long long>(gridDim.x) * R) {
        float g[R][8] = {}, x[R][8] = {}, factor[R], totals[2 * R];
#pragma unroll
        for (int r = 0; r < R; ++r) {
            if (active && first + r < rows) {
                zp::read<8>(grad + (first + r) * columns + column, g[r]);
                zp::read<8>(saved + (first + r) * columns + column, x[r]);
            }
        }
#pragma unroll
        for (int r = 0; r < R; ++r) {
            const bool here = active && first + r < rows;
            factor[r] = first + r < rows ? rstd[first + r] : 0.0f;
            const float centre = mean && first + r < rows ? mean[first + r] : 0.0f;
            totals[2 * r] = totals[2 * r + 1] = 0.0f;
#pragma unroll
            for (int k = 0; k < 8; ++k) {
                if (here) x[r][k] = mean ? (x[r][k] - centre) * factor[r] : zp::quotient(x[r][k] - s[k], w[k]);
                of_weight[k] += g[r][k] * x[r][k];
                of_shift[k] += g[r][k];
                g[r][k] *= w[k];
                totals[2 * r] += g[r][k];
                totals[2 * r + 1] += g[r][k] * x[r][k];
            }
        }
        zp::block_totals(totals);
#pragma unroll
        for (int r = 0; r < R; ++r) {
            if (!active || first + r >= rows) continue;
            const long long at = (first + r) * columns + column;
            const float one = totals[2 * r] / static_cast<float>(columns), two = totals[2 * r + 1] / static_cast<float>(columns);
#pragma unroll
            for (int k = 0; k < 8; ++k) g[r][k] = factor[r] * (g[r][k] - one - x[r][k] * two);
            if (extra) {
                float more[8];
                zp::read<8>(extra + at, more);
#pragma unroll
                for (int k = 0; k < 8; ++k) g[r][k] += more[k];
            }
            zp::round_to_type(g[r]);
            zp::write<8>(grad_sum + at, g[r]);
            if (threshold) {
                zp::drop(g[r], at / 8, zp::Dropping{seed, stream, salt, threshold, scale}, key);
                zp::round_to_type(g[r]);
                zp::write<8>(grad_x + at, g[r]);
            }
#pragma unroll
            for (int k = 0; k < 8; ++k) of_bias[k] += g[r][k];
        }
    }
    if (active) {
        float* mine = partial + blockIdx.x * sums * columns + column;
        zp::write<8>(mine, of_weight);
        zp::write<8>(mine + columns, of_shift);
        if (sums == 3) zp::write<8>(mine + 2 * columns, of_bias);
    }
}

// Where no norm follows: grad_x = dropout(grad) where something was dropped, and the bias's sums, `partial` [grid][columns].
extern "C" __global__ void __launch_bounds__(ZP_THREADS)
    zp_add_backward(const zp::T* grad, zp::T* grad_x, float* partial, const unsigned long long* seed, unsigned stream,
                    unsigned salt, unsigned threshold, float scale, long long rows, long long columns) {
    const long long column = threadIdx.x * 8LL;
    if (column >= columns) return;
    const unsigned long long key = threshold ? *seed : 0;
    float of_bias[8] = {};
#pragma unroll 4
    for (long long row = blockIdx.x; row < rows; row += gridDim.x) {
        const long long at = row * columns + column;
        float g[8];
        zp::read<8>(grad + at, g);
        if (threshold) {
            zp::drop(g, at / 8, zp::Dropping{seed, stream, salt, threshold, scale}, key);
            zp::round_to_type(g);
            zp::write<8>(grad_x + at, g);
        }
#pragma unroll
        for (int k = 0; k < 8; ++k) of_bias[k] += g[k];
    }
    zp::write<8>(partial + blockIdx.x * columns + column, of_bias);
}

// out = gelu(x + bias); `groups` of eight elements, `width` of them a row.
extern "C" __global__ void __launch_bounds__(256)
    zp_bias_gelu(const zp::T* x, const zp::T* bias, zp::T* out, long long groups, unsigned width, int tanh_form) {
    const long long step = static_cast<long long>(gridDim.x) * blockDim.x;
    for (long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; i < groups; i += step) {
        float v[8], b[8];
        zp::read<8>(x + i * 8, v);
        zp::read<8>(bias + i % width * 8, b);
#pragma unroll
        for (int k = 0; k < 8; ++k) v[k] = zp::gelu(v[k] + b[k], tanh_form);
        zp::write<8>(out + i * 8, v);
    }
}

// grad = grad * gelu'(x + bias), in place, and the bias's sums, `partial` [parts][columns]. `chunks` blocks share a row.
extern "C" __global__ void __launch_bounds__(256)
    zp_bias_gelu_backward(zp::T* grad, const zp::T* x, const zp::T* bias, float* partial, long long rows, long long columns,
                          unsigned chunks, int tanh_form) {
    constexpr int R = 4; // rows whose loads are in flight together
    const long long part = blockIdx.x / chunks, parts = gridDim.x / chunks;
    const long long column = (static_cast<long long>(blockIdx.x % chunks) * blockDim.x + threadIdx.x) * 8;
    if (column >= columns) return;
    float b[8], of_bias[8] = {};
    zp::read<8>(bias + column, b);
    for (long long first = part * R; first < rows; first += parts * R) {
        float g[R][8] = {}, v[R][8] = {};
#pragma unroll
        for (int r = 0; r < R; ++r) {
            if (first + r < rows) {
                zp::read<8>(grad + (first + r) * columns + column, g[r]);
                zp::read<8>(x + (first + r) * columns + column, v[r]);
            }
        }
#pragma unroll
        for (int r = 0; r < R; ++r) {
            if (first + r >= rows) continue;
#pragma unroll
            for (int k = 0; k < 8; ++k) g[r][k] *= zp::gelu_slope(v[r][k] + b[k], tanh_form);
            zp::round_to_type(g[r]);
            zp::write<8>(grad + (first + r) * columns + column, g[r]);
#pragma unroll
            for (int k = 0; k < 8; ++k) of_bias[k] += g[r][k];
        }
    }
    zp::write<8>(partial + part * columns + column, of_bias);
}

// Adds up `partial` [parts][sums * columns] over the parts: the first `columns` go to `one`, the next to `two`, then to `three`.
// 256 threads: a warp takes every eighth part of 32 columns.
extern "C" __global__ void __launch_bounds__(256)
    zp_column_sums(const float* partial, long long parts, long long columns, int sums, zp::T* one, zp::T* two, zp::T* three) {
    __shared__ float warps[8][32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const long long column = blockIdx.x * 32LL + lane, whole = columns * sums;
    float sum = 0.0f;
    if (column < whole)
        for (long long part = warp; part < parts; part += 8) sum += partial[part * whole + column];
    warps[warp][lane] = sum;
    __syncthreads();
    if (warp != 0 || column >= whole) return;
    float total[1] = {0.0f};
    for (int w = 0; w < 8; ++w) total[0] += warps[w][lane];
    zp::T* target = column < columns ? one : column < 2 * columns ? two : three;
    zp::write<1>(target + column % columns, total);
}
