/* The numbers that kernels read and write, float32 or with BFLOAT16 bfloat16; arithmetic is float32 all the same. */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>

#ifdef BFLOAT16
typedef uint16_t number;
static inline float load(number x) {
    union { uint32_t bits; float value; } u = {(uint32_t)x << 16};
    return u.value;
}
static inline number store(float x) {
    union { float value; uint32_t bits; } u = {x};
    return (number)((u.bits + 0x7fff + ((u.bits >> 16) & 1)) >> 16);
}
#else
typedef float number;
static inline float load(number x) { return x; }
static inline number store(float x) { return x; }
#endif

/* Threads for work that takes one of them so many nanoseconds: to wake another one takes as long as little work. */
#define WORTH_WAKING 20000
static inline int threads_for(int64_t nanoseconds, int threads) { return nanoseconds < WORTH_WAKING ? 1 : threads; }

/* exp to within 2 units in the last place, as plain arithmetic that compilers turn into vectors; 0 below -87. */
static inline float exponential(float x) {
    float bounded = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;
    float n = rintf(bounded * 1.44269504f);
    float r = bounded - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    union { int32_t bits; float value; } power = {((int32_t)n + 127) << 23};
    return x < -87.0f ? 0.0f : p * power.value;
}

/* The finaliser of splitmix64, and the number in [0, 1) that algorithms/random.py computes from two keys. */
static inline uint64_t mixed(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}
#define INCREMENT 0x9E3779B97F4A7C15ull
static inline double uniform_of(int64_t key, int64_t index) {
    uint64_t state = mixed((uint64_t)key + INCREMENT);
    return (double)(mixed(((uint64_t)index ^ state) + INCREMENT) >> 11) * 0x1p-53;
}
