// Memory for weights and what lies between them: in pages of 2 MiB where the system gives them. A step walks through all
// weights; and what fits the second-level cache only stays there whole if its addresses follow each other in memory too.
#pragma once

#include <sys/mman.h>

#include <cstdlib>
#include <new>
#include <vector>

namespace prefixcache {

template <class T>
struct HugePageAllocator {
    typedef T value_type;

    HugePageAllocator() = default;
    template <class U>
    HugePageAllocator(const HugePageAllocator<U>&) {}

    T* allocate(size_t n) {
        constexpr size_t page = 2 << 20;
        const size_t size = (n * sizeof(T) + page - 1) / page * page;
        void* p = std::aligned_alloc(page, size);
        if (p == nullptr) throw std::bad_alloc();
        madvise(p, size, MADV_HUGEPAGE);  // a wish; without it everything works as well
        return static_cast<T*>(p);
    }

    void deallocate(T* p, size_t) { std::free(p); }

    template <class U>
    bool operator==(const HugePageAllocator<U>&) const {
        return true;
    }
    template <class U>
    bool operator!=(const HugePageAllocator<U>&) const {
        return false;
    }
};

template <class T>
using HugeVector = std::vector<T, HugePageAllocator<T>>;

// Makes room for at least `n`; what was in it is lost.
template <class T>
static inline void grow(HugeVector<T>& v, size_t n) {
    if (v.size() < n) HugeVector<T>(n).swap(v);
}

}  // namespace prefixcache
