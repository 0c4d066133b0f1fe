// What Python calls (prefixcache/model/native/library.py). Nothing here takes Python's lock, and no call may overlap another
// on the same object.

#include <memory>

#include "decoder.h"

using namespace prefixcache;

namespace {

template <class T>
void multiply(const Packed<T>& weight, const float* x, long num_rows, float* out, int num_threads) {
    const Chunks chunks(num_rows, weight.num_panels, num_threads);
    const long K = weight.in_features, N = weight.out_features;
    Phases phases(1);
    phases.run(num_threads, [&](Phases::Walk& walk) {
        static thread_local HugeVector<float> scratch;
        walk.phase(chunks.count(), [&](int chunk) {
            chunks.for_each_panel(chunk, [&](long panel, long first_row, long end_row) {
                const long columns = std::min<long>(PANEL, N - panel * PANEL);
                multiply_panel(weight, panel, x, K, first_row, end_row, scratch, [&](long row, const float* c) {
                    std::copy_n(c, columns, out + row * N + panel * PANEL);
                });
            });
        });
    });
}

}  // namespace

extern "C" {

// Raise this with every change of what follows; Python refuses a library of another version.
int32_t prefixcache_abi() { return 2; }

AnyDecoder* prefixcache_decoder_f32(const Dims* dims) { return new Decoder<float>(*dims); }

AnyDecoder* prefixcache_decoder_bf16(const Dims* dims) { return new Decoder<BFloat16>(*dims); }

void prefixcache_decoder_add_layer(AnyDecoder* decoder, const LayerWeights* weights) { decoder->add_layer(*weights); }

void prefixcache_decoder_free(AnyDecoder* decoder) { delete decoder; }

void prefixcache_forward(AnyDecoder* decoder, const Step* step) { decoder->forward(*step); }

Packed<float>* prefixcache_pack_f32(int64_t out_features, int64_t in_features, const float* weight) {
    return new Packed<float>(out_features, in_features, weight, nullptr);
}

Packed<BFloat16>* prefixcache_pack_bf16(int64_t out_features, int64_t in_features, const BFloat16* weight) {
    return new Packed<BFloat16>(out_features, in_features, weight, nullptr);
}

void prefixcache_packed_free_f32(Packed<float>* packed) { delete packed; }

void prefixcache_packed_free_bf16(Packed<BFloat16>* packed) { delete packed; }

void prefixcache_multiply_f32(const Packed<float>* weight, const float* x, int64_t num_rows, float* out, int32_t num_threads) {
    multiply(*weight, x, num_rows, out, num_threads);
}

void prefixcache_multiply_bf16(const Packed<BFloat16>* weight, const float* x, int64_t num_rows, float* out,
                               int32_t num_threads) {
    multiply(*weight, x, num_rows, out, num_threads);
}
}
