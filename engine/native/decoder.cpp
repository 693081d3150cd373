// All layers of a Llama-shaped decoder in one call: engine/fuse.py's FusedLayer, one after the other. What it saves is
// the time between the operations, which for few tokens is as long as the smaller of them take.
//
// T tokens, H hidden size, Hq query heads, Hkv key/value heads, D head size, I intermediate size

#include "kernels.h"

struct DecoderLayer {
    const void *input_norm, *post_norm;  // [H]
    const void *q_norm, *k_norm;         // [D] or null
    Linear qkv, out, gate_up, down;
    Attention attention;
    float eps, head_eps;
};

namespace {

// hidden [T, H], in place. cos, sin [T, D / 2].
template <class T>
void decode(const DecoderLayer* layers, int64_t count, const Step& step, const float* cos, const float* sin,
            T* hidden) {
    static thread_local std::vector<T> room;
    const int64_t tokens = step.tokens;
    for (int64_t i = 0; i < count; i++) {
        const DecoderLayer& layer = layers[i];
        const Attention& a = layer.attention;
        const int64_t size = layer.qkv.inputs, width = layer.qkv.outputs, inner = layer.down.inputs;
        const int64_t q_width = a.q_heads * a.dim, k_width = a.kv_heads * a.dim;
        room.resize(tokens * (size + std::max(width + q_width, 3 * inner)));
        T *normed = room.data(), *qkv = normed + tokens * size, *attended = qkv + tokens * width;
        T *gate_up = qkv, *gated = gate_up + tokens * 2 * inner;

        rms_norm(hidden, (const T*)layer.input_norm, layer.eps, tokens, size, normed);
        gemm<T>(layer.qkv, normed, tokens, nullptr, qkv);
        rotate(qkv, tokens, width, a.q_heads, a.kv_heads, a.dim, cos, sin, (const T*)layer.q_norm,
               (const T*)layer.k_norm, layer.head_eps);
        attend(a, step, qkv, width, qkv + q_width, width, qkv + q_width + k_width, width, attended);
        gemm<T>(layer.out, attended, tokens, hidden, hidden);
        rms_norm(hidden, (const T*)layer.post_norm, layer.eps, tokens, size, normed);
        gemm<T>(layer.gate_up, normed, tokens, nullptr, gate_up);
        silu_mul(gate_up, tokens, inner, gated);
        gemm<T>(layer.down, gated, tokens, hidden, hidden);
    }
}

}  // namespace

#define EXPORT(T, suffix)                                                                                             \
    extern "C" void decode_##suffix(const DecoderLayer* layers, int64_t count, const Step* step, const float* cos,    \
                                    const float* sin, T* hidden) {                                                    \
        decode(layers, count, *step, cos, sin, hidden);                                                               \
    }

EXPORT(float, float32)
EXPORT(bf16, bfloat16)
