// out = source * scale, between fp32, bf16 and fp16.
#include "common.cuh"

namespace zp {

struct Cast {
    const ZP_GRAD* __restrict__ source;
    ZP_OUT* __restrict__ out;
    float scale;

    template <int V>
    struct Pack {
        float x[V];
    };
    template <int V>
    __device__ void load(Pack<V>& pack, i64 i) const {
        read<V>(source + i, pack.x);
    }
    template <int V>
    __device__ void update(Pack<V>& pack) const {
#pragma unroll
        for (int k = 0; k < V; ++k) pack.x[k] = pack.x[k] * scale;
    }
    template <int V>
    __device__ void store(const Pack<V>& pack, i64 i) const {
        write_at(out, i, pack.x);
    }
};

} // namespace zp

extern "C" __global__ void __launch_bounds__(ZP_THREADS)
    zp_cast(const ZP_GRAD* source, ZP_OUT* out, long long n, long long head, float scale) {
    zp::for_each<ZP_VEC, ZP_UNROLL>(zp::Cast{source, out, scale}, n, head);
}
