// Attention over the page pool: online softmax over tiles of tokens, partial results merged by their sums of exponentials
// (FlashAttention, arXiv 2205.14135; the split along tokens, flash-decoding).
//
// A part is some query rows that see the same pages. It is cut into units of work:
//
//     part          rows 0..63       rows 64..127     (of a group of three heads)
//     tokens 0..511   unit             unit          for each K/V head: its group's queries are stacked as rows
//     tokens 512..    unit             unit
//
// A row that several units meet gets one partial result from each: output, maximum, sum of exponentials.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "gemm.h"

namespace prefixcache {

constexpr int PAGE = 16;              // tokens in one page; a page is one panel of keys
constexpr int TOKEN_TILE = 64;
constexpr int STACKED_ROWS = 192;     // most queries of a unit: rows x the group's heads
constexpr int FEW_ROWS = 6;           // up to so many, dot products are quicker than turning keys into panels
constexpr long FEW_AHEAD = 32;        // so many tokens ahead those of few queries are fetched
constexpr long MIN_SPLIT_TOKENS = 128;
static_assert(FEW_ROWS <= TILE_ROWS && TILE_ROWS <= 8 && PAGE == PANEL, "one tile, one reduction, one panel a page");

struct Part {
    int32_t first_row_index;  // in the list of rows
    int32_t num_rows;
    int32_t first_page_index;  // in the list of pages
    int32_t num_tokens;        // what the last row sees
    int32_t is_causal;         // row i sees num_tokens - (num_rows - 1 - i) tokens; else all see all
};

// Who attends to what, in one step.
struct Queries {
    const Part* parts;
    int64_t num_parts;
    const int32_t* rows;   // of all parts
    const int32_t* pages;  // of all parts
};

struct Unit {
    int part, first_kv_head, num_kv_heads;
    long first_row, num_rows;  // of the part
    long first_token, end_token;
    long first_ordinal;        // in the plan's list: the first row's, then the next rows'
};

struct AttentionShape {
    int num_heads, num_kv_heads, head_dim;

    int group() const { return num_heads / num_kv_heads; }
};

// The units of one set of queries, the same in every layer that has them.
struct AttentionPlan {
    std::vector<Unit> units;
    std::vector<int> num_partials;    // of each row
    std::vector<long> first_partial;  // of each row
    std::vector<int> ordinals;        // which of its row's partials a unit writes, for each row of each unit
    std::vector<int> merged_rows;     // rows with several partials
    long total_partials = 0;

    AttentionPlan(const Queries& queries, long num_query_rows, AttentionShape shape, int num_threads)
        : num_partials(num_query_rows, 0), first_partial(num_query_rows, 0) {
        const Part* parts = queries.parts;
        const int32_t* rows = queries.rows;
        const int num_parts = int(queries.num_parts);
        const long rows_per_unit = std::max(1, STACKED_ROWS / shape.group());
        // Few rows: all heads of a token in one unit, so that memory is read in the order in which it lies. Many rows
        // spend their time computing: a head each, so that a unit's rows stay in the nearest cache.
        auto heads_per_unit = [&](const Part& part) {
            return part.num_rows * shape.group() <= FEW_ROWS ? shape.num_kv_heads : 1;
        };
        long num_blocks = 0;
        for (int p = 0; p < num_parts; p++)
            num_blocks += (parts[p].num_rows + rows_per_unit - 1) / rows_per_unit * (shape.num_kv_heads / heads_per_unit(parts[p]));
        // enough units for the threads to share evenly, and no more: each costs a partial result
        const long wanted = std::max<long>(1, 4 * num_threads / std::max<long>(1, num_blocks));
        struct Cut {
            int part;
            long first_row, num_rows, first_token, end_token;
        };
        std::vector<Cut> cuts;
        for (int p = 0; p < num_parts; p++) {
            const Part& part = parts[p];
            for (long row = 0; row < part.num_rows; row += rows_per_unit) {
                const long n = std::min<long>(rows_per_unit, part.num_rows - row);
                const long tokens = part.is_causal ? part.num_tokens - (part.num_rows - row - n) : part.num_tokens;
                const long splits = std::max<long>(1, std::min(wanted, tokens / MIN_SPLIT_TOKENS));
                const long length = (tokens / splits + PAGE - 1) / PAGE * PAGE;
                for (long token = 0; token < tokens; token += length)
                    cuts.push_back({p, row, n, token, std::min(tokens, token + length)});
            }
        }
        for (const Cut& cut : cuts)
            for (long i = 0; i < cut.num_rows; i++) num_partials[rows[parts[cut.part].first_row_index + cut.first_row + i]]++;
        for (long row = 0; row < num_query_rows; row++) {
            first_partial[row] = total_partials;
            if (num_partials[row] > 1) {
                merged_rows.push_back(int(row));
                total_partials += num_partials[row];
            }
        }
        std::vector<int> num_seen(num_query_rows, 0);
        for (const Cut& cut : cuts) {
            const int heads = heads_per_unit(parts[cut.part]);
            for (int head = 0; head < shape.num_kv_heads; head += heads)
                units.push_back({cut.part, head, heads, cut.first_row, cut.num_rows, cut.first_token, cut.end_token, long(ordinals.size())});
            for (long i = 0; i < cut.num_rows; i++)
                ordinals.push_back(num_seen[rows[parts[cut.part].first_row_index + cut.first_row + i]]++);
        }
        // the longest first, so that no thread is left with one at the end
        std::stable_sort(units.begin(), units.end(), [](const Unit& a, const Unit& b) {
            return a.num_rows * a.num_kv_heads * (a.end_token - a.first_token) >
                   b.num_rows * b.num_kv_heads * (b.end_token - b.first_token);
        });
    }
};

// Partial results of one row: for each head, output [head_dim] weighted by exponentials, their maximum and their sum.
struct Partials {
    HugeVector<float> output;         // [total][num_heads][head_dim]
    std::vector<float> maximum, sum;  // [total][num_heads]

    void resize(long total, AttentionShape shape) {
        if (long(maximum.size()) < total * shape.num_heads) {
            maximum.resize(total * shape.num_heads);
            sum.resize(total * shape.num_heads);
            grow(output, total * shape.num_heads * shape.head_dim);
        }
    }
};

// What one thread needs for a unit, and for a product.
struct Scratch {
    float *query, *output;   // [stacked][head_dim]
    float* scores;           // [TILE_ROWS][TOKEN_TILE]
    float *keys, *values;    // a tile's: panels [head_dim][PAGE], and [TOKEN_TILE][head_dim]
    float *maximum, *sum;    // [stacked], and some more so that eight can be read at once
    HugeVector<float> panel;

    // Lays the buffers out for a model's shape; allocates only where they have never been so large.
    void resize(AttentionShape shape) {
        const long rows = std::max({STACKED_ROWS, shape.group(), FEW_ROWS * shape.num_kv_heads}), D = shape.head_dim;
        const long sizes[] = {rows * D, rows * D, TILE_ROWS * TOKEN_TILE, TOKEN_TILE * D, TOKEN_TILE * D, rows + 8, rows + 8};
        float** const starts[] = {&query, &output, &scores, &keys, &values, &maximum, &sum};
        auto whole_lines = [](long size) { return (size + 15) / 16 * 16; };
        long total = 0;
        for (long size : sizes) total += whole_lines(size);
        grow(memory_, total);
        float* next = memory_.data();
        for (int i = 0; i < 7; i++) {
            *starts[i] = next;
            next += whole_lines(sizes[i]);
        }
    }

  private:
    HugeVector<float> memory_;  // one piece: buffers that each begin at a page's start would crowd the same cache sets
};

template <class KV>
class Attention {
  public:
    // pool: one layer's keys [num_slots][num_kv_heads][head_dim], and its values behind them.
    // query: [num_rows][query_stride], a row's heads one after another. output: [num_rows][num_heads * head_dim].
    Attention(AttentionShape shape, const KV* keys, const KV* values, const float* query, long query_stride, float* output,
              Partials& partials)
        : shape_(shape), keys_(keys), values_(values), query_(query), query_stride_(query_stride), output_(output),
          partials_(partials), slot_stride_(long(shape.num_kv_heads) * shape.head_dim) {}

    void run(const Unit& unit, const AttentionPlan& plan, const Queries& queries, Scratch& scratch) {
        const Part& part = queries.parts[unit.part];
        const long D = shape_.head_dim, group = shape_.group(), stacked = unit.num_rows * group;
        const long all_stacked = stacked * unit.num_kv_heads;
        const int32_t* rows = queries.rows + part.first_row_index + unit.first_row;
        const int32_t* pages = queries.pages + part.first_page_index;
        for (int head = 0; head < unit.num_kv_heads; head++) load_queries(unit, head, rows, scratch);
        std::fill_n(scratch.output, all_stacked * D, 0.0f);
        std::fill_n(scratch.maximum, all_stacked, -INFINITY);
        std::fill_n(scratch.sum, all_stacked, 0.0f);
        for (long token = unit.first_token; token < unit.end_token; token += TOKEN_TILE) {
            const Tile tokens{unit, part, pages, token, std::min<long>(TOKEN_TILE, unit.end_token - token)};
            if (stacked <= FEW_ROWS)
                for (int head = 0; head < unit.num_kv_heads; head++) add_to_few(tokens, head, stacked, scratch);
            else
                add_to_many(tokens, stacked, scratch);
        }
        for (int head = 0; head < unit.num_kv_heads; head++) write(unit, head, plan, rows, scratch);
    }

    // Puts a row's partial results together.
    void merge(int row, const AttentionPlan& plan) {
        const long D = shape_.head_dim, H = shape_.num_heads, first = plan.first_partial[row], n = plan.num_partials[row];
        for (long head = 0; head < H; head++) {
            float top = -INFINITY, total = 0.0f;
            for (long p = first; p < first + n; p++) top = std::max(top, partials_.maximum[p * H + head]);
            float* out = output_ + row * H * D + head * D;
            std::fill_n(out, D, 0.0f);
            for (long p = first; p < first + n; p++) {
                const float weight = std::exp2(partials_.maximum[p * H + head] - top);
                total += weight * partials_.sum[p * H + head];
                const float* part = partials_.output.data() + (p * H + head) * D;
                for (long d = 0; d < D; d++) out[d] += weight * part[d];
            }
            for (long d = 0; d < D; d++) out[d] /= total;
        }
    }

  private:
    // Stacks the group's queries of each row; the softmax scale and the base of 2 go into them.
    void load_queries(const Unit& unit, int head, const int32_t* rows, Scratch& scratch) {
        const long D = shape_.head_dim, group = shape_.group();
        const float scale = 1.44269504f / std::sqrt(float(D));
        for (long row = 0; row < unit.num_rows; row++) {
            const float* q = query_ + rows[row] * query_stride_ + (unit.first_kv_head + head) * group * D;
            float* to = scratch.query + (head * unit.num_rows + row) * group * D;
            for (long i = 0; i < group * D; i++) to[i] = q[i] * scale;
        }
    }

    const KV* at(const KV* pool, int kv_head, const int32_t* pages, long token) const {
        return pool + (long(pages[token / PAGE]) * PAGE + token % PAGE) * slot_stride_ + kv_head * shape_.head_dim;
    }

    // Asks memory for what will be wanted soon: keys and values of `n` tokens within one page.
    void fetch(int kv_head, const int32_t* pages, long token, long n) const {
        const KV* key = at(keys_, kv_head, pages, token);
        const KV* value = at(values_, kv_head, pages, token);
        for (long i = 0; i < n; i++)
            for (long d = 0; d < shape_.head_dim; d += 64 / long(sizeof(KV))) {
                __builtin_prefetch(key + i * slot_stride_ + d);
                __builtin_prefetch(value + i * slot_stride_ + d);
            }
    }

    // Some tokens, seen by a unit's rows.
    struct Tile {
        const Unit& unit;
        const Part& part;
        const int32_t* pages;
        long token, num_tokens;

        // How many of the tile's tokens the unit's row sees; below 1 if none.
        long seen_by(long row) const {
            const long all = part.is_causal ? part.num_tokens - (part.num_rows - 1 - unit.first_row - row) : part.num_tokens;
            return std::min(num_tokens, all - token);
        }
    };

    // Few queries: each key and value is used where it lies.
    void add_to_few(const Tile& t, int head, long stacked, Scratch& scratch) {
        const long D = shape_.head_dim, base = head * stacked;  // where the head's rows begin in the scratch
        const int kv_head = t.unit.first_kv_head + head;
        float* scores = scratch.scores;
        for (long i = 0; i < t.num_tokens; i += 8) {  // within one page: tiles and pages are multiples of 8
            const KV* key = at(keys_, kv_head, t.pages, t.token + i);
            if (t.token + i + FEW_AHEAD < t.unit.end_token) fetch(kv_head, t.pages, t.token + i + FEW_AHEAD, 8);
            for (long s = 0; s < stacked; s++) {
                const float* q = scratch.query + (base + s) * D;
                Float8 dots[8] = {};
                for (long d = 0; d < D; d += 8) {
                    const Float8 x = load(q + d);
                    for (int j = 0; j < 8; j++) dots[j] += x * load(key + j * slot_stride_ + d);
                }
                store(scores + s * TOKEN_TILE + i, reduce(dots, [](Float8 a, Float8 b) { return a + b; }));
            }
        }
        weigh(scores, t.num_tokens, int(stacked), base, scratch, [&](long s) { return t.seen_by((s - base) / shape_.group()); });
        for (long i = 0; i < t.num_tokens; i += PAGE) {
            const KV* page = at(values_, kv_head, t.pages, t.token + i);
            for (long d = 0; d < D; d += PANEL)
                tile<true>(int(stacked), scores + i, TOKEN_TILE, page + d, slot_stride_,
                           std::min<long>(PAGE, t.num_tokens - i), scratch.output + base * D + d, D);
        }
    }

    // Many queries: keys are turned into panels and values made float32 once for all of them. Then a few queries at a time
    // go all the way, so that their scores stay in the nearest cache.
    void add_to_many(const Tile& t, long stacked, Scratch& scratch) {
        const long D = shape_.head_dim, group = shape_.group();
        load_tile(t, scratch);
        for (long s = 0; s < stacked; s += TILE_ROWS) {
            const int rows = int(std::min<long>(TILE_ROWS, stacked - s));
            const long n = t.seen_by((s + rows - 1) / group);  // by the last of them, which sees most
            if (n <= 0) continue;
            float* scores = scratch.scores;
            for (long i = 0; i < n; i += PAGE)
                tile<false>(rows, scratch.query + s * D, D, scratch.keys + i * D, PAGE, D, scores + i, TOKEN_TILE);
            weigh(scores, n, rows, s, scratch, [&](long row) { return t.seen_by(row / group); });
            for (long d = 0; d < D; d += PANEL)
                tile<true>(rows, scores, TOKEN_TILE, scratch.values + d, D, n, scratch.output + s * D + d, D);
        }
    }

    void load_tile(const Tile& t, Scratch& scratch) {
        const long D = shape_.head_dim;
        const int head = t.unit.first_kv_head;
        for (long i = 0; i < t.num_tokens; i += PAGE) {
            const KV* key = at(keys_, head, t.pages, t.token + i);
            const KV* value = at(values_, head, t.pages, t.token + i);
            if (t.token + i + TOKEN_TILE < t.unit.end_token) fetch(head, t.pages, t.token + i + TOKEN_TILE, PAGE);
            float* panel = scratch.keys + i * D;  // [D][PAGE]
            for (long d = 0; d < D; d += 8)
                for (long half = 0; half < PAGE; half += 8) {
                    Float8 square[8];
                    for (int j = 0; j < 8; j++) square[j] = load(key + (half + j) * slot_stride_ + d);
                    transpose(square);
                    for (int j = 0; j < 8; j++) store(panel + (d + j) * PAGE + half, square[j]);
                }
            float* to = scratch.values + i * D;
            for (long j = 0; j < std::min<long>(PAGE, t.num_tokens - i); j++)
                for (long d = 0; d < D; d += 8) store(to + j * D + d, load(value + j * slot_stride_ + d));
        }
    }

    // Online softmax of up to eight rows of scores, together: turns them into weights, and scales down what the rows, from
    // `s` on, have gathered before. num_seen: how many of the scores each row sees, maybe none.
    template <class Seen>
    void weigh(float* scores, long num_scores, int rows, long s, Scratch& scratch, Seen&& num_seen) {
        const long end = (num_scores + 7) / 8 * 8;
        Float8 eight[8] = {};
        for (int r = 0; r < rows; r++) {
            float* row = scores + r * TOKEN_TILE;
            for (long t = std::max(0L, num_seen(s + r)); t < end; t++) row[t] = -INFINITY;
            eight[r] = load(row);
            for (long t = 8; t < end; t += 8) eight[r] = max(eight[r], load(row + t));
        }
        const Float8 before = load(scratch.maximum + s);
        const Float8 top = max(before, reduce(eight, [](Float8 a, Float8 b) { return max(a, b); }));
        const Float8 shrink = exp2(before - top);
        for (int r = 0; r < rows; r++) {
            float* row = scores + r * TOKEN_TILE;
            eight[r] = Float8{};
            for (long t = 0; t < end; t += 8) {
                const Float8 weight = exp2(load(row + t) - top[r]);
                store(row + t, weight);
                eight[r] += weight;
            }
        }
        const Float8 sum = load(scratch.sum + s) * shrink + reduce(eight, [](Float8 a, Float8 b) { return a + b; });
        for (int r = 0; r < rows; r++) {
            scratch.maximum[s + r] = top[r];
            scratch.sum[s + r] = sum[r];
            if (shrink[r] == 1.0f) continue;
            float* out = scratch.output + (s + r) * shape_.head_dim;
            for (long d = 0; d < shape_.head_dim; d += 8) store(out + d, load(out + d) * shrink[r]);
        }
    }

    void write(const Unit& unit, int local_head, const AttentionPlan& plan, const int32_t* rows, const Scratch& scratch) {
        const long D = shape_.head_dim, H = shape_.num_heads, group = shape_.group();
        for (long i = 0; i < unit.num_rows; i++) {
            const int row = rows[i];
            const bool is_only = plan.num_partials[row] == 1;
            const long partial = plan.first_partial[row] + plan.ordinals[unit.first_ordinal + i];
            for (long g = 0; g < group; g++) {
                const long s = (local_head * unit.num_rows + i) * group + g;
                const long head = (unit.first_kv_head + local_head) * group + g;
                const float factor = is_only ? 1.0f / scratch.sum[s] : 1.0f;
                float* to = is_only ? output_ + row * H * D + head * D : partials_.output.data() + (partial * H + head) * D;
                for (long d = 0; d < D; d++) to[d] = scratch.output[s * D + d] * factor;
                if (!is_only) {
                    partials_.maximum[partial * H + head] = scratch.maximum[s];
                    partials_.sum[partial * H + head] = scratch.sum[s];
                }
            }
        }
    }

    AttentionShape shape_;
    const KV *keys_, *values_;
    const float* query_;
    long query_stride_;
    float* output_;
    Partials& partials_;
    long slot_stride_;
};

}  // namespace prefixcache
