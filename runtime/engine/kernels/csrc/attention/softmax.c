/* What attention in decode steps and in chunks of a prompt have in common: pages, softmax, and joining parts, so that a
 * token has the same bits in both. Included by kernels.c.
 *
 * Attention to some keys is (values, sum, exponent): values = sum of 2^(x - exponent) V, sum = sum of 2^(x - exponent), where
 * x = score * log2 e, and exponent is an integer. A weight 2^(x - exponent) is a power of two times what depends on x alone, and
 * so is what KEYS keys add in float; these are added as doubles. So moving to another exponent is exact, and sums of doubles
 * hardly ever round: the result has the same bits wherever keys are cut at multiples of KEYS, and whichever part is added first
 * (in the end a float is a double rounded: two sums that differ in the last bit of a double give two floats once in 10^8).
 *
 * Over pages of bfloat16, on a processor with a dot product of pairs (PAIRED), queries and softmax's weights are rounded to
 * bfloat16: scores are sums over pairs of a head's values, results sums over pairs of keys, in float32. Softmax divides by
 * the sum of the rounded weights, so that rounding them does not scale the result. Where there is a tile unit (amx.c), it computes
 * these sums, in its own order. Otherwise all products are float32.
 *
 *     page pool  ->  token t of a page at page * page_stride + t * kv_heads * dim, K and V in two pools
 */
/* Softmax takes KEYS keys at a time, at multiples of KEYS in a row. SPLIT: keys of a part that one thread attends to in a decode
 * step. */
#define SPLIT 512
#define KEYS 64

#if defined(__AVX512BF16__) && VL == 16 && PRODUCTS != 1
#define PAIRED 1
#else
#define PAIRED 0
#endif

/* Whether queries and keys, and weights and V, of these pages are multiplied on tiles. */
#define ON_TILES(pages) (PAIRED && (pages)->narrow && on_tiles())

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

/* acc [VL] += made. */
INLINE void add_wide(double *acc, vec made)
{
    union {
        vec all;
        halfvec half[2];
    } parts = {made};
    *(dvec *)acc += __builtin_convertvector(parts.half[0], dvec);
    *(dvec *)(acc + VL / 2) += __builtin_convertvector(parts.half[1], dvec);
}

/* 2^by for an integer by <= 0, as a factor of doubles; 0 for minus infinity and NaN. */
INLINE double power_of_two(double by) { return by > -1000.0 ? ldexp(1.0, (int)by) : 0.0; }

/* 2^(x + rest - exponent) for x <= exponent, an integer, and a rest that x was rounded by: 2^n 2^f with |f| <= 1/2 (Cephes). Below
 * 2^-125, and for NaN, it is 0. */
INLINE vec power_of(vec x, vec rest, float exponent)
{
    const float magic = 12582912.0f, whole = 4194304.0f; /* adding and subtracting it rounds to an integer, up to `whole` */
    const vec zero = {0};
    ivec kept = (ivec)(x - exponent > -125.0f);
    x = pick(kept, x, zero);
    vec n = pick((ivec)(x < whole) & (ivec)(x > -whole), x + magic - magic, x);
    vec f = x - n + rest;
    vec y = fused(f, zero + 1.535336188319500e-4f, zero + 1.339887440266574e-3f);
    y = fused(y, f, zero + 9.618437357674640e-3f);
    y = fused(y, f, zero + 5.550332471162809e-2f);
    y = fused(y, f, zero + 2.402264791363012e-1f);
    y = fused(y, f, zero + 6.931472028550421e-1f);
    y = fused(y, f, zero + 1.0f);
    ivec power = (__builtin_convertvector(pick(kept, n - exponent, zero), ivec) + 127) << 23;
    return pick(kept, y * (vec)power, zero);
}

/* Update one query head's softmax with `scale` times the scores of KEYS keys, of which [begin, end) count: scores become
 * weights, rounded to bfloat16 if PAIRED and `narrow`; exponent, sum and acc [width] of the preceding keys move to the new
 * exponent. scale is positive. Decode steps and chunks of a prompt call this one function, so that a token has the same bits
 * in both. */
static __attribute__((noinline)) void soften(int64_t begin, int64_t end, float scale, float cap, float *scores, double *exponent, double *sum,
                                             double *acc, int64_t width, int narrow)
{
    if (cap > 0.0f) {
        for (int64_t t = begin; t < end; t++) scores[t] = tanhf(scores[t] * scale / cap) * cap;
        scale = 1.0f;
    }
    scale *= 1.44269504088896341f;
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
    double most = ceilf(max_of(high) * scale);
    if (most > *exponent) {
        double shrink = power_of_two(*exponent - most);
        *sum *= shrink;
        for (int64_t i = 0; i < width; i += VL / 2) *(dvec *)(acc + i) *= shrink;
        *exponent = most;
    }
    vec total = {0};
    float now = *exponent == -INFINITY ? 0.0f : (float)*exponent; /* avoids NaN when all are -inf */
    for (int t = 0; t < KEYS; t += VL) {
        vec s = *(vec *)(scores + t), x = s * scale;
        vec p = power_of(x, fused(s, broadcast(scale), -x), now);
        if (PAIRED && narrow) p = round_weights(p);
        *(vec *)(scores + t) = p;
        total += p;
    }
    *sum += sum_of(total);
}

/* Add attention to some keys to that to others: acc [width], exponent and sum of both. */
static void add_part(const double *acc, double exponent, double sum, double *total, double *total_exponent, double *total_sum, int64_t width)
{
    if (exponent == -INFINITY) return;
    double most = exponent > *total_exponent ? exponent : *total_exponent;
    double kept = power_of_two(*total_exponent - most), added = power_of_two(exponent - most);
    *total_sum = *total_sum * kept + sum * added;
    *total_exponent = most;
    for (int64_t i = 0; i < width; i++) total[i] = total[i] * kept + acc[i] * added;
}

/* Write attention to all keys of a query head: acc divided by its sum to a float array, or with `sums` as it is to an array of
 * doubles, sum and exponent to two more. `place`: the head's place in the arrays. */
INLINE void put_out(const double *acc, double exponent, double sum, void *out, double *sums, int64_t place, int64_t dim)
{
    if (sums == NULL) {
        float *to = (float *)out + place * dim;
        for (int64_t j = 0; j < dim; j++) to[j] = sum > 0.0 ? (float)(acc[j] / sum) : 0.0f;
        return;
    }
    memcpy((double *)out + place * dim, acc, (size_t)dim * 8);
    sums[2 * place] = sum;
    sums[2 * place + 1] = exponent;
}

/* Merge attention to parts of the tokens: values [parts, rows, width] and sums [parts, rows, 2] (sum, exponent) into out
 * [rows, width] and total [rows, 2] or NULL, as put_out. In the order of the parts; one without tokens changes nothing. */
void zoo_merge(const double *values, const double *sums, int64_t parts, int64_t rows, int64_t width, void *out, double *total)
{
    double acc[width];
    for (int64_t r = 0; r < rows; r++) {
        double sum = 0.0, exponent = -INFINITY;
        memset(acc, 0, (size_t)width * 8);
        for (int64_t p = 0; p < parts; p++) {
            const double *mine = sums + (p * rows + r) * 2;
            add_part(values + (p * rows + r) * width, mine[1], mine[0], acc, &exponent, &sum, width);
        }
        put_out(acc, exponent, sum, out, total, r, width);
    }
}
