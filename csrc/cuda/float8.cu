// What 8-bit products need beside torch's operations: gathered messages as bf16, and factors that lie the other way round.
#include "common.cuh"

namespace zp {

// e4m3 has the exponent bias 7 and no infinity: as fp16, whose bias is 15, it is 2^8 times too small, subnormal numbers too.
__device__ inline float widen_e4m3(u32 byte) {
    fp16 x;
    x.bits = static_cast<u16>((byte & 0x80) << 8 | (byte & 0x7f) << 7);
    return (byte & 0x7f) == 0x7f ? __uint_as_float(0x7fffffff) : widen(x) * 256.0f;
}

} // namespace zp

// out[rank][i] = bits[rank][i] * scale[rank], e4m3 to bf16. A message begins with its scale, fp32, and its bits begin 16 bytes
// behind it; shards and messages are multiples of 16.
extern "C" __global__ void __launch_bounds__(ZP_THREADS)
    zp_widen_float8(const unsigned char* messages, zp::bf16* out, long long shard, long long message, long long blocks) {
    const long long rank = blockIdx.x / blocks, i = ((blockIdx.x % blocks) * ZP_THREADS + threadIdx.x) * 16;
    if (i >= shard) return;
    const unsigned char* own = messages + rank * message;
    const float scale = *reinterpret_cast<const float*>(own);
    const uint4 word = *reinterpret_cast<const uint4*>(own + 16 + i);
    const zp::u32 parts[4] = {word.x, word.y, word.z, word.w};
    union {
        uint4 words[2];
        zp::bf16 values[16];
    } made;
#pragma unroll
    for (int k = 0; k < 16; ++k)
        made.values[k] = zp::narrow<zp::bf16>(zp::widen_e4m3(parts[k / 4] >> (8 * (k % 4)) & 0xff) * scale);
    uint4* target = reinterpret_cast<uint4*>(out + rank * shard + i);
    target[0] = made.words[0], target[1] = made.words[1];
}

// out[column][row] = bits[row][column]; rows and columns are multiples of 16. A block turns 64 × 64 bytes.
extern "C" __global__ void __launch_bounds__(ZP_THREADS)
    zp_turn_float8(const unsigned char* bits, unsigned char* out, long long rows, long long columns, long long across) {
    static_assert(ZP_THREADS == 256, "a thread has 16 bytes of a tile");
    __shared__ unsigned char tile[64][68]; // 17 words a row: neighbours in a column lie in different banks
    const long long top = blockIdx.x / across * 64, left = blockIdx.x % across * 64;
    const int line = threadIdx.x / 4, part = threadIdx.x % 4 * 16;
    if (top + line < rows && left + part < columns) {
        const uint4 word = *reinterpret_cast<const uint4*>(bits + (top + line) * columns + left + part);
        zp::u32* row = reinterpret_cast<zp::u32*>(&tile[line][part]);
        row[0] = word.x, row[1] = word.y, row[2] = word.z, row[3] = word.w;
    }
    __syncthreads();
    if (left + line < columns && top + part < rows) {
        union {
            uint4 word;
            unsigned char bytes[16];
        } made;
#pragma unroll
        for (int k = 0; k < 16; ++k) made.bytes[k] = tile[part + k][line];
        *reinterpret_cast<uint4*>(out + (left + line) * rows + top + part) = made.word;
    }
}
