/* Forward and backward of the layers that torch computes in many passes over memory, in one pass each. */
#include "numbers.h"

/* out = x * scale * weight with scale = 1 / sqrt(mean(x^2) + epsilon), which is kept for the backward. */
void norm_forward(const number *x, const number *weight, number *out, float *scales, int64_t rows, int64_t width,
                  float epsilon, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t r = 0; r < rows; r++) {
        const number *restrict in = x + r * width;
        number *restrict o = out + r * width;
        float square = 0;
#pragma omp simd reduction(+ : square)
        for (int64_t i = 0; i < width; i++) square += load(in[i]) * load(in[i]);
        float scale = 1.0f / sqrtf(square / (float)width + epsilon);
        for (int64_t i = 0; i < width; i++) o[i] = store(load(weight[i]) * (load(in[i]) * scale));
        scales[r] = scale;
    }
}

/* grad_x = scale * (w * g - x * scale^2 * mean(w * g * x)); grad_weight (parts, width) holds sums of g * x * scale over the
   rows of each part. */
void norm_backward(const number *grad, const number *x, const number *weight, const float *scales, number *grad_x,
                   float *grad_weight, int64_t rows, int64_t width, int64_t parts, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t part = 0; part < parts; part++) {
        float *restrict sums = grad_weight + part * width;
        for (int64_t r = rows * part / parts; r < rows * (part + 1) / parts; r++) {
            const number *restrict g = grad + r * width, *restrict in = x + r * width;
            number *restrict out = grad_x + r * width;
            float product = 0, scale = scales[r];
#pragma omp simd reduction(+ : product)
            for (int64_t i = 0; i < width; i++) product += load(g[i]) * load(weight[i]) * load(in[i]);
            float mean = product * scale * scale / (float)width;
            for (int64_t i = 0; i < width; i++) {
                out[i] = store(scale * (load(g[i]) * load(weight[i]) - load(in[i]) * mean));
                sums[i] += load(g[i]) * load(in[i]) * scale;
            }
        }
    }
}

/* out = silu(gate) * up */
void gate_forward(const number *restrict gate, const number *restrict up, number *restrict out, int64_t count, int threads) {
#pragma omp parallel for simd num_threads(threads) schedule(static)
    for (int64_t i = 0; i < count; i++) {
        float g = load(gate[i]);
        out[i] = store(g / (1.0f + exponential(-g)) * load(up[i]));
    }
}

/* With s = sigmoid(gate): grad_up = grad * gate * s, grad_gate = grad * up * s * (1 + gate * (1 - s)). */
void gate_backward(const number *restrict grad, const number *restrict gate, const number *restrict up,
                   number *restrict grad_gate, number *restrict grad_up, int64_t count, int threads) {
#pragma omp parallel for simd num_threads(threads) schedule(static)
    for (int64_t i = 0; i < count; i++) {
        float g = load(gate[i]), sigmoid = 1.0f / (1.0f + exponential(-g));
        grad_up[i] = store(load(grad[i]) * g * sigmoid);
        grad_gate[i] = store(load(grad[i]) * load(up[i]) * sigmoid * (1.0f + g * (1.0f - sigmoid)));
    }
}
