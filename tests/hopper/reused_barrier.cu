// What becomes of shared memory that held an mbarrier, where processes share the GPU:
//
//     nvcc -arch=sm_90a -o reused_barrier reused_barrier.cu
//     for m in 0 1 2; do ./reused_barrier $m & done; wait
//
// On an H200 0 read the barrier's first state, 7fffe000001ffff8, over what it had written: in every block of every
// launch, once, as soon as another process used the GPU; alone, never. PTX forbids the reuse. With the barrier
// invalidated first (1), or none (2), every word was what had been written.
#include <cstdint>
#include <cstdio>
#include <cstdlib>

enum { KEPT, INVALIDATED, NONE };

constexpr int LAUNCHES = 10, BLOCKS = 132, WORDS = 16;
constexpr uint64_t NANOSECONDS = 300'000'000;

struct Found {
    unsigned wrong;
    unsigned long long got, wrote;
};

__device__ uint32_t address(const void *p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

__device__ uint64_t now() {
    uint64_t t;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
    return __shfl_sync(~0u, t, 0);
}

// The first warp writes and reads words, the second takes part in a barrier that stays one.
template <int MODE> __global__ void reuse(Found *found) {
    __shared__ __align__(128) uint64_t words[WORDS], used;
    int t = threadIdx.x, phase = 0;
    if (t == 0) {
        if (MODE != NONE) asm volatile("mbarrier.init.shared::cta.b64 [%0], 4;" ::"r"(address(words)));
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(address(&used)));
        asm volatile("fence.mbarrier_init.release.cluster;");
        if (MODE == INVALIDATED) asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(address(words)) : "memory");
    }
    __syncthreads();
    uint64_t start = now();
    for (unsigned long long turn = 0; now() - start < NANOSECONDS; turn++) {
        if (t < 32) {
            unsigned long long wrote = turn * WORDS + t;
            volatile uint64_t *word = words + t;
            if (t < WORDS) *word = wrote;
            __syncwarp();
            __nanosleep(2000);
            if (t < WORDS) {
                unsigned long long got = *word;
                if (got != wrote && atomicAdd(&found->wrong, 1) == 0) found->got = got, found->wrote = wrote;
            }
        } else {
            if (t == 32) asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address(&used)) : "memory");
            asm volatile(
                "{\n.reg .pred p;\nagain%=: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@!p bra again%=;\n}" ::
                    "r"(address(&used)),
                "r"(phase)
                : "memory");
            phase ^= 1;
            __nanosleep(500);
        }
    }
}

int main(int count, char **arguments) {
    Found *found;
    if (cudaMallocManaged(&found, sizeof(Found)) != cudaSuccess) return 3;
    *found = {};
    for (int i = 0; i < LAUNCHES; i++) {
        switch (count > 1 ? atoi(arguments[1]) : -1) {
        case KEPT: reuse<KEPT><<<BLOCKS, 64>>>(found); break;
        case INVALIDATED: reuse<INVALIDATED><<<BLOCKS, 64>>>(found); break;
        case NONE: reuse<NONE><<<BLOCKS, 64>>>(found); break;
        default: printf("a mode from 0 to 2\n"); return 2;
        }
        if (cudaDeviceSynchronize() != cudaSuccess) return 3;
    }
    printf("%u words were not what was written", found->wrong);
    if (found->wrong) printf(", the first %llx for %llx", found->got, found->wrote);
    printf("\n");
    return found->wrong != 0;
}
