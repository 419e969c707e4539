/* What attention in decode steps and in chunks of a prompt have in common: pages, softmax, and joining splits, so that a
 * token has the same bits in both. Included by kernels.c.
 *
 * Over pages of bfloat16, on a processor with a dot product of pairs (PAIRED), queries and softmax's weights are rounded to
 * bfloat16: scores are sums over pairs of a head's values, results sums over pairs of keys, in float32. Softmax divides by
 * the sum of the rounded weights, so that rounding them does not scale the result. Otherwise all products are float32.
 *
 *     page pool  ->  token t of a page at page * page_stride + t * kv_heads * dim, K and V in two pools
 */
/* Attention over more than SPLIT keys is split into parts of SPLIT keys, and softmax is updated after every KEYS keys:
 * at multiples of both, in decode steps and in chunks of a prompt. */
#define SPLIT 512
#define KEYS 64

#if defined(__AVX512BF16__) && VL == 16 && PRODUCTS != 1
#define PAIRED 1
#else
#define PAIRED 0
#endif

struct pages {
    const char *k, *v;       /* pools of float32, or of bfloat16 if `narrow` */
    int64_t page_stride;     /* values from page to page */
    int64_t page_tokens;
    const int64_t *tables;   /* page ids of this layer, `table_stride` apart from row to row */
    int64_t table_stride;
    int64_t narrow;
};

typedef uint16_t hvec __attribute__((vector_size(VL * 2), aligned(2)));

/* Values of K or V as floats. */
INLINE vec load_of(const char *p, int64_t i, int narrow)
{
    if (narrow) return (vec)(__builtin_convertvector(*(const hvec *)(p + i * 2), uvec) << 16);
    return *(const vec *)(p + i * 4);
}

/* Pairs of the bfloat16 values [i, i + VL) of two keys, of which either may be NULL for zeros. `count` of them exist. */
INLINE uvec pairs_of(const char *even, const char *odd, int64_t i, int64_t count)
{
    hvec low = {0}, high = {0};
    if (count >= VL) {
        if (even != NULL) low = *(const hvec *)(even + i * 2);
        if (odd != NULL) high = *(const hvec *)(odd + i * 2);
    } else {
        if (even != NULL) memcpy(&low, even + i * 2, (size_t)count * 2);
        if (odd != NULL) memcpy(&high, odd + i * 2, (size_t)count * 2);
    }
    return __builtin_convertvector(low, uvec) | __builtin_convertvector(high, uvec) << 16;
}

/* Units [p, p + VL) of VL keys of `bytes` bytes, transposed: a unit is a float or a pair of bfloat16. Keys may be NULL. */
INLINE void turn_keys(const char **ks, int64_t offset, int64_t bytes, int64_t p, const char **then, uvec *r)
{
    for (int i = 0; i < VL; i++) {
        r[i] = (uvec){0};
        if (ks[i] == NULL) continue;
        if (bytes - p * 4 >= VL * 4)
            r[i] = *(const uvec *)(ks[i] + offset + p * 4);
        else
            memcpy(&r[i], ks[i] + offset + p * 4, (size_t)(bytes - p * 4));
        if (then != NULL) __builtin_prefetch(then[i] + offset + p * 4, 0, 2);
    }
    transpose(r);
}

INLINE float value_of(const char *p, int64_t i, int narrow)
{
    return narrow ? wide_of(((const uint16_t *)p)[i]) : ((const float *)p)[i];
}

/* p [VL], at least 0, rounded to bfloat16 as pair_up rounds. */
INLINE vec round_weights(vec p)
{
#if PAIRED
    return (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)p)), 16);
#else
    return p;
#endif
}

/* Update one query head's softmax with `scale` times the scores of KEYS keys, of which [begin, end) count: scores become
 * weights, rounded to bfloat16 if PAIRED and `narrow`; maximum, sum and acc [width] of the preceding keys are scaled to the
 * new maximum. scale is positive. Decode steps and chunks of a prompt call this one function, so that a token has the same
 * bits in both. */
static __attribute__((noinline)) void soften(int64_t begin, int64_t end, float scale, float cap, float *scores, float *maximum, float *sum,
                                             float *acc, int64_t width, int narrow)
{
    if (cap > 0.0f) {
        for (int64_t t = begin; t < end; t++) scores[t] = tanhf(scores[t] * scale / cap) * cap;
        scale = 1.0f;
    }
    vec high = (vec){0} - INFINITY;
    if (begin > 0 || end < KEYS) {
        int32_t lanes[VL] ALIGNED;
        for (int t = 0; t < VL; t++) lanes[t] = t;
        for (int t = 0; t < KEYS; t += VL) {
            ivec at = *(ivec *)lanes + t;
            *(vec *)(scores + t) = pick((at < (int32_t)end) & (at >= (int32_t)begin), *(vec *)(scores + t), (vec){0} - INFINITY);
        }
    }
    for (int t = 0; t < KEYS; t += VL) {
        vec s = *(vec *)(scores + t);
        high = pick((ivec)(s > high), s, high);
    }
    float most = max_of(high) * scale;
    if (most > *maximum) {
        float shrink = expf(*maximum - most);
        *sum *= shrink;
        for (int64_t i = 0; i < width; i += VL) *(vec *)(acc + i) *= shrink;
        *maximum = most;
    }
    vec total = {0}, base = (vec){0} - (*maximum == -INFINITY ? 0.0f : *maximum); /* avoids NaN when all are -inf */
    for (int t = 0; t < KEYS; t += VL) {
        vec p = exp_of(fused(*(vec *)(scores + t), broadcast(scale), base));
        if (PAIRED && narrow) p = round_weights(p);
        *(vec *)(scores + t) = p;
        total += p;
    }
    *sum += sum_of(total);
}

/* Add the attention over SPLIT keys to that over the preceding ones: acc [width], maximum and sum of both. One function
 * for decode steps and chunks, as soften. */
static __attribute__((noinline)) void add_split(const float *acc, float maximum, float sum, float *total, float *total_maximum, float *total_sum,
                                                int64_t width)
{
    if (maximum == -INFINITY) return;
    float most = maximum > *total_maximum ? maximum : *total_maximum;
    float kept = expf(*total_maximum - most), added = expf(maximum - most);
    *total_sum = *total_sum * kept + sum * added;
    *total_maximum = most;
    for (int64_t i = 0; i < width; i += VL) *(vec *)(total + i) = fused(*(const vec *)(acc + i), broadcast(added), *(vec *)(total + i) * kept);
}

/* Merge attention to parts of the tokens: outs [parts, rows, width] and sums [parts, rows], natural logarithms of the sums of
 * exponentiated scores, into out [rows, width] and sum [rows]. In the order of the parts; one with minus infinity changes nothing. */
void zoo_merge(const float *outs, const float *sums, int64_t parts, int64_t rows, int64_t width, float *out, float *sum)
{
    for (int64_t r = 0; r < rows; r++) {
        float most = -INFINITY, total = 0.0f, *to = out + r * width;
        for (int64_t p = 0; p < parts; p++)
            if (sums[p * rows + r] > most) most = sums[p * rows + r];
        memset(to, 0, width * sizeof(float));
        for (int64_t p = 0; p < parts && most > -INFINITY; p++) {
            float weight = expf(sums[p * rows + r] - most);
            const float *from = outs + (p * rows + r) * width;
            if (weight == 0.0f) continue;
            total += weight;
            for (int64_t i = 0; i < width; i++) to[i] += weight * from[i];
        }
        for (int64_t i = 0; i < width && total > 0.0f; i++) to[i] /= total;
        sum[r] = total > 0.0f ? most + logf(total) : -INFINITY;
    }
}
