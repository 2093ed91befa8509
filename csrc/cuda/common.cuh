// Shared by all kernels: element types, vector access, the step's scalars, loops, reductions.
//
// The kernels include no other header, so NVRTC needs none; nvcc compiles the same files. The command line sets these macros:
//   ZP_GRAD   element type of the gradient: zp::bf16, zp::fp16 or float
//   ZP_OUT    element type of the written copy of the parameter, or void for none
//   ZP_THREADS, ZP_VEC, ZP_UNROLL   threads a block; elements a vector access; vectors a thread has in flight
//   ZP_LOAD, ZP_STORE   cache hint: 0 default, 1 streaming (evict first)
//
// Note [Arithmetic]: every product, sum, root and quotient is rounded to fp32 on its own (-fmad=false, IEEE square root and
// division, no flush to zero), in the order written. The CPU twins and the torch path keep the same order, so all three give
// the same bits. The kernels wait for memory, so the lost contraction costs nothing.
#pragma once

#ifndef ZP_GRAD
#define ZP_GRAD zp::bf16
#endif
#ifndef ZP_OUT
#define ZP_OUT zp::bf16
#endif
#ifndef ZP_THREADS
#define ZP_THREADS 256
#endif
#ifndef ZP_VEC
#define ZP_VEC 4
#endif
#ifndef ZP_UNROLL
#define ZP_UNROLL 2
#endif
#ifndef ZP_LOAD
#define ZP_LOAD 0
#endif
#ifndef ZP_STORE
#define ZP_STORE 0
#endif

namespace zp {

using i64 = long long;
using u16 = unsigned short;
using u32 = unsigned int;

struct bf16 {
    u16 bits;
};
struct fp16 {
    u16 bits;
};

// ---- conversion, round to nearest even ------------------------------------------------------------------------------

__device__ inline float widen(float x) { return x; }
__device__ inline float widen(bf16 x) { return __uint_as_float(static_cast<u32>(x.bits) << 16); }
__device__ inline float widen(fp16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}

template <class T>
__device__ T narrow(float x);
template <>
__device__ inline float narrow<float>(float x) {
    return x;
}
template <>
__device__ inline fp16 narrow<fp16>(float x) {
    fp16 y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
}
template <>
__device__ inline bf16 narrow<bf16>(float x) {
    bf16 y;
#if __CUDA_ARCH__ >= 800
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
#else
    const u32 bits = __float_as_uint(x);
    y.bits = x != x ? 0x7fff : static_cast<u16>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
#endif
    return y;
}

// ---- vector access --------------------------------------------------------------------------------------------------

template <class W>
__device__ inline W fetch(const W* p) {
#if ZP_LOAD == 1
    return __ldcs(p);
#else
    return *p;
#endif
}
template <class W>
__device__ inline void put(W* p, W x) {
#if ZP_STORE == 1
    __stcs(p, x);
#else
    *p = x;
#endif
}

// The machine word that holds two, four or eight 16-bit elements.
template <int Words>
struct Word;
template <>
struct Word<2> {
    using type = uint2;
};
template <>
struct Word<4> {
    using type = uint4;
};

// r[k] = p[k]; for V > 1 p is aligned to the access (16 bytes, or 8 for four 16-bit elements).
template <int V>
__device__ inline void read(const float* p, float (&r)[V]) {
    if constexpr (V == 1) {
        r[0] = fetch(p);
    } else {
#pragma unroll
        for (int k = 0; k < V; k += 4) {
            const float4 x = fetch(reinterpret_cast<const float4*>(p + k));
            r[k] = x.x, r[k + 1] = x.y, r[k + 2] = x.z, r[k + 3] = x.w;
        }
    }
}
template <int V, class H>
__device__ inline void read(const H* p, float (&r)[V]) {
    if constexpr (V == 1) {
        H x;
        x.bits = fetch(&p->bits);
        r[0] = widen(x);
    } else {
        using W = typename Word<V / 2>::type;
        union {
            W word;
            H h[V];
        } x;
        x.word = fetch(reinterpret_cast<const W*>(p));
#pragma unroll
        for (int k = 0; k < V; ++k) r[k] = widen(x.h[k]);
    }
}

// p[k] = r[k], rounded to p's type. A void pointer stores nothing.
template <int V>
__device__ inline void write(float* p, const float (&r)[V]) {
    if constexpr (V == 1) {
        put(p, r[0]);
    } else {
#pragma unroll
        for (int k = 0; k < V; k += 4) put(reinterpret_cast<float4*>(p + k), make_float4(r[k], r[k + 1], r[k + 2], r[k + 3]));
    }
}
template <int V, class H>
__device__ inline void write(H* p, const float (&r)[V]) {
    if constexpr (V == 1) {
        put(&p->bits, narrow<H>(r[0]).bits);
    } else {
        using W = typename Word<V / 2>::type;
        union {
            W word;
            H h[V];
        } x;
#pragma unroll
        for (int k = 0; k < V; ++k) x.h[k] = narrow<H>(r[k]);
        put(reinterpret_cast<W*>(p), x.word);
    }
}
template <class T, int V>
__device__ inline void write_at(T* base, i64 i, const float (&r)[V]) {
    write<V>(base + i, r);
}
template <int V>
__device__ inline void write_at(void*, i64, const float (&)[V]) {}

// ---- the step's scalars (zeroplan_runtime/kernels/update.py) ---------------------------------------------------------

struct Scalars {
    float squares; // sum of the squares of the gradient as it is stored, loss scale included
    float norm;    // norm of the gradient without the loss scale, before clipping
    float factor;  // multiplies every gradient: clip factor over loss scale
    float skip;    // 1: optimizer kernels change nothing
};

__device__ inline float factor(const Scalars* scalars) { return scalars ? scalars->factor : 1.0f; }
__device__ inline bool skips(const Scalars* scalars) { return scalars && scalars->skip != 0.0f; }

// ---- loops ----------------------------------------------------------------------------------------------------------

// Applies an element-wise op to [0, n). Elements [head, head + k V) are aligned for vector access; those before and after are
// processed one by one. head == n where the pointers do not align with each other. The grid may have any size.
template <int V, int U, class Op>
__device__ inline void for_each(const Op& op, i64 n, i64 head) {
    const i64 packs = (n - head) / V;
    const i64 tile = static_cast<i64>(blockDim.x) * U;
    for (i64 first = blockIdx.x * tile; first < packs; first += gridDim.x * tile) {
        typename Op::template Pack<V> pack[U];
#pragma unroll
        for (int u = 0; u < U; ++u) {
            const i64 i = first + u * static_cast<i64>(blockDim.x) + threadIdx.x;
            if (i < packs) op.load(pack[u], head + i * V);
        }
#pragma unroll
        for (int u = 0; u < U; ++u) {
            const i64 i = first + u * static_cast<i64>(blockDim.x) + threadIdx.x;
            if (i < packs) {
                op.update(pack[u]);
                op.store(pack[u], head + i * V);
            }
        }
    }
    const i64 tail = head + packs * V, edge = head + (n - tail);
    for (i64 k = blockIdx.x * static_cast<i64>(blockDim.x) + threadIdx.x; k < edge; k += gridDim.x * static_cast<i64>(blockDim.x)) {
        const i64 i = k < head ? k : tail + (k - head);
        typename Op::template Pack<1> pack;
        op.load(pack, i);
        op.update(pack);
        op.store(pack, i);
    }
}

// Adds up x over the block, in an order that depends on the block's size alone. All threads call it; thread 0 has the result.
__device__ inline double block_sum(double x) {
    __shared__ double warps[32];
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) x += __shfl_down_sync(0xffffffffu, x, offset);
    __syncthreads(); // a previous call may still be reading
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = x;
    __syncthreads();
    x = threadIdx.x < blockDim.x / 32 ? warps[threadIdx.x] : 0.0;
    if (threadIdx.x < 32) {
#pragma unroll
        for (int offset = 16; offset > 0; offset /= 2) x += __shfl_down_sync(0xffffffffu, x, offset);
    }
    return x;
}

} // namespace zp
