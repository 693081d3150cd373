// Numbers of the kernels: floats and bfloat16, and registers full of floats that loads widen to.
// Everything is computed in float; bfloat16 and small integers are only ways to store.

#pragma once

#ifdef __AVX2__
#include <immintrin.h>
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

namespace {

using bf16 = uint16_t;

inline float load(float x) { return x; }
inline float load(bf16 x) {
    uint32_t bits = uint32_t(x) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
inline void store(float& to, float x) { to = x; }
inline void store(bf16& to, float x) {  // to nearest, ties to even; NaN stays NaN
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    to = x != x ? 0x7fc0 : bf16((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// A register of floats; loads widen, and may be anywhere in memory.
#ifdef __AVX512F__
constexpr int kWidth = 16;
#else
constexpr int kWidth = 8;
#endif
typedef float Floats __attribute__((vector_size(kWidth * 4)));
typedef uint32_t Words __attribute__((vector_size(kWidth * 4)));
typedef int32_t Ints __attribute__((vector_size(kWidth * 4)));
typedef uint16_t Halves __attribute__((vector_size(kWidth * 2)));

inline Floats load_many(const float* from) {
    Floats x;
    std::memcpy(&x, from, sizeof x);
    return x;
}
inline Floats load_many(const bf16* from) {
    Halves x;
    std::memcpy(&x, from, sizeof x);
    return (Floats)(__builtin_convertvector(x, Words) << 16);
}
inline void store_many(float* to, Floats x) { std::memcpy(to, &x, sizeof x); }
inline void store_many(bf16* to, Floats x) {
    for (int i = 0; i < kWidth; i++) store(to[i], x[i]);
}

// sum + x * y, in one instruction and in this order: compilers that may reorder sums make three of two products.
inline Floats add_product(Floats sum, Floats x, Floats y) {
#if defined(__AVX512F__)
    return (Floats)_mm512_fmadd_ps((__m512)x, (__m512)y, (__m512)sum);
#elif defined(__FMA__) && defined(__AVX2__)
    return (Floats)_mm256_fmadd_ps((__m256)x, (__m256)y, (__m256)sum);
#else
    return sum + x * y;
#endif
}
inline Floats add_product(Floats sum, float x, Floats y) { return add_product(sum, Floats{} + x, y); }

inline float sum_of(Floats x) {
    float sum = 0;
    for (int i = 0; i < kWidth; i++) sum += x[i];
    return sum;
}

// to[i] = the sum of x[i]
inline void sums_of_four(const Floats* x, float* to) {
#ifdef __AVX2__
    __m256 half[4];
    for (int i = 0; i < 4; i++) {
#ifdef __AVX512F__
        const __m512d both = (__m512d)x[i];
        half[i] = (__m256)_mm512_extractf64x4_pd(both, 0) + (__m256)_mm512_extractf64x4_pd(both, 1);
#else
        half[i] = (__m256)x[i];
#endif
    }
    const __m256 pairs = _mm256_hadd_ps(_mm256_hadd_ps(half[0], half[1]), _mm256_hadd_ps(half[2], half[3]));
    _mm_storeu_ps(to, _mm256_castps256_ps128(pairs) + _mm256_extractf128_ps(pairs, 1));
#else
    for (int i = 0; i < 4; i++) to[i] = sum_of(x[i]);
#endif
}

// exp to about 2 units in the last place; written so that the compiler can vectorize loops over it.
inline float fast_exp(float x) {
    x = std::min(std::max(x, -87.0f), 88.0f);
    float n = __builtin_nearbyintf(x * 1.44269504f);
    float r = std::fma(n, -0.693359375f, x);
    r = std::fma(n, 2.12194440e-4f, r);
    float p = 1.9875691500e-4f;
    p = std::fma(p, r, 1.3981999507e-3f);
    p = std::fma(p, r, 8.3334519073e-3f);
    p = std::fma(p, r, 4.1665795894e-2f);
    p = std::fma(p, r, 1.6666665459e-1f);
    p = std::fma(p, r, 5.0000001201e-1f);
    p = std::fma(p, r * r, r + 1.0f);
    uint32_t bits = uint32_t(int32_t(n) + 127) << 23;
    float power;
    std::memcpy(&power, &bits, 4);
    return p * power;
}

// fast_exp of each. x <= 0, or NaN, which stays NaN
inline Floats fast_exp(Floats x) {
    const Floats lowest = Floats{} - 87.0f;
    x = x < lowest ? lowest : x;
    const Ints whole = __builtin_convertvector(x * 1.44269504f - 0.5f, Ints);  // to nearest, as x is not positive
    const Floats n = __builtin_convertvector(whole, Floats);
    Floats r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    Floats p = 1.9875691500e-4f * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + (r + 1.0f);
    return p * (Floats)((whole + 127) << 23);
}

constexpr int64_t kParallelFrom = 16384;  // elements: below, waking the other threads costs more than it saves

}  // namespace
