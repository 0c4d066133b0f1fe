// Attention over the page pool: online softmax over tiles of tokens, partial results merged by their sums of exponentials
// (FlashAttention, arXiv 2205.14135; the split along tokens, flash-decoding).
//
// A part is some query rows that see the same pages. It is cut into units of work:
//
//     part          rows 0..31       rows 32..63
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
constexpr int STACKED_ROWS = 96;      // most queries of a unit: rows x the group's heads
constexpr int FEW_ROWS = 6;           // up to so many, dot products are quicker than turning keys into panels
constexpr long MIN_SPLIT_TOKENS = 128;

struct Part {
    int32_t first_row_index;  // in the list of rows
    int32_t num_rows;
    int32_t first_page_index;  // in the list of pages
    int32_t num_tokens;        // what the last row sees
    int32_t is_causal;         // row i sees num_tokens - (num_rows - 1 - i) tokens; else all see all
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

// One step's units, the same in every layer.
struct AttentionPlan {
    std::vector<Unit> units;
    std::vector<int> num_partials;    // of each row of the step
    std::vector<long> first_partial;  // of each row of the step
    std::vector<int> ordinals;        // which of its row's partials a unit writes, for each row of each unit
    std::vector<int> merged_rows;     // rows with several partials
    long total_partials = 0;

    AttentionPlan(const Part* parts, int num_parts, const int32_t* rows, long num_step_rows, AttentionShape shape,
                  int num_threads)
        : num_partials(num_step_rows, 0), first_partial(num_step_rows, 0) {
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
        for (long row = 0; row < num_step_rows; row++) {
            first_partial[row] = total_partials;
            if (num_partials[row] > 1) {
                merged_rows.push_back(int(row));
                total_partials += num_partials[row];
            }
        }
        std::vector<int> num_seen(num_step_rows, 0);
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
    std::vector<float> output, maximum, sum;  // [total][num_heads][head_dim], [total][num_heads] twice

    void resize(long total, AttentionShape shape) {
        if (long(maximum.size()) < total * shape.num_heads) {
            maximum.resize(total * shape.num_heads);
            sum.resize(total * shape.num_heads);
            output.resize(total * shape.num_heads * shape.head_dim);
        }
    }
};

// What one thread needs for a unit, and for a product.
struct Scratch {
    std::vector<float> query, output, scores, keys, values, maximum, sum;
    std::vector<float> panel;

    void resize(AttentionShape shape) {
        const size_t rows = std::max({STACKED_ROWS, shape.group(), FEW_ROWS * shape.num_kv_heads});
        query.resize(rows * shape.head_dim);
        output.resize(rows * shape.head_dim);
        scores.resize(rows * TOKEN_TILE);
        keys.resize(size_t(TOKEN_TILE) * shape.head_dim);
        values.resize(size_t(TOKEN_TILE) * shape.head_dim);
        maximum.resize(rows);
        sum.resize(rows);
    }
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

    void run(const Unit& unit, const Part& part, const AttentionPlan& plan, const int32_t* rows, const int32_t* pages,
             Scratch& scratch) {
        const long D = shape_.head_dim, group = shape_.group(), stacked = unit.num_rows * group;
        const long all_stacked = stacked * unit.num_kv_heads;
        rows += part.first_row_index + unit.first_row;
        pages += part.first_page_index;
        for (int head = 0; head < unit.num_kv_heads; head++) load_queries(unit, head, rows, scratch);
        std::fill_n(scratch.output.begin(), all_stacked * D, 0.0f);
        std::fill_n(scratch.maximum.begin(), all_stacked, -INFINITY);
        std::fill_n(scratch.sum.begin(), all_stacked, 0.0f);
        for (long token = unit.first_token; token < unit.end_token; token += TOKEN_TILE) {
            const long n = std::min<long>(TOKEN_TILE, unit.end_token - token);
            for (int head = 0; head < unit.num_kv_heads; head++) {
                const long base = head * stacked;  // where the head's rows begin in the scratch
                const int kv_head = unit.first_kv_head + head;
                if (stacked <= FEW_ROWS)
                    scores_by_dots(kv_head, pages, token, n, base, stacked, scratch);
                else
                    scores_by_panels(kv_head, pages, token, n, stacked, scratch);
                for (long s = 0; s < stacked; s++) {
                    const long row = unit.first_row + s / group;
                    const long seen = part.is_causal ? part.num_tokens - (part.num_rows - 1 - row) : part.num_tokens;
                    add_row(scratch, s, base + s, std::min(n, seen - token));
                }
                add_values(kv_head, pages, token, n, base, stacked, scratch);
            }
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
            float* to = scratch.query.data() + (head * unit.num_rows + row) * group * D;
            for (long i = 0; i < group * D; i++) to[i] = q[i] * scale;
        }
    }

    const KV* at(const KV* pool, int kv_head, const int32_t* pages, long token) const {
        return pool + (long(pages[token / PAGE]) * PAGE + token % PAGE) * slot_stride_ + kv_head * shape_.head_dim;
    }

    void scores_by_dots(int kv_head, const int32_t* pages, long token, long n, long base, long stacked, Scratch& scratch) {
        const long D = shape_.head_dim;
        for (long t = 0; t < n; t += 8) {  // within one page: tiles and pages are multiples of 8
            const KV* key = at(keys_, kv_head, pages, token + t);
            for (long s = 0; s < stacked; s++) {
                const float* q = scratch.query.data() + (base + s) * D;
                Float8 dots[8] = {};
                for (long d = 0; d < D; d += 8) {
                    const Float8 x = load(q + d);
                    for (int i = 0; i < 8; i++) dots[i] += x * load(key + i * slot_stride_ + d);
                }
                transpose(dots);
                const Float8 total = ((dots[0] + dots[1]) + (dots[2] + dots[3])) + ((dots[4] + dots[5]) + (dots[6] + dots[7]));
                store(scratch.scores.data() + s * TOKEN_TILE + t, total);
            }
        }
    }

    void scores_by_panels(int kv_head, const int32_t* pages, long token, long n, long stacked, Scratch& scratch) {
        const long D = shape_.head_dim;
        for (long t = 0; t < n; t += PAGE) {
            const KV* key = at(keys_, kv_head, pages, token + t);
            float* panel = scratch.keys.data();  // [D][PAGE]
            for (long d = 0; d < D; d += 8)
                for (long half = 0; half < PAGE; half += 8) {
                    Float8 square[8];
                    for (int i = 0; i < 8; i++) square[i] = load(key + (half + i) * slot_stride_ + d);
                    transpose(square);
                    for (int i = 0; i < 8; i++) store(panel + (d + i) * PAGE + half, square[i]);
                }
            for (long s = 0; s < stacked; s += TILE_ROWS)
                tile<false>(int(std::min<long>(TILE_ROWS, stacked - s)), scratch.query.data() + s * D, D, panel, PAGE, D,
                            scratch.scores.data() + s * TOKEN_TILE + t, TOKEN_TILE);
        }
    }

    // Online softmax: turns a row's scores into weights, and scales down what it has gathered before.
    void add_row(Scratch& scratch, long score_row, long s, long num_seen) {
        float* scores = scratch.scores.data() + score_row * TOKEN_TILE;
        for (long t = std::max<long>(0, num_seen); t < TOKEN_TILE; t++) scores[t] = -INFINITY;
        if (num_seen <= 0) {
            std::fill_n(scores, TOKEN_TILE, 0.0f);
            return;
        }
        Float8 top8 = load(scores);
        for (long t = 8; t < TOKEN_TILE; t += 8) top8 = max(top8, load(scores + t));
        const float before = scratch.maximum[s], top = std::max(before, max(top8));
        Float8 total = {};
        for (long t = 0; t < TOKEN_TILE; t += 8) {
            const Float8 weight = exp2(load(scores + t) - top);
            store(scores + t, weight);
            total += weight;
        }
        const float shrink = before == top ? 1.0f : std::exp2(before - top);
        scratch.maximum[s] = top;
        scratch.sum[s] = scratch.sum[s] * shrink + sum(total);
        if (shrink != 1.0f) {
            float* out = scratch.output.data() + s * shape_.head_dim;
            for (long d = 0; d < shape_.head_dim; d++) out[d] *= shrink;
        }
    }

    void add_values(int kv_head, const int32_t* pages, long token, long n, long base, long stacked, Scratch& scratch) {
        const long D = shape_.head_dim;
        if (stacked <= TILE_ROWS) {  // each value is read once: from where it lies
            for (long t = 0; t < n; t += PAGE) {
                const KV* page = at(values_, kv_head, pages, token + t);
                for (long d = 0; d < D; d += PANEL)
                    tile<true>(int(stacked), scratch.scores.data() + t, TOKEN_TILE, page + d, slot_stride_,
                               std::min<long>(PAGE, n - t), scratch.output.data() + base * D + d, D);
            }
            return;
        }
        float* values = scratch.values.data();  // [n][D]
        for (long t = 0; t < n; t++) {
            const KV* from = at(values_, kv_head, pages, token + t);
            for (long d = 0; d < D; d += 8) store(values + t * D + d, load(from + d));
        }
        for (long d = 0; d < D; d += PANEL)
            for (long s = 0; s < stacked; s += TILE_ROWS)
                tile<true>(int(std::min<long>(TILE_ROWS, stacked - s)), scratch.scores.data() + s * TOKEN_TILE, TOKEN_TILE,
                           values + d, D, n, scratch.output.data() + (base + s) * D + d, D);
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
