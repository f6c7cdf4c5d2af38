// How thread blocks (CTAs) of one grid wait for each other's results.
//
// A producer writes its part of a state, then adds 1 to a counter with release semantics; a consumer reads the counter
// with acquire semantics until all producers have added theirs. No value of a state has a special meaning. (One counter
// for each producer, each lane of a waiting warp looking at another one, was measured to be slower.) Waiting ends for
// certain: after `limit` nanoseconds of wall time the waiter raises the error flag in device memory, everyone who sees
// the flag stops waiting for the rest of the launch, and all that is published from then on is NaN: results that nobody
// may use do not look like results.
#pragma once
#include "numerics.cuh"

constexpr int POLLS_BETWEEN_LOOKS = 16;  // at the clock and the flag; a usual wait is over after a few polls

constexpr int COUNTER_STRIDE = 32;  // counters are 128 bytes apart, so that they do not share a cache line

// Called by one thread, after a barrier of the CTA.
__device__ __forceinline__ void announce(u32* counter) {
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}

__device__ __forceinline__ u64 nanoseconds() {
    u64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

struct Patience {
    int* error;
    u64 limit;
    int code;      // what the flag is set to: which kernel gave up
    bool is_over;  // the same in all lanes of a warp

    __device__ __forceinline__ Patience(int* error, u64 limit, int code)
        : error(error), limit(limit), code(code), is_over(false) {
        is_over = __any_sync(~0u, flag() != 0);
    }
    __device__ __forceinline__ int flag() const {
        int value;
        asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(error) : "memory");
        return value;
    }
    __device__ __forceinline__ float or_nan(float value) const { return is_over ? __int_as_float(0x7fffffff) : value; }

    // Every lane acquires, so that every lane may read what was released. Called by whole warps.
    __device__ __forceinline__ void wait_until(const u32* counter, u32 goal) {
        u64 began = 0;
        for (int polls = 1; !is_over; polls++) {
            u32 count;
            asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(count) : "l"(counter) : "memory");
            if (!__any_sync(~0u, count < goal)) return;
            if (polls % POLLS_BETWEEN_LOOKS != 0) continue;
            const u64 now = nanoseconds();
            if (began == 0) began = now;
            if (__any_sync(~0u, now - began > limit || flag() != 0)) {
                if ((threadIdx.x & 31) == 0) atomicCAS(error, 0, code);
                is_over = true;
            }
        }
    }
};
