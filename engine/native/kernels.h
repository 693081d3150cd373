// The kernels that files of this folder offer to each other, for T = float and T = bf16, and the structs that Python
// fills in (engine/native/__init__.py has the same ones).
//
// T tokens, Hq query heads, Hkv key/value heads, D head size, Dv value size, N pages, P pages of the longest part

#pragma once

#include "numbers.h"

struct Attention {  // one attention layer and its part of the pool
    void *keys, *values;  // [N, Hkv, page_size, D], [N, Hkv, page_size, Dv]
    int64_t q_heads, kv_heads, dim, value_dim, page_size;
    int64_t window;        // 0 = none
    float scale, softcap;  // softcap 0 = none
    const float* sinks;    // [Hq] or null
};

struct Step {  // what all layers of a forward share
    int64_t tokens, parts;
    const int64_t* slots;       // [T] where the keys and values of each token go
    const int64_t* q_start;     // [parts + 1]: part p has the rows [q_start[p], q_start[p + 1])
    const int64_t* kv_len;      // [parts]: tokens of the sequence after this step
    const int64_t* page_table;  // [parts, P]
    int64_t table_stride;       // P
};

struct Linear {  // y = x W^T + bias
    const void* weights;  // panels, see gemm.cpp
    const float* scales;  // null unless the weights are integers
    const void* bias;     // null or as x
    int64_t inputs, outputs;
    int64_t format;  // of the weights: 0 float, 1 bfloat16, 2 int8, 3 int4, 4 bfloat16 times bfloat16
};

// Writes keys and values of all rows to their slots, then attends. query [T, Hq * D], key [T, Hkv * D] and value
// [T, Hkv * Dv] are rows of numbers that lie side by side, `stride` numbers from one row to the next. out [T, Hq * Dv].
template <class T>
void attend(const Attention&, const Step&, const T* query, int64_t q_stride, const T* key, int64_t k_stride,
            const T* value, int64_t v_stride, T* out);

// out [rows, outputs] = x W^T (+ bias) (+ residual [rows, outputs], which may be out)
template <class T>
void gemm(const Linear&, const T* x, int64_t rows, const T* residual, T* out);

template <class T>
void rms_norm(const T* x, const T* weight, float eps, int64_t tokens, int64_t size, T* out);

// gate_up [tokens, 2 * size] -> silu(gate) * up
template <class T>
void silu_mul(const T* gate_up, int64_t tokens, int64_t size, T* out);

// Norms (if there are weights) and rotates the first q_heads + k_heads heads of every row of qkv, in place.
// cos, sin [tokens, dim / 2]
template <class T>
void rotate(T* qkv, int64_t tokens, int64_t stride, int64_t q_heads, int64_t k_heads, int64_t dim, const float* cos,
            const float* sin, const T* q_norm, const T* k_norm, float eps);
