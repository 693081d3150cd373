// y = x W^T (+ bias) (+ residual) for CPUs, with weights stored as float, bfloat16, int8 or int4, computed in float; or,
// where processors have an instruction for it, in pairs of bfloat16 that are multiplied and added to a float.
//
// M rows of x, K inputs, N outputs. The weights lie in panels of C outputs, input by input: [N / C][K][C]; of the last
// panel the outputs beyond N are padding. A panel is multiplied with up to kRows rows of x at once, whose sums
// stay in registers. Few rows read the panel as it is stored, so that small formats save memory traffic.

#include "kernels.h"

namespace {

constexpr int kColumns = 2 * kWidth;            // C: outputs of a panel, two registers
constexpr int kRows = kWidth == 16 ? 12 : 6;    // rows of x whose sums fit into the registers
constexpr int64_t kBlockFloats = 256 * 1024;     // of x that are multiplied with all panels before the next ones

// A panel: load(k) gives its C weights of input k (but for Pairs). Input is what the rows of x are converted to. From
// kWidenFrom rows on a panel is widened to floats first, once for all of them.
struct Pair {
    Floats a, b;
};

template <class T>
struct Plain {  // float or bfloat16
    using Input = float;
    const T* data;
    Plain(const void* weights, const float*, int64_t panel, int64_t inputs)
        : data((const T*)weights + panel * inputs * kColumns) {}
    Pair load(int64_t k) const { return {load_many(data + k * kColumns), load_many(data + k * kColumns + kWidth)}; }
    static constexpr bool kScaleAtEnd = false;
    static constexpr int kBitsAnInput = 8 * sizeof(T);
    static constexpr int64_t kWidenFrom = std::is_same_v<T, float> ? INT64_MAX : 2 * kRows + 1;
};

struct Int8 {  // one scale an output, applied to the sums
    using Input = float;
    const int8_t* data;
    Int8(const void* weights, const float*, int64_t panel, int64_t inputs)
        : data((const int8_t*)weights + panel * inputs * kColumns) {}
    Pair load(int64_t k) const {
        const int8_t* row = data + k * kColumns;
        return {__builtin_convertvector(load_ints(row), Floats), __builtin_convertvector(load_ints(row + kWidth), Floats)};
    }
    static constexpr bool kScaleAtEnd = true;
    static constexpr int kBitsAnInput = 8;
    static constexpr int64_t kWidenFrom = 2 * kRows + 1;
};

struct Int4 {  // 32 inputs of an output share a scale: [N / C][K / 32][C]. Byte k / 2 holds input k low, k + 1 high
    using Input = float;
    const uint8_t* data;
    const float* scales;
    Int4(const void* weights, const float* scales, int64_t panel, int64_t inputs)
        : data((const uint8_t*)weights + panel * inputs / 2 * kColumns),
          scales(scales + panel * (inputs / 32) * kColumns) {}
    Pair scale(int64_t k) const {
        const float* at = scales + k / 32 * kColumns;
        return {load_many(at), load_many(at + kWidth)};
    }
    Pair load(int64_t k) const {
        const uint8_t* row = data + k / 2 * kColumns;
        const int shift = k % 2 * 4;
        auto widen = [&](const uint8_t* from) {
            return __builtin_convertvector(((load_ints(from) >> shift) & 15) - 8, Floats);
        };
        return {widen(row) * scale(k).a, widen(row + kWidth) * scale(k).b};
    }
    static constexpr bool kScaleAtEnd = false;
    static constexpr int kBitsAnInput = 4;
    static constexpr int64_t kWidenFrom = 2 * kRows + 1;
};

struct Pairs {  // [N / C][K / 2][C][2]: inputs k and k + 1 of an output side by side
    using Input = bf16;
    const Words* data;
    Pairs(const void* weights, const float*, int64_t panel, int64_t inputs)
        : data((const Words*)weights + panel * inputs) {}  // a register of K / 2, twice
    static constexpr bool kScaleAtEnd = false;
    static constexpr int kBitsAnInput = 16;
    static constexpr int64_t kWidenFrom = INT64_MAX;
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
    return sums + first * (Floats)(weights << 16) + second * (Floats)(weights & 0xffff0000u);
#endif
}

template <int rows>
void multiply(const bf16* x, int64_t stride, const Pairs& panel, int64_t inputs, const char* ahead, int64_t bytes,
              Pair* sums) {
    Pair part[rows] = {};
    for (int64_t k = 0; k < inputs; k += 2) {
        __builtin_prefetch(ahead + k * bytes, 0, 2);
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

// sums[r] = x[r] . panel for `rows` rows, `stride` floats apart. Meanwhile `ahead`, as many bytes a input as a panel
// has, is asked for: the next panel comes from memory while this one is multiplied.
template <int rows, class Panel>
void multiply(const float* x, int64_t stride, const Panel& panel, int64_t inputs, const char* ahead, int64_t bytes,
              Pair* sums) {
    constexpr int ways = rows == 1 ? 4 : rows <= 3 ? 2 : 1;  // sums of few rows would wait for each other
    Pair part[ways][rows] = {};
    int64_t k = 0;
    for (; k + ways <= inputs; k += ways) {
        __builtin_prefetch(ahead + k * bytes, 0, 2);
        for (int w = 0; w < ways; w++) {
            Pair weights = panel.load(k + w);
            for (int r = 0; r < rows; r++) {
                part[w][r].a += x[r * stride + k + w] * weights.a;
                part[w][r].b += x[r * stride + k + w] * weights.b;
            }
        }
    }
    for (; k < inputs; k++) {
        Pair weights = panel.load(k);
        for (int r = 0; r < rows; r++) {
            part[0][r].a += x[r * stride + k] * weights.a;
            part[0][r].b += x[r * stride + k] * weights.b;
        }
    }
    for (int r = 0; r < rows; r++) {
        sums[r] = part[0][r];
        for (int w = 1; w < ways; w++) sums[r].a += part[w][r].a, sums[r].b += part[w][r].b;
    }
}

// Of few rows of x: the 8 that is to be subtracted from every weight, and the scale, wait for the end of a group.
template <int rows, class = std::enable_if_t<(rows <= 3)>>
void multiply(const float* x, int64_t stride, const Int4& panel, int64_t inputs, const char* ahead, int64_t bytes,
              Pair* sums) {
    for (int r = 0; r < rows; r++) sums[r] = Pair{};
    for (int64_t group = 0; group < inputs; group += 32) {
        Pair even[rows] = {}, odd[rows] = {};
        for (int64_t k = group; k < group + 32; k += 2) {
            const uint8_t* row = panel.data + k / 2 * kColumns;
            __builtin_prefetch(ahead + k * bytes, 0, 2);
            const Ints a = load_ints(row), b = load_ints(row + kWidth);
            const Floats a_low = __builtin_convertvector(a & 15, Floats), a_high = __builtin_convertvector(a >> 4, Floats);
            const Floats b_low = __builtin_convertvector(b & 15, Floats), b_high = __builtin_convertvector(b >> 4, Floats);
            for (int r = 0; r < rows; r++) {
                const float first = x[r * stride + k], second = x[r * stride + k + 1];
                even[r].a += first * a_low, even[r].b += first * b_low;
                odd[r].a += second * a_high, odd[r].b += second * b_high;
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
                   const char* ahead, int64_t bytes, Pair* sums) {
    if constexpr (rows > 0) {
        if (count == rows) multiply<rows>(x, stride, panel, inputs, ahead, bytes, sums);
        else multiply_some<rows - 1>(count, x, stride, panel, inputs, ahead, bytes, sums);
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

template <class Panel, class T>
void run_panel(const Call<T>& call, const typename Panel::Input* x, int64_t first_row, int64_t rows, int64_t index, float* wide) {
    const int64_t inputs = call.inputs;
    Panel panel(call.weights, call.scales, index, inputs);
    constexpr bool widens = Panel::kWidenFrom != INT64_MAX;
    const bool wide_enough = rows >= Panel::kWidenFrom;
    if constexpr (widens)
        for (int64_t k = 0; wide_enough && k < inputs; k++) {
            Pair weights = panel.load(k);
            std::memcpy(wide + k * kColumns, &weights, sizeof weights);
        }
    constexpr int64_t bytes = Panel::kBitsAnInput * kColumns / 8;
    const int64_t blocks = (rows + kRows - 1) / kRows;
    for (int64_t block = 0; block < blocks; block++) {
        int64_t row = rows * block / blocks, count = rows * (block + 1) / blocks - row;
        Pair sums[kRows];
        const char* ahead = (const char*)panel.data + (block + 1 == blocks ? inputs * bytes : 0);
        const auto* from = x + row * inputs;
        if constexpr (widens)
            if (wide_enough) {
                Plain<float> widened(wide, nullptr, 0, 0);
                multiply_some<kRows>(count, from, inputs, widened, inputs, ahead, bytes, sums);
            }
        if (!wide_enough) multiply_some<kRows>(count, from, inputs, panel, inputs, ahead, bytes, sums);
        finish<Panel>(call, first_row + row, count, index, sums);
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
            wide.resize(call.inputs * kColumns);
#pragma omp for schedule(dynamic, 4)  // a core may be busy with another process
            for (int64_t panel = 0; panel < panels; panel++)
                run_panel<Panel>(call, x, first, rows, panel, wide.data());
        }
    }
}

}  // namespace

template <class T>
void gemm(const Linear& linear, const T* x, int64_t rows, const T* residual, T* out) {
    Call<T> call{x, (const T*)linear.bias, residual, linear.weights, linear.scales, out, rows, linear.inputs,
                 linear.outputs};
    switch (linear.format) {
        case 0: return run<Plain<float>>(call);
        case 1: return run<Plain<bf16>>(call);
        case 2: return run<Int8>(call);
        case 3: return run<Int4>(call);
        case 4: return run<Pairs>(call);
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
