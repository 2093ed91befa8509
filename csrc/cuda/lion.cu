// Lion (Chen et al. 2023, algorithm 2), one pass over flat buffers.
#include "common.cuh"

namespace zp {

struct Lion {
    float* __restrict__ p; // [n] fp32 master parameters
    float* __restrict__ m; // [n] momentum
    const ZP_GRAD* __restrict__ g;
    ZP_OUT* __restrict__ out; // [n] the parameter in the model's dtype
    float scale, beta1, one_minus_beta1, beta2, one_minus_beta2, keep, lr;

    template <int V>
    struct Pack {
        float p[V], m[V], g[V];
    };
    template <int V>
    __device__ void load(Pack<V>& x, i64 i) const {
        read<V>(g + i, x.g);
        read<V>(p + i, x.p);
        read<V>(m + i, x.m);
    }
    template <int V>
    __device__ void update(Pack<V>& x) const {
#pragma unroll
        for (int k = 0; k < V; ++k) {
            const float grad = x.g[k] * scale;
            const float c = beta1 * x.m[k] + one_minus_beta1 * grad;
            // The sign of a zero is 0, of a NaN is NaN: c - c is 0 for finite c and NaN otherwise.
            const float sign = c > 0.0f ? 1.0f : (c < 0.0f ? -1.0f : c - c);
            x.p[k] = keep * x.p[k] - lr * sign;
            x.m[k] = beta2 * x.m[k] + one_minus_beta2 * grad;
        }
    }
    template <int V>
    __device__ void store(const Pack<V>& x, i64 i) const {
        write<V>(p + i, x.p);
        write<V>(m + i, x.m);
        write_at(out, i, x.p);
    }
};

} // namespace zp

// keep = 1 - lr * weight decay.
extern "C" __global__ void __launch_bounds__(ZP_THREADS)
    zp_lion(float* p, const ZP_GRAD* g, float* m, ZP_OUT* out, long long n, long long head, const zp::Scalars* scalars, float beta1,
            float one_minus_beta1, float beta2, float one_minus_beta2, float keep, float lr) {
    if (zp::skips(scalars)) return;
    const zp::Lion op{p, m, g, out, zp::factor(scalars), beta1, one_minus_beta1, beta2, one_minus_beta2, keep, lr};
    zp::for_each<ZP_VEC, ZP_UNROLL>(op, n, head);
}
