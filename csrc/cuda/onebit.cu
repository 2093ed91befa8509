// Momentum in one bit an element: what 1-bit Adam (Tang et al. 2021, algorithm 1) sends, averages and steps with.
//
// A chunk is one rank's shard of a flat; zeroplan/core/one_bit.py, Note [Messages], says how a message of it is laid out.
// One thread block has one scale's elements, eight a thread, in registers, so every kernel passes over its data once. The sum
// behind a scale is added in fp64 in an order that all backends share: eight elements in sequence, then halves.
#include "common.cuh"

namespace zp {

constexpr int per_thread = 8, per_block = 1024 * per_thread;

// Where a thread's elements are: `element` counts from the chunk's begin; past its end there are none.
struct Position {
    i64 chunk, block, element;
    int count; // elements of the block's scale
};

__device__ inline Position position(i64 shard) {
    const i64 blocks = (shard + per_block - 1) / per_block;
    const i64 chunk = blockIdx.x / blocks, block = blockIdx.x % blocks, rest = shard - block * per_block;
    return {chunk, block, block * per_block + threadIdx.x * per_thread, static_cast<int>(rest < per_block ? rest : per_block)};
}

__device__ inline const float* scales(const u32* message, i64 shard) { return reinterpret_cast<const float*>(message + shard / 32); }

// value = ±scale by bit k of `signs`.
__device__ inline float signed_scale(u32 signs, int k, float scale) { return signs >> k & 1 ? scale : -scale; }

// Writes the signs of c and their scale to the message; c becomes what they leave out. All threads of the block call it.
__device__ inline void compress(float (&c)[per_thread], u32* message, const Position& at, i64 shard) {
    __shared__ float shared;
    const bool inside = at.element < shard;
    double sum = 0.0;
    if (inside) {
#pragma unroll
        for (int k = 0; k < per_thread; ++k) sum += fabsf(c[k]);
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) {
        shared = static_cast<float>(sum / at.count);
        reinterpret_cast<float*>(message + shard / 32)[at.block] = shared;
    }
    __syncthreads();
    if (!inside) return;
    const float scale = shared;
    u32 signs = 0;
#pragma unroll
    for (int k = 0; k < per_thread; ++k) signs |= (c[k] >= 0.0f ? 1u : 0u) << k;
#pragma unroll
    for (int k = 0; k < per_thread; ++k) c[k] = c[k] - signed_scale(signs, k, scale);
    reinterpret_cast<unsigned char*>(message)[at.element / per_thread] = static_cast<unsigned char>(signs);
}

} // namespace zp

// messages[ranks][words] = signs of beta1 m + (1 - beta1) g + error, chunk by chunk; error = what they leave out. One thread
// block for each scale of each chunk.
extern "C" __global__ void __launch_bounds__(1024)
    zp_sign_pack(const float* m, const ZP_GRAD* g, float* error, unsigned int* messages, long long shard, long long words,
                 const zp::Scalars* scalars, float beta1, float one_minus_beta1) {
    const zp::Position at = zp::position(shard);
    const zp::i64 i = at.chunk * shard + at.element;
    const bool inside = at.element < shard;
    const float factor = zp::factor(scalars);
    float c[zp::per_thread] = {};
    if (inside) {
        float momentum[zp::per_thread], grad[zp::per_thread], left[zp::per_thread];
        zp::read<zp::per_thread>(g + i, grad);
        zp::read<zp::per_thread>(m + i, momentum);
        zp::read<zp::per_thread>(error + i, left);
#pragma unroll
        for (int k = 0; k < zp::per_thread; ++k) {
            c[k] = beta1 * momentum[k] + one_minus_beta1 * (grad[k] * factor) + left[k];
        }
    }
    zp::compress(c, messages + at.chunk * words, at, shard);
    if (inside && !zp::skips(scalars)) zp::write<zp::per_thread>(error + i, c);
}

// message = signs of the mean of the ranks' values plus error; error = what they leave out. One thread block for each scale.
extern "C" __global__ void __launch_bounds__(1024)
    zp_sign_average(const unsigned int* received, float* error, unsigned int* message, long long shard, long long words, int ranks,
                    const zp::Scalars* scalars, float share) {
    const zp::Position at = zp::position(shard);
    const bool inside = at.element < shard;
    float c[zp::per_thread] = {};
    if (inside) {
        for (int rank = 0; rank < ranks; ++rank) {
            const zp::u32* from = received + rank * words;
            const zp::u32 signs = reinterpret_cast<const unsigned char*>(from)[at.element / zp::per_thread];
            const float scale = zp::scales(from, shard)[at.block];
#pragma unroll
            for (int k = 0; k < zp::per_thread; ++k) c[k] += zp::signed_scale(signs, k, scale);
        }
        float left[zp::per_thread];
        zp::read<zp::per_thread>(error + at.element, left);
#pragma unroll
        for (int k = 0; k < zp::per_thread; ++k) c[k] = c[k] * share + left[k];
    }
    zp::compress(c, message, at, shard);
    if (inside && !zp::skips(scalars)) zp::write<zp::per_thread>(error + at.element, c);
}

// m = decay m + (1 - decay) the values of messages[ranks][words], chunk by chunk; with decay 0, those values. One thread block
// for each scale of each chunk.
extern "C" __global__ void __launch_bounds__(1024)
    zp_sign_unpack(const unsigned int* messages, float* m, long long shard, long long words, const zp::Scalars* scalars,
                   float decay, float gain) {
    const zp::Position at = zp::position(shard);
    if (at.element >= shard || zp::skips(scalars)) return;
    const zp::u32* from = messages + at.chunk * words;
    const zp::u32 signs = reinterpret_cast<const unsigned char*>(from)[at.element / zp::per_thread];
    const float scale = zp::scales(from, shard)[at.block];
    float values[zp::per_thread];
#pragma unroll
    for (int k = 0; k < zp::per_thread; ++k) values[k] = zp::signed_scale(signs, k, scale);
    float* to = m + at.chunk * shard + at.element;
    if (decay != 0.0f) {
        float before[zp::per_thread];
        zp::read<zp::per_thread>(to, before);
#pragma unroll
        for (int k = 0; k < zp::per_thread; ++k) values[k] = before[k] * decay + values[k] * gain;
    }
    zp::write<zp::per_thread>(to, values);
}

namespace zp {

struct FrozenAdam {
    float* __restrict__ p;       // [n] fp32 master parameters
    const float* __restrict__ m; // [n] first moment
    const float* __restrict__ v; // [n] second moment, as the warm-up left it
    ZP_OUT* __restrict__ out;    // [n] the parameter in the model's dtype
    float root2, eps, keep, step_size;

    template <int V>
    struct Pack {
        float p[V], m[V], v[V];
    };
    template <int V>
    __device__ void load(Pack<V>& x, i64 i) const {
        read<V>(p + i, x.p);
        read<V>(m + i, x.m);
        read<V>(v + i, x.v);
    }
    template <int V>
    __device__ void update(Pack<V>& x) const {
#pragma unroll
        for (int k = 0; k < V; ++k) {
            // One bit has no zero: where the warm-up saw no gradient the momentum is noise, and its quotient without bound.
            const float direction = x.v[k] == 0.0f ? 0.0f : x.m[k] / (sqrtf(x.v[k]) * root2 + eps);
            x.p[k] = keep * x.p[k] - step_size * direction;
        }
    }
    template <int V>
    __device__ void store(const Pack<V>& x, i64 i) const {
        write<V>(p + i, x.p);
        write_at(out, i, x.p);
    }
};

} // namespace zp

// Adam's step with a second moment that stays, and without one where it is 0; see adam.cu for the coefficients.
extern "C" __global__ void __launch_bounds__(ZP_THREADS)
    zp_frozen_adam(float* p, const float* m, const float* v, ZP_OUT* out, long long n, long long head, const zp::Scalars* scalars,
                   float root2, float eps, float keep, float step_size) {
    if (zp::skips(scalars)) return;
    const zp::FrozenAdam op{p, m, v, out, root2, eps, keep, step_size};
    zp::for_each<ZP_VEC, ZP_UNROLL>(op, n, head);
}
