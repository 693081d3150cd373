// Attention over pages, reading them where they lie. engine/attention/sdpa.py computes the same in torch and says what
// it means.
//
// A task is a tile of queries of one sequence, with all query heads that share a key/value head: its rows. They see
// the same keys, which are read once for all of them, block by block, with a running softmax. Where there are single
// queries enough for all threads, a task takes several key/value heads, page by page: memory is read faster in longer
// stretches.
//
// The context is cut into spans of kSpan tokens, whose results are joined one by one; those of a single query are tasks
// of their own. Spans and blocks begin at fixed positions, so that the result of a query does not depend on what else
// is in its tile or step.
//
// T tokens, Hq query heads, Hkv key/value heads, G = Hq / Hkv, D head size, Dv value size

#include <omp.h>

#include "tile.h"

namespace {

constexpr int64_t kTileRows = 32;  // of a tile: queries * G, unless G alone is more
constexpr int64_t kSpan = 512;     // tokens of context

struct Task {
    int64_t part, row, queries;  // rows [row, row + queries) of the batch
    int64_t position;            // of the first query
    int64_t first, last;         // tokens of context
    int64_t kv_head, kv_heads;   // the first of its key/value heads, and how many
    int64_t spans, slot;         // split into so many tasks, if not 1; this one's place among the split ones
};

template <class T>
void write_kv(const Attention& layer, const Step& step, int64_t t, const T* key, const T* value) {
    int64_t page = step.slots[t] / layer.page_size, offset = step.slots[t] % layer.page_size;
    for (int64_t h = 0; h < layer.kv_heads; h++) {
        int64_t at = (page * layer.kv_heads + h) * layer.page_size + offset;
        std::memcpy((T*)layer.keys + at * layer.dim, key + h * layer.dim, layer.dim * sizeof(T));
        std::memcpy((T*)layer.values + at * layer.value_dim, value + h * layer.value_dim, layer.value_dim * sizeof(T));
    }
}

// The scores, weights and weighted values of the task's rows with the tokens [first, last) of one span. q [R, D]
template <class T>
void attend_span(const Attention& layer, const Step& step, const Task& task, int64_t first, int64_t last,
                 const float* q, float* scores, float* results) {
    const int64_t group = layer.q_heads / layer.kv_heads, rows = task.queries * group, all_rows = task.kv_heads * rows;
    const int64_t dim = layer.dim, value_dim = layer.value_dim, size = layer.page_size, stride = kHead + value_dim;
    const int64_t* pages = step.page_table + task.part * step.table_stride;
    std::fill(results, results + all_rows * stride, 0.0f);
    for (int64_t r = 0; r < all_rows; r++) results[r * stride] = -INFINITY;

    for (int64_t block = first / kBlock * kBlock; block < last; block += kBlock) {
        const int64_t end = std::min(block + kBlock, last);
        auto each_run = [&](const void* pool, int64_t width, auto use) {  // of tokens side by side in a page
            auto address = [&](int64_t at, int64_t h) {
                const int64_t head = pages[at / size] * layer.kv_heads + task.kv_head + h;
                return (const T*)pool + (head * size + at % size) * width;
            };
            for (int64_t at = std::max(block, first), n; at < end; at += n) {
                n = std::min(size - at % size, end - at);
                for (int64_t h = 0; h < task.kv_heads; h++)
                    use(at - block, h * rows, address(at, h), n, address(std::min(at + size, end - 1), h));
            }
        };
        each_run(layer.keys, dim, [&](int64_t token, int64_t first_row, const T* keys, int64_t n, const T* next) {
            each_few_rows(rows, dim, [&](auto few, auto fixed, int64_t r) {
                r += first_row;
                score<few, fixed>(q + r * dim, keys, n, dim, scores + r * kBlock + token, next);
            });
        });
        for (int64_t r = 0; r < all_rows; r++) {
            int64_t hi = task.position + r % rows / group + 1, lo = layer.window ? hi - layer.window : 0;
            soften(scores + r * kBlock, std::max<int64_t>(lo - block, 0), std::min(hi, end) - block, end - block,
                   layer.softcap, results + r * stride, value_dim);
        }
        each_run(layer.values, value_dim, [&](int64_t token, int64_t first_row, const T* values, int64_t n,
                                              const T* next) {
            each_few_rows(rows, value_dim, [&](auto few, auto fixed, int64_t r) {
                r += first_row;
                weigh<few, fixed>(scores + r * kBlock + token, values, n, value_dim, results + r * stride + kHead,
                                  stride, next);
            });
        });
    }
}

// Adds the result of a row with a span to that with the spans before.
void join(float* row, const float* span, int64_t value_dim) {
    if (span[1] == 0) return;  // it saw nothing there
    if (row[1] == 0) return (void)std::memcpy(row, span, (kHead + value_dim) * sizeof(float));
    const float largest = std::max(row[0], span[0]);
    const float mine = fast_exp(row[0] - largest), its = fast_exp(span[0] - largest);
    row[0] = largest;
    for (int64_t i = 1; i < kHead + value_dim; i++) row[i] = row[i] * mine + span[i] * its;
}

// Divides by the sum of the weights, of which the sink of the head is one.
template <class T>
void finish(const float* row, int64_t value_dim, const float* sink, T* out) {
    const float largest = sink ? std::max(*sink, row[0]) : row[0], worth = fast_exp(row[0] - largest);
    const float total = row[1] * worth + (sink ? fast_exp(*sink - largest) : 0.0f);
    for (int64_t d = 0; d < value_dim; d++) store(out[d], row[kHead + d] * worth / total);
}

// Room of R rows, the key/value heads of the task * its rows, head by head: q [R, D], scores [R, kBlock], and results
// [R, kHead + Dv] twice. The task's own are the second ones.
template <class T>
void attend_task(const Attention& layer, const Step& step, const Task& task, const T* query, int64_t q_stride, float* q,
                 float* scores, float* span, float* results) {
    const int64_t group = layer.q_heads / layer.kv_heads, dim = layer.dim, stride = kHead + layer.value_dim;
    const int64_t all_rows = task.kv_heads * task.queries * group;
    for (int64_t h = 0; h < task.kv_heads; h++)
        for (int64_t i = 0; i < task.queries; i++) {
            const T* from = query + (task.row + i) * q_stride + (task.kv_head + h) * group * dim;
            float* to = q + (h * task.queries + i) * group * dim;
            for (int64_t d = 0; d < group * dim; d++) to[d] = load(from[d]) * layer.scale;
        }
    std::fill(results, results + all_rows * stride, 0.0f);
    for (int64_t first = task.first, last; first < task.last; first = last) {
        last = std::min((first / kSpan + 1) * kSpan, task.last);
        attend_span<T>(layer, step, task, first, last, q, scores, span);
        for (int64_t r = 0; r < all_rows; r++) join(results + r * stride, span + r * stride, layer.value_dim);
    }
}

// The tokens of context that the first query of a tile sees begin here.
int64_t first_seen(const Attention& layer, int64_t position) {
    return layer.window ? std::max<int64_t>(0, position + 1 - layer.window) : 0;
}

int64_t num_spans(const Attention& layer, const Step& step, int64_t part) {
    if (step.q_start[part + 1] - step.q_start[part] != 1) return 1;
    const int64_t last = step.kv_len[part] - 1;
    return last / kSpan - first_seen(layer, last) / kSpan + 1;
}

// -> how many spans the split queries have, all together
int64_t make_tasks(const Attention& layer, const Step& step, std::vector<Task>& tasks) {
    const int64_t group = layer.q_heads / layer.kv_heads, tile = std::max<int64_t>(1, kTileRows / group);
    int64_t singles = 0, slots = 0;
    for (int64_t part = 0; part < step.parts; part++)
        if (step.q_start[part + 1] - step.q_start[part] == 1) singles += num_spans(layer, step, part);
    const int64_t together = singles < 4 * omp_get_max_threads() ? 1 : std::max<int64_t>(1, kTileRows / 2 / group);
    tasks.clear();
    for (int64_t part = 0; part < step.parts; part++) {
        const int64_t count = step.q_start[part + 1] - step.q_start[part], start = step.kv_len[part] - count;
        for (int64_t i = 0; i < count; i += tile) {
            const int64_t queries = std::min(tile, count - i), position = start + i, last = position + queries;
            const int64_t first = first_seen(layer, position), spans = num_spans(layer, step, part);
            for (int64_t s = 0; s < spans; s++) {
                const int64_t begin = (first / kSpan + s) * kSpan;
                Task task{part, step.q_start[part] + i, queries, position, std::max(first, begin),
                          s + 1 < spans ? begin + kSpan : last, 0, count == 1 ? together : 1, spans, slots};
                slots += spans > 1;
                for (; task.kv_head < layer.kv_heads; task.kv_head += task.kv_heads) {
                    task.kv_heads = std::min(task.kv_heads, layer.kv_heads - task.kv_head);
                    tasks.push_back(task);
                }
            }
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
    int64_t rows = 0;
    for (const Task& task : made) rows = std::max(rows, task.kv_heads * task.queries * group);
    const Task* tasks = made.data();
    float* split_results = split.data();
    const int64_t num_tasks = made.size();
    auto sink = [&](int64_t head) { return layer.sinks ? layer.sinks + head : nullptr; };
    auto place = [&](int64_t row, int64_t head) { return out + (row * layer.q_heads + head) * layer.value_dim; };
#pragma omp parallel
    {
        static thread_local std::vector<float> room;
        room.resize(rows * (layer.dim + kBlock + 2 * stride));
        float *q = room.data(), *scores = q + rows * layer.dim, *span = scores + rows * kBlock;
        float* own = span + rows * stride;
#pragma omp for
        for (int64_t t = 0; t < step.tokens; t++) write_kv(layer, step, t, key + t * k_stride, value + t * v_stride);
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < num_tasks; i++) {
            const Task& task = tasks[i];
            const bool whole = task.spans == 1;
            float* results = whole ? own : split_results + (task.slot * layer.q_heads + task.kv_head * group) * stride;
            attend_task(layer, step, task, query, q_stride, q, scores, span, results);
            for (int64_t h = 0, r = 0; whole && h < task.kv_heads; h++)
                for (int64_t row = task.row; row < task.row + task.queries; row++)
                    for (int64_t head = (task.kv_head + h) * group, g = 0; g < group; g++, head++, r++)
                        finish(results + r * stride, layer.value_dim, sink(head), place(row, head));
        }
#pragma omp for
        for (int64_t i = 0; i < num_tasks; i++)
            if (tasks[i].spans > 1 && (i == 0 || tasks[i - 1].row != tasks[i].row))
                for (int64_t head = 0; head < layer.q_heads; head++) {
                    float* joined = split_results + (tasks[i].slot * layer.q_heads + head) * stride;
                    for (int64_t s = 1; s < tasks[i].spans; s++)
                        join(joined, joined + s * layer.q_heads * stride, layer.value_dim);
                    finish(joined, layer.value_dim, sink(head), place(tasks[i].row, head));
                }
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
