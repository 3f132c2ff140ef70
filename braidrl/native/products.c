/* Products of rows with a weight, out = x @ weight.T + bias, whose bits do not depend on the number of rows: each result is one dot
   product, summed in vectors along the inner dimension in one order.

   Threads share the weight's rows, and each reads its own once for a block of x's rows. A tile of ROWS x COLUMNS results stays in
   registers. The cost of few rows is that of reading the weight.

   Sums stay in the order in which they are written: for other numbers of rows a compiler would find other orders. */
#ifdef __clang__
#pragma clang fp reassociate(off)
#else
#pragma GCC optimize("no-associative-math")
#endif
#include "numbers.h"
#include <string.h>

#ifdef __AVX512F__
#define WIDTH 16
#define ROWS 6
#else
#define WIDTH 8
#define ROWS 3
#endif
#define COLUMNS 4
#define CACHED 65536 /* numbers of x that a block of rows has, so that it stays in a core's cache */
typedef float vector __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
typedef float quad __attribute__((vector_size(16)));
typedef int32_t lanes __attribute__((vector_size(WIDTH == 16 ? 64 : 16)));

/* Loads a vector once: compilers would rather load it for each of its products, and loads are what is scarce. */
#ifdef __x86_64__
#define IN_REGISTER(v) __asm__("" : "+v"(v))
#else
#define IN_REGISTER(v)
#endif

/* The sums of four vectors' numbers: halves are added until one number of each is left. */
#if WIDTH == 16
#define HALVES(a, b, i, j, k, l)                                                                                        \
    __builtin_shuffle(a, b, (lanes){i, i + 1, i + 2, i + 3, j, j + 1, j + 2, j + 3, k, k + 1, k + 2, k + 3, l, l + 1,     \
                                    l + 2, l + 3})
static inline quad sums_of(vector a, vector b, vector c, vector d) {
    vector ab = HALVES(a, b, 0, 4, 16, 20) + HALVES(a, b, 8, 12, 24, 28);
    vector cd = HALVES(c, d, 0, 4, 16, 20) + HALVES(c, d, 8, 12, 24, 28);
    vector all = HALVES(ab, cd, 0, 8, 16, 24) + HALVES(ab, cd, 4, 12, 20, 28);
    all += __builtin_shuffle(all, (lanes){2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13});
    all += __builtin_shuffle(all, (lanes){1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14});
    all = __builtin_shuffle(all, (lanes){0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12});
    quad sums;
    memcpy(&sums, &all, sizeof sums);
    return sums;
}
#else
static inline quad folded(vector x) {
    quad low, high;
    memcpy(&low, &x, sizeof low);
    memcpy(&high, (const float *)&x + 4, sizeof high);
    return low + high;
}

static inline quad sums_of(vector a, vector b, vector c, vector d) {
    quad p = folded(a), q = folded(b), r = folded(c), s = folded(d);
    quad ab = __builtin_shuffle(p, q, (lanes){0, 4, 1, 5}) + __builtin_shuffle(p, q, (lanes){2, 6, 3, 7});
    quad cd = __builtin_shuffle(r, s, (lanes){0, 4, 1, 5}) + __builtin_shuffle(r, s, (lanes){2, 6, 3, 7});
    return __builtin_shuffle(ab, cd, (lanes){0, 1, 4, 5}) + __builtin_shuffle(ab, cd, (lanes){2, 3, 6, 7});
}
#endif

static inline __attribute__((always_inline)) void tile(const float *restrict x, const float *restrict w, int64_t inner, int rows,
                                                       int columns, float sums[ROWS][COLUMNS]) {
    vector total[ROWS][COLUMNS];
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++) total[r][c] = (vector){0};
    for (int64_t k = 0; k < inner; k += WIDTH) {
        vector left[ROWS];
        for (int r = 0; r < rows; r++) {
            left[r] = *(const vector *)(x + r * inner + k);
            IN_REGISTER(left[r]);
        }
        for (int c = 0; c < columns; c++) {
            vector right = *(const vector *)(w + c * inner + k);
            IN_REGISTER(right);
            for (int r = 0; r < rows; r++) total[r][c] += left[r] * right;
        }
    }
    for (int r = 0; r < rows; r++) {
        quad all = sums_of(total[r][0], columns > 1 ? total[r][1] : (vector){0}, columns > 2 ? total[r][2] : (vector){0},
                           columns > 3 ? total[r][3] : (vector){0});
        memcpy(sums[r], &all, sizeof all);
    }
}

/* A function for each number of rows and columns, so that the loops above have constant bounds. */
#define TILE(r, c)                                                                                                      \
    case r * 16 + c:                                                                                                    \
        tile(x, w, inner, r, c, sums);                                                                                  \
        break;
#define TILES(r) TILE(r, 1) TILE(r, 2) TILE(r, 3) TILE(r, 4)
static void tile_of(const float *x, const float *w, int64_t inner, int rows, int columns, float sums[ROWS][COLUMNS]) {
    switch (rows * 16 + columns) {
        TILES(1) TILES(2) TILES(3)
#if ROWS > 3
        TILES(4) TILES(5) TILES(6)
#endif
    }
}

/* Rows of numbers as float32, padded with 0 to a multiple of WIDTH. */
static void widened(const number *restrict from, int64_t rows, int64_t inner, int64_t padded, float *restrict to) {
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t i = 0; i < inner; i++) to[r * padded + i] = load(from[r * inner + i]);
        for (int64_t i = inner; i < padded; i++) to[r * padded + i] = 0;
    }
}

/* x (rows, inner), weight (columns, inner), bias (columns) or NULL, out (rows, columns). Returns 0 without memory. */
int product(const number *x, const number *weight, const number *bias, number *out, int64_t rows, int64_t inner,
            int64_t columns, int threads) {
    int64_t padded = (inner + WIDTH - 1) / WIDTH * WIDTH, block = CACHED / padded / ROWS * ROWS;
    if (block < ROWS) block = ROWS;
    if (block > rows) block = rows;
    int direct = sizeof(number) == sizeof(float) && padded == inner, failed = 0;
#pragma omp parallel num_threads(threads)
    {
        float *memory = direct ? NULL : aligned_alloc(64, sizeof(float) * (size_t)((block + COLUMNS) * padded + 15) / 64 * 64 + 64);
        if (!direct && !memory) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp barrier
        for (int64_t first = 0; first < rows && !failed; first += block) {
            int64_t count = first + block < rows ? block : rows - first;
            const float *left = (const float *)(x + first * inner);
            if (!direct) {
                widened(x + first * inner, count, inner, padded, memory);
                left = memory;
            }
#pragma omp for schedule(static) nowait
            for (int64_t j = 0; j < (columns + COLUMNS - 1) / COLUMNS; j++) {
                int64_t c = j * COLUMNS;
                int wide = columns - c < COLUMNS ? (int)(columns - c) : COLUMNS;
                const float *right = (const float *)(weight + c * inner);
                if (!direct) {
                    widened(weight + c * inner, wide, inner, padded, memory + block * padded);
                    right = memory + block * padded;
                }
                float added[COLUMNS] = {0};
                for (int k = 0; bias && k < wide; k++) added[k] = load(bias[c + k]);
                for (int64_t r = 0; r < count; r += ROWS) {
                    int high = count - r < ROWS ? (int)(count - r) : ROWS;
                    float sums[ROWS][COLUMNS];
                    tile_of(left + r * padded, right, padded, high, wide, sums);
                    for (int i = 0; i < high; i++) {
                        number *to = out + (first + r + i) * columns + c;
                        for (int k = 0; k < COLUMNS; k++) sums[i][k] += added[k];
                        if (wide == COLUMNS)
                            for (int k = 0; k < COLUMNS; k++) to[k] = store(sums[i][k]);
                        else
                            for (int k = 0; k < wide; k++) to[k] = store(sums[i][k]);
                    }
                }
            }
        }
        free(memory);
    }
    return !failed;
}
