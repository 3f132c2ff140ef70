/* Causal attention within each of many short sequences that lie one after the other, forward and backward. Sequences may share a
   prompt: it is the first of their family, and each other one of the family sees all of the prompt's tokens before its own.

   A task is one family and one key head with its query heads: it reads and writes nothing of another's, so its bits depend
   neither on the other families nor on the number of threads. Outputs have the bits that they have without sharing. Scores stay
   in a scratch of length x length per thread, and the backward computes them again. All products are one small matrix product
   with other strides.

   Layouts: token t, head h, number i of x is x[t * x_token + h * x_head + i]; scores and sums are float32 whatever the numbers are. */
#include "numbers.h"
#include <string.h>

#ifdef __AVX512F__
#define WIDTH 16
#else
#define WIDTH 8
#endif
#define TILE 6 /* rows; rows_of has a case for each number */
#define ROUND(n, to) (((n) + (to)-1) / (to) * (to))
typedef float vector __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));

typedef struct {
    const number *at;
    int64_t token, head;
} view;

typedef struct {
    number *at;
    int64_t token, head;
} target;

/* c[r][0 .. 2 * WIDTH) = (or with `add` +=) sum over k < inner of a[r * a_row + k * a_inner] * b[k * b_row ..], for `rows` <= TILE rows. */
static inline __attribute__((always_inline)) void tile(const float *a, int64_t a_row, int64_t a_inner, const float *b,
                                                       int64_t b_row, float *c, int64_t c_row, int64_t inner, int rows,
                                                       int add) {
    vector sums[TILE][2];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < 2; v++) sums[r][v] = add ? *(const vector *)(c + r * c_row + v * WIDTH) : (vector){0};
    for (int64_t k = 0; k < inner; k++) {
        vector left = *(const vector *)(b + k * b_row), right = *(const vector *)(b + k * b_row + WIDTH);
        for (int r = 0; r < rows; r++) {
            float factor = a[r * a_row + k * a_inner];
            sums[r][0] += factor * left;
            sums[r][1] += factor * right;
        }
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < 2; v++) *(vector *)(c + r * c_row + v * WIDTH) = sums[r][v];
}

/* A block of up to TILE rows of c, `columns` (a multiple of 2 * WIDTH) wide. */
static void rows_of(const float *a, int64_t a_row, int64_t a_inner, const float *b, int64_t b_row, float *c, int64_t c_row,
                    int64_t inner, int64_t rows, int64_t columns, int add) {
    for (int64_t j = 0; j < columns; j += 2 * WIDTH) {
        switch (rows) {
#define CASE(n)                                                             \
    case n:                                                                 \
        tile(a, a_row, a_inner, b + j, b_row, c + j, c_row, inner, n, add); \
        break;
            CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
        }
    }
}

/* What a thread works with: a sequence's numbers as float32, with room for `padded` tokens and `wide` numbers. What is in the rest of
   that room is computed with, but goes nowhere. */
typedef struct {
    float *keys, *values, *keys_across, *values_across, *query, *grad, *scores, *grad_scores, *out, *grad_keys, *grad_values;
} scratch;

static int64_t scratch_floats(int64_t padded, int64_t wide) { return 9 * padded * wide + 2 * padded * padded; }

static scratch divided(float *memory, int64_t padded, int64_t wide) {
    scratch s;
    float **parts[] = {&s.keys,  &s.values, &s.keys_across, &s.values_across, &s.query,
                       &s.grad,  &s.out,    &s.grad_keys,   &s.grad_values};
    for (int i = 0; i < 9; i++) *parts[i] = memory + i * padded * wide;
    s.scores = memory + 9 * padded * wide;
    s.grad_scores = s.scores + padded * padded;
    return s;
}

static void read_rows(view from, int64_t first, int64_t head, int64_t length, int64_t width, int64_t wide, float scale, float *to) {
    for (int64_t t = 0; t < length; t++) {
        const number *restrict in = from.at + (first + t) * from.token + head * from.head;
        float *restrict out = to + t * wide;
        for (int64_t i = 0; i < width; i++) out[i] = load(in[i]) * scale;
    }
}

static void transposed(const float *restrict from, int64_t length, int64_t width, int64_t wide, int64_t padded, float *restrict to) {
    for (int64_t i = 0; i < width; i++)
        for (int64_t t = 0; t < length; t++) to[i * padded + t] = from[t * wide + i];
}

static void write_rows(const float *from, int64_t first, int64_t head, int64_t length, int64_t width, int64_t wide, target to) {
    for (int64_t t = 0; t < length; t++) {
        number *restrict out = to.at + (first + t) * to.token + head * to.head;
        for (int64_t i = 0; i < width; i++) out[i] = store(from[t * wide + i]);
    }
}

/* Probabilities of query t in place of its scores, 0 for the keys that it does not see, up to `columns`. */
static void softmax(float *restrict row, int64_t t, int64_t window, int64_t columns) {
    int64_t first = window > 0 && t >= window ? t - window + 1 : 0;
    float largest = -INFINITY, sum = 0;
    for (int64_t j = first; j <= t; j++) largest = row[j] > largest ? row[j] : largest;
    for (int64_t j = 0; j < first; j++) row[j] = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t j = first; j <= t; j++) {
        row[j] = exponential(row[j] - largest);
        sum += row[j];
    }
    float scale = 1.0f / sum;
    for (int64_t j = first; j <= t; j++) row[j] *= scale;
    for (int64_t j = t + 1; j < columns; j++) row[j] = 0;
}

/* Probabilities of queries t .. t + rows, (rows, padded). */
static void probabilities(const scratch *s, int64_t t, int64_t rows, int64_t width, int64_t wide, int64_t padded, int64_t window) {
    int64_t seen = ROUND(t + rows, 2 * WIDTH);
    rows_of(s->query + t * wide, wide, 1, s->keys_across, padded, s->scores + t * padded, padded, width, rows, seen, 0);
    for (int64_t r = 0; r < rows; r++) softmax(s->scores + (t + r) * padded, t + r, window, padded);
}

static inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

/* One sequence of one query head, whose queries begin after `before` tokens of its prompt: their outputs (length, wide). The key
   head's keys and values are in the scratch. */
static void forward_head(const scratch *s, int64_t before, int64_t length, int64_t width, int64_t wide, int64_t padded, int64_t window) {
    for (int64_t t = before; t < length; t += TILE) {
        int64_t rows = smaller(TILE, length - t);
        probabilities(s, t, rows, width, wide, padded, window);
        rows_of(s->scores + t * padded, padded, 1, s->values, wide, s->out + t * wide, wide, t + rows, rows, wide, 0);
    }
}

/* Its gradients: of the queries in `out`, of keys and values added to theirs. `query` is scaled and `grad` the outputs' gradient. */
static void backward_head(const scratch *s, int64_t before, int64_t length, int64_t width, int64_t wide, int64_t padded, int64_t window,
                          float scaling) {
    for (int64_t t = before; t < length; t += TILE) {
        int64_t rows = smaller(TILE, length - t), seen = ROUND(t + rows, 2 * WIDTH);
        probabilities(s, t, rows, width, wide, padded, window);
        rows_of(s->grad + t * wide, wide, 1, s->values_across, padded, s->grad_scores + t * padded, padded, width, rows, seen, 0);
        for (int64_t r = t; r < t + rows; r++) {
            float *restrict p = s->scores + r * padded, *restrict g = s->grad_scores + r * padded, mean = 0;
#pragma omp simd reduction(+ : mean)
            for (int64_t j = 0; j <= r; j++) mean += p[j] * g[j];
            for (int64_t j = 0; j <= r; j++) g[j] = p[j] * (g[j] - mean);
            for (int64_t j = r + 1; j < padded; j++) g[j] = 0;
        }
        rows_of(s->grad_scores + t * padded, padded, 1, s->keys, wide, s->out + t * wide, wide, t + rows, rows, wide, 0);
    }
    for (int64_t i = before * wide; i < length * wide; i++) s->out[i] *= scaling;
    /* the queries that see these keys: none before the first of them, none of the prompt */
    for (int64_t j = 0; j < length; j += TILE) {
        int64_t rows = smaller(TILE, length - j), t = j < before ? before : j, left = length - t, from = t * padded + j;
        rows_of(s->grad_scores + from, 1, padded, s->query + t * wide, wide, s->grad_keys + j * wide, wide, left, rows, wide, 1);
        rows_of(s->scores + from, 1, padded, s->grad + t * wide, wide, s->grad_values + j * wide, wide, left, rows, wide, 1);
    }
}

/* Keys and values of the prompt's tokens, `before` from `prompt`, and of the sequence's, `length` from `first`: as they are and across. */
static void read_keys(const scratch *s, view keys, view values, int64_t prompt, int64_t before, int64_t first, int64_t head, int64_t length,
                      int64_t width, int64_t wide, int64_t padded) {
    read_rows(keys, prompt, head, before, width, wide, 1.0f, s->keys);
    read_rows(values, prompt, head, before, width, wide, 1.0f, s->values);
    read_rows(keys, first, head, length, width, wide, 1.0f, s->keys + before * wide);
    read_rows(values, first, head, length, width, wide, 1.0f, s->values + before * wide);
    transposed(s->keys, before + length, width, wide, padded, s->keys_across);
    transposed(s->values, before + length, width, wide, padded, s->values_across);
}

typedef struct {
    view queries, keys, values, grads;
    target outs, grad_keys, grad_values;
    const int32_t *offsets;
    int64_t group, width, wide, window;
    float scaling;
} call;

/* The outputs of sequence n for key head k, or the gradients of its queries; those of keys and values go to the scratch. */
static void attend_sequence(const call *c, const scratch *s, int64_t prompt, int64_t before, int64_t n, int64_t k) {
    int64_t first = c->offsets[n], own = c->offsets[n + 1] - first, length = before + own, padded = ROUND(length, 2 * WIDTH);
    int64_t width = c->width, wide = c->wide, skip = before * wide;
    read_keys(s, c->keys, c->values, prompt, before, first, k, own, width, wide, padded);
    for (int64_t h = k * c->group; h < (k + 1) * c->group; h++) {
        read_rows(c->queries, first, h, own, width, wide, c->scaling, s->query + skip);
        if (c->grads.at) {
            read_rows(c->grads, first, h, own, width, wide, 1.0f, s->grad + skip);
            backward_head(s, before, length, width, wide, padded, c->window, c->scaling);
        } else {
            forward_head(s, before, length, width, wide, padded, c->window);
        }
        write_rows(s->out + skip, first, h, own, width, wide, c->outs);
    }
}

/* Sequences `first` .. `first + members`, of which the first is the prompt of the others; `memory` has room for `most` tokens. */
static void attend_family(const call *c, float *memory, int64_t most, int64_t first, int64_t members, int64_t k) {
    int64_t prompt = c->offsets[first], shared = c->offsets[first + 1] - prompt, wide = c->wide;
    scratch s = divided(memory, members > 1 ? most : ROUND(shared, 2 * WIDTH), wide);
    memset(s.grad_keys, 0, sizeof(float) * (size_t)(shared * wide));
    memset(s.grad_values, 0, sizeof(float) * (size_t)(shared * wide));
    /* the prompt last: its keys have the gradients from all that see them by then */
    for (int64_t i = 1; i <= members; i++) {
        int64_t n = first + i % members, before = n == first ? 0 : shared, skip = before * wide;
        int64_t own = c->offsets[n + 1] - c->offsets[n];
        if (before) {
            memset(s.grad_keys + skip, 0, sizeof(float) * (size_t)(own * wide));
            memset(s.grad_values + skip, 0, sizeof(float) * (size_t)(own * wide));
        }
        attend_sequence(c, &s, prompt, before, n, k);
        if (c->grads.at) {
            write_rows(s.grad_keys + skip, c->offsets[n], k, own, c->width, wide, c->grad_keys);
            write_rows(s.grad_values + skip, c->offsets[n], k, own, c->width, wide, c->grad_values);
        }
    }
}

/* Sequences of tokens offsets[n] .. offsets[n + 1]. Family f of `count` is the prompt families[f] and the sequences that continue it,
   up to families[f + 1]; without `families` it is sequence f. No sequence with its prompt is longer than `longest`; `window` > 0
   limits how far back. With `grad` the backward: `out` gets the gradient of the queries. `strides` are those of a token and a head,
   in the order of the arguments. Returns 0 without memory. */
int attention(const number *query, const number *key, const number *value, const number *grad, number *out, number *grad_key,
              number *grad_value, const int32_t *offsets, const int32_t *families, const int64_t *strides, int64_t count, int64_t heads,
              int64_t key_heads, int64_t width, int64_t longest, int64_t window, float scaling, int threads) {
    call c = {
        .queries = {query, strides[0], strides[1]},
        .keys = {key, strides[2], strides[3]},
        .values = {value, strides[4], strides[5]},
        .grads = {grad, strides[6], strides[7]},
        .outs = {out, strides[8], strides[9]},
        .grad_keys = {grad_key, strides[10], strides[11]},
        .grad_values = {grad_value, strides[12], strides[13]},
        .offsets = offsets,
        .group = heads / key_heads,
        .width = width,
        .wide = ROUND(width, 2 * WIDTH),
        .window = window,
        .scaling = scaling,
    };
    int64_t most = ROUND(longest, 2 * WIDTH);
    int failed = 0;
#pragma omp parallel num_threads(threads)
    {
        float *memory = malloc(sizeof(float) * (size_t)scratch_floats(most, c.wide));
        if (!memory) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp barrier
        if (!failed) {
#pragma omp for schedule(dynamic)
            for (int64_t task = 0; task < count * key_heads; task++) {
                int64_t f = task / key_heads, first = families ? families[f] : f;
                attend_family(&c, memory, most, first, families ? families[f + 1] - first : 1, task % key_heads);
            }
        }
        free(memory);
    }
    return !failed;
}
