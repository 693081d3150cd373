// y = x W^T (+ bias) (+ residual) for CPUs, with weights of 8 or 4 bits and rows of x rounded to 16: two products of
// inputs side by side are one instruction, and their sums are exact.
//
// A row of x is rounded in groups of kGroup inputs, whose largest is 32767: about 2^-16 of it is lost, much less than
// with bfloat16. Panels:
//
//     int8    [N / C][K / 2][C][2], K rounded up to pairs, zeros beyond. One scale an output
//     int4    [N / C][K / 8][C] words of 8 inputs. Bits 4 j on hold input 2 j, bits 4 j + 16 on hold input 2 j + 1, as
//             0..15, which stands for -8..7. One scale an output and 32 inputs: [N / C][K / 32][C]

#include "panels.h"

namespace {

constexpr int64_t kGroup = 128;    // inputs of a row that are rounded together; with so many no sum overflows
constexpr int64_t kScaled = 32;    // inputs of an output that share a scale in int4
constexpr float kLargest = 32767;  // of a rounded row
constexpr float kLeast = 1e-30f;   // a group without anything larger is taken for zeros

// sums + both products of each pair of 16 bits, x being one pair
inline Ints add_pairs(Ints sums, uint32_t x, Ints weights) {
#if defined(__AVX512VNNI__)
    return (Ints)_mm512_dpwssd_epi32((__m512i)sums, _mm512_set1_epi32(int(x)), (__m512i)weights);
#elif defined(__AVX512BW__)
    return sums + (Ints)_mm512_madd_epi16(_mm512_set1_epi32(int(x)), (__m512i)weights);
#elif defined(__AVX2__) && !defined(__AVX512F__)
    return sums + (Ints)_mm256_madd_epi16(_mm256_set1_epi32(int(x)), (__m256i)weights);
#else
    const int32_t pair = int32_t(x);
    return sums + int32_t(int16_t(pair)) * (weights << 16 >> 16) + (pair >> 16) * (weights >> 16);
#endif
}

// 2 * kWidth numbers of 8 bits as pairs of 16
inline Ints load_pairs(const int8_t* from) {
#if defined(__AVX512BW__)
    return (Ints)_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)from));
#elif defined(__AVX2__) && !defined(__AVX512F__)
    return (Ints)_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)from));
#else
    Ints pairs;
    for (int i = 0; i < kWidth; i++) pairs[i] = int32_t(uint16_t(from[2 * i])) | int32_t(from[2 * i + 1]) << 16;
    return pairs;
#endif
}

struct Rounded {  // rows of x
    std::vector<int16_t> values;   // [M, width]
    std::vector<float> scales;     // [M, groups]
    std::vector<int32_t> offsets;  // [M, width / 32]: what to add to the sums of 32 inputs of int4, whose zero is 8
    int64_t width, groups;         // width: K rounded up to pairs

    template <class T>
    void take(const T* x, int64_t rows, int64_t inputs, bool with_offsets) {
        width = (inputs + 1) / 2 * 2, groups = (inputs + kGroup - 1) / kGroup;
        values.resize(rows * width), scales.resize(rows * groups);
        if (with_offsets) offsets.resize(rows * (width / kScaled));
#pragma omp parallel for if (rows * inputs > kParallelFrom)
        for (int64_t r = 0; r < rows; r++) {
            for (int64_t g = 0; g < groups; g++) {
                const int64_t first = g * kGroup, count = std::min(kGroup, inputs - first);
                scales[r * groups + g] = round(x + r * inputs + first, count, &values[r * width + first]);
            }
            if (inputs < width) values[r * width + inputs] = 0;
            for (int64_t s = 0; with_offsets && s < width / kScaled; s++) {
                int32_t sum = 0;
                for (int64_t k = s * kScaled; k < (s + 1) * kScaled; k++) sum += values[r * width + k];
                offsets[r * (width / kScaled) + s] = -8 * sum;
            }
        }
    }

    // -> what 1 stands for; NaN if a number is not finite
    template <class T>
    static float round(const T* x, int64_t count, int16_t* to) {
        float copy[kGroup];
        uint32_t largest = 0;  // of the absolute numbers, as bits, which are ordered alike; NaN is the largest
        for (int64_t i = 0; i < count; i++) copy[i] = load(x[i]);
        for (int64_t i = 0; i < count; i++) {
            uint32_t bits;
            std::memcpy(&bits, copy + i, 4);
            largest = std::max(largest, bits & 0x7fffffff);
        }
        float most;
        std::memcpy(&most, &largest, 4);
        if (!(most > kLeast && most < INFINITY)) {
            std::fill(to, to + count, int16_t(0));
            return most <= kLeast ? 0.0f : NAN;
        }
        const float factor = kLargest / most;
        for (int64_t i = 0; i < count; i++) to[i] = int16_t(int32_t(copy[i] * factor + 32768.5f) - 32768);
        return most / kLargest;
    }
};

inline Floats widen(Ints x) { return __builtin_convertvector(x, Floats); }

// Panels: pairs of 16 bits of the outputs of their first register, and of their second. kPairs of them lie together,
// from input k on, of which j is one.
struct Int8 {
    static constexpr int kPairs = 1;
    const int8_t* data;
    Ints first(int64_t k, int) const {
        prefetch(data + k * kColumns);
        return load_pairs(data + k * kColumns);
    }
    Ints second(int64_t k, int) const { return load_pairs(data + (k + 1) * kColumns); }
};
struct Int4 {
    static constexpr int kPairs = 4;
    const Ints* data;
    static Ints pair(Ints words, int j) { return words >> 4 * j & (Ints{} + 0x000f000f); }
    Ints first(int64_t k, int j) const {
        if (j % (kWidth == 16 ? 2 : 4) == 0) prefetch(data + k / 4 + j / 2);
        return pair(data[k / 4], j);
    }
    Ints second(int64_t k, int j) const { return pair(data[k / 4 + 1], j); }

    // to: [K / 2] pairs of registers, as Int16 reads them
    void take_apart(int64_t width, Ints* to) const {
        for (int64_t k = 0; k < width; k += 2 * kPairs)
            for (int j = 0; j < kPairs; j++) to[k + 2 * j] = first(k, j), to[k + 2 * j + 1] = second(k, j);
    }
};
struct Int16 {  // int4 that has been taken apart
    static constexpr int kPairs = 1;
    const Ints* data;
    Ints first(int64_t k, int) const { return data[k]; }
    Ints second(int64_t k, int) const { return data[k + 1]; }
};

using Scales = const float*;  // of a panel of int4: [K / 32][C]

// sums[r] = x[r] . panel for `rows` rows from `row` on
template <int rows, class Panel>
void multiply(const Rounded& x, int64_t row, const Panel& panel, Scales scales, Pair* sums) {
    constexpr bool scaled = !std::is_same_v<Panel, Int8>;
    constexpr int64_t step = scaled ? kScaled : kGroup;
    const int16_t* values = x.values.data() + row * x.width;
    for (int r = 0; r < rows; r++) sums[r] = Pair{};
    for (int64_t from = 0; from < x.width; from += step) {
        Ints a[rows] = {}, b[rows] = {};
        for (int r = 0; scaled && r < rows; r++)
            a[r] = b[r] = Ints{} + x.offsets[((row + r) * x.width + from) / kScaled];
        const int64_t end = scaled ? from + step : std::min(from + step, x.width);
        for (int64_t k = from; k < end; k += 2 * Panel::kPairs)
            for (int j = 0; j < Panel::kPairs; j++) {
                const Ints first = panel.first(k, j), second = panel.second(k, j);
                for (int r = 0; r < rows; r++) {
                    const uint32_t pair = pair_at(values + r * x.width + k + 2 * j);
                    a[r] = add_pairs(a[r], pair, first), b[r] = add_pairs(b[r], pair, second);
                }
            }
        for (int r = 0; r < rows; r++) {
            const Floats scale = Floats{} + x.scales[(row + r) * x.groups + from / kGroup];
            const float* at = scaled ? scales + from / kScaled * kColumns : nullptr;
            sums[r].a = add_product(sums[r].a, widen(a[r]), scaled ? scale * load_many(at) : scale);
            sums[r].b = add_product(sums[r].b, widen(b[r]), scaled ? scale * load_many(at + kWidth) : scale);
        }
    }
}

}  // namespace

template <int bits, class T>
void gemm_integers(const Call<T>& call) {
    static thread_local Rounded made;
    made.take(call.x, call.rows, call.inputs, bits == 4);
    const Rounded& x = made;
    constexpr int64_t few = 2;  // rows, for which words of int4 are taken apart as they come; else once for all
    each_tile(call.rows, call.outputs, [&](int64_t count, int64_t row, int64_t first, int64_t last) {
        static thread_local std::vector<Ints> apart;
        for (int64_t index = first; index < last; index++) {
            const int8_t* weights = (const int8_t*)call.weights + index * x.width * kColumns * bits / 8;
            Scales scales = bits == 4 ? call.scales + index * x.width / kScaled * kColumns : nullptr;
            Pair sums[kRows];
            if constexpr (bits == 8) {
                with_constant<kRows>(count, [&](auto n) { multiply<n>(x, row, Int8{weights}, scales, sums); });
            } else if (const Int4 panel{(const Ints*)weights}; call.rows <= few) {
                with_constant<few>(count, [&](auto n) { multiply<n>(x, row, panel, scales, sums); });
            } else {
                apart.resize(kTogether * x.width);
                Ints* wide = apart.data() + (index - first) * x.width;
                if (row == 0) panel.take_apart(x.width, wide);
                with_constant<kRows>(count, [&](auto n) { multiply<n>(x, row, Int16{wide}, scales, sums); });
            }
            finish(call, row, count, index, sums, bits == 8 ? call.scales : nullptr);
        }
    });
}

template void gemm_integers<8>(const Call<float>&);
template void gemm_integers<8>(const Call<bf16>&);
template void gemm_integers<4>(const Call<float>&);
template void gemm_integers<4>(const Call<bf16>&);
