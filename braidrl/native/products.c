/* Products of rows with a weight, out = x @ weight.T + bias, whose bits do not depend on the number of rows: each result is summed
   over the inner dimension in one order, in parts of PART numbers.

   The weight is read as panels of WIDTH of its rows (columns of out), one number of each row beside the other:

       weight (columns, inner) ──pack──▶ panels (columns / WIDTH, inner, WIDTH)

   A tile of rows times panels of results stays in registers, so few rows cost little more than reading the weight, and many rows
   come near the processor's peak. A weight that is used often is packed once; otherwise each thread packs the panels that it needs.

   Sums stay in the order in which they are written: for other numbers of rows a compiler would find other orders. */
#ifdef __clang__
#pragma clang fp reassociate(off)
#else
#pragma GCC optimize("no-associative-math")
#endif
#include "numbers.h"
#include <omp.h>
#include <string.h>

#ifdef __AVX512F__
#define WIDTH 16
#define ROWS 8 /* of a tile, at most */
#define BELOW_FOUR 4 /* panels of a tile with 2 to 4 rows */
#else
#define WIDTH 8
#define ROWS 4
#define BELOW_FOUR 3
#endif
#define PANELS 8 /* of a tile with one row: as many sums as a processor adds at once */
#define PART 256
#define LINE 16 /* numbers that memory sends at once */
typedef float vector __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
typedef int32_t lanes __attribute__((vector_size(4 * WIDTH)));

/* Keeps a vector in a register: compilers would rather load it for each of its products, and loads are what is scarce. Four rows and
   three panels take all 16 registers of AVX2. */
#ifdef __x86_64__
#define IN_REGISTER(v) __asm__("" : "+v"(v))
#else
#define IN_REGISTER(v)
#endif

static inline int panels_of(int rows) { return rows == 1 ? PANELS : rows <= 4 ? BELOW_FOUR : 3; }

/* WIDTH rows of a weight as one panel: perfect shuffles of rows, as many as WIDTH has bits, transpose a block of WIDTH x WIDTH. */
static void pack_panel(const number *restrict weight, int64_t inner, int wide, float *restrict panel) {
    lanes low, high;
    for (int i = 0; i < WIDTH; i++) {
        low[i] = i / 2 + (i & 1) * WIDTH;
        high[i] = low[i] + WIDTH / 2;
    }
    int64_t k = 0;
    for (; wide == WIDTH && k + WIDTH <= inner; k += WIDTH) {
        vector block[WIDTH], shuffled[WIDTH];
        for (int r = 0; r < WIDTH; r++)
            for (int i = 0; i < WIDTH; i++) block[r][i] = load(weight[r * inner + k + i]);
        for (int bits = 1; bits < WIDTH; bits *= 2) {
            for (int r = 0; r < WIDTH / 2; r++) {
                shuffled[2 * r] = __builtin_shuffle(block[r], block[r + WIDTH / 2], low);
                shuffled[2 * r + 1] = __builtin_shuffle(block[r], block[r + WIDTH / 2], high);
            }
            memcpy(block, shuffled, sizeof block);
        }
        memcpy(panel + k * WIDTH, block, sizeof block);
    }
    for (; k < inner; k++)
        for (int r = 0; r < WIDTH; r++) panel[k * WIDTH + r] = r < wide ? load(weight[r * inner + k]) : 0;
}

/* weight (columns, inner) as panels (ceil(columns / WIDTH), inner, WIDTH). */
void pack(const number *weight, float *panels, int64_t inner, int64_t columns, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t c = 0; c < columns; c += WIDTH)
        pack_panel(weight + c * inner, inner, columns - c < WIDTH ? (int)(columns - c) : WIDTH, panels + c * inner);
}

/* Sums of a tile. Meanwhile the panels at `ahead`, which are read next and rarely lie in a cache, come from memory, `pace` numbers at
   each step: loads at an even pace do not make products wait. */
static inline __attribute__((always_inline)) void tile(const float *restrict x, const float *restrict panels, int64_t inner,
                                                       int rows, int wide, const float *ahead, int64_t pace,
                                                       vector sums[ROWS][PANELS]) {
    for (int64_t first = 0; first < inner; first += PART) {
        int64_t end = first + PART < inner ? first + PART : inner;
        vector total[ROWS][PANELS];
        for (int r = 0; r < rows; r++)
            for (int c = 0; c < wide; c++) total[r][c] = (vector){0};
        for (int64_t k = first; k < end; k++) {
            vector right[PANELS];
            __builtin_prefetch(ahead + k * pace, 0, 2);
            for (int c = 0; c < wide; c++) {
                right[c] = *(const vector *)(panels + (c * inner + k) * WIDTH);
                if (rows > 1) IN_REGISTER(right[c]);
            }
            for (int r = 0; r < rows; r++) {
                vector left = x[r * inner + k] - (vector){0};
                IN_REGISTER(left);
                for (int c = 0; c < wide; c++) total[r][c] += left * right[c];
            }
        }
        for (int r = 0; r < rows; r++)
            for (int c = 0; c < wide; c++) {
                if (first) total[r][c] += sums[r][c];
                sums[r][c] = total[r][c];
            }
    }
}

/* A function for each number of rows and panels, so that the loops above have constant bounds. */
#define TILE(r, c)                                                                                                      \
    case r * 16 + c:                                                                                                    \
        tile(x, panels, inner, r, c, ahead, pace, sums);                                                                      \
        break;
#define TILES(r) TILE(r, 1) TILE(r, 2) TILE(r, 3)
static void tile_of(const float *x, const float *panels, int64_t inner, int rows, int wide, const float *ahead,
                    int64_t pace, vector sums[ROWS][PANELS]) {
    switch (rows * 16 + wide) {
        TILES(1) TILES(2) TILES(3) TILES(4)
        TILE(1, PANELS)
#if ROWS > 4
        TILE(2, 4) TILE(3, 4) TILE(4, 4)
        TILES(5) TILES(6) TILES(7) TILES(8)
#endif
    }
}

/* Products of some rows x (rows, inner) with `wide` panels, whose first column is `column`; out has `columns`; see `tile`. */
static void multiply(const float *x, const float *panels, const number *bias, number *out, int rows, int64_t inner, int wide,
                     int64_t column, int64_t columns, const float *ahead, int64_t pace) {
    vector sums[ROWS][PANELS];
    for (int done = 0, now; done < wide; done += now) {
        int left = wide - done;
        now = left >= panels_of(rows) ? panels_of(rows) : left < 3 ? left : 3;
        tile_of(x, panels + done * inner * WIDTH, inner, rows, now, ahead, pace, sums);
        int64_t first = column + done * WIDTH, count = columns - first < now * WIDTH ? columns - first : now * WIDTH;
        for (int r = 0; r < rows; r++) {
            const float *from = (const float *)sums[r];
            number *to = out + r * columns + first;
            for (int64_t c = 0; c < count; c++) to[c] = store(bias ? from[c] + load(bias[first + c]) : from[c]);
        }
    }
}

/* Rows of a tile: equal shares of the rows, so that the last tile is not low. */
static inline int height_of(int64_t rows) {
    int64_t tiles = (rows + ROWS - 1) / ROWS;
    return rows ? (int)((rows + tiles - 1) / tiles) : 1;
}

/* `product` by the threads of the team that calls it together, which do not wait for each other at the end. `memory` of each
   thread has room for PANELS panels; it is unused where the weight is packed. */
static void product_by_team(const float *x, const number *weight, const float *packed, float *memory, const number *bias,
                            number *out, int64_t rows, int64_t inner, int64_t columns) {
    int64_t all = rows ? (columns + WIDTH - 1) / WIDTH : 0;
    int high = height_of(rows), group = panels_of(high);
#pragma omp for schedule(static) nowait
    for (int64_t j = 0; j < (all + group - 1) / group; j++) {
        int64_t first = j * group;
        int wide = all - first < group ? (int)(all - first) : group;
        const float *panels = packed + first * inner * WIDTH;
        if (!packed) {
            for (int64_t p = 0; p < wide; p++) {
                int64_t column = (first + p) * WIDTH;
                pack_panel(weight + column * inner, inner, columns - column < WIDTH ? (int)(columns - column) : WIDTH,
                           memory + p * inner * WIDTH);
            }
            panels = memory;
        }
        /* The tiles of these panels together bring the next ones. */
        int64_t size = wide * inner * WIDTH, tiles = (rows + high - 1) / high, share = wide * WIDTH / tiles;
        int64_t pace = share < LINE ? share : LINE;
        for (int64_t r = 0; r < rows; r += high)
            multiply(x + r * inner, panels, bias, out + r * columns, rows - r < high ? (int)(rows - r) : high, inner, wide,
                     first * WIDTH, columns, panels + size + r / high * pace * inner, pace);
    }
}

/* x (rows, inner), bias (columns) or NULL, out (rows, columns), and a weight (columns, inner) or its panels; the other one is NULL.
   Returns 0 without memory. */
int product(const number *x, const number *weight, const float *packed, const number *bias, number *out, int64_t rows,
            int64_t inner, int64_t columns, int threads) {
    int is_wide = sizeof(number) == sizeof(float);
    size_t of_thread = packed ? 0 : (size_t)PANELS * inner * WIDTH;
    threads = threads_for(rows * inner * columns / 50 + (packed ? 0 : inner * columns / 10), threads);
    float *left = is_wide ? (float *)x : malloc(sizeof(float) * (size_t)(rows * inner + 1));
    float *memory = malloc(sizeof(float) * (of_thread * threads + 1));
    if (left && memory) {
        for (int64_t i = 0; !is_wide && i < rows * inner; i++) left[i] = load(x[i]);
#pragma omp parallel num_threads(threads)
        product_by_team(left, weight, packed, memory + of_thread * omp_get_thread_num(), bias, out, rows, inner, columns);
    }
    int done = left && memory;
    free(memory);
    if (!is_wide) free(left);
    return done;
}

/* The `active` experts of each row with the largest logits (rows, experts), of equal ones the first, in descending order, and
   their softmax over all experts, or over the chosen ones where it is `normalised`. */
void route(const number *logits, int64_t *chosen, number *weights, int64_t rows, int64_t experts, int64_t active, int normalised,
           int threads) {
#pragma omp parallel for num_threads(threads_for(rows * experts * (active + 1), threads)) schedule(static)
    for (int64_t r = 0; r < rows; r++) {
        const number *x = logits + r * experts;
        float before = INFINITY, largest = 0;
        int64_t last = -1;
        for (int64_t k = 0; k < active; k++) {
            int64_t best = -1;
            float highest = -INFINITY;
            for (int64_t e = 0; e < experts; e++) {
                float value = load(x[e]);
                int is_left = value < before || (value == before && e > last);
                if (is_left && (best < 0 || value > highest)) {
                    best = e;
                    highest = value;
                }
            }
            last = chosen[r * active + k] = best < 0 ? k : best; /* NaN, which the weights show */
            before = load(x[last]);
            if (!k) largest = before;
        }
        const int64_t *of_row = chosen + r * active;
        float of_all = 0, of_chosen = 0;
        for (int64_t e = 0; e < experts; e++) of_all += exponential(load(x[e]) - largest);
        for (int64_t k = 0; k < active; k++) of_chosen += exponential(load(x[of_row[k]]) - largest);
        float total = normalised && of_all == of_all ? of_chosen : of_all;
        for (int64_t k = 0; k < active; k++) weights[r * active + k] = store(exponential(load(x[of_row[k]]) - largest) / total);
    }
}

/* Elements of a matrix (columns, inner) among the packed ones of a stack. */
static inline int64_t packed_size(int64_t columns, int64_t inner) { return (columns + 15) / 16 * 16 * inner; }

/* The rows token * active + k by expert in `order`, each row's position there, and where each expert's begin, (experts + 1). */
static void sort_by_expert(const int64_t *chosen, int64_t rows, int64_t experts, int64_t *starts, int64_t *order,
                           int64_t *positions) {
    memset(starts, 0, sizeof(int64_t) * (size_t)(experts + 1));
    for (int64_t r = 0; r < rows; r++) starts[chosen[r] + 1]++;
    for (int64_t e = 0; e < experts; e++) starts[e + 1] += starts[e];
    for (int64_t r = 0; r < rows; r++) order[positions[r] = starts[chosen[r]]++] = r;
    for (int64_t e = experts; e > 0; e--) starts[e] = starts[e - 1];
    starts[0] = 0;
}

/* out (tokens, width) = the sum over the experts `chosen` (tokens, active) of each token x (tokens, width), times `weights`
   (tokens, active), of down (silu(gate x) * up x). The stacks gate_up (experts, 2 * inner, width) and down (experts, width, inner)
   are given, or their panels. Results are added in the order of `chosen`. Returns 0 without memory. */
int mixture(const number *x, const int64_t *chosen, const number *weights, const number *gate_up, const float *packed_gate_up,
            const number *down, const float *packed_down, number *out, int64_t tokens, int64_t active, int64_t experts,
            int64_t width, int64_t inner, int threads) {
    int64_t rows = tokens * active, longest = width > inner ? width : inner;
    size_t of_thread = packed_down ? 0 : (size_t)PANELS * longest * WIDTH;
    threads = threads_for((rows * 2 + (packed_down ? 0 : experts * 10)) * width * inner * 3 / 100, threads);
    int64_t *starts = malloc(sizeof(int64_t) * (size_t)(experts + 1 + 2 * rows));
    float *left = malloc(sizeof(float) * ((size_t)(rows * longest) + of_thread * threads + 1));
    number *results = malloc(sizeof(number) * (size_t)(rows * (2 * inner + width) + 1));
    int done = starts && left && results;
    if (done) {
        int64_t *order = starts + experts + 1, *positions = order + rows;
        number *both = results, *products = results + rows * 2 * inner;
        sort_by_expert(chosen, rows, experts, starts, order, positions);
#pragma omp parallel num_threads(threads)
        {
            float *memory = left + rows * longest + of_thread * omp_get_thread_num();
#pragma omp for schedule(static)
            for (int64_t r = 0; r < rows; r++)
                for (int64_t i = 0; i < width; i++) left[r * width + i] = load(x[order[r] / active * width + i]);
            for (int64_t e = 0; e < experts; e++)
                product_by_team(left + starts[e] * width, gate_up + e * 2 * inner * width,
                                packed_gate_up ? packed_gate_up + e * packed_size(2 * inner, width) : NULL, memory, NULL,
                                both + starts[e] * 2 * inner, starts[e + 1] - starts[e], width, 2 * inner);
#pragma omp barrier
#pragma omp for schedule(static)
            for (int64_t r = 0; r < rows; r++) {
                const number *gate = both + r * 2 * inner, *up = gate + inner;
                for (int64_t i = 0; i < inner; i++) {
                    float g = load(gate[i]);
                    left[r * inner + i] = load(store(g / (1.0f + exponential(-g)) * load(up[i])));
                }
            }
            for (int64_t e = 0; e < experts; e++)
                product_by_team(left + starts[e] * inner, down + e * width * inner,
                                packed_down ? packed_down + e * packed_size(width, inner) : NULL, memory, NULL,
                                products + starts[e] * width, starts[e + 1] - starts[e], inner, width);
#pragma omp barrier
#pragma omp for schedule(static)
            for (int64_t t = 0; t < tokens; t++)
                for (int64_t i = 0; i < width; i++) {
                    float sum = 0;
                    for (int64_t k = 0; k < active; k++)
                        sum += load(weights[t * active + k]) * load(products[positions[t * active + k] * width + i]);
                    out[t * width + i] = store(sum);
                }
        }
    }
    free(results);
    free(left);
    free(starts);
    return done;
}
