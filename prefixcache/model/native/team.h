// Threads that work through one list of phases together.
//
//     phase 0 |chunk 0|chunk 1|chunk 2|   every thread takes the next chunk that nobody has
//     phase 1 |chunk 0|chunk 1|           begins once all chunks of phase 0 are done
//
// A phase waits for its chunks, not for the threads: one that the system has put aside is not missed unless it holds a
// chunk, so that a core which another program keeps busy costs its share of speed and no more.
#pragma once

#include <omp.h>
#include <sched.h>

#include <atomic>
#include <memory>

namespace prefixcache {

static inline void pause_briefly() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

class Phases {
  public:
    explicit Phases(int capacity) : counters_(new Counter[capacity]), capacity_(capacity) {}

    void reset() {
        for (int i = 0; i < capacity_; i++) {
            counters_[i].next.store(0, std::memory_order_relaxed);
            counters_[i].done.store(0, std::memory_order_relaxed);
        }
    }

    // One thread's way through the phases. All threads must ask for the same phases in the same order.
    class Walk {
      public:
        explicit Walk(Phases& phases) : phases_(phases) {}

        template <class Work>
        void phase(int num_chunks, Work&& work) {
            Counter& counter = phases_.counters_[index_++];
            int chunk;
            while ((chunk = counter.next.fetch_add(1, std::memory_order_relaxed)) < num_chunks) {
                work(chunk);
                counter.done.fetch_add(1, std::memory_order_release);
            }
            for (int spins = 0; counter.done.load(std::memory_order_acquire) < num_chunks; spins++) {
                if (spins < 1000)
                    pause_briefly();
                else
                    sched_yield();
            }
        }

      private:
        Phases& phases_;
        int index_ = 0;
    };

    // Runs `body(walk)` on every thread of the team and returns when all have come through.
    template <class Body>
    void run(int num_threads, Body&& body) {
        reset();
#pragma omp parallel num_threads(num_threads)
        {
            Walk walk(*this);
            body(walk);
        }
    }

  private:
    struct alignas(64) Counter {
        std::atomic<int> next{0}, done{0};
    };
    std::unique_ptr<Counter[]> counters_;
    int capacity_;
};

}  // namespace prefixcache
