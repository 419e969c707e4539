/* Norms, rotary positions, and writing K and V to pages; included by kernels.c. */

/* RMSNorm of `inner` adjacent vectors of `width` in each of `rows` rows of x, `stride` apart, to the same places of
 * out, rows `out_stride` apart. `weight` [width]. */
void zoo_norm(const float *x, int64_t rows, int64_t inner, int64_t width, int64_t stride, const float *weight, float eps, float *out,
              int64_t out_stride, int threads)
{
#pragma omp parallel for schedule(dynamic, SHARE(rows * inner)) num_threads(threads) if (rows * inner * width > 4096)
    for (int64_t each = 0; each < rows * inner; each++) {
        int64_t row = each / inner, at = each % inner * width;
        const float *in = x + row * stride + at;
        float *o = out + row * out_stride + at;
        vec sums = {0};
        float sum = 0.0f;
        int64_t i = 0;
        for (; i + VL <= width; i += VL) sums += *(const vec *)(in + i) * *(const vec *)(in + i);
        for (; i < width; i++) sum += in[i] * in[i];
        sum += sum_of(sums);
        float scale = 1.0f / sqrtf(sum / (float)width + eps);
        for (i = 0; i + VL <= width; i += VL) *(vec *)(o + i) = *(const vec *)(in + i) * scale * *(const vec *)(weight + i);
        for (; i < width; i++) o[i] = in[i] * scale * weight[i];
    }
}

/* Rotary positions in place on the first `heads` heads of each token of x, pairing the two halves of a head.
 * cosine, sine [tokens, dim]. */
void zoo_rotate(float *x, int64_t tokens, int64_t stride, int64_t heads, int64_t dim, const float *cosine, const float *sine, int threads)
{
    int64_t half = dim / 2;
#pragma omp parallel for schedule(dynamic, SHARE(tokens)) num_threads(threads) if (tokens * heads * dim > 8192)
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t h = 0; h < heads; h++) {
            float *restrict a = x + t * stride + h * dim, *restrict b = a + half;
            const float *c = cosine + t * dim, *s = sine + t * dim;
            for (int64_t i = 0; i < half; i++) {
                float first = a[i], second = b[i];
                a[i] = first * c[i] - second * s[i];
                b[i] = second * c[half + i] + first * s[half + i];
            }
        }
}

/* Write one token's values to a pool: floats as they are (size 4), bfloat16 as it is (size 2), or floats as bfloat16. */
INLINE void put(const void *from, void *to, int64_t width, int64_t size, int narrowed)
{
    if (!narrowed) {
        memcpy(to, from, (size_t)(width * size));
        return;
    }
    for (int64_t i = 0; i < width; i++) ((uint16_t *)to)[i] = (uint16_t)narrow_of(((const float *)from)[i]);
}

/* Write K and V of tokens [tokens, width] to (pages[i], offsets[i]) of the pools. Strides are in values: `k_stride` and
 * `v_stride` from token to token, `page_stride` from page to page. `size`: bytes of a pool's value. `narrowed`: K and V
 * are float32 and are rounded to the pools' bfloat16. */
void zoo_keep(const void *k, const void *v, int64_t k_stride, int64_t v_stride, int64_t tokens, int64_t width, void *k_pool,
              void *v_pool, int64_t page_stride, const int64_t *pages, const int64_t *offsets, int64_t size, int narrowed, int threads)
{
    int64_t from = narrowed ? 4 : size;
#pragma omp parallel for schedule(dynamic, SHARE(tokens)) num_threads(threads) if (tokens * width > 16384)
    for (int64_t t = 0; t < tokens; t++) {
        int64_t at = (pages[t] * page_stride + offsets[t] * width) * size;
        put((const char *)k + t * k_stride * from, (char *)k_pool + at, width, size, narrowed);
        put((const char *)v + t * v_stride * from, (char *)v_pool + at, width, size, narrowed);
    }
}
