// Adam and AdamW (Kingma & Ba 2015, algorithm 1; Loshchilov & Hutter 2019, algorithm 2), one pass over flat buffers.
#include "common.cuh"

namespace zp {

struct Adam {
    float* __restrict__ p; // [n] fp32 master parameters
    float* __restrict__ m; // [n] first moment
    float* __restrict__ v; // [n] second moment
    const ZP_GRAD* __restrict__ g;
    ZP_OUT* __restrict__ out; // [n] the parameter in the model's dtype
    float scale, beta1, one_minus_beta1, beta2, one_minus_beta2, root2, eps, l2, keep, step_size;

    template <int V>
    struct Pack {
        float p[V], m[V], v[V], g[V];
    };
    template <int V>
    __device__ void load(Pack<V>& x, i64 i) const {
        read<V>(g + i, x.g);
        read<V>(p + i, x.p);
        read<V>(m + i, x.m);
        read<V>(v + i, x.v);
    }
    template <int V>
    __device__ void update(Pack<V>& x) const {
#pragma unroll
        for (int k = 0; k < V; ++k) {
            const float grad = x.g[k] * scale + l2 * x.p[k];
            x.m[k] = beta1 * x.m[k] + one_minus_beta1 * grad;
            x.v[k] = beta2 * x.v[k] + one_minus_beta2 * grad * grad;
            x.p[k] = keep * x.p[k] - step_size * (x.m[k] / (sqrtf(x.v[k]) * root2 + eps));
        }
    }
    template <int V>
    __device__ void store(const Pack<V>& x, i64 i) const {
        write<V>(p + i, x.p);
        write<V>(m + i, x.m);
        write<V>(v + i, x.v);
        write_at(out, i, x.p);
    }
};

} // namespace zp

// root2 = 1 / sqrt(1 - beta2^t), step_size = lr / (1 - beta1^t); Adam: l2 = weight decay, keep = 1; AdamW: l2 = 0,
// keep = 1 - lr * weight decay.
extern "C" __global__ void __launch_bounds__(ZP_THREADS)
    zp_adam(float* p, const ZP_GRAD* g, float* m, float* v, ZP_OUT* out, long long n, long long head, const zp::Scalars* scalars,
            float beta1, float one_minus_beta1, float beta2, float one_minus_beta2, float root2, float eps, float l2, float keep,
            float step_size) {
    if (zp::skips(scalars)) return;
    const zp::Adam op{p, m, v, g, out, zp::factor(scalars), beta1, one_minus_beta1, beta2, one_minus_beta2, root2, eps, l2,
                      keep, step_size};
    zp::for_each<ZP_VEC, ZP_UNROLL>(op, n, head);
}
