// What attention.cpp does with a few rows of queries and a stretch of keys and values that lie side by side: scores,
// their weights by a running softmax, weighted sums.
//
// D head size, Dv value size

#pragma once

#include "kernels.h"

namespace {

constexpr int64_t kBlock = 256;  // tokens of context whose scores are there at once

// The result of a row of a task: the largest score, the sum of the weights relative to it, the weighted values [Dv].
constexpr int64_t kHead = 2;

template <int n>
using Const = std::integral_constant<int, n>;

// Calls use(n, fixed, r) for n <= 3 rows from r on: few enough for the registers. n and fixed are known to the
// compiler; fixed is `dim` if that is a common one, else 0.
template <class Use>
void each_few_rows(int64_t rows, int64_t dim, Use use) {
    auto few = [&](auto n, int64_t r) {
        if (dim == 64) use(n, Const<64>{}, r);
        else if (dim == 128) use(n, Const<128>{}, r);
        else use(n, Const<0>{}, r);
    };
    int64_t r = 0;
    for (; r + 3 <= rows; r += 3) few(Const<3>{}, r);
    if (rows - r == 2) few(Const<2>{}, r);
    if (rows - r == 1) few(Const<1>{}, r);
}

// Asks for the row that lies at the same place in the next page: the hardware's prefetcher does not cross pages.
template <class T>
void prefetch(const T* row, int64_t dim) {
    for (int64_t d = 0; d < dim; d += 64 / int64_t(sizeof(T))) __builtin_prefetch(row + d);
}

// scores[g * kBlock + i] = query[g] . keys[i] for n rows and `count` tokens that lie side by side. The score of a key
// does not depend on which others are looked at with it.
template <int n, int fixed, class T>
void score(const float* query, const T* keys, int64_t count, int64_t any_dim, float* scores, const T* next) {
    const int64_t dim = fixed ? fixed : any_dim, whole = dim / kWidth * kWidth;
    constexpr int few = 4;  // keys at once
    for (int64_t i = 0; i < count; i += few) {
        const T* key[few];  // the last one again where there are no more
        for (int j = 0; j < few; j++) key[j] = keys + std::min(i + j, count - 1) * dim;
        Floats sums[n][few] = {};
        for (int j = 0; j < few; j++) prefetch(next + (key[j] - keys), dim);
        for (int64_t d = 0; d < whole; d += kWidth) {
            Floats part[few];
            for (int j = 0; j < few; j++) part[j] = load_many(key[j] + d);
            for (int g = 0; g < n; g++) {
                const Floats q = load_many(query + g * dim + d);
                for (int j = 0; j < few; j++) sums[g][j] += q * part[j];
            }
        }
        const int64_t there = std::min<int64_t>(few, count - i);
        for (int g = 0; g < n; g++) {
            float* to = scores + g * kBlock + i;
            float four[few];
            sums_of_four(sums[g], there == few ? to : four);
            if (there < few) std::memcpy(to, four, there * sizeof(float));
        }
    }
    for (int64_t d = whole; d < dim; d++)
        for (int64_t i = 0; i < count; i++)
            for (int g = 0; g < n; g++) {
                float& to = scores[g * kBlock + i];
                to = std::fma(query[g * dim + d], load(keys[i * dim + d]), to);
            }
}

// out[g * stride + d] += sum over i of weights[g * kBlock + i] * values[i][d]
template <int n, int fixed, class T>
void weigh(const float* weights, const T* values, int64_t count, int64_t any_dim, float* out, int64_t stride,
           const T* next) {
    constexpr int block = 4;  // registers of a value that are summed at once, for each head
    const int64_t dim = fixed ? fixed : any_dim;
    int64_t d = 0;
    for (; d + block * kWidth <= dim; d += block * kWidth) {
        Floats sums[n][block];
        for (int g = 0; g < n; g++)
            for (int b = 0; b < block; b++) sums[g][b] = load_many(out + g * stride + d + b * kWidth);
        for (int64_t i = 0; i < count; i++) {
            if (d == 0) prefetch(next + i * dim, dim);
            Floats v[block];
            for (int b = 0; b < block; b++) v[b] = load_many(values + i * dim + d + b * kWidth);
            for (int g = 0; g < n; g++)
                for (int b = 0; b < block; b++) sums[g][b] += weights[g * kBlock + i] * v[b];
        }
        for (int g = 0; g < n; g++) std::memcpy(out + g * stride + d, sums[g], sizeof sums[g]);
    }
    for (int64_t i = 0; i < count; i++)
        for (int g = 0; g < n; g++)
            for (int64_t rest = d; rest < dim; rest++)
                out[g * stride + rest] += weights[g * kBlock + i] * load(values[i * dim + rest]);
}

// Turns the scores [0, count) of a row into weights: those in [lo, hi) are visible, the others get 0. What the row's
// result holds of earlier blocks is rescaled to the new largest score.
void soften(float* scores, int64_t lo, int64_t hi, int64_t count, float softcap, float* result, int64_t value_dim) {
    std::fill(scores, scores + std::min(lo, count), 0.0f);
    std::fill(scores + std::max<int64_t>(hi, 0), scores + count, 0.0f);
    if (lo >= hi) return std::fill(scores, scores + count, 0.0f);
    if (softcap > 0)
        for (int64_t i = lo; i < hi; i++) scores[i] = softcap * std::tanh(scores[i] / softcap);
    const int64_t whole = lo + (hi - lo) / kWidth * kWidth;
    Floats many = Floats{} + result[0];
    for (int64_t i = lo; i < whole; i += kWidth) {
        const Floats x = load_many(scores + i);
        many = x > many ? x : many;
    }
    float largest = many[0];
    for (int j = 1; j < kWidth; j++) largest = std::max(largest, many[j]);
    for (int64_t i = whole; i < hi; i++) largest = std::max(largest, scores[i]);
    many = Floats{};
    for (int64_t i = lo; i < whole; i += kWidth) {
        const Floats x = fast_exp(load_many(scores + i) - largest);
        std::memcpy(scores + i, &x, sizeof x);
        many += x;
    }
    float sum = sum_of(many);
    for (int64_t i = whole; i < hi; i++) sum += scores[i] = fast_exp(scores[i] - largest);
    if (result[0] != largest) {
        float factor = fast_exp(result[0] - largest);
        for (int64_t d = 1; d < value_dim + kHead; d++) result[d] *= factor;
    }
    result[0] = largest;
    result[1] += sum;
}

}  // namespace
