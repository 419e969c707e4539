/* What attention in decode steps and in chunks of a prompt have in common: pages, softmax, and joining splits, so that a
 * token has the same bits in both. Included by kernels.c.
 *
 *     page pool  ->  token t of a page at page * page_stride + t * kv_heads * dim, K and V in two pools
 */
/* Attention over more than SPLIT keys is split into parts of SPLIT keys, and softmax is updated after every KEYS keys:
 * at multiples of both, in decode steps and in chunks of a prompt. */
#define SPLIT 512
#define KEYS 64

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

INLINE float value_of(const char *p, int64_t i, int narrow)
{
    return narrow ? wide_of(((const uint16_t *)p)[i]) : ((const float *)p)[i];
}

/* Update one query head's softmax with `scale` times the scores of KEYS keys, of which [begin, end) count: scores become
 * weights; maximum, sum and acc [width] of the preceding keys are scaled to the new maximum. scale is positive. Decode
 * steps and chunks of a prompt call this one function, so that a token has the same bits in both. */
static __attribute__((noinline)) void soften(int64_t begin, int64_t end, float scale, float cap, float *scores, float *maximum, float *sum,
                                             float *acc, int64_t width)
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
        vec p = exp_of(fused(*(vec *)(scores + t), (vec){0} + scale, base));
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
    for (int64_t i = 0; i < width; i += VL) *(vec *)(total + i) = fused(*(const vec *)(acc + i), (vec){0} + added, *(vec *)(total + i) * kept);
}
