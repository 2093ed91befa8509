// AdamW with its moments in blocks of codes, one pass: decode, step, encode with each block's new scale.
//
// See Note [Blockwise states] and Note [Bins] in zeroplan_runtime/kernels/block_quantisation.py. A warp works on a block. The
// command line sets ZP_BITS (8 or 4) and ZP_BLOCK, a multiple of 128; ZP_UNROLL blocks are in flight.
#include "common.cuh"

#ifndef ZP_BITS
#define ZP_BITS 8
#endif
#ifndef ZP_BLOCK
#define ZP_BLOCK 256
#endif

namespace zp {

using u8 = unsigned char;

constexpr int warp = 32, vector = 4;             // lanes; elements of one access of a lane
constexpr int rounds = ZP_BLOCK / (warp * vector); // accesses of a lane for one block
constexpr int codes = 1 << ZP_BITS, low_half = codes / 2;
constexpr int bins = 24 * 128 + 1, first_bin = (127 - 24) << 7;
constexpr int words = 2 * (codes + bins);
constexpr u32 every_lane = 0xffffffffu;

// The tables of both moments: levels by code, and bins to find ranks by.
struct Maps {
    const float* levels;
    const u32* bins;
};

// Four codes of one lane, in the low bytes of a word.
__device__ inline u32 read_codes(const u8* p, i64 i) {
#if ZP_BITS == 8
    return fetch(reinterpret_cast<const u32*>(p + i));
#else
    return fetch(reinterpret_cast<const u16*>(p + i / 2));
#endif
}
__device__ inline void write_codes(u8* p, i64 i, u32 packed) {
#if ZP_BITS == 8
    put(reinterpret_cast<u32*>(p + i), packed);
#else
    put(reinterpret_cast<u16*>(p + i / 2), static_cast<u16>(packed));
#endif
}

__device__ inline float decode(const Maps& map, u32 packed, int k, float scale) {
    return map.levels[(packed >> (ZP_BITS * k)) & (codes - 1)] * scale;
}

// Orders fp32 by magnitude, then negative above positive: the sign becomes the lowest bit. NaN is above all.
__device__ inline u32 key_of(float x) {
    const u32 bits = __float_as_uint(x);
    return (bits << 1) | (bits >> 31);
}
__device__ inline float of_key(u32 key) { return __uint_as_float((key >> 1) | (key << 31)); }

__device__ inline u32 largest(u32 key) {
#if __CUDA_ARCH__ >= 800
    return __reduce_max_sync(every_lane, key);
#else
#pragma unroll
    for (int offset = warp / 2; offset > 0; offset /= 2) {
        const u32 other = __shfl_xor_sync(every_lane, key, offset);
        key = other > key ? other : key;
    }
    return key;
#endif
}

// The block's scale: its element of largest magnitude, 0 below 2^-120, so that the reciprocal is finite.
__device__ inline float scale_of(u32 key) {
    const float scale = of_key(key);
    return fabsf(scale) < 0x1p-120f ? 0.0f : scale;
}
__device__ inline float reciprocal(float scale) { return scale == 0.0f ? 0.0f : 1.0f / scale; }

__device__ inline u32 rank_of(const Maps& map, u32 magnitude) {
    int at = static_cast<int>(magnitude >> 16) - first_bin;
    at = at < 0 ? 0 : (at < bins ? at : bins - 1);
    const u32 bin = map.bins[at];
    return (bin & 0xffu) + ((magnitude & 0xffffu) >= (bin >> 8) ? 1u : 0u);
}
__device__ inline u32 code_signed(const Maps& map, float x) {
    const u32 bits = __float_as_uint(x), rank = rank_of(map, bits & 0x7fffffffu);
    const u32 negative = low_half + (rank < low_half - 1 ? rank : low_half - 1);
    return (bits >> 31) && rank ? negative : rank;
}
__device__ inline u32 code_unsigned(const Maps& map, float x) { return rank_of(map, __float_as_uint(x) & 0x7fffffffu); }

struct AdamBlockwise {
    float* __restrict__ p; // [n] fp32 master parameters
    u8* __restrict__ m;    // [n] codes of the first moment
    u8* __restrict__ v;    // [n] codes of the second moment
    float2* __restrict__ scales; // [n / block] of each block the first moment's and the second's
    const ZP_GRAD* __restrict__ g;
    ZP_OUT* __restrict__ out; // [n] the parameter in the model's dtype
    float factor, beta1, one_minus_beta1, beta2, one_minus_beta2, root2, eps, keep, step_size;

    // What a lane holds of one block.
    struct Pack {
        float p[rounds][vector], g[rounds][vector], m[rounds][vector], v[rounds][vector];
        u32 m_codes[rounds], v_codes[rounds];
        float2 scale;
    };
    __device__ i64 place(i64 block, int round) const {
        return block * ZP_BLOCK + round * (warp * vector) + (threadIdx.x % warp) * vector;
    }
    __device__ void load(Pack& x, i64 block) const {
        x.scale = scales[block];
#pragma unroll
        for (int r = 0; r < rounds; ++r) {
            const i64 i = place(block, r);
            read<vector>(g + i, x.g[r]);
            read<vector>(p + i, x.p[r]);
            x.m_codes[r] = read_codes(m, i);
            x.v_codes[r] = read_codes(v, i);
        }
    }
    __device__ void update(Pack& x, const Maps& first, const Maps& second) const {
        u32 m_key = 0, v_key = 0;
#pragma unroll
        for (int r = 0; r < rounds; ++r) {
#pragma unroll
            for (int k = 0; k < vector; ++k) {
                const float grad = x.g[r][k] * factor;
                const float m_old = decode(first, x.m_codes[r], k, x.scale.x), v_old = decode(second, x.v_codes[r], k, x.scale.y);
                const float m_new = beta1 * m_old + one_minus_beta1 * grad;
                const float v_new = beta2 * v_old + one_minus_beta2 * grad * grad;
                x.p[r][k] = keep * x.p[r][k] - step_size * (m_new / (sqrtf(v_new) * root2 + eps));
                x.m[r][k] = m_new, x.v[r][k] = v_new;
                m_key = key_of(m_new) > m_key ? key_of(m_new) : m_key;
                v_key = key_of(v_new) > v_key ? key_of(v_new) : v_key;
            }
        }
        x.scale = make_float2(scale_of(largest(m_key)), scale_of(largest(v_key)));
        const float m_inverse = reciprocal(x.scale.x), v_inverse = reciprocal(x.scale.y);
#pragma unroll
        for (int r = 0; r < rounds; ++r) {
            x.m_codes[r] = x.v_codes[r] = 0;
#pragma unroll
            for (int k = 0; k < vector; ++k) {
                x.m_codes[r] |= code_signed(first, x.m[r][k] * m_inverse) << (ZP_BITS * k);
                x.v_codes[r] |= code_unsigned(second, x.v[r][k] * v_inverse) << (ZP_BITS * k);
            }
        }
    }
    __device__ void store(const Pack& x, i64 block) const {
#pragma unroll
        for (int r = 0; r < rounds; ++r) {
            const i64 i = place(block, r);
            write<vector>(p + i, x.p[r]);
            write_codes(m, i, x.m_codes[r]);
            write_codes(v, i, x.v_codes[r]);
            write_at(out, i, x.p[r]);
        }
        if (threadIdx.x % warp == 0) scales[block] = x.scale;
    }
};

} // namespace zp

// root2 = 1 / sqrt(1 - beta2^t), step_size = lr / (1 - beta1^t), keep = 1 - lr * weight decay. All buffers begin on whole
// vectors; the grid may have any size.
extern "C" __global__ void __launch_bounds__(ZP_THREADS)
    zp_adam_blockwise(float* p, const ZP_GRAD* g, unsigned char* m, unsigned char* v, float* scales, ZP_OUT* out,
                      const unsigned int* maps, long long blocks, const zp::Scalars* scalars, float beta1, float one_minus_beta1,
                      float beta2, float one_minus_beta2, float root2, float eps, float keep, float step_size) {
    if (zp::skips(scalars)) return;
    __shared__ unsigned int tables[zp::words];
    for (int i = threadIdx.x; i < zp::words; i += ZP_THREADS) tables[i] = maps[i];
    __syncthreads();
    const float* levels = reinterpret_cast<const float*>(tables);
    const zp::Maps first{levels, tables + 2 * zp::codes}, second{levels + zp::codes, tables + 2 * zp::codes + zp::bins};
    const zp::AdamBlockwise op{p, m, v, reinterpret_cast<float2*>(scales), g, out, zp::factor(scalars), beta1, one_minus_beta1,
                               beta2, one_minus_beta2, root2, eps, keep, step_size};
    constexpr int warps = ZP_THREADS / zp::warp;
    const long long turn = static_cast<long long>(gridDim.x) * warps;
    for (long long block = blockIdx.x * static_cast<long long>(warps) + threadIdx.x / zp::warp; block < blocks; block += turn * ZP_UNROLL) {
        zp::AdamBlockwise::Pack pack[ZP_UNROLL];
#pragma unroll
        for (int u = 0; u < ZP_UNROLL; ++u) {
            if (block + u * turn < blocks) op.load(pack[u], block + u * turn);
        }
#pragma unroll
        for (int u = 0; u < ZP_UNROLL; ++u) {
            if (block + u * turn < blocks) {
                op.update(pack[u], first, second);
                op.store(pack[u], block + u * turn);
            }
        }
    }
}
