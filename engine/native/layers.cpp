// The small operations between the GEMMs of a decoder layer: norms, rotary embedding, SwiGLU.
// engine/ops.py computes the same in torch and says what it means.
//
// T tokens, Hq query heads, Hkv key/value heads, D head size

#include <omp.h>

#include "kernels.h"

namespace {

template <class T>
float inverse_rms(const T* x, int64_t n, float eps) {
    float sum = 0;
    for (int64_t i = 0; i < n; i++) sum += load(x[i]) * load(x[i]);
    return 1.0f / std::sqrt(sum / float(n) + eps);
}

}  // namespace

template <class T>
void rms_norm(const T* x, const T* weight, float eps, int64_t tokens, int64_t size, T* out) {
#pragma omp parallel for if (tokens * size > kParallelFrom)
    for (int64_t t = 0; t < tokens; t++) {
        const T* row = x + t * size;
        float scale = inverse_rms(row, size, eps);
        for (int64_t i = 0; i < size; i++) store(out[t * size + i], load(row[i]) * scale * load(weight[i]));
    }
}

template <class T>
void silu_mul(const T* gate_up, int64_t tokens, int64_t size, T* out) {
#pragma omp parallel for if (tokens * size > kParallelFrom)
    for (int64_t t = 0; t < tokens; t++) {
        const T *gate = gate_up + 2 * t * size, *up = gate + size;
        for (int64_t i = 0; i < size; i++) {
            float g = load(gate[i]);
            store(out[t * size + i], g / (1.0f + fast_exp(-g)) * load(up[i]));
        }
    }
}

template <class T>
void rotate(T* qkv, int64_t tokens, int64_t stride, int64_t q_heads, int64_t k_heads, int64_t dim, const float* cos,
            const float* sin, const T* q_norm, const T* k_norm, float eps) {
    const int64_t half = dim / 2;
#pragma omp parallel for if (tokens * (q_heads + k_heads) * dim > kParallelFrom)
    for (int64_t t = 0; t < tokens; t++) {
        const float *c = cos + t * half, *s = sin + t * half;
        for (int64_t h = 0; h < q_heads + k_heads; h++) {
            T *x = qkv + t * stride + h * dim, *y = x + half;
            if (q_norm) {
                const T* weight = h < q_heads ? q_norm : k_norm;
                float scale = inverse_rms(x, dim, eps);
                for (int64_t i = 0; i < dim; i++) store(x[i], load(x[i]) * scale * load(weight[i]));
            }
            for (int64_t i = 0; i < half; i++) {
                float first = load(x[i]), second = load(y[i]);
                store(x[i], first * c[i] - second * s[i]);
                store(y[i], second * c[i] + first * s[i]);
            }
        }
    }
}

#define EXPORT(T, suffix)                                                                                             \
    template void rms_norm<T>(const T*, const T*, float, int64_t, int64_t, T*);                                       \
    template void silu_mul<T>(const T*, int64_t, int64_t, T*);                                                        \
    template void rotate<T>(T*, int64_t, int64_t, int64_t, int64_t, int64_t, const float*, const float*, const T*,    \
                            const T*, float);                                                                         \
    extern "C" void rms_norm_##suffix(const T* x, const T* weight, float eps, int64_t tokens, int64_t size, T* out) { \
        rms_norm(x, weight, eps, tokens, size, out);                                                                  \
    }                                                                                                                 \
    extern "C" void silu_mul_##suffix(const T* gate_up, int64_t tokens, int64_t size, T* out) {                       \
        silu_mul(gate_up, tokens, size, out);                                                                         \
    }                                                                                                                 \
    extern "C" void rotate_##suffix(T* qkv, int64_t tokens, int64_t stride, int64_t q_heads, int64_t k_heads,         \
                                    int64_t dim, const float* cos, const float* sin, const T* q_norm,                 \
                                    const T* k_norm, float eps) {                                                     \
        rotate(qkv, tokens, stride, q_heads, k_heads, dim, cos, sin, q_norm, k_norm, eps);                            \
    }

EXPORT(float, float32)
EXPORT(bf16, bfloat16)

// Of this library's loops. Needed where torch brings an OpenMP of its own under another name.
extern "C" void set_threads(int count) { omp_set_num_threads(count); }
