// y = x W^T (+ bias) (+ residual) for CPUs, with weights stored as float, bfloat16, int8 or int4, computed in float; or,
// where processors have an instruction for it, in pairs of bfloat16 that are multiplied and added to a float.
//
// M rows of x, K inputs, N outputs. The weights lie in panels of C outputs, input by input: [N / C][K][C]; bfloat16 with
// two inputs of an output side by side: [N / C][K / 2][C][2]. Of the last panel the outputs beyond N are padding. A panel
// is multiplied with up to kRows rows of x at once, whose sums stay in registers. Few rows read the panel as it is
// stored, so that small formats save memory traffic.

#include "panels.h"

namespace {

constexpr int kRows = kWidth == 16 ? 12 : 6;  // rows of x whose sums fit into the registers
constexpr int64_t kBlockFloats = 256 * 1024;  // of x that are multiplied with all panels before the next ones
constexpr int64_t kTogether = 2;              // panels that the same rows are multiplied with before the next ones

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

template <int rows>
void multiply(const bf16* x, int64_t stride, const Pairs<bf16>& panel, int64_t inputs, Pair* sums) {
    Pair part[rows] = {};
    for (int64_t k = 0; k < inputs; k += 2) {
        prefetch(panel, k);
        const Words a = panel.data[k], b = panel.data[k + 1];
        for (int r = 0; r < rows; r++) {
            uint32_t pair;
            std::memcpy(&pair, x + r * stride + k, 4);
            part[r].a = add_pairs(part[r].a, pair, a);
            part[r].b = add_pairs(part[r].b, pair, b);
        }
    }
    for (int r = 0; r < rows; r++) sums[r] = part[r];
}

template <int rows>
void multiply(const float* x, int64_t stride, const Pairs<float>& panel, int64_t inputs, Pair* sums) {
    constexpr int ways = rows <= 3 ? 2 : 1;  // sums of few rows would wait for each other
    Pair part[ways][rows] = {};
    for (int64_t k = 0; k < inputs; k += 2) {
        prefetch(panel, k);
        const Pair low = panel.load(k);
        for (int r = 0; r < rows; r++) {
            part[0][r].a = add_product(part[0][r].a, x[r * stride + k], low.a);
            part[0][r].b = add_product(part[0][r].b, x[r * stride + k], low.b);
        }
        const Pair high = panel.load(k + 1);
        for (int r = 0; r < rows; r++) {
            part[ways - 1][r].a = add_product(part[ways - 1][r].a, x[r * stride + k + 1], high.a);
            part[ways - 1][r].b = add_product(part[ways - 1][r].b, x[r * stride + k + 1], high.b);
        }
    }
    for (int r = 0; r < rows; r++) {
        sums[r] = part[0][r];
        if (ways > 1) sums[r].a += part[1][r].a, sums[r].b += part[1][r].b;
    }
}

// sums[r] = x[r] . panel for `rows` rows, `stride` numbers apart
template <int rows, class Panel>
void multiply(const float* x, int64_t stride, const Panel& panel, int64_t inputs, Pair* sums) {
    constexpr int ways = rows == 1 ? 4 : rows <= 3 ? 2 : 1;  // sums of few rows would wait for each other
    Pair part[ways][rows] = {};
    int64_t k = 0;
    for (; k + ways <= inputs; k += ways) {
        for (int w = 0; w < ways; w++) {
            if (w * kColumns * Panel::kBitsAnInput % 512 == 0) prefetch(panel, k + w);  // one a cache line
            Pair weights = panel.load(k + w);
            for (int r = 0; r < rows; r++) {
                part[w][r].a = add_product(part[w][r].a, x[r * stride + k + w], weights.a);
                part[w][r].b = add_product(part[w][r].b, x[r * stride + k + w], weights.b);
            }
        }
    }
    for (; k < inputs; k++) {
        Pair weights = panel.load(k);
        for (int r = 0; r < rows; r++) {
            part[0][r].a = add_product(part[0][r].a, x[r * stride + k], weights.a);
            part[0][r].b = add_product(part[0][r].b, x[r * stride + k], weights.b);
        }
    }
    for (int r = 0; r < rows; r++) {
        sums[r] = part[0][r];
        for (int w = 1; w < ways; w++) sums[r].a += part[w][r].a, sums[r].b += part[w][r].b;
    }
}

// Of few rows of x: the 8 that is to be subtracted from every weight, and the scale, wait for the end of a group.
template <int rows, class = std::enable_if_t<(rows <= 3)>>
void multiply(const float* x, int64_t stride, const Int4& panel, int64_t inputs, Pair* sums) {
    for (int r = 0; r < rows; r++) sums[r] = Pair{};
    for (int64_t group = 0; group < inputs; group += 32) {
        Pair even[rows] = {}, odd[rows] = {};
        for (int64_t k = group; k < group + 32; k += 2) {
            const uint8_t* row = panel.data + k / 2 * kColumns;
            prefetch(panel, k);
            const Ints a = load_ints(row), b = load_ints(row + kWidth);
            const Floats a_low = __builtin_convertvector(a & 15, Floats), a_high = __builtin_convertvector(a >> 4, Floats);
            const Floats b_low = __builtin_convertvector(b & 15, Floats), b_high = __builtin_convertvector(b >> 4, Floats);
            for (int r = 0; r < rows; r++) {
                const float first = x[r * stride + k], second = x[r * stride + k + 1];
                even[r].a = add_product(even[r].a, first, a_low), even[r].b = add_product(even[r].b, first, b_low);
                odd[r].a = add_product(odd[r].a, second, a_high), odd[r].b = add_product(odd[r].b, second, b_high);
            }
        }
        const Pair scale = panel.scale(group);
        for (int r = 0; r < rows; r++) {
            float total = 0;
            for (int64_t k = group; k < group + 32; k++) total += x[r * stride + k];
            sums[r].a += (even[r].a + odd[r].a - 8 * total) * scale.a;
            sums[r].b += (even[r].b + odd[r].b - 8 * total) * scale.b;
        }
    }
}

template <int rows, class Panel>
void multiply_some(int64_t count, const typename Panel::Input* x, int64_t stride, const Panel& panel, int64_t inputs,
                   Pair* sums) {
    if constexpr (rows > 0) {
        if (count == rows) multiply<rows>(x, stride, panel, inputs, sums);
        else multiply_some<rows - 1>(count, x, stride, panel, inputs, sums);
    }
}

template <class T>
struct Call {
    const T *x, *bias, *residual;  // bias and residual may be null
    const void* weights;
    const float* scales;  // null unless the weights are integers
    T* out;               // [M, N], as residual
    int64_t rows, inputs, outputs;
};

template <class Panel, class T>
void finish(const Call<T>& call, int64_t row, int64_t count, int64_t panel, const Pair* sums) {
    const int64_t first = panel * kColumns, columns = std::min<int64_t>(kColumns, call.outputs - first);
    for (int64_t r = 0; r < count; r++) {
        float values[kColumns];
        std::memcpy(values, &sums[r], sizeof values);
        const int64_t at = (row + r) * call.outputs + first;
        for (int64_t c = 0; c < columns; c++) {
            float y = values[c];
            if (Panel::kScaleAtEnd) y *= call.scales[first + c];
            if (call.bias) y += load(call.bias[first + c]);
            if (call.residual) y += load(call.residual[at + c]);
            store(call.out[at + c], y);
        }
    }
}

// The panels [first, last) with some rows, in the order that leaves both in the caches. Room: wide, of all these panels.
template <class Panel, class T>
void run_panels(const Call<T>& call, const typename Panel::Input* x, int64_t first_row, int64_t rows, int64_t first,
                int64_t last, float* wide) {
    const int64_t inputs = call.inputs;
    constexpr bool widens = Panel::kWidenFrom != INT64_MAX;
    const bool wide_enough = rows >= Panel::kWidenFrom;
    if constexpr (widens)
        for (int64_t index = first; wide_enough && index < last; index++) {
            const Panel panel(call.weights, call.scales, index, inputs);
            for (int64_t k = 0; k < inputs; k++) {
                prefetch(panel, k);
                const Pair weights = panel.load(k);
                std::memcpy(wide + ((index - first) * inputs + k) * kColumns, &weights, sizeof weights);
            }
        }
    for (int64_t row = 0; row < rows; row += kRows) {
        const int64_t count = std::min<int64_t>(kRows, rows - row);
        for (int64_t index = first; index < last; index++) {
            Pair sums[kRows];
            if constexpr (widens)
                if (wide_enough) {
                    const Plain panel(wide, nullptr, index - first, inputs);
                    multiply_some<kRows>(count, x + row * inputs, inputs, panel, inputs, sums);
                }
            if (!wide_enough) {
                const Panel panel(call.weights, call.scales, index, inputs);
                multiply_some<kRows>(count, x + row * inputs, inputs, panel, inputs, sums);
            }
            finish<Panel>(call, first_row + row, count, index, sums);
        }
    }
}

template <class Panel, class T>
void run(const Call<T>& call) {
    static thread_local std::vector<typename Panel::Input> converted;
    const int64_t panels = (call.outputs + kColumns - 1) / kColumns;
    const int64_t block = std::max<int64_t>(kRows, kBlockFloats / call.inputs / kRows * kRows);
    for (int64_t first = 0; first < call.rows; first += block) {
        const int64_t rows = std::min(block, call.rows - first);
        const typename Panel::Input* x;
        if constexpr (std::is_same_v<T, typename Panel::Input>) {
            x = call.x + first * call.inputs;
        } else {
            converted.resize(rows * call.inputs);
            for (int64_t i = 0; i < rows * call.inputs; i++) store(converted[i], load(call.x[first * call.inputs + i]));
            x = converted.data();
        }
#pragma omp parallel
        {
            static thread_local std::vector<float> wide;
            if (Panel::kWidenFrom != INT64_MAX) wide.resize(kTogether * call.inputs * kColumns);
#pragma omp for schedule(dynamic, 2)  // a core may be busy with another process
            for (int64_t panel = 0; panel < panels; panel += kTogether)
                run_panels<Panel>(call, x, first, rows, panel, std::min(panel + kTogether, panels), wide.data());
        }
    }
}

}  // namespace

template <class T>
void gemm(const Linear& linear, const T* x, int64_t rows, const T* residual, T* out) {
    Call<T> call{x, (const T*)linear.bias, residual, linear.weights, linear.scales, out, rows, linear.inputs,
                 linear.outputs};
    switch (linear.format) {
        case 0: return run<Plain>(call);
        case 1: return run<Pairs<float>>(call);
        case 2: return run<Int8>(call);
        case 3: return run<Int4>(call);
        case 4: return run<Pairs<bf16>>(call);
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
