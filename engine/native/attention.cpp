// Attention over pages, reading them where they lie. engine/attention/sdpa.py computes the same in torch and says what
// it means.
//
// A task is a tile of queries of one sequence, with all query heads that share a key/value head: its rows. They see
// the same keys, which are read once for all of them, block by block, with a running softmax. The long context of a
// single query is split into several tasks, whose results are joined.
//
// T tokens, Hq query heads, Hkv key/value heads, G = Hq / Hkv, D head size, Dv value size

#include "kernels.h"

namespace {

constexpr int64_t kTileRows = 32;  // of a tile: queries * G, unless G alone is more
constexpr int64_t kBlock = 256;    // tokens of context whose scores are there at once
constexpr int64_t kSplit = 512;    // tokens of context that one task of a single query attends to

struct Task {
    int64_t part, row, queries;  // rows [row, row + queries) of the batch
    int64_t position;            // of the first query
    int64_t first, last;         // tokens of context
    int64_t spans, slot;         // split into so many tasks, if not 1; this one's place among the split ones
};

// The result of a row of a task: the largest score, the sum of the weights relative to it, the weighted values [Dv].
constexpr int64_t kHead = 2;

template <class T>
void write_kv(const Attention& layer, const Step& step, int64_t t, const T* key, const T* value) {
    int64_t page = step.slots[t] / layer.page_size, offset = step.slots[t] % layer.page_size;
    for (int64_t h = 0; h < layer.kv_heads; h++) {
        int64_t at = (page * layer.kv_heads + h) * layer.page_size + offset;
        std::memcpy((T*)layer.keys + at * layer.dim, key + h * layer.dim, layer.dim * sizeof(T));
        std::memcpy((T*)layer.values + at * layer.value_dim, value + h * layer.value_dim, layer.value_dim * sizeof(T));
    }
}

template <int n>
using Const = std::integral_constant<int, n>;

// Calls use(n, fixed, r) for n <= 4 rows from r on: few enough for the registers. n and fixed are known to the
// compiler; fixed is `dim` if that is a common one, else 0.
template <class Use>
void each_few_rows(int64_t rows, int64_t dim, Use use) {
    auto few = [&](auto n, int64_t r) {
        if (dim == 64) use(n, Const<64>{}, r);
        else if (dim == 128) use(n, Const<128>{}, r);
        else use(n, Const<0>{}, r);
    };
    int64_t r = 0;
    for (; r + 4 <= rows; r += 4) few(Const<4>{}, r);
    if (rows - r == 3) few(Const<3>{}, r);
    if (rows - r == 2) few(Const<2>{}, r);
    if (rows - r == 1) few(Const<1>{}, r);
}

// Asks for the row that lies at the same place in the next page: the hardware's prefetcher does not cross pages.
template <class T>
void prefetch(const T* row, int64_t dim) {
    for (int64_t d = 0; d < dim; d += 64 / int64_t(sizeof(T))) __builtin_prefetch(row + d);
}

// scores[g * kBlock + i] = query[g] . keys[i] for n rows and `count` tokens that lie side by side.
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
            scores[g * kBlock + i] = sum;
        }
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
        Floats sums[n][block] = {};
        for (int64_t i = 0; i < count; i++) {
            if (d == 0) prefetch(next + i * dim, dim);
            for (int b = 0; b < block; b++) {
                Floats v = load_many(values + i * dim + d + b * kWidth);
                for (int g = 0; g < n; g++) sums[g][b] += weights[g * kBlock + i] * v;
            }
        }
        for (int g = 0; g < n; g++)
            for (int b = 0; b < block; b++)
                for (int j = 0; j < kWidth; j++) out[g * stride + d + b * kWidth + j] += sums[g][b][j];
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
    float largest = result[0], sum = 0;
    for (int64_t i = lo; i < hi; i++) largest = std::max(largest, scores[i]);
    for (int64_t i = lo; i < hi; i++) sum += scores[i] = fast_exp(scores[i] - largest);
    if (result[0] != largest) {
        float factor = fast_exp(result[0] - largest);
        for (int64_t d = 1; d < value_dim + kHead; d++) result[d] *= factor;
    }
    result[0] = largest;
    result[1] += sum;
}

// One key/value head of a task. Room: q [rows, D], scores [rows, kBlock], results [rows, kHead + Dv].
template <class T>
void attend_task(const Attention& layer, const Step& step, const Task& task, int64_t kv_head, const T* query,
                 int64_t q_stride, float* q, float* scores, float* results) {
    const int64_t group = layer.q_heads / layer.kv_heads, rows = task.queries * group;
    const int64_t dim = layer.dim, value_dim = layer.value_dim, size = layer.page_size, stride = kHead + value_dim;
    const int64_t* pages = step.page_table + task.part * step.table_stride;
    for (int64_t i = 0; i < task.queries; i++) {
        const T* from = query + (task.row + i) * q_stride + kv_head * group * dim;
        for (int64_t d = 0; d < group * dim; d++) q[i * group * dim + d] = load(from[d]) * layer.scale;
    }
    std::fill(results, results + rows * stride, 0.0f);
    for (int64_t r = 0; r < rows; r++) results[r * stride] = -INFINITY;

    for (int64_t block = task.first; block < task.last; block += kBlock) {
        const int64_t end = std::min(block + kBlock, task.last);
        auto each_run = [&](const void* pool, int64_t width, auto use) {  // of tokens side by side in a page
            auto address = [&](int64_t at) {
                return (const T*)pool + ((pages[at / size] * layer.kv_heads + kv_head) * size + at % size) * width;
            };
            for (int64_t at = block, n; at < end; at += n) {
                n = std::min(size - at % size, end - at);
                use(at - block, address(at), n, address(std::min(at + n, end - 1)));
            }
        };
        each_run(layer.keys, dim, [&](int64_t token, const T* keys, int64_t n, const T* next) {
            each_few_rows(rows, dim, [&](auto few, auto fixed, int64_t r) {
                score<few, fixed>(q + r * dim, keys, n, dim, scores + r * kBlock + token, next);
            });
        });
        for (int64_t r = 0; r < rows; r++) {
            int64_t hi = task.position + r / group + 1, lo = layer.window ? hi - layer.window : 0;
            soften(scores + r * kBlock, std::max<int64_t>(lo - block, 0), std::min(hi, end) - block, end - block,
                   layer.softcap, results + r * stride, value_dim);
        }
        each_run(layer.values, value_dim, [&](int64_t token, const T* values, int64_t n, const T* next) {
            each_few_rows(rows, value_dim, [&](auto few, auto fixed, int64_t r) {
                weigh<few, fixed>(scores + r * kBlock + token, values, n, value_dim, results + r * stride + kHead,
                                  stride, next);
            });
        });
    }
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
            sum += partial[s * stride + kHead + d] * fast_exp(partial[s * stride] - largest);
        store(out[d], sum / total);
    }
}

// -> how many of the tasks are parts of a split one
int64_t make_tasks(const Attention& layer, const Step& step, std::vector<Task>& tasks) {
    const int64_t tile = std::max<int64_t>(1, kTileRows / (layer.q_heads / layer.kv_heads));
    int64_t slots = 0;
    tasks.clear();
    for (int64_t part = 0; part < step.parts; part++) {
        const int64_t count = step.q_start[part + 1] - step.q_start[part], start = step.kv_len[part] - count;
        for (int64_t i = 0; i < count; i += tile) {
            const int64_t queries = std::min(tile, count - i), position = start + i, last = position + queries;
            const int64_t first = layer.window ? std::max<int64_t>(0, position + 1 - layer.window) : 0;
            const int64_t spans = count == 1 ? (last - first + kSplit - 1) / kSplit : 1;
            for (int64_t s = 0; s < spans; s++)
                tasks.push_back({part, step.q_start[part] + i, queries, position, first + s * kSplit,
                                 s + 1 < spans ? first + (s + 1) * kSplit : last, spans, spans > 1 ? slots++ : 0});
        }
    }
    return slots;
}

}  // namespace

template <class T>
void attend(const Attention& layer, const Step& step, const T* query, int64_t q_stride, const T* key, int64_t k_stride,
            const T* value, int64_t v_stride, T* out) {
    static thread_local std::vector<Task> made;
    static thread_local std::vector<float> split;
    const int64_t group = layer.q_heads / layer.kv_heads, stride = kHead + layer.value_dim;
    split.resize(make_tasks(layer, step, made) * layer.q_heads * stride);
    int64_t rows = group;
    for (const Task& task : made) rows = std::max(rows, task.queries * group);
    const Task* tasks = made.data();
    float* split_results = split.data();
    const int64_t num_tasks = made.size();
    auto sink = [&](int64_t head) { return layer.sinks ? layer.sinks + head : nullptr; };
    auto place = [&](int64_t row, int64_t head) { return out + (row * layer.q_heads + head) * layer.value_dim; };
#pragma omp parallel
    {
        static thread_local std::vector<float> room;
        room.resize(rows * (layer.dim + kBlock + stride));
        float *q = room.data(), *scores = q + rows * layer.dim, *own = scores + rows * kBlock;
#pragma omp for
        for (int64_t t = 0; t < step.tokens; t++) write_kv(layer, step, t, key + t * k_stride, value + t * v_stride);
#pragma omp for collapse(2) schedule(dynamic)
        for (int64_t i = 0; i < num_tasks; i++)
            for (int64_t h = 0; h < layer.kv_heads; h++) {
                const Task& task = tasks[i];
                const bool whole = task.spans == 1;
                float* results = whole ? own : split_results + (task.slot * layer.q_heads + h * group) * stride;
                attend_task(layer, step, task, h, query, q_stride, q, scores, results);
                for (int64_t r = 0; whole && r < task.queries * group; r++) {
                    int64_t head = h * group + r % group;
                    join(results + r * stride, 1, 0, layer.value_dim, sink(head), place(task.row + r / group, head));
                }
            }
#pragma omp for
        for (int64_t i = 0; i < num_tasks; i++)
            if (tasks[i].spans > 1 && (i == 0 || tasks[i - 1].row != tasks[i].row))
                for (int64_t head = 0; head < layer.q_heads; head++)
                    join(split_results + (tasks[i].slot * layer.q_heads + head) * stride, tasks[i].spans,
                         layer.q_heads * stride, layer.value_dim, sink(head), place(tasks[i].row, head));
    }
}

#define EXPORT(T, suffix)                                                                                             \
    template void attend<T>(const Attention&, const Step&, const T*, int64_t, const T*, int64_t, const T*, int64_t,   \
                            T*);                                                                                      \
    extern "C" void attend_##suffix(const Attention* layer, const Step* step, const T* query, int64_t q_stride,       \
                                    const T* key, int64_t k_stride, const T* value, int64_t v_stride, T* out) {       \
        attend(*layer, *step, query, q_stride, key, k_stride, value, v_stride, out);                                  \
    }

EXPORT(float, float32)
EXPORT(bf16, bfloat16)
