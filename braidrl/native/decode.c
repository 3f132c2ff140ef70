/* The parts of a decode step that are not matrix products, each fused into one pass over its rows.

   Compiled for one processor and one model's shape: HEAD is the width of a head, GROUP the query heads per key head, and with
   BFLOAT16 weights, keys and values are bfloat16 (arithmetic is float32 all the same). Every row is computed by itself, so its
   bits depend neither on the other rows nor on the number of threads.

   Layouts: projected (rows, (GROUP * K + 2 * K) * HEAD) holds a row's queries, keys and values; keys and values are
   (slots, K, capacity, HEAD); row r is slot r. */
#include "numbers.h"

/* residual += update (where there is one); out = residual / sqrt(mean(residual^2) + epsilon) * weight */
void add_norm(float *residual, const number *update, const number *weight, number *out, int64_t rows, int64_t width,
              float epsilon, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t r = 0; r < rows; r++) {
        float *restrict h = residual + r * width;
        number *restrict o = out + r * width;
        if (update) {
            const number *restrict u = update + r * width;
            for (int64_t i = 0; i < width; i++) h[i] += load(u[i]);
        }
        float square = 0;
#pragma omp simd reduction(+ : square)
        for (int64_t i = 0; i < width; i++) square += h[i] * h[i];
        float scale = 1.0f / sqrtf(square / (float)width + epsilon);
        for (int64_t i = 0; i < width; i++) o[i] = store(load(weight[i]) * (h[i] * scale));
    }
}

/* out = silu(first half) * second half, of `both` (rows, 2 * width) */
void gated(const number *both, number *out, int64_t rows, int64_t width, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t r = 0; r < rows; r++) {
        const number *restrict gate = both + 2 * r * width, *restrict up = gate + width;
        number *restrict o = out + r * width;
        for (int64_t i = 0; i < width; i++) {
            float g = load(gate[i]);
            o[i] = store(g / (1.0f + exponential(-g)) * load(up[i]));
        }
    }
}

/* A head's vector, normalised where it has a weight, turned by its position's angles. */
static inline void rotated(const number *restrict x, const number *restrict weight, float epsilon,
                           const float *restrict cosine, const float *restrict sine, float *restrict out) {
    float v[HEAD];
    float scale = 1.0f;
    for (int i = 0; i < HEAD; i++) v[i] = load(x[i]);
    if (weight) {
        float square = 0;
#pragma omp simd reduction(+ : square)
        for (int i = 0; i < HEAD; i++) square += v[i] * v[i];
        scale = 1.0f / sqrtf(square / HEAD + epsilon);
        for (int i = 0; i < HEAD; i++) v[i] *= scale * load(weight[i]);
    }
    for (int i = 0; i < HEAD / 2; i++) {
        out[i] = v[i] * cosine[i] - v[i + HEAD / 2] * sine[i];
        out[i + HEAD / 2] = v[i + HEAD / 2] * cosine[i + HEAD / 2] + v[i] * sine[i + HEAD / 2];
    }
}

/* One query per head against the slot's keys up to its position, reading each key and value once; `scores` has room for
   GROUP rows of `seen` numbers. */
static void attend_one(float query[GROUP][HEAD], const number *restrict keys, const number *restrict values,
                       int64_t seen, float *restrict scores, number *restrict out) {
    float largest[GROUP], total[GROUP], sums[GROUP][HEAD];
    for (int g = 0; g < GROUP; g++) {
        largest[g] = -INFINITY;
        for (int i = 0; i < HEAD; i++) sums[g][i] = 0;
    }
    for (int64_t l = 0; l < seen; l++) {
        const number *restrict key = keys + l * HEAD;
        for (int g = 0; g < GROUP; g++) {
            float product = 0;
#pragma omp simd reduction(+ : product)
            for (int i = 0; i < HEAD; i++) product += query[g][i] * load(key[i]);
            scores[g * seen + l] = product;
            largest[g] = product > largest[g] ? product : largest[g];
        }
    }
    for (int g = 0; g < GROUP; g++) {
        float sum = 0, *restrict row = scores + g * seen;
#pragma omp simd reduction(+ : sum)
        for (int64_t l = 0; l < seen; l++) {
            row[l] = exponential(row[l] - largest[g]);
            sum += row[l];
        }
        total[g] = sum;
    }
    for (int64_t l = 0; l < seen; l++) {
        const number *restrict value = values + l * HEAD;
        for (int g = 0; g < GROUP; g++) {
            float weight = scores[g * seen + l];
            for (int i = 0; i < HEAD; i++) sums[g][i] += weight * load(value[i]);
        }
    }
    for (int g = 0; g < GROUP; g++)
        for (int i = 0; i < HEAD; i++) out[g * HEAD + i] = store(sums[g][i] / total[g]);
}

/* Puts each row's new key and value at its position and attends; `window` > 0 limits how far back. Returns 0 without memory. */
int attend(const number *projected, const number *query_weight, const number *key_weight, float epsilon,
           const float *cosine, const float *sine, const int64_t *positions, number *keys, number *values, number *out,
           int64_t rows, int64_t key_heads, int64_t capacity, int64_t window, float scaling, int threads) {
    int failed = 0;
#pragma omp parallel num_threads(threads)
    {
        float *scores = malloc(sizeof(float) * GROUP * (size_t)capacity);
        if (!scores) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp barrier
        if (!failed) {
#pragma omp for schedule(dynamic, 8)
            for (int64_t task = 0; task < rows * key_heads; task++) {
                int64_t r = task / key_heads, k = task % key_heads, position = positions[r];
                const number *row = projected + r * (GROUP + 2) * key_heads * HEAD;
                const float *c = cosine + r * HEAD, *s = sine + r * HEAD;
                const number *new_key = row + (GROUP * key_heads + k) * HEAD, *new_value = new_key + key_heads * HEAD;
                number *slot_keys = keys + task * capacity * HEAD, *slot_values = values + task * capacity * HEAD;
                float turned[HEAD], query[GROUP][HEAD];
                rotated(new_key, key_weight, epsilon, c, s, turned);
                for (int i = 0; i < HEAD; i++) {
                    slot_keys[position * HEAD + i] = store(turned[i]);
                    slot_values[position * HEAD + i] = new_value[i];
                }
                for (int g = 0; g < GROUP; g++) {
                    rotated(row + (k * GROUP + g) * HEAD, query_weight, epsilon, c, s, query[g]);
                    for (int i = 0; i < HEAD; i++) query[g][i] *= scaling;
                }
                int64_t first = window > 0 && position >= window ? position - window + 1 : 0;
                attend_one(query, slot_keys + first * HEAD, slot_values + first * HEAD, position + 1 - first, scores,
                           out + (r * key_heads + k) * GROUP * HEAD);
            }
        }
        free(scores);
    }
    return !failed;
}

#define BLOCK 128

/* Draws a token for each row by the inverse of the running sum of exp((logit - largest) / temperature), in blocks; `sums` has
   room for every row's blocks. A greedy row takes the likeliest. log_probs are at the row's temperature. */
void draw(const number *logits, const double *temperatures, const uint8_t *greedy, const double *uniforms, int64_t *tokens, float *log_probs,
          double *sums, int64_t rows, int64_t vocabulary, int threads) {
    int64_t blocks = (vocabulary + BLOCK - 1) / BLOCK;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t r = 0; r < rows; r++) {
        const number *restrict x = logits + r * vocabulary;
        double *restrict sum = sums + r * blocks;
        float inverse = (float)(1.0 / temperatures[r]);
        float largest = -INFINITY;
#pragma omp simd reduction(max : largest)
        for (int64_t i = 0; i < vocabulary; i++) {
            float value = load(x[i]);
            largest = value > largest ? value : largest;
        }
        double total = 0;
        for (int64_t b = 0; b < blocks; b++) {
            int64_t end = (b + 1) * BLOCK < vocabulary ? (b + 1) * BLOCK : vocabulary;
            float part = 0;
#pragma omp simd reduction(+ : part)
            for (int64_t i = b * BLOCK; i < end; i++) part += exponential((load(x[i]) - largest) * inverse);
            sum[b] = part;
            total += part;
        }
        int64_t token = -1;
        if (!greedy[r]) {
            double target = uniforms[r] * total, before = 0;
            int64_t b = 0;
            while (b + 1 < blocks && before + sum[b] <= target) before += sum[b++];
            int64_t end = (b + 1) * BLOCK < vocabulary ? (b + 1) * BLOCK : vocabulary;
            /* the last token with a weight, where rounding lets the target pass the block's end */
            for (int64_t i = b * BLOCK; i < end; i++) {
                float weight = exponential((load(x[i]) - largest) * inverse);
                if (weight > 0) token = i;
                before += weight;
                if (weight > 0 && before > target) break;
            }
        }
        for (int64_t i = 0; token < 0 && i < vocabulary; i++)
            if (load(x[i]) == largest) token = i;
        if (token < 0) token = 0; /* nothing but NaN, which the log-prob shows */
        tokens[r] = token;
        log_probs[r] = (load(x[token]) - largest) * inverse - (float)log(total);
    }
}
