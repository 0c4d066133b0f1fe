// Products with weights that never change, packed so that each is read once, in order.
//
//     weight [out_features, in_features]  ->  panels of 16 outputs, each [in_features][16]
//
// A tile of up to 6 rows x 16 outputs stays in registers over all in_features. Each output is one chain of additions in
// the same order whatever the number of rows, so a row's result does not depend on what it is computed together with.
#pragma once

#include <algorithm>
#include <type_traits>
#include <vector>

#include "memory.h"
#include "vectors.h"

namespace prefixcache {

constexpr int PANEL = 16;
constexpr int TILE_ROWS = 6;
constexpr long ROW_BLOCK = 21 * TILE_ROWS;    // most rows of a chunk: a panel is read, and made float32, once for all of them
constexpr long DIRECT_ROWS = 4 * TILE_ROWS;   // up to so many, a panel of bfloat16 is quicker used as it is
constexpr long FETCHING_TILES = 4;            // more fetch no more quickly

// Memory that will be wanted soon, fetched bit by bit while a tile is computed: `step` bytes with each k.
struct Ahead {
    const char* from;
    long step;
};

enum class Fetch { NOTHING, TO_FIRST_LEVEL, TO_SECOND_LEVEL };

// c[R][16] = (or, if Add, +=) a[R][K] * w[K][16]; lda and ldw are strides in elements.
template <int R, bool Add, Fetch F, class W>
static inline void tile(const float* a, long lda, const W* w, long ldw, long K, float* c, long ldc, Ahead ahead) {
    Float8 lo[R], hi[R];
    for (int r = 0; r < R; r++) {
        lo[r] = Add ? load(c + r * ldc) : Float8{};
        hi[r] = Add ? load(c + r * ldc + 8) : Float8{};
    }
    for (long k = 0; k < K; k++, w += ldw) {
        if (F == Fetch::TO_FIRST_LEVEL) __builtin_prefetch(ahead.from, 0, 3);
        if (F == Fetch::TO_SECOND_LEVEL) __builtin_prefetch(ahead.from, 0, 2);
        if (F != Fetch::NOTHING) ahead.from += ahead.step;
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
template <bool Add, Fetch F = Fetch::NOTHING, class W>
static inline void tile(int rows, const float* a, long lda, const W* w, long ldw, long K, float* c, long ldc,
                        Ahead ahead = {}) {
    switch (rows) {
        case 1: return tile<1, Add, F>(a, lda, w, ldw, K, c, ldc, ahead);
        case 2: return tile<2, Add, F>(a, lda, w, ldw, K, c, ldc, ahead);
        case 3: return tile<3, Add, F>(a, lda, w, ldw, K, c, ldc, ahead);
        case 4: return tile<4, Add, F>(a, lda, w, ldw, K, c, ldc, ahead);
        case 5: return tile<5, Add, F>(a, lda, w, ldw, K, c, ldc, ahead);
        default: return tile<6, Add, F>(a, lda, w, ldw, K, c, ldc, ahead);
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

    Chunks(long num_rows, long num_panels, int num_threads) : rows(num_rows), panels(num_panels) {
        const long row_blocks = std::max<long>(1, (rows + ROW_BLOCK - 1) / ROW_BLOCK);  // also of no rows at all
        row_block = std::max<long>(1, ((rows + row_blocks - 1) / row_blocks + TILE_ROWS - 1) / TILE_ROWS) * TILE_ROWS;
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

static inline const float* widened(const float* panel, long, HugeVector<float>&) { return panel; }

static inline const float* widened(const BFloat16* panel, long size, HugeVector<float>& scratch) {
    grow(scratch, size);
    for (long i = 0; i < size; i += 8) store(scratch.data() + i, load(panel + i));
    return scratch.data();
}

// Multiplies rows [first_row, end_row) of in[][in_stride] with one panel; calls work(row, c[PANEL]) for each row.
template <class W, class Work>
static inline void multiply_panel(const Packed<W>& weight, long panel, const float* in, long in_stride, long first_row,
                                  long end_row, HugeVector<float>& scratch, Work&& work) {
    const long K = weight.in_features, num_rows = end_row - first_row, num_tiles = (num_rows + TILE_ROWS - 1) / TILE_ROWS;
    const long row_bytes = PANEL * long(sizeof(W));
    const W* w = weight.panel(panel);
    alignas(64) float c[TILE_ROWS * PANEL];
    auto one_tile = [&](auto fetch, long row, const auto* from, Ahead ahead) {
        const int n = int(std::min<long>(TILE_ROWS, end_row - row));
        tile<false, fetch.value>(n, in + row * in_stride, in_stride, from, PANEL, K, c, PANEL, ahead);
        for (int r = 0; r < n; r++) work(row + r, c + r * PANEL);
    };
    // One tile waits for memory most of the time: it fetches what is 4 KiB ahead. Several are busy computing: the first
    // of them fetch the next panel, each a share.
    auto all_tiles = [&](const auto* from) {
        const long num_fetching = std::min(num_tiles, FETCHING_TILES);
        Ahead ahead{reinterpret_cast<const char*>(w + K * PANEL), (row_bytes + num_fetching - 1) / num_fetching};
        long row = first_row;
        for (long i = 0; i < num_fetching; i++, row += TILE_ROWS, ahead.from += K * ahead.step)
            one_tile(std::integral_constant<Fetch, Fetch::TO_SECOND_LEVEL>(), row, from, ahead);
        for (; row < end_row; row += TILE_ROWS) one_tile(std::integral_constant<Fetch, Fetch::NOTHING>(), row, from, {});
    };
    if (num_tiles == 1)
        one_tile(std::integral_constant<Fetch, Fetch::TO_FIRST_LEVEL>(), first_row, w,
                 {reinterpret_cast<const char*>(w) + 4096, row_bytes});
    else if (num_rows <= DIRECT_ROWS)
        all_tiles(w);
    else
        all_tiles(widened(w, K * PANEL, scratch));
}

}  // namespace prefixcache
