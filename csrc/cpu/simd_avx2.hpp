// Eight lanes: AVX2 with F16C.
#pragma once

#include <immintrin.h>

namespace {

struct Vec {
    static constexpr int width = 8;
    __m256 x;
};

inline Vec splat(float x) { return {_mm256_set1_ps(x)}; }
inline Vec operator+(Vec a, Vec b) { return {_mm256_add_ps(a.x, b.x)}; }
inline Vec operator-(Vec a, Vec b) { return {_mm256_sub_ps(a.x, b.x)}; }
inline Vec operator*(Vec a, Vec b) { return {_mm256_mul_ps(a.x, b.x)}; }
inline Vec operator/(Vec a, Vec b) { return {_mm256_div_ps(a.x, b.x)}; }
inline Vec root(Vec a) { return {_mm256_sqrt_ps(a.x)}; }
inline Vec sign(Vec a) {
    const __m256 zero = _mm256_setzero_ps(), one = _mm256_set1_ps(1.0f), minus = _mm256_set1_ps(-1.0f);
    __m256 r = _mm256_sub_ps(a.x, a.x); // 0, or NaN where a is not finite
    r = _mm256_blendv_ps(r, one, _mm256_cmp_ps(a.x, zero, _CMP_GT_OQ));
    return {_mm256_blendv_ps(r, minus, _mm256_cmp_ps(a.x, zero, _CMP_LT_OQ))};
}

inline Vec load(const float* p) { return {_mm256_loadu_ps(p)}; }
inline Vec load(const Bf16* p) {
    const __m128i h = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16))};
}
inline Vec load(const Fp16* p) { return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))}; }

inline __m128i to_bf16(Vec a) {
    const __m256i bits = _mm256_castps_si256(a.x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i h = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    h = _mm256_srli_epi32(h, 16);
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a.x, a.x, _CMP_UNORD_Q));
    h = _mm256_blendv_epi8(h, _mm256_set1_epi32(0x7fc0), nan);
    h = _mm256_permute4x64_epi64(_mm256_packus_epi32(h, h), 0x08);
    return _mm256_castsi256_si128(h);
}
inline __m128i to_fp16(Vec a) { return _mm256_cvtps_ph(a.x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

inline void store(float* p, Vec a) { _mm256_storeu_ps(p, a.x); }
inline void store(Bf16* p, Vec a) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), to_bf16(a)); }
inline void store(Fp16* p, Vec a) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), to_fp16(a)); }

// Stores past the caches. p is aligned to the vector.
inline void stream(float* p, Vec a) { _mm256_stream_ps(p, a.x); }
inline void stream(Bf16* p, Vec a) { _mm_stream_si128(reinterpret_cast<__m128i*>(p), to_bf16(a)); }
inline void stream(Fp16* p, Vec a) { _mm_stream_si128(reinterpret_cast<__m128i*>(p), to_fp16(a)); }
inline void fence() { _mm_sfence(); }

} // namespace
