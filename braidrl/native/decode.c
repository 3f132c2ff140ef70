/* The parts of a decode step that are not matrix products, each fused into one pass over its rows.

   Compiled for one processor and one model's shape: HEAD is the width of a head, GROUP the query heads per key head, and with
   BFLOAT16 weights, keys and values are bfloat16 (arithmetic is float32 all the same). Every row is computed by itself, so its
   bits depend neither on the other rows nor on the number of threads.

   Layouts: projected (rows, (GROUP * K + 2 * K) * HEAD) holds the queries, keys and values of a row, which is one token; keys and
   values are (slots, K, capacity, HEAD), and row r belongs to slot slots[r]. Several rows may belong to one slot. */
#include "numbers.h"
#include <string.h>

/* residual += update (where there is one); out = residual / sqrt(mean(residual^2) + epsilon) * weight */
void add_norm(float *residual, const number *update, const number *weight, number *out, int64_t rows, int64_t width,
              float epsilon, int threads) {
#pragma omp parallel for num_threads(threads_for(rows * width / 2, threads)) schedule(static)
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
#pragma omp parallel for num_threads(threads_for(rows * width / 2, threads)) schedule(static)
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

/* Has a head's vector brought from memory to the cache. */
static inline void fetch(const number *x) {
    for (int i = 0; i < HEAD; i += 64 / (int)sizeof(number)) __builtin_prefetch(x + i, 0, 2);
}

/* One query per head against the slot's keys up to its position, reading each key and value once; `scores` has room for
   GROUP rows of `seen` numbers. Meanwhile the values, and then the keys at `ahead`, which are read next, come from memory. */
static void attend_one(float query[GROUP][HEAD], const number *restrict keys, const number *restrict values,
                       int64_t seen, float *restrict scores, number *restrict out, const number *ahead) {
    float largest[GROUP], total[GROUP], sums[GROUP][HEAD];
    for (int g = 0; g < GROUP; g++) {
        largest[g] = -INFINITY;
        for (int i = 0; i < HEAD; i++) sums[g][i] = 0;
    }
    for (int64_t l = 0; l < seen; l++) {
        const number *restrict key = keys + l * HEAD;
        fetch(values + l * HEAD);
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
        fetch(ahead + l * HEAD);
        for (int g = 0; g < GROUP; g++) {
            float weight = scores[g * seen + l];
            for (int i = 0; i < HEAD; i++) sums[g][i] += weight * load(value[i]);
        }
    }
    for (int g = 0; g < GROUP; g++)
        for (int i = 0; i < HEAD; i++) out[g * HEAD + i] = store(sums[g][i] / total[g]);
}

/* Puts each row's new key and value at its slot's position, then attends; `window` > 0 limits how far back. A row of a slot below 0
   is padding: its output is 0. Returns 0 without memory. */
int attend(const number *projected, const number *query_weight, const number *key_weight, float epsilon,
           const float *cosine, const float *sine, const int64_t *slots, const int64_t *positions, number *keys,
           number *values, number *out, int64_t rows, int64_t key_heads, int64_t capacity, int64_t window,
           float scaling, int threads) {
    int failed = 0;
    int64_t seen = 0;
    for (int64_t r = 0; r < rows; r++) seen += positions[r] + 4;
#pragma omp parallel num_threads(threads_for(seen * key_heads * GROUP * HEAD / 4, threads))
    {
        float *scores = malloc(sizeof(float) * GROUP * (size_t)capacity);
        if (!scores) {
#pragma omp atomic write
            failed = 1;
        }
        /* all keys first: a row sees those of earlier rows of its slot */
#pragma omp for schedule(static)
        for (int64_t r = 0; r < rows; r++) {
            const number *new_keys = projected + r * (GROUP + 2) * key_heads * HEAD + GROUP * key_heads * HEAD;
            const number *new_values = new_keys + key_heads * HEAD;
            for (int64_t k = 0; k < key_heads && slots[r] >= 0; k++) {
                int64_t at = ((slots[r] * key_heads + k) * capacity + positions[r]) * HEAD;
                float turned[HEAD];
                rotated(new_keys + k * HEAD, key_weight, epsilon, cosine + r * HEAD, sine + r * HEAD, turned);
                for (int i = 0; i < HEAD; i++) {
                    keys[at + i] = store(turned[i]);
                    values[at + i] = new_values[k * HEAD + i];
                }
            }
        }
        if (!failed) {
#pragma omp for schedule(dynamic, 8)
            for (int64_t task = 0; task < rows * key_heads; task++) {
                int64_t r = task / key_heads, k = task % key_heads, position = positions[r];
                const number *row = projected + r * (GROUP + 2) * key_heads * HEAD;
                number *attended = out + task * GROUP * HEAD;
                if (slots[r] < 0) {
                    memset(attended, 0, sizeof(number) * GROUP * HEAD);
                    continue;
                }
                float query[GROUP][HEAD];
                for (int g = 0; g < GROUP; g++) {
                    rotated(row + (k * GROUP + g) * HEAD, query_weight, epsilon, cosine + r * HEAD, sine + r * HEAD,
                            query[g]);
                    for (int i = 0; i < HEAD; i++) query[g][i] *= scaling;
                }
                int64_t first = window > 0 && position >= window ? position - window + 1 : 0;
                int64_t start = ((slots[r] * key_heads + k) * capacity + first) * HEAD;
                int64_t next = task + 1 < rows * key_heads ? task + 1 : task, slot = slots[next / key_heads];
                int64_t start_of_next = ((slot < 0 ? 0 : slot) * key_heads + next % key_heads) * capacity * HEAD;
                attend_one(query, keys + start, values + start, position + 1 - first, scores, attended,
                           keys + start_of_next);
            }
        }
        free(scores);
    }
    return !failed;
}

/* Lays out the tokens that a pass reads: the current token of each row and counts[r] guesses of its next ones, of `longest`, none
   without counts; then padding up to `size` tokens, which is the first row's without a slot. `starts` are (rows + 1); `tokens` are
   (6, size): the row of each, its slot, the token, its number in the response, position and shift; `uniforms` draw what follows it. */
void lay_out(const int64_t *slots, const int64_t *counts, const int64_t *guesses, const int64_t *current, const int64_t *positions,
             const int64_t *shifts, const int64_t *drawn, const int64_t *keys, const int64_t *first_draws, int64_t *starts,
             int64_t *tokens, double *uniforms, int64_t rows, int64_t longest, int64_t size) {
    int64_t at = 0;
    for (int64_t r = 0; r <= rows; r++) {
        int64_t row = r < rows ? r : 0, slot = slots[row], end = r == rows ? size : at + 1 + (counts ? counts[r] : 0);
        starts[r] = at;
        for (int64_t offset = 0; at < end; at++) {
            int64_t count = drawn[slot] + offset;
            tokens[at] = row, tokens[size + at] = r < rows ? slot : -1;
            tokens[2 * size + at] = offset ? guesses[row * longest + offset - 1] : current[slot];
            tokens[3 * size + at] = count, tokens[4 * size + at] = positions[slot] + offset, tokens[5 * size + at] = shifts[slot];
            uniforms[at] = uniform_of(keys[slot], first_draws[slot] + count);
            offset += r < rows;
        }
    }
}

/* Appends to each row's response what it has drawn: tokens starts[r] .. starts[r + 1] of a pass are its last token and guesses of
   the next ones, and `drawn` is what it draws behind each. What it draws behind a wrong guess, or after its end, does not count.
   `kept` marks the tokens that count, `ended` the rows that reached a stop token or their limit. `draws` are those of `draw`, kept in
   `kept_draws`, or NULL. Returns how many tokens count. */
int64_t keep(const int64_t *read, const int64_t *starts, const int64_t *slots, const int64_t *drawn, const float *log_probs,
          const float *draws, int64_t *tokens, float *kept_log_probs, float *kept_draws, int64_t *current, int64_t *position,
          int64_t *counts, const int64_t *limits, const int64_t *stops, uint8_t *kept, uint8_t *ended, int64_t rows, int64_t room, int64_t stop_room) {
    int64_t all = 0;
    for (int64_t r = 0; r < rows; r++) {
        int64_t slot = slots[r];
        for (int64_t i = starts[r]; i < starts[r + 1]; i++, all++) {
            if (i > starts[r] && (ended[r] || read[i] != drawn[i - 1])) break;
            kept[i] = 1;
            tokens[slot * room + counts[slot]] = current[slot] = drawn[i];
            kept_log_probs[slot * room + counts[slot]] = log_probs[i];
            for (int64_t n = 0; draws && n < 3; n++) kept_draws[3 * (slot * room + counts[slot]) + n] = draws[3 * i + n];
            position[slot]++;
            ended[r] = ++counts[slot] >= limits[slot];
            for (int64_t s = 0; s < stop_room; s++) ended[r] |= stops[slot * stop_room + s] == drawn[i];
        }
    }
    return all;
}

#define BLOCK 128

/* Draws a token for each row by the inverse of the running sum of exp((logit - largest) / temperature), in blocks; `sums` has
   room for every row's blocks. A greedy row takes the likeliest. log_probs are at the row's temperature. `draws` are (rows, 3): the
   ends of the interval in [0, 1) whose numbers draw the token, and the number that did. */
void draw(const number *logits, const double *temperatures, const uint8_t *greedy, const double *uniforms, int64_t *tokens, float *log_probs,
          float *draws, double *sums, int64_t rows, int64_t vocabulary, int threads) {
    int64_t blocks = (vocabulary + BLOCK - 1) / BLOCK;
#pragma omp parallel for num_threads(threads_for(rows * vocabulary, threads)) schedule(static)
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
        double before = 0, last = total; /* the sums up to the token, without it and with it */
        if (!greedy[r]) {
            double target = uniforms[r] * total;
            int64_t b = 0;
            while (b + 1 < blocks && before + sum[b] <= target) before += sum[b++];
            int64_t end = (b + 1) * BLOCK < vocabulary ? (b + 1) * BLOCK : vocabulary;
            /* the last token with a weight, where rounding lets the target pass the block's end */
            for (int64_t i = b * BLOCK; i < end; i++) {
                float weight = exponential((load(x[i]) - largest) * inverse);
                if (weight > 0) token = i, last = before + weight;
                if (weight > 0 && last > target) break;
                before += weight;
            }
        }
        for (int64_t i = 0; token < 0 && i < vocabulary; i++)
            if (load(x[i]) == largest) token = i;
        if (token < 0) token = 0; /* nothing but NaN, which the log-prob shows */
        tokens[r] = token;
        draws[3 * r] = (float)(before / total), draws[3 * r + 1] = (float)(last / total), draws[3 * r + 2] = (float)uniforms[r];
        log_probs[r] = (load(x[token]) - largest) * inverse - (float)log(total);
    }
}
