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

/* out = silu(gate) * up, of rows whose gates and values of up begin `stride` numbers apart. */
void gate_forward(const number *gate, const number *up, number *out, int64_t rows, int64_t width, int64_t stride, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t r = 0; r < rows; r++) {
        const number *restrict gates = gate + r * stride, *restrict ups = up + r * stride;
        number *restrict o = out + r * width;
#pragma omp simd
        for (int64_t i = 0; i < width; i++) {
            float g = load(gates[i]);
            o[i] = store(g / (1.0f + exponential(-g)) * load(ups[i]));
        }
    }
}

/* With s = sigmoid(gate): grad_up = grad * gate * s, grad_gate = grad * up * s * (1 + gate * (1 - s)). Both gradients have
   the stride of the gates. */
void gate_backward(const number *grad, const number *gate, const number *up, number *grad_gate, number *grad_up,
                   int64_t rows, int64_t width, int64_t stride, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t r = 0; r < rows; r++) {
        const number *restrict grads = grad + r * width, *restrict gates = gate + r * stride, *restrict ups = up + r * stride;
        number *restrict to_gate = grad_gate + r * stride, *restrict to_up = grad_up + r * stride;
#pragma omp simd
        for (int64_t i = 0; i < width; i++) {
            float g = load(gates[i]), sigmoid = 1.0f / (1.0f + exponential(-g));
            to_up[i] = store(load(grads[i]) * g * sigmoid);
            to_gate[i] = store(load(grads[i]) * load(ups[i]) * sigmoid * (1.0f + g * (1.0f - sigmoid)));
        }
    }
}

/* `gate_backward` of rows of gates and values of up side by side, `both` (rows, 2 * width), whose results are multiplied by `scales`
   (rows): from the gradient of the product, `grad`, also the scaled results in `active`, and the gradients of the scales. */
void scaled_gate_backward(const number *grad, const number *both, const number *scales, number *active, number *to_both,
                          float *to_scales, int64_t rows, int64_t width, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t r = 0; r < rows; r++) {
        const number *restrict grads = grad + r * width, *restrict gates = both + r * 2 * width, *restrict ups = gates + width;
        number *restrict out = active + r * width, *restrict to_gate = to_both + r * 2 * width, *restrict to_up = to_gate + width;
        float scale = load(scales[r]), product = 0;
#pragma omp simd reduction(+ : product)
        for (int64_t i = 0; i < width; i++) {
            float g = load(gates[i]), sigmoid = 1.0f / (1.0f + exponential(-g)), silu = g * sigmoid;
            float result = load(store(silu * load(ups[i]))), scaled = load(grads[i]) * scale;
            product += load(grads[i]) * result;
            out[i] = store(result * scale);
            to_up[i] = store(scaled * silu);
            to_gate[i] = store(scaled * load(ups[i]) * sigmoid * (1.0f + g * (1.0f - sigmoid)));
        }
        to_scales[r] = product;
    }
}

/* Rotary embedding of `heads` vectors a row: out = x * cosine + turned(x) * sine, where turned has the second half of x with the
   other sign, then the first. With `inverse` the gradient of x, from that of out. Cosines and sines are (rows, width). */
void rotate(const number *x, const number *cosine, const number *sine, number *out, int64_t rows, int64_t heads, int64_t width,
            int inverse, int threads) {
    int64_t half = width / 2;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t row = 0; row < rows * heads; row++) {
        const number *restrict c = cosine + row / heads * width, *restrict s = sine + row / heads * width;
        const number *restrict low = x + row * width, *restrict high = low + half;
        number *restrict to_low = out + row * width, *restrict to_high = to_low + half;
#pragma omp simd
        for (int64_t i = 0; i < half; i++) {
            float of_high = inverse ? load(s[i + half]) : -load(s[i]), of_low = inverse ? -load(s[i]) : load(s[i + half]);
            to_low[i] = store(load(low[i]) * load(c[i]) + load(high[i]) * of_high);
            to_high[i] = store(load(high[i]) * load(c[i + half]) + load(low[i]) * of_low);
        }
    }
}
