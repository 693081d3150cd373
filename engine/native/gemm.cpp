// y = x W^T (+ bias) (+ residual) for CPUs, with weights stored as float or bfloat16, computed in float; or, where
// processors have an instruction for it, in pairs of bfloat16 that are multiplied and added to a float. integers.cpp
// has the other formats.
//
// Panels of floats lie input by input, [N / C][K][C]; of bfloat16 with two inputs of an output side by side,
// [N / C][K / 2][C][2]. Few rows read the panel as it is stored, so that a small format saves memory traffic.
//
// The products of an output are added one by one, in the order of the inputs, however many rows and panels are
// multiplied at once: a row's result does not depend on which others it is computed with.

#include "panels.h"

namespace {

constexpr int64_t kBlockFloats = 256 * 1024;  // of x that are multiplied with all panels before the next ones

template <int rows>
void add_products(const float* x, int64_t stride, Floats a, Floats b, Pair* sums) {
    for (int r = 0; r < rows; r++) {
        sums[r].a = add_product(sums[r].a, x[r * stride], a);
        sums[r].b = add_product(sums[r].b, x[r * stride], b);
    }
}

// What adds the products of kStep inputs from k on to the sums of `rows` rows of x, in kTurns, of which `turn` is one.
struct Plain {
    using Input = float;
    static constexpr int kStep = 1, kTurns = 1;
    const float* data;
    Plain(const void* weights, int64_t panel, int64_t inputs)
        : data((const float*)weights + panel * inputs * kColumns) {}
    template <int rows>
    void add(const float* x, int64_t stride, int64_t k, int, Pair* sums) const {
        const float* row = data + k * kColumns;
        for (int c = 0; c < kColumns; c += 16) prefetch(row + c);
        add_products<rows>(x + k, stride, load_many(row), load_many(row + kWidth), sums);
    }
};

struct Pairs {  // of bfloat16, multiplied as floats
    using Input = float;
    static constexpr int kStep = 2, kTurns = 2;
    const Words* data;  // two registers a pair
    Pairs(const void* weights, int64_t panel, int64_t inputs) : data((const Words*)weights + panel * inputs) {}
    template <int rows>
    void add(const float* x, int64_t stride, int64_t k, int turn, Pair* sums) const {
        constexpr uint32_t second = 0xffff0000;  // the bits of the second number of a pair
        if (turn < kWidth / 8) prefetch(data + k + turn);
        const Words a = data[k], b = data[k + 1];
        if (turn) add_products<rows>(x + k + 1, stride, (Floats)(a & second), (Floats)(b & second), sums);
        else add_products<rows>(x + k, stride, (Floats)(a << 16), (Floats)(b << 16), sums);
    }
};

// sums + the products of both numbers of each pair, x being one pair
inline Floats add_pairs(Floats sums, uint32_t x, Words weights) {
#if defined(__AVX512BF16__) && defined(__AVX512F__)
    return (Floats)_mm512_dpbf16_ps((__m512)sums, (__m512bh)_mm512_set1_epi32(int(x)), (__m512bh)weights);
#else
    const uint32_t low = x << 16, high = x & 0xffff0000u;
    float first, second;
    std::memcpy(&first, &low, 4);
    std::memcpy(&second, &high, 4);
    return add_product(add_product(sums, first, (Floats)(weights << 16)), second, (Floats)(weights & 0xffff0000u));
#endif
}

struct ShortPairs : Pairs {  // multiplied as bfloat16, both at once
    using Input = bf16;
    using Pairs::Pairs;
    static constexpr int kTurns = 1;
    template <int rows>
    void add(const bf16* x, int64_t stride, int64_t k, int, Pair* sums) const {
        for (int w = 0; w < 2; w += 16 / kWidth) prefetch(data + k + w);
        for (int r = 0; r < rows; r++) {
            const uint32_t pair = pair_at(x + r * stride + k);
            sums[r].a = add_pairs(sums[r].a, pair, data[k]);
            sums[r].b = add_pairs(sums[r].b, pair, data[k + 1]);
        }
    }
};

// sums[p][r] = x[r] . panels[p] for `rows` rows, `stride` numbers apart
template <int rows, int panels, class Panel>
void multiply(const typename Panel::Input* x, int64_t stride, const Panel* panel, int64_t inputs, Pair (*sums)[kRows]) {
    Pair part[panels][rows] = {};
    for (int64_t k = 0; k < inputs; k += Panel::kStep)
        for (int turn = 0; turn < Panel::kTurns; turn++)
            for (int p = 0; p < panels; p++) panel[p].template add<rows>(x, stride, k, turn, part[p]);
    for (int p = 0; p < panels; p++)
        for (int r = 0; r < rows; r++) sums[p][r] = part[p][r];
}

template <class Panel, class T>
void run(const Call<T>& call) {
    using Input = typename Panel::Input;
    static thread_local std::vector<Input> converted;
    const int64_t inputs = call.inputs, block = std::max<int64_t>(kRows, kBlockFloats / inputs / kRows * kRows);
    for (int64_t first_row = 0; first_row < call.rows; first_row += block) {
        const int64_t rows = std::min(block, call.rows - first_row);
        const Input* x;
        if constexpr (std::is_same_v<T, Input>) {
            x = call.x + first_row * inputs;
        } else {
            converted.resize(rows * inputs);
            for (int64_t i = 0; i < rows * inputs; i++) store(converted[i], load(call.x[first_row * inputs + i]));
            x = converted.data();
        }
        each_tile(rows, call.outputs, [&](int64_t count, int64_t row, int64_t first, int64_t last) {
            static_assert(kTogether == 2);
            const Panel panels[2] = {{call.weights, first, inputs}, {call.weights, last - 1, inputs}};
            Pair sums[2][kRows];
            const Input* rows_of_x = x + row * inputs;
            with_constant<kRows>(count, [&](auto n) {
                // The sums of few rows with one panel would wait for each other.
                if (n <= kRows / 2 && last - first == 2) return multiply<n, 2>(rows_of_x, inputs, panels, inputs, sums);
                for (int p = 0; p < last - first; p++) multiply<n, 1>(rows_of_x, inputs, panels + p, inputs, sums + p);
            });
            for (int64_t p = 0; p < last - first; p++)
                finish<T>(call, first_row + row, count, first + p, sums[p], nullptr);
        });
    }
}

}  // namespace

template <class T>
void gemm(const Linear& linear, const T* x, int64_t rows, const T* residual, T* out) {
    Call<T> call{x, (const T*)linear.bias, residual, linear.weights, linear.scales, out, rows, linear.inputs,
                 linear.outputs};
    switch (linear.format) {
        case 0: return run<Plain>(call);
        case 1: return run<Pairs>(call);
        case 2: return gemm_integers<8>(call);
        case 3: return gemm_integers<4>(call);
        case 4: return run<ShortPairs>(call);
    }
}

#define EXPORT(T, suffix)                                                                                             \
    template void gemm<T>(const Linear&, const T*, int64_t, const T*, T*);                                            \
    extern "C" void gemm_##suffix(const Linear* linear, const T* x, int64_t rows, const T* residual, T* out) {        \
        gemm(*linear, x, rows, residual, out);                                                                        \
    }

extern "C" int64_t gemm_columns() { return kColumns; }
EXPORT(float, float32)
EXPORT(bf16, bfloat16)
