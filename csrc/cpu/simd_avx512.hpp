// Sixteen lanes: AVX-512F.
#pragma once

#include <immintrin.h>

namespace {

struct Vec {
    static constexpr int width = 16;
    __m512 x;
};

inline Vec splat(float x) { return {_mm512_set1_ps(x)}; }
inline Vec operator+(Vec a, Vec b) { return {_mm512_add_ps(a.x, b.x)}; }
inline Vec operator-(Vec a, Vec b) { return {_mm512_sub_ps(a.x, b.x)}; }
inline Vec operator*(Vec a, Vec b) { return {_mm512_mul_ps(a.x, b.x)}; }
inline Vec operator/(Vec a, Vec b) { return {_mm512_div_ps(a.x, b.x)}; }
inline Vec root(Vec a) { return {_mm512_sqrt_ps(a.x)}; }
inline Vec sign(Vec a) {
    const __m512 zero = _mm512_setzero_ps();
    __m512 r = _mm512_sub_ps(a.x, a.x); // 0, or NaN where a is not finite
    r = _mm512_mask_mov_ps(r, _mm512_cmp_ps_mask(a.x, zero, _CMP_GT_OQ), _mm512_set1_ps(1.0f));
    return {_mm512_mask_mov_ps(r, _mm512_cmp_ps_mask(a.x, zero, _CMP_LT_OQ), _mm512_set1_ps(-1.0f))};
}

inline Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline Vec load(const Bf16* p) {
    const __m256i h = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16))};
}
inline Vec load(const Fp16* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))}; }

inline __m256i to_bf16(Vec a) {
    const __m512i bits = _mm512_castps_si512(a.x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i h = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    h = _mm512_srli_epi32(h, 16);
    h = _mm512_mask_mov_epi32(h, _mm512_cmp_ps_mask(a.x, a.x, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc0));
    return _mm512_cvtepi32_epi16(h);
}
inline __m256i to_fp16(Vec a) { return _mm512_cvtps_ph(a.x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

inline void store(float* p, Vec a) { _mm512_storeu_ps(p, a.x); }
inline void store(Bf16* p, Vec a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), to_bf16(a)); }
inline void store(Fp16* p, Vec a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), to_fp16(a)); }

// Stores past the caches. p is aligned to the vector.
inline void stream(float* p, Vec a) { _mm512_stream_ps(p, a.x); }
inline void stream(Bf16* p, Vec a) { _mm256_stream_si256(reinterpret_cast<__m256i*>(p), to_bf16(a)); }
inline void stream(Fp16* p, Vec a) { _mm256_stream_si256(reinterpret_cast<__m256i*>(p), to_fp16(a)); }
inline void fence() { _mm_sfence(); }

} // namespace
