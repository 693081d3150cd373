// The formats of weights that gemm.cpp multiplies with: a panel of C outputs, input by input.

#pragma once

#include "kernels.h"

namespace {

constexpr int kColumns = 2 * kWidth;  // C: outputs of a panel, two registers

struct Pair {
    Floats a, b;
};

// Each has
//   Input          what the rows of x are converted to
//   load(k)        the C weights of input k as floats; not of pairs that are multiplied as bfloat16
//   data           where the panel begins, kBitsAnInput of it a output and input
//   kScaleAtEnd    whether the sums of an output are to be multiplied by its scale
//   kWidenFrom     with so many rows a panel is widened to floats first, once for all of them

struct Plain {
    using Input = float;
    const float* data;
    Plain(const void* weights, const float*, int64_t panel, int64_t inputs)
        : data((const float*)weights + panel * inputs * kColumns) {}
    Pair load(int64_t k) const { return {load_many(data + k * kColumns), load_many(data + k * kColumns + kWidth)}; }
    static constexpr bool kScaleAtEnd = false;
    static constexpr int kBitsAnInput = 32;
    static constexpr int64_t kWidenFrom = INT64_MAX;
};

template <class T>
struct Pairs {  // of bfloat16. T: what they are multiplied as
    using Input = T;
    const Words* data;
    Pairs(const void* weights, const float*, int64_t panel, int64_t inputs)
        : data((const Words*)weights + panel * inputs) {}  // two registers a pair
    Pair load(int64_t k) const {
        const Words a = data[k / 2 * 2], b = data[k / 2 * 2 + 1];
        if (k % 2) return {(Floats)(a & kHigh), (Floats)(b & kHigh)};
        return {(Floats)(a << 16), (Floats)(b << 16)};
    }
    static constexpr uint32_t kHigh = 0xffff0000;  // the bits of the second number of a pair
    static constexpr bool kScaleAtEnd = false;
    static constexpr int kBitsAnInput = 16;
    static constexpr int64_t kWidenFrom = INT64_MAX;
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
    static constexpr int64_t kWidenFrom = INT64_MAX;
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
    static constexpr int64_t kWidenFrom = 13;
};

// Asks for what lies a little further on than input k of a panel, be it in the next one: memory then answers in time.
template <class Panel>
inline void prefetch(const Panel& panel, int64_t k) {
    constexpr int64_t kAhead = 1536;  // bytes
    __builtin_prefetch((const char*)panel.data + k * kColumns * Panel::kBitsAnInput / 8 + kAhead, 0, 2);
}

}  // namespace
