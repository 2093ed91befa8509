// SGD with or without momentum (Sutskever et al. 2013, in torch.optim.SGD's form), one pass over flat buffers.
#include "common.cuh"

namespace zp {

template <bool Momentum>
struct Sgd {
    float* __restrict__ p; // [n] fp32 master parameters
    float* __restrict__ b; // [n] momentum buffer, unused without momentum
    const ZP_GRAD* __restrict__ g;
    ZP_OUT* __restrict__ out; // [n] the parameter in the model's dtype
    float scale, momentum, gain, l2, lr;
    bool nesterov;

    template <int V>
    struct Pack {
        float p[V], b[V], g[V];
    };
    template <int V>
    __device__ void load(Pack<V>& x, i64 i) const {
        read<V>(g + i, x.g);
        read<V>(p + i, x.p);
        if constexpr (Momentum) read<V>(b + i, x.b);
    }
    template <int V>
    __device__ void update(Pack<V>& x) const {
#pragma unroll
        for (int k = 0; k < V; ++k) {
            float grad = x.g[k] * scale + l2 * x.p[k];
            if constexpr (Momentum) {
                x.b[k] = momentum * x.b[k] + gain * grad;
                grad = nesterov ? grad + momentum * x.b[k] : x.b[k];
            }
            x.p[k] = x.p[k] - lr * grad;
        }
    }
    template <int V>
    __device__ void store(const Pack<V>& x, i64 i) const {
        write<V>(p + i, x.p);
        if constexpr (Momentum) write<V>(b + i, x.b);
        write_at(out, i, x.p);
    }
};

} // namespace zp

// gain = 1 - dampening, 1 on the first step; b == nullptr: no momentum.
extern "C" __global__ void __launch_bounds__(ZP_THREADS)
    zp_sgd(float* p, const ZP_GRAD* g, float* b, ZP_OUT* out, long long n, long long head, const zp::Scalars* scalars, float momentum,
           float gain, float l2, float lr, int nesterov) {
    if (zp::skips(scalars)) return;
    const float scale = zp::factor(scalars);
    if (b) {
        const zp::Sgd<true> op{p, b, g, out, scale, momentum, gain, l2, lr, nesterov != 0};
        zp::for_each<ZP_VEC, ZP_UNROLL>(op, n, head);
    } else {
        const zp::Sgd<false> op{p, b, g, out, scale, momentum, gain, l2, lr, nesterov != 0};
        zp::for_each<ZP_VEC, ZP_UNROLL>(op, n, head);
    }
}
