// The forward pass of a Llama-family decoder, layer by layer, as phases that all threads work through together.
#pragma once

#include <cmath>
#include <memory>
#include <vector>

#include "attention.h"
#include "gemm.h"
#include "team.h"

namespace prefixcache {

struct Dims {
    int32_t num_layers, hidden_size, intermediate_size, num_heads, num_kv_heads, head_dim;
    float rms_norm_eps;
};

struct LayerWeights {  // as the model has them, row-major; what a model lacks is null
    const float *input_norm, *q_norm, *k_norm, *mlp_norm;
    const void *qkv, *attention_out, *gate, *up, *down;  // in the decoder's number format
    const float *qkv_bias, *attention_out_bias, *gate_bias, *up_bias, *down_bias;
};

// What one step is made of; all of it belongs to the caller.
struct Step {
    float* hidden;               // [num_rows, hidden_size]: embeddings in, spoilt on the way
    int64_t num_rows;
    const int64_t* positions;    // [num_rows]
    const int64_t* slots;        // [num_rows]: where each row's K/V goes
    const float* rope;           // [2, max_model_len, head_dim]: cos, and sin with the rotation's minus in its first half
    int64_t rope_length;
    void* kv;                    // [num_layers, 2, num_slots, num_kv_heads, head_dim]
    int64_t num_slots;
    Queries queries;             // of all layers but the last
    float* outputs;              // [num_outputs, hidden_size]: the last layer's output
    const int64_t* output_rows;  // [num_outputs]: the rows whose output is wanted, ascending
    int64_t num_outputs;
    Queries output_queries;      // of the last layer; their rows are counted among the output rows
    int32_t num_threads;
};

static inline void rms_norm(const float* x, const float* weight, long n, float eps, float* out) {
    Float8 squares = {};
    for (long i = 0; i < n; i += 8) squares += load(x + i) * load(x + i);
    const float factor = 1.0f / std::sqrt(sum(squares) / float(n) + eps);
    for (long i = 0; i < n; i += 8) store(out + i, load(x + i) * factor * load(weight + i));
}

// One head, in place.
static inline void rotate(float* x, const float* cos, const float* sin, long n) {
    for (long i = 0; i < n / 2; i += 8) {
        const Float8 a = load(x + i), b = load(x + n / 2 + i);
        store(x + i, a * load(cos + i) + b * load(sin + i));
        store(x + n / 2 + i, b * load(cos + n / 2 + i) + a * load(sin + n / 2 + i));
    }
}

class AnyDecoder {
  public:
    virtual ~AnyDecoder() = default;
    virtual void add_layer(const LayerWeights& weights) = 0;  // copies them
    virtual void forward(const Step& step) = 0;
};

// T is the number format of weights and K/V; everything between them is float32.
template <class T>
class Decoder : public AnyDecoder {
  public:
    explicit Decoder(const Dims& dims)
        : dims_(dims), shape_{dims.num_heads, dims.num_kv_heads, dims.head_dim},
          phases_(dims.num_layers * PHASES_PER_LAYER + 1) {
        layers_.reserve(dims.num_layers);
    }

    void add_layer(const LayerWeights& weights) override { layers_.emplace_back(dims_, weights); }

    void forward(const Step& step) override {
        const long M = step.num_rows, H = dims_.hidden_size, I = dims_.intermediate_size;
        const long heads = long(dims_.num_heads) * dims_.head_dim, all_heads = heads + 2L * dims_.num_kv_heads * dims_.head_dim;
        const AttentionPlan all_plan(step.queries, M, shape_, step.num_threads);
        const AttentionPlan output_plan(step.output_queries, step.num_outputs, shape_, step.num_threads);
        partials_.resize(std::max(all_plan.total_partials, output_plan.total_partials), shape_);
        grow(normed_, M * H);
        grow(qkv_, M * all_heads);
        grow(output_queries_, step.num_outputs * heads);
        grow(attended_, M * heads);
        grow(activated_, M * I);

        phases_.run(step.num_threads, [&](Phases::Walk& walk) {
            static thread_local Scratch scratch;
            scratch.resize(shape_);
            auto for_rows = [&](long num_rows, auto&& work) {
                const long size = std::max<long>(1, std::min<long>(16, num_rows / (2 * step.num_threads)));
                walk.phase(int((num_rows + size - 1) / size), [&](int chunk) {
                    for (long row = chunk * size; row < std::min(num_rows, (chunk + 1) * size); row++) work(row);
                });
            };
            for (int l = 0; l < dims_.num_layers; l++) {
                const Layer& layer = layers_[l];
                T* keys = static_cast<T*>(step.kv) + 2L * l * step.num_slots * dims_.num_kv_heads * dims_.head_dim;
                T* values = keys + step.num_slots * dims_.num_kv_heads * dims_.head_dim;

                for_rows(M, [&](long row) { norm(step.hidden, layer.input_norm, row); });
                product(walk, step, M, layer.qkv, normed_.data(), H, qkv_.data(), all_heads, false, scratch.panel);
                for_rows(M, [&](long row) { rotate_and_keep(layer, step, row, keys, values); });
                // from here on the last layer has only those rows whose output is wanted; of the others it was the K/V
                const bool is_last = l == dims_.num_layers - 1;
                if (is_last)
                    for_rows(step.num_outputs, [&](long row) {
                        const long from = step.output_rows[row];
                        std::copy_n(step.hidden + from * H, H, step.outputs + row * H);
                        std::copy_n(qkv_.data() + from * all_heads, heads, output_queries_.data() + row * heads);
                    });
                const long rows = is_last ? step.num_outputs : M;
                float* hidden = is_last ? step.outputs : step.hidden;
                const Queries& queries = is_last ? step.output_queries : step.queries;
                const AttentionPlan& plan = is_last ? output_plan : all_plan;
                const float* query = is_last ? output_queries_.data() : qkv_.data();

                Attention<T> attention(shape_, keys, values, query, is_last ? heads : all_heads, attended_.data(), partials_);
                walk.phase(int(plan.units.size()), [&](int i) { attention.run(plan.units[i], plan, queries, scratch); });
                walk.phase(int(plan.merged_rows.size()), [&](int i) { attention.merge(plan.merged_rows[i], plan); });
                product(walk, step, rows, layer.attention_out, attended_.data(), heads, hidden, H, true, scratch.panel);

                for_rows(rows, [&](long row) { norm(hidden, layer.mlp_norm, row); });
                gated_product(walk, step, rows, layer, scratch.panel);
                product(walk, step, rows, layer.down, activated_.data(), I, hidden, H, true, scratch.panel);
            }
        });
    }

  private:
    static constexpr int PHASES_PER_LAYER = 9;

    struct Layer {
        std::vector<float> input_norm, q_norm, k_norm, mlp_norm;
        Packed<T> qkv, attention_out, gate, up, down;

        Layer(const Dims& d, const LayerWeights& w)
            : input_norm(w.input_norm, w.input_norm + d.hidden_size), mlp_norm(w.mlp_norm, w.mlp_norm + d.hidden_size),
              qkv((d.num_heads + 2 * d.num_kv_heads) * d.head_dim, d.hidden_size, w.qkv, w.qkv_bias),
              attention_out(d.hidden_size, d.num_heads * d.head_dim, w.attention_out, w.attention_out_bias),
              gate(d.intermediate_size, d.hidden_size, w.gate, w.gate_bias),
              up(d.intermediate_size, d.hidden_size, w.up, w.up_bias),
              down(d.hidden_size, d.intermediate_size, w.down, w.down_bias) {
            if (w.q_norm != nullptr) {
                q_norm.assign(w.q_norm, w.q_norm + d.head_dim);
                k_norm.assign(w.k_norm, w.k_norm + d.head_dim);
            }
        }
    };

    void norm(const float* hidden, const std::vector<float>& weight, long row) {
        const long H = dims_.hidden_size;
        rms_norm(hidden + row * H, weight.data(), H, dims_.rms_norm_eps, normed_.data() + row * H);
    }

    // out (+)= in * weight^T + bias
    void product(Phases::Walk& walk, const Step& step, long num_rows, const Packed<T>& weight, const float* in,
                 long in_stride, float* out, long out_stride, bool add, HugeVector<float>& scratch) {
        const Chunks chunks(num_rows, weight.num_panels, step.num_threads);
        walk.phase(chunks.count(), [&](int chunk) {
            chunks.for_each_panel(chunk, [&](long panel, long first_row, long end_row) {
                multiply_panel(weight, panel, in, in_stride, first_row, end_row, scratch, [&](long row, const float* c) {
                    for (int j = 0; j < PANEL; j += 8) {
                        float* to = out + row * out_stride + panel * PANEL + j;
                        const Float8 value = load(c + j) + weight.bias8(panel * PANEL + j);
                        store(to, add ? load(to) + value : value);
                    }
                });
            });
        });
    }

    // silu(x * gate^T) * (x * up^T)
    void gated_product(Phases::Walk& walk, const Step& step, long num_rows, const Layer& layer, HugeVector<float>& scratch) {
        const long H = dims_.hidden_size, I = dims_.intermediate_size;
        const Chunks chunks(num_rows, layer.gate.num_panels, step.num_threads);
        walk.phase(chunks.count(), [&](int chunk) {
            chunks.for_each_panel(chunk, [&](long panel, long first_row, long end_row) {
                float* out = activated_.data() + panel * PANEL;
                const float* x = normed_.data();
                multiply_panel(layer.gate, panel, x, H, first_row, end_row, scratch, [&](long row, const float* c) {
                    for (int j = 0; j < PANEL; j += 8)
                        store(out + row * I + j, silu(load(c + j) + layer.gate.bias8(panel * PANEL + j)));
                });
                multiply_panel(layer.up, panel, x, H, first_row, end_row, scratch, [&](long row, const float* c) {
                    for (int j = 0; j < PANEL; j += 8) {
                        float* to = out + row * I + j;
                        store(to, load(to) * (load(c + j) + layer.up.bias8(panel * PANEL + j)));
                    }
                });
            });
        });
    }

    // Norms of query and key where the model has them, rotation, and the row's K/V to its slot.
    void rotate_and_keep(const Layer& layer, const Step& step, long row, T* keys, T* values) {
        const long D = dims_.head_dim, num_heads = dims_.num_heads, num_kv_heads = dims_.num_kv_heads;
        float* x = qkv_.data() + row * (num_heads + 2 * num_kv_heads) * D;
        const float* cos = step.rope + step.positions[row] * D;
        const float* sin = cos + step.rope_length * D;
        for (long head = 0; head < num_heads + num_kv_heads; head++) {
            const std::vector<float>& weight = head < num_heads ? layer.q_norm : layer.k_norm;
            if (!weight.empty()) rms_norm(x + head * D, weight.data(), D, dims_.rms_norm_eps, x + head * D);
            rotate(x + head * D, cos, sin, D);
        }
        const long slot = step.slots[row] * num_kv_heads * D;
        for (long i = 0; i < num_kv_heads * D; i += 8) {
            store(keys + slot + i, load(x + num_heads * D + i));
            store(values + slot + i, load(x + (num_heads + num_kv_heads) * D + i));
        }
    }

    Dims dims_;
    AttentionShape shape_;
    std::vector<Layer> layers_;
    Phases phases_;
    Partials partials_;
    HugeVector<float> normed_, qkv_, output_queries_, attended_, activated_;  // one step's intermediate rows
};

}  // namespace prefixcache
