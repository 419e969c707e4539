/* Products with bfloat16 weights, included by kernels.c.
 *
 *     packed weight [out, in]  ->  panels [ceil(out / NR)][ceil(in / 2)][NR], each a pair of bfloat16: inputs 2 p and
 *                                  2 p + 1 of one output; zeros after the last output and the last input
 *
 * x is rounded to bfloat16 pairs once per call. Sums are float32. There are three ways, or paths (amx.c chooses): tiles;
 * AVX512-BF16, of which one instruction multiplies 16 pairs; or both halves of a pair are widened to float32. The order
 * of each sum is fixed by k, as in the float32 kernels, so a row's result does not depend on the other rows. It does
 * depend on the path.
 */
#ifndef PRODUCTS
#define PRODUCTS 0 /* the fastest path of the processor; else a number of the list in amx.c */
#endif
/* The bits of a float, rounded to the nearest bfloat16, ties to even; NaN stays NaN. */
INLINE uint32_t narrow_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return (bits >> 16) | 0x40;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

INLINE float wide_of(uint16_t bits)
{
    uint32_t all = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &all, 4);
    return value;
}

INLINE float rounded(float value) { return wide_of((uint16_t)narrow_of(value)); }

/* As narrow_of, for a vector; the results are the upper halves, the lower ones are zero. */
INLINE vec rounded_vec(vec v)
{
    uvec bits = (uvec)v, even = bits >> 16 & 1, near = (bits + 0x7fff + even) & 0xffff0000u;
    uvec strange = (uvec)((bits & 0x7fffffffu) > 0x7f800000u), kept = (bits | 0x400000u) & 0xffff0000u;
    return (vec)((near & ~strange) | (kept & strange));
}

/* Round floats to bfloat16 pairs: out[p] has x[2 p] in its lower half, x[2 p + 1] in its upper half; zero after k. */
static void pair_up(const float *x, int64_t k, uint32_t *out)
{
    int64_t p = 0;
#if defined(__AVX512BF16__) && VL == 16
    for (; 2 * p + 32 <= k; p += 16)
        _mm512_storeu_si512(out + p, (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(x + 2 * p + 16), _mm512_loadu_ps(x + 2 * p)));
#endif
    for (; 2 * p < k; p++) out[p] = narrow_of(x[2 * p]) | (2 * p + 1 < k ? narrow_of(x[2 * p + 1]) << 16 : 0);
}

/* acc + both products of each pair. */
INLINE vec dot_pairs(vec acc, uvec a, uvec b)
{
#if defined(__AVX512BF16__) && VL == 16 && PRODUCTS != 1
    return (vec)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b);
#else
    acc = fused((vec)(a << 16), (vec)(b << 16), acc);
    return fused((vec)(a & 0xffff0000u), (vec)(b & 0xffff0000u), acc);
#endif
}

/* Lay out panel number p of a weight. */
static void pack_panel(const uint16_t *w, int64_t n, int64_t k, int64_t stride_n, int64_t stride_k, int64_t p, uint32_t *out)
{
    int64_t pairs = (k + 1) / 2;
    for (int64_t j = 0; j < NR; j++) {
        int64_t o = p * NR + j;
        if (o >= n) {
            for (int64_t i = 0; i < pairs; i++) out[i * NR + j] = 0;
            continue;
        }
        const uint16_t *row = w + o * stride_n;
        for (int64_t i = 0; i < pairs; i++)
            out[i * NR + j] = row[2 * i * stride_k] | (2 * i + 1 < k ? (uint32_t)row[(2 * i + 1) * stride_k] << 16 : 0);
    }
}

void zoo_pack_narrow(const uint16_t *w, int64_t n, int64_t k, int64_t stride_n, int64_t stride_k, uint32_t *out, int threads)
{
    int64_t panels = (n + NR - 1) / NR, pairs = (k + 1) / 2;
#pragma omp parallel for schedule(dynamic, SHARE(panels)) num_threads(threads)
    for (int64_t p = 0; p < panels; p++) pack_panel(w, n, k, stride_n, stride_k, p, out + p * pairs * NR);
}

void zoo_unpack_narrow(const uint32_t *packed, int64_t n, int64_t k, uint16_t *out, int threads)
{
    int64_t pairs = (k + 1) / 2;
#pragma omp parallel for schedule(dynamic, SHARE(n)) num_threads(threads)
    for (int64_t o = 0; o < n; o++)
        for (int64_t i = 0; i < k; i++) out[o * k + i] = (uint16_t)(packed[((o / NR) * pairs + i / 2) * NR + o % NR] >> 16 * (i % 2));
}

/* m rows of pairs, `step` apart, times one panel: as `tile`. */
INLINE void tile_narrow(int m, int64_t pairs, const uint32_t *restrict x, int64_t step, const uint32_t *restrict w, const uint32_t *fetch,
                        int64_t pace, float *restrict out, int64_t across)
{
    vec acc[MR][NV];
    const uint32_t *rows[BASES];
    for (int i = 0; i < m; i++)
        for (int j = 0; j < NV; j++) acc[i][j] = (vec){0};
    for (int i = 0; i < m; i += 3) rows[i / 3] = x + i * step;
    for (int64_t p = 0; p < pairs; p++) {
        uvec b[NV];
        for (int j = 0; j < NV; j++) b[j] = *(const uvec *)(w + p * NR + j * VL);
        for (int j = 0; j < pace; j += 16) __builtin_prefetch(fetch + p * pace + j);
        for (int i = 0; i < m; i++) {
            uvec s = (uvec){0} + rows[i / 3][i % 3 * step];
            for (int j = 0; j < NV; j++) acc[i][j] = dot_pairs(acc[i][j], b[j], s);
        }
        for (int i = 0; i < m; i += 3) rows[i / 3] = KEPT(rows[i / 3] + 1);
    }
    for (int i = 0; i < m; i++)
        for (int j = 0; j < NV; j++) *(vec *)(out + i * across + j * VL) = acc[i][j];
}

#define NARROW_ROWS(m) \
    case m: \
        if (fetch == NULL) \
            tile_narrow(m, pairs, x, step, w, w + AHEAD, NR, out, across); \
        else \
            tile_narrow(m, pairs, x, step, w, fetch, NR / 2, out, across); \
        break;
/* As `rows_tile`, with rows of pairs. */
static void rows_tile_narrow(int64_t m, int64_t pairs, int64_t step, const uint32_t *x, const uint32_t *w, const uint32_t *fetch, float *out,
                             int64_t across)
{
    switch (m) {
        NARROW_ROWS(1) NARROW_ROWS(2) NARROW_ROWS(3) NARROW_ROWS(4)
#if MR > 4
        NARROW_ROWS(5) NARROW_ROWS(6)
#endif
#if MR > 6
        NARROW_ROWS(7) NARROW_ROWS(8) NARROW_ROWS(9) NARROW_ROWS(10) NARROW_ROWS(11) NARROW_ROWS(12)
#endif
    }
}

static int on_tiles(void);
static int stored_on_tiles(const float *x, int64_t rows, int64_t k, const uint16_t *w, int64_t apart, const float *bias, int64_t n, float *out,
                           int threads);

/* Round n floats to bfloat16, in place. */
void zoo_round(float *x, int64_t n, int threads)
{
#pragma omp parallel for schedule(dynamic, SHARE(n / 1024)) num_threads(threads) if (n > 16384)
    for (int64_t b = 0; b < (n + 1023) / 1024; b++) {
        int64_t i = b * 1024, end = i + 1024 < n ? i + 1024 : n;
        for (; i + VL <= end; i += VL) *(vec *)(x + i) = rounded_vec(*(vec *)(x + i));
        for (; i < end; i++) x[i] = rounded(x[i]);
    }
}
