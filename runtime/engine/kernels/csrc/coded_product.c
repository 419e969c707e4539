/* Products with int8 weights that have one scale per output; included by kernels.c.
 *
 *     codes [out, in]  ->  panels [ceil(out / WIDE)], each [in][WIDE] int8 and then [WIDE] float32, the scales; zeros
 *                          after the last output
 *
 * A code is widened to float32 and x stays float32. Each output sums over k from first to last, with one rounding per
 * step, and is scaled once at the end. Few rows widen the codes in registers, many rows read a panel that is widened
 * first: the operations are the same, so a row's result does not depend on the other rows. */

/* A panel is twice as wide as those of other weights: one row then has enough sums under way to wait for memory only. */
#define WIDE (2 * NR)
#define WIDE_VECTORS (2 * NV)
#define CODED_ROWS (MR / 2)
/* Bytes that a panel's scales take, in rows of codes. */
#define SCALE_ROWS 4

int64_t zoo_coded_panel(void) { return WIDE; }

/* `flip` is 128 where the codes are offset by it. */
void zoo_pack_coded(const uint8_t *codes, int64_t n, int64_t k, int64_t apart, int flip, const float *scale, uint8_t *out, int threads)
{
    int64_t panels = (n + WIDE - 1) / WIDE;
#pragma omp parallel for schedule(dynamic, SHARE(panels)) num_threads(threads)
    for (int64_t p = 0; p < panels; p++) {
        uint8_t *to = out + p * (k + SCALE_ROWS) * WIDE;
        for (int64_t j = 0; j < WIDE; j++) {
            int64_t o = p * WIDE + j;
            for (int64_t i = 0; i < k; i++) to[i * WIDE + j] = o < n ? (uint8_t)(codes[o * apart + i] ^ flip) : 0;
            float s = o < n ? scale[o] : 0.0f;
            memcpy(to + k * WIDE + j * 4, &s, 4);
        }
    }
}

/* The weight [n, k] in float32. */
void zoo_unpack_coded(const int8_t *packed, int64_t n, int64_t k, float *out, int threads)
{
#pragma omp parallel for schedule(dynamic, SHARE(n)) num_threads(threads)
    for (int64_t o = 0; o < n; o++) {
        const int8_t *panel = packed + o / WIDE * (k + SCALE_ROWS) * WIDE;
        const float *scale = (const float *)(panel + k * WIDE);
        for (int64_t i = 0; i < k; i++) out[o * k + i] = (float)panel[i * WIDE + o % WIDE] * scale[o % WIDE];
    }
}

INLINE vec widened(const int8_t *codes)
{
#if VL == 16
    return (vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)codes)));
#elif VL == 8
    return (vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)codes)));
#else
    vec made;
    for (int j = 0; j < VL; j++) made[j] = (float)codes[j];
    return made;
#endif
}

/* m rows of x, k floats apart, times one panel -> out, two blocks [MR, NR]. Prefetches the codes that follow. */
INLINE void tile_coded(int m, int64_t k, const float *restrict x, const int8_t *restrict w, float *restrict out)
{
    vec acc[CODED_ROWS][WIDE_VECTORS];
    for (int i = 0; i < m; i++)
        for (int j = 0; j < WIDE_VECTORS; j++) acc[i][j] = (vec){0};
    for (int64_t p = 0; p < k; p++) {
        vec s[CODED_ROWS];
        __builtin_prefetch(w + p * WIDE + AHEAD * 2);
        for (int i = 0; i < m; i++) s[i] = broadcast(x[i * k + p]);
        for (int j = 0; j < WIDE_VECTORS; j++) {
            vec b = widened(w + p * WIDE + j * VL);
            for (int i = 0; i < m; i++) acc[i][j] = fused(b, s[i], acc[i][j]);
        }
    }
    for (int i = 0; i < m; i++)
        for (int j = 0; j < WIDE_VECTORS; j++) *(vec *)(out + j / NV * MR * NR + i * NR + j % NV * VL) = acc[i][j];
}

#define CODED(m) \
    case m: tile_coded(m, k, x, w, out); break;
static void few_coded(int64_t m, int64_t k, const float *x, const int8_t *w, float *out)
{
    switch (m) {
        CODED(1) CODED(2)
#if CODED_ROWS > 2
        CODED(3)
#endif
#if CODED_ROWS > 3
        CODED(4) CODED(5) CODED(6)
#endif
    }
}

/* Widen a panel to two of float32 weights [2][k][NR]. */
static void widen_panel(const int8_t *w, int64_t k, float *out)
{
    for (int64_t p = 0; p < k; p++)
        for (int j = 0; j < WIDE_VECTORS; j++) *(vec *)(out + (j / NV * k + p) * NR + j % NV * VL) = widened(w + p * WIDE + j * VL);
}

/* Scale m rows of made [m, NR] and add a bias, of which `width` values exist; `scale` has NR of them. */
INLINE void scale_rows(int64_t m, int64_t width, const float *scale, const float *bias, float *made)
{
    vec plus[NV];
    memset(plus, 0, sizeof plus);
    if (bias != NULL) memcpy(plus, bias, (size_t)width * 4);
    for (int64_t i = 0; i < m; i++)
        for (int j = 0; j < NV; j++) {
            vec *at = (vec *)(made + i * NR + j * VL);
            vec product = *at * *(const vec *)(scale + j * VL);
            *at = bias == NULL ? product : (vec)product + plus[j];
        }
}

/* As zoo_linear. */
static int linear_coded(const float *x, int64_t rows, int64_t k, const struct part *parts, int count, int how, const float *add, float *out,
                        int threads)
{
    const int gated = how == GATED_SILU, few = rows <= 2 * CODED_ROWS;
    const int64_t height = few ? CODED_ROWS : MR, blocks = (rows + height - 1) / height, size = (k + SCALE_ROWS) * WIDE;
    int64_t total = 0, panels = 0;
    int failed = 0;
    for (int c = 0; c < (gated ? 1 : count); c++) {
        total += parts[c].n;
        panels += (parts[c].n + WIDE - 1) / WIDE;
    }
#pragma omp parallel num_threads(threads)
    {
        float buffer[2][2 * MR * NR] ALIGNED;
        float *wide = few ? NULL : aligned_alloc(64, (size_t)((1 + gated) * k * WIDE * 4 + 63) / 64 * 64);
        if (!few && wide == NULL) __atomic_store_n(&failed, 1, __ATOMIC_RELAXED);
#pragma omp for schedule(dynamic, SHARE(panels)) nowait
        for (int64_t panel = 0; panel < panels; panel++) {
            if (!few && wide == NULL) continue;
            int64_t which = 0, p = panel, left = 0;
            while (p >= (parts[which].n + WIDE - 1) / WIDE) {
                p -= (parts[which].n + WIDE - 1) / WIDE;
                left += parts[which++].n;
            }
            for (int g = 0; !few && g <= gated; g++) widen_panel((const int8_t *)parts[which + g].weight + p * size, k, wide + g * k * WIDE);
            for (int64_t b = 0; b < blocks; b++) {
                const int64_t lo = rows * b / blocks, m = rows * (b + 1) / blocks - lo;
                for (int g = 0; g <= gated; g++) {
                    const int8_t *w = (const int8_t *)parts[which + g].weight + p * size;
                    if (few) few_coded(m, k, x + lo * k, w, buffer[g]);
                    for (int half = 0; half < 2; half++) {
                        const int64_t first = p * WIDE + half * NR, n = parts[which + g].n - first, width = n < NR ? n : NR;
                        float *made = buffer[g] + half * MR * NR, *from = wide + (g * 2 + half) * k * NR;
                        if (width <= 0) break;
                        if (!few) rows_tile(m, k, k, x + lo * k, from, from, made, NR);
                        scale_rows(m, width, (const float *)(w + k * WIDE) + half * NR,
                                   parts[which + g].bias == NULL ? NULL : parts[which + g].bias + first, made);
                    }
                }
                for (int half = 0; half < 2; half++) {
                    const int64_t first = p * WIDE + half * NR, n = parts[which].n - first, width = n < NR ? n : NR;
                    float *made = buffer[0] + half * MR * NR, *to = out + lo * total + left + first;
                    if (width <= 0) break;
                    if (gated)
                        for (int64_t i = 0; i < m * NR; i += VL)
                            *(vec *)(made + i) = silu(*(vec *)(made + i)) * *(vec *)(buffer[1] + half * MR * NR + i);
                    write_rows(m, width, made, NULL, add == NULL ? NULL : add + (to - out), how == ROUNDED, to, total);
                }
            }
        }
        free(wide);
    }
    return failed;
}
