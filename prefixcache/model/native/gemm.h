// Products with weights that never change, packed so that each is read once, in order.
//
//     weight [out_features, in_features]  ->  panels of 16 outputs, each [in_features][16]
//
// A tile of up to 6 rows x 16 outputs stays in registers over all in_features. Each output is one chain of additions in
// the same order whatever the number of rows, so a row's result does not depend on what it is computed together with.
#pragma once

#include <algorithm>
#include <vector>

#include "memory.h"
#include "vectors.h"

namespace prefixcache {

constexpr int PANEL = 16;
constexpr int TILE_ROWS = 6;
constexpr long ROW_BLOCK_BYTES = 192 * 1024;  // rows of one chunk, so that they stay in the second-level cache

// c[R][16] = (or, if Add, +=) a[R][K] * w[K][16]; lda and ldw are strides in elements.
template <int R, bool Add, class W>
static inline void tile(const float* a, long lda, const W* w, long ldw, long K, float* c, long ldc) {
    Float8 lo[R], hi[R];
    for (int r = 0; r < R; r++) {
        lo[r] = Add ? load(c + r * ldc) : Float8{};
        hi[r] = Add ? load(c + r * ldc + 8) : Float8{};
    }
    for (long k = 0; k < K; k++, w += ldw) {
        if (sizeof(W) == 2) __builtin_prefetch(w + 512);  // bfloat16 comes from memory, float32 mostly from scratch
        Float8 w0 = load(w), w1 = load(w + 8);
        for (int r = 0; r < R; r++) {
            float x = a[r * lda + k];
            lo[r] += w0 * x;
            hi[r] += w1 * x;
        }
    }
    for (int r = 0; r < R; r++) {
        store(c + r * ldc, lo[r]);
        store(c + r * ldc + 8, hi[r]);
    }
}

// The same for any number of rows up to TILE_ROWS.
template <bool Add, class W>
static inline void tile(int rows, const float* a, long lda, const W* w, long ldw, long K, float* c, long ldc) {
    switch (rows) {
        case 1: return tile<1, Add>(a, lda, w, ldw, K, c, ldc);
        case 2: return tile<2, Add>(a, lda, w, ldw, K, c, ldc);
        case 3: return tile<3, Add>(a, lda, w, ldw, K, c, ldc);
        case 4: return tile<4, Add>(a, lda, w, ldw, K, c, ldc);
        case 5: return tile<5, Add>(a, lda, w, ldw, K, c, ldc);
        default: return tile<6, Add>(a, lda, w, ldw, K, c, ldc);
    }
}

template <class W>
struct Packed {
    long out_features = 0, in_features = 0, num_panels = 0;
    HugeVector<W> data;         // [num_panels][in_features][PANEL], zeros behind the last output
    std::vector<float> bias;    // [num_panels * PANEL], or empty

    Packed() = default;

    // weight: [out][in], of type W.
    Packed(long out, long in, const void* weight, const float* b)
        : out_features(out), in_features(in), num_panels((out + PANEL - 1) / PANEL), data(num_panels * in * PANEL) {
        for (long o = 0; o < out; o++) {
            W* panel = data.data() + (o / PANEL) * in * PANEL + o % PANEL;
            for (long i = 0; i < in; i++) panel[i * PANEL] = static_cast<const W*>(weight)[o * in + i];
        }
        if (b != nullptr) {
            bias.assign(num_panels * PANEL, 0.0f);
            std::copy(b, b + out, bias.begin());
        }
    }

    const W* panel(long p) const { return data.data() + p * in_features * PANEL; }

    Float8 bias8(long column) const { return bias.empty() ? Float8{} : load(bias.data() + column); }
};

// How a product's rows x panels are cut into chunks.
struct Chunks {
    long rows, panels, row_block, panel_block;

    Chunks(long num_rows, long num_panels, long in_features, int num_threads) : rows(num_rows), panels(num_panels) {
        row_block = std::max<long>(1, ROW_BLOCK_BYTES / (in_features * long(sizeof(float))) / TILE_ROWS) * TILE_ROWS;
        long row_blocks = (rows + row_block - 1) / row_block;
        // few rows: enough chunks for every thread to have several; many rows: enough work in a chunk to be worth one
        long wanted = std::max<long>(1, 6 * num_threads / row_blocks);
        panel_block = std::max<long>(1, std::min<long>((panels + wanted - 1) / wanted, 32));
    }

    int count() const {
        return int(((rows + row_block - 1) / row_block) * ((panels + panel_block - 1) / panel_block));
    }

    // Calls work(panel, first_row, end_row) for each panel of the chunk.
    template <class Work>
    void for_each_panel(int chunk, Work&& work) const {
        const long row_blocks = (rows + row_block - 1) / row_block;
        const long first_row = (chunk % row_blocks) * row_block, end_row = std::min(rows, first_row + row_block);
        const long first_panel = (chunk / row_blocks) * panel_block;
        for (long panel = first_panel; panel < std::min(panels, first_panel + panel_block); panel++)
            work(panel, first_row, end_row);
    }
};

static inline const float* widened(const float* panel, long, std::vector<float>&) { return panel; }

static inline const float* widened(const BFloat16* panel, long size, std::vector<float>& scratch) {
    if (long(scratch.size()) < size) scratch.resize(size);
    for (long i = 0; i < size; i += 8) store(scratch.data() + i, load(panel + i));
    return scratch.data();
}

// Multiplies rows [first_row, end_row) of in[][in_stride] with one panel; calls work(row, c[PANEL]) for each row.
template <class W, class Work>
static inline void multiply_panel(const Packed<W>& weight, long panel, const float* in, long in_stride, long first_row,
                                  long end_row, std::vector<float>& scratch, Work&& work) {
    const long K = weight.in_features;
    auto tiles = [&](const auto* w) {
        for (long row = first_row; row < end_row; row += TILE_ROWS) {
            const int n = int(std::min<long>(TILE_ROWS, end_row - row));
            float c[TILE_ROWS * PANEL];
            tile<false>(n, in + row * in_stride, in_stride, w, PANEL, K, c, PANEL);
            for (int r = 0; r < n; r++) work(row + r, c + r * PANEL);
        }
    };
    if (end_row - first_row <= TILE_ROWS)
        tiles(weight.panel(panel));
    else  // several tiles: made float32 once for all of them
        tiles(widened(weight.panel(panel), K * PANEL, scratch));
}

}  // namespace prefixcache
