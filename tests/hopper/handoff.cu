// What racecheck makes of hand-overs in shared memory, all of them in order but the first:
//
//     nvcc -arch=sm_90a -o handoff handoff.cu
//     for m in 0 1 2 3 4 5 6; do compute-sanitizer --tool racecheck ./handoff $m; done
//
// compute-sanitizer 2025.3.1 on an H200 reported a race for 0, and for 3 to 5 as well; 2026.4.0 for 0, 3 and 4.
// Neither did for 6, which is how the folded launch hands over its tickets.
#include <cstdint>
#include <cstdio>
#include <cstdlib>

enum { UNORDERED, NAMED_BARRIER, ALL_ARRIVE, ONE_ARRIVES, ONE_ARRIVES_BOTH_WAYS, BAR_ARRIVE, AS_TICKETS };

__device__ uint32_t address(const void *p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

__device__ void init(uint64_t *b, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address(b)), "r"(count));
}

__device__ void arrive(uint64_t *b) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address(b)) : "memory");
}

// Every thread, once its copies are over: at once, where it copies nothing.
__device__ void arrive_async(uint64_t *b) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(address(b)) : "memory");
}

__device__ void wait(uint64_t *b, int phase) {
    asm volatile(
        "{\n.reg .pred p;\nagain%=: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@!p bra again%=;\n}" ::"r"(
            address(b)),
        "r"(phase)
        : "memory");
}

__device__ void barrier(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

// Threads 0 .. 127 write, 128 .. 255 read.
template <int MODE> __global__ void handoff(int *out) {
    __shared__ int s[128];
    __shared__ uint64_t full, empty;
    int t = threadIdx.x, sum = 0;
    bool writes = t < 128;
    if (t == 0) {
        init(&full, MODE == ALL_ARRIVE ? 128 : MODE == AS_TICKETS ? 1 + 128 : 1);
        init(&empty, MODE == ALL_ARRIVE || MODE == AS_TICKETS ? 128 : 1);
        asm volatile("fence.mbarrier_init.release.cluster;");
    }
    __syncthreads();
    bool both_ways = MODE == ALL_ARRIVE || MODE == ONE_ARRIVES_BOTH_WAYS || MODE == AS_TICKETS;
    int rounds = both_ways || MODE == BAR_ARRIVE ? 4 : 1;
    for (int i = 0; i < rounds; i++) {
        if (writes) {
            if (both_ways) wait(&empty, (i & 1) ^ 1);
            s[t] = t + i;
        }
        if (MODE == NAMED_BARRIER) barrier(1, 256);
        if (MODE == BAR_ARRIVE && writes) {
            asm volatile("bar.arrive 1, 256;" ::: "memory");
            barrier(2, 256);
        }
        if (MODE == ALL_ARRIVE && writes) arrive(&full);
        if ((MODE == ONE_ARRIVES || MODE == ONE_ARRIVES_BOTH_WAYS || MODE == AS_TICKETS) && writes) {
            barrier(3, 128);
            if (t == 0) arrive(&full);
            if (MODE == AS_TICKETS) arrive_async(&full);
        }
        if (!writes) {
            if (MODE == BAR_ARRIVE) barrier(1, 256);
            if (both_ways || MODE == ONE_ARRIVES) wait(&full, i & 1);
            sum += s[t - 128];
            if (MODE == BAR_ARRIVE) asm volatile("bar.arrive 2, 256;" ::: "memory");
            if (MODE == ALL_ARRIVE) arrive(&empty);
            if (MODE == AS_TICKETS) arrive_async(&empty);
            if (MODE == ONE_ARRIVES_BOTH_WAYS) {
                barrier(4, 128);
                if (t == 128) arrive(&empty);
            }
        }
    }
    out[t] = sum;
}

int main(int count, char **arguments) {
    int *out;
    if (cudaMalloc(&out, 256 * sizeof(int)) != cudaSuccess) return 3;
    switch (count > 1 ? atoi(arguments[1]) : -1) {
    case UNORDERED: handoff<UNORDERED><<<1, 256>>>(out); break;
    case NAMED_BARRIER: handoff<NAMED_BARRIER><<<1, 256>>>(out); break;
    case ALL_ARRIVE: handoff<ALL_ARRIVE><<<1, 256>>>(out); break;
    case ONE_ARRIVES: handoff<ONE_ARRIVES><<<1, 256>>>(out); break;
    case ONE_ARRIVES_BOTH_WAYS: handoff<ONE_ARRIVES_BOTH_WAYS><<<1, 256>>>(out); break;
    case BAR_ARRIVE: handoff<BAR_ARRIVE><<<1, 256>>>(out); break;
    case AS_TICKETS: handoff<AS_TICKETS><<<1, 256>>>(out); break;
    default: printf("a mode from 0 to 6\n"); return 2;
    }
    return cudaDeviceSynchronize() != cudaSuccess;
}
