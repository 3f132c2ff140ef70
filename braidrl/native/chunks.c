/* Log-probs of a chunk of tokens and the gradient of its logits: each row of the vocabulary is read twice and nothing is copied. */
#include "numbers.h"

#define BLOCK 512 /* numbers that are summed in float32; their sums are added in double */

/* With z = logits / temperature: log_sums = log sum exp(z), log_probs = z[target] - log_sum, entropies = log_sum - mean of z. */
void statistics(const number *logits, const int64_t *targets, float temperature, float *log_probs, float *log_sums,
                float *entropies, int64_t rows, int64_t vocabulary, int threads) {
    float inverse = 1.0f / temperature;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t r = 0; r < rows; r++) {
        const number *restrict x = logits + r * vocabulary;
        float largest = -INFINITY;
#pragma omp simd reduction(max : largest)
        for (int64_t i = 0; i < vocabulary; i++) {
            float value = load(x[i]);
            largest = value > largest ? value : largest;
        }
        double total = 0, moment = 0;
        for (int64_t start = 0; start < vocabulary; start += BLOCK) {
            int64_t end = start + BLOCK < vocabulary ? start + BLOCK : vocabulary;
            float sum = 0, weighted = 0;
#pragma omp simd reduction(+ : sum, weighted)
            for (int64_t i = start; i < end; i++) {
                float z = (load(x[i]) - largest) * inverse, weight = exponential(z);
                sum += weight;
                weighted += weight > 0 ? weight * z : 0;
            }
            total += sum;
            moment += weighted;
        }
        float logarithm = (float)log(total);
        log_sums[r] = largest * inverse + logarithm;
        log_probs[r] = (load(x[targets[r]]) - largest) * inverse - logarithm;
        entropies[r] = logarithm - (float)(moment / total);
    }
}

/* The gradient of one logit: d log p_y / dz = 1[y] - p; d H / dz = -p (log p + H). */
static inline float gradient_of(float log_prob, float is_target, float entropy, float grad_log_prob, float grad_entropy) {
    float p = exponential(log_prob), own = p > 0 ? p * (log_prob + entropy) : 0;
    return grad_log_prob * (is_target - p) - grad_entropy * own;
}

/* Writes the gradient over the logits; without `grad_entropies` the entropy has none. */
void gradient(number *logits, const int64_t *targets, float temperature, const float *log_sums, const float *entropies,
              const float *grad_log_probs, const float *grad_entropies, int64_t rows, int64_t vocabulary, int threads) {
    float inverse = 1.0f / temperature;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t r = 0; r < rows; r++) {
        number *restrict x = logits + r * vocabulary;
        float log_sum = log_sums[r], grad = grad_log_probs[r], entropy = entropies[r];
        float grad_entropy = grad_entropies ? grad_entropies[r] : 0;
        float at_target = load(x[targets[r]]) * inverse - log_sum;
        if (grad_entropies)
            for (int64_t i = 0; i < vocabulary; i++)
                x[i] = store(inverse * gradient_of(load(x[i]) * inverse - log_sum, 0, entropy, grad, grad_entropy));
        else
            for (int64_t i = 0; i < vocabulary; i++) x[i] = store(-inverse * grad * exponential(load(x[i]) * inverse - log_sum));
        x[targets[r]] = store(inverse * gradient_of(at_target, 1, entropy, grad, grad_entropy));
    }
}

/* total += part */
void accumulate(float *restrict total, const number *restrict part, int64_t count, int threads) {
#pragma omp parallel for simd num_threads(threads) schedule(static)
    for (int64_t i = 0; i < count; i++) total[i] += load(part[i]);
}
