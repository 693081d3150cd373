// The formats of weights that the GEMMs multiply with, panel by panel, and what both GEMMs share.
//
// M rows of x, K inputs, N outputs. A panel is C outputs, input by input; of the last one the outputs beyond N are
// padding. A panel is multiplied with up to kRows rows of x at once, whose sums stay in registers.

#pragma once

#include "kernels.h"

template <class T>
struct Call {
    const T *x, *bias, *residual;  // bias and residual may be null
    const void* weights;
    const float* scales;  // null unless the weights are integers
    T* out;               // [M, N], as residual
    int64_t rows, inputs, outputs;
};

// The GEMM of integers, in integers.cpp. bits: 8 or 4
template <int bits, class T>
void gemm_integers(const Call<T>& call);

namespace {

constexpr int kColumns = 2 * kWidth;          // C: outputs of a panel, two registers
constexpr int kRows = kWidth == 16 ? 12 : 6;  // rows of x whose sums fit into the registers
constexpr int kTogether = 2;                  // panels that the same rows are multiplied with before the next ones

struct Pair {
    Floats a, b;
};

// Two numbers of 16 bits that lie side by side.
inline uint32_t pair_at(const void* x) {
    uint32_t pair;
    std::memcpy(&pair, x, 4);
    return pair;
}

// Asks for what lies a little further on in the panels, be it in the next one: memory then answers in time.
inline void prefetch(const void* weights) {
    constexpr int64_t kAhead = 1536;  // bytes
    __builtin_prefetch((const char*)weights + kAhead, 0, 2);
}

// Writes the sums of `count` rows, from `row` on, with one panel. `scales` [N], or null: what each output is worth.
template <class T>
void finish(const Call<T>& call, int64_t row, int64_t count, int64_t panel, const Pair* sums, const float* scales) {
    const int64_t first = panel * kColumns, columns = std::min<int64_t>(kColumns, call.outputs - first);
    for (int64_t r = 0; r < count; r++) {
        const int64_t at = (row + r) * call.outputs + first;
        if (columns == kColumns) {
            for (int64_t c = 0; c < kColumns; c += kWidth) {
                Floats y = c ? sums[r].b : sums[r].a;
                if (scales) y *= load_many(scales + first + c);
                if (call.bias) y += load_many(call.bias + first + c);
                if (call.residual) y += load_many(call.residual + at + c);
                store_many(call.out + at + c, y);
            }
            continue;
        }
        float values[kColumns];
        std::memcpy(values, &sums[r], sizeof values);
        for (int64_t c = 0; c < columns; c++) {
            float y = values[c];
            if (scales) y *= scales[first + c];
            if (call.bias) y += load(call.bias[first + c]);
            if (call.residual) y += load(call.residual[at + c]);
            store(call.out[at + c], y);
        }
    }
}

// Calls use(count, row, first, last) for every `count` rows from `row` on and the panels [first, last), few of each:
// in the order that leaves both in the caches, on all threads.
template <class Use>
void each_tile(int64_t rows, int64_t outputs, Use use) {
    const int64_t panels = (outputs + kColumns - 1) / kColumns;
#pragma omp parallel for schedule(dynamic, 2)  // a core may be busy with another process
    for (int64_t first = 0; first < panels; first += kTogether)
        for (int64_t row = 0; row < rows; row += kRows)
            use(std::min<int64_t>(kRows, rows - row), row, first, std::min(first + kTogether, panels));
}

// Calls use(n), n = count as a constant, 0 < count <= most.
template <int most, class Use>
void with_constant(int64_t count, Use use) {
    if constexpr (most > 0) {
        if (count == most) use(std::integral_constant<int, most>{});
        else with_constant<most - 1>(count, use);
    }
}

}  // namespace
