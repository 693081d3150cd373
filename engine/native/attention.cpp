// Attention of single queries over pages, reading them where they lie. engine/attention/sdpa.py computes the same in
// torch and says what it means.
//
// T tokens, Hq query heads, Hkv key/value heads, G = Hq / Hkv, D head size, Dv value size, N pages

#include "numbers.h"

extern "C" {

struct Layer {  // one attention layer and its part of the pool
    void *keys, *values;  // [N, Hkv, page_size, D], [N, Hkv, page_size, Dv]
    int64_t q_heads, kv_heads, dim, value_dim, page_size;
    int64_t window;  // 0 = none
    float scale, softcap;  // softcap 0 = none
    const float* sinks;  // [Hq] or null
};

struct Step {  // what all layers of a forward share
    int64_t tokens;
    const int64_t* slots;  // [T] where the keys and values of each token go
    int64_t decodes;  // rows [0, decodes) are single queries
    const int64_t* kv_len;  // [decodes]
    const int64_t* page_table;  // [decodes, table_stride]
    int64_t table_stride;
};
}

namespace {

constexpr int64_t kSpan = 512;  // tokens of context that one task attends to

struct Task {
    int64_t row, first, last;  // tokens [first, last) of the row's context
    int64_t span, spans;       // this is one of so many of the row
};

template <class T>
void write_kv(const Layer& layer, const Step& step, int64_t t, const T* key, int64_t k_stride, const T* value,
              int64_t v_stride) {
    int64_t page = step.slots[t] / layer.page_size, offset = step.slots[t] % layer.page_size;
    for (int64_t h = 0; h < layer.kv_heads; h++) {
        int64_t at = (page * layer.kv_heads + h) * layer.page_size + offset;
        std::memcpy((T*)layer.keys + at * layer.dim, key + t * k_stride + h * layer.dim, layer.dim * sizeof(T));
        std::memcpy((T*)layer.values + at * layer.value_dim, value + t * v_stride + h * layer.value_dim,
                    layer.value_dim * sizeof(T));
    }
}

template <int n>
using Const = std::integral_constant<int, n>;

// Calls use(n, fixed, g) for runs of n <= 4 query heads from g on: few enough for the registers. n and fixed are known
// to the compiler; fixed is `dim` if that is a common one, else 0.
template <class Use>
void each_few_heads(int64_t group, int64_t dim, Use use) {
    auto few = [&](auto n, int64_t g) {
        if (dim == 64) use(n, Const<64>{}, g);
        else if (dim == 128) use(n, Const<128>{}, g);
        else use(n, Const<0>{}, g);
    };
    int64_t g = 0;
    for (; g + 4 <= group; g += 4) few(Const<4>{}, g);
    if (group - g == 3) few(Const<3>{}, g);
    if (group - g == 2) few(Const<2>{}, g);
    if (group - g == 1) few(Const<1>{}, g);
}

// Asks for the row that lies at the same place in the next page: the hardware's prefetcher does not cross pages.
template <class T>
void prefetch(const T* row, int64_t dim) {
    for (int64_t d = 0; d < dim; d += 64 / int64_t(sizeof(T))) __builtin_prefetch(row + d);
}

// scores[g * kSpan + i] = query[g] . keys[i] for n heads and `count` tokens that lie side by side.
template <int n, int fixed, class T>
void score(const float* query, const T* keys, int64_t count, int64_t any_dim, float* scores, const T* next) {
    const int64_t dim = fixed ? fixed : any_dim;
    for (int64_t i = 0; i < count; i++) {
        const T* key = keys + i * dim;
        prefetch(next + i * dim, dim);
        Floats sums[n] = {};
        int64_t d = 0;
        for (; d + kWidth <= dim; d += kWidth) {
            Floats k = load_many(key + d);
            for (int g = 0; g < n; g++) sums[g] += load_many(query + g * dim + d) * k;
        }
        for (int g = 0; g < n; g++) {
            float sum = sum_of(sums[g]);
            for (int64_t rest = d; rest < dim; rest++) sum += query[g * dim + rest] * load(key[rest]);
            scores[g * kSpan + i] = sum;
        }
    }
}

// out[g * stride + d] += sum over i of weights[g * kSpan + i] * values[i][d]
template <int n, int fixed, class T>
void weigh(const float* weights, const T* values, int64_t count, int64_t any_dim, float* out, int64_t stride,
           const T* next) {
    constexpr int block = 4;  // registers of a value that are summed at once, for each head
    const int64_t dim = fixed ? fixed : any_dim;
    int64_t d = 0;
    for (; d + block * kWidth <= dim; d += block * kWidth) {
        Floats sums[n][block] = {};
        for (int64_t i = 0; i < count; i++) {
            if (d == 0) prefetch(next + i * dim, dim);
            for (int b = 0; b < block; b++) {
                Floats v = load_many(values + i * dim + d + b * kWidth);
                for (int g = 0; g < n; g++) sums[g][b] += weights[g * kSpan + i] * v;
            }
        }
        for (int g = 0; g < n; g++)
            for (int b = 0; b < block; b++)
                for (int j = 0; j < kWidth; j++) out[g * stride + d + b * kWidth + j] += sums[g][b][j];
    }
    for (int64_t i = 0; i < count; i++)
        for (int g = 0; g < n; g++)
            for (int64_t rest = d; rest < dim; rest++)
                out[g * stride + rest] += weights[g * kSpan + i] * load(values[i * dim + rest]);
}

// One key/value head of one task. partial: per query head of the group its largest score, the sum of the weights
// relative to it, and the weighted sum of the values [Dv]. scores: room for G * kSpan.
template <class T>
void attend_span(const Layer& layer, const Step& step, const Task& task, int64_t kv_head, const float* query,
                 float* scores, float* partial) {
    const int64_t group = layer.q_heads / layer.kv_heads, dim = layer.dim, value_dim = layer.value_dim;
    const int64_t size = layer.page_size, count = task.last - task.first, stride = value_dim + 2;
    const int64_t* pages = step.page_table + task.row * step.table_stride;
    auto each_run = [&](const void* pool, int64_t width, auto use) {  // of tokens side by side in a page
        auto address = [&](int64_t at) {
            return (const T*)pool + ((pages[at / size] * layer.kv_heads + kv_head) * size + at % size) * width;
        };
        for (int64_t at = task.first, n; at < task.last; at += n) {
            n = std::min(size - at % size, task.last - at);
            use(at - task.first, address(at), n, address(std::min(at + n, task.last - 1)));
        }
    };
    each_run(layer.keys, dim, [&](int64_t token, const T* keys, int64_t n, const T* next) {
        each_few_heads(group, dim, [&](auto heads, auto fixed, int64_t g) {
            score<heads, fixed>(query + g * dim, keys, n, dim, scores + g * kSpan + token, next);
        });
    });
    for (int64_t g = 0; g < group; g++) {
        float *s = scores + g * kSpan, *result = partial + g * stride, largest = -INFINITY, sum = 0;
        for (int64_t i = 0; i < count; i++) s[i] *= layer.scale;
        if (layer.softcap > 0)
            for (int64_t i = 0; i < count; i++) s[i] = layer.softcap * std::tanh(s[i] / layer.softcap);
        for (int64_t i = 0; i < count; i++) largest = std::max(largest, s[i]);
        for (int64_t i = 0; i < count; i++) sum += s[i] = fast_exp(s[i] - largest);
        result[0] = largest;
        result[1] = sum;
        std::fill(result + 2, result + stride, 0.0f);
    }
    each_run(layer.values, value_dim, [&](int64_t token, const T* values, int64_t n, const T* next) {
        each_few_heads(group, value_dim, [&](auto heads, auto fixed, int64_t g) {
            float* out = partial + g * stride + 2;
            weigh<heads, fixed>(scores + g * kSpan + token, values, n, value_dim, out, stride, next);
        });
    });
}

// Joins the partial results of a row's spans, `stride` floats apart, and the sink of the head.
template <class T>
void join(const float* partial, int64_t spans, int64_t stride, int64_t value_dim, const float* sink, T* out) {
    float largest = sink ? *sink : -INFINITY;
    for (int64_t s = 0; s < spans; s++) largest = std::max(largest, partial[s * stride]);
    float total = sink ? fast_exp(*sink - largest) : 0.0f;
    for (int64_t s = 0; s < spans; s++) total += partial[s * stride + 1] * fast_exp(partial[s * stride] - largest);
    for (int64_t d = 0; d < value_dim; d++) {
        float sum = 0;
        for (int64_t s = 0; s < spans; s++)
            sum += partial[s * stride + 2 + d] * fast_exp(partial[s * stride] - largest);
        store(out[d], sum / total);
    }
}

template <class T>
void attend(const Layer& layer, const Step& step, const T* query, int64_t q_stride, const T* key, int64_t k_stride,
            const T* value, int64_t v_stride, T* out) {
    static thread_local std::vector<Task> tasks;
    static thread_local std::vector<float> partials;
    const int64_t group = layer.q_heads / layer.kv_heads, value_dim = layer.value_dim;
    tasks.clear();
    for (int64_t row = 0; row < step.decodes; row++) {
        int64_t first = layer.window ? std::max<int64_t>(0, step.kv_len[row] - layer.window) : 0;
        int64_t count = step.kv_len[row] - first, spans = (count + kSpan - 1) / kSpan;
        for (int64_t s = 0; s < spans; s++)
            tasks.push_back({row, first + s * kSpan, std::min(first + (s + 1) * kSpan, step.kv_len[row]), s, spans});
    }
    const int64_t head_floats = value_dim + 2, task_floats = layer.q_heads * head_floats;
    partials.resize(tasks.size() * task_floats);
    const Task* all = tasks.data();
    float* results = partials.data();
    const int64_t num_tasks = tasks.size();
#pragma omp parallel
    {
        std::vector<float> room(group * (kSpan + layer.dim));
        float *scores = room.data(), *q = scores + group * kSpan;
#pragma omp for
        for (int64_t t = 0; t < step.tokens; t++) write_kv(layer, step, t, key, k_stride, value, v_stride);
#pragma omp for collapse(2) schedule(dynamic)
        for (int64_t i = 0; i < num_tasks; i++)
            for (int64_t h = 0; h < layer.kv_heads; h++) {
                const T* from = query + all[i].row * q_stride + h * group * layer.dim;
                for (int64_t d = 0; d < group * layer.dim; d++) q[d] = load(from[d]);
                attend_span<T>(layer, step, all[i], h, q, scores, results + i * task_floats + h * group * head_floats);
            }
#pragma omp for
        for (int64_t i = 0; i < num_tasks; i++)
            if (all[i].span == 0)
                for (int64_t h = 0; h < layer.q_heads; h++)
                    join(results + i * task_floats + h * head_floats, all[i].spans, task_floats, value_dim,
                         layer.sinks ? layer.sinks + h : nullptr,
                         out + (all[i].row * layer.q_heads + h) * value_dim);
    }
}

}  // namespace

#define EXPORT(T, suffix)                                                                                             \
    void attend_##suffix(const Layer* layer, const Step* step, const T* query, int64_t q_stride, const T* key,        \
                         int64_t k_stride, const T* value, int64_t v_stride, T* out) {                                \
        attend(*layer, *step, query, q_stride, key, k_stride, value, v_stride, out);                                  \
    }

extern "C" {
EXPORT(float, float32)
EXPORT(bf16, bfloat16)
}
