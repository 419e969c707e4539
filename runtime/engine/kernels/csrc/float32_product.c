/* Products with float32 weights, and `zoo_linear`, which also calls those with bfloat16 and int8 weights; included by kernels.c.
 *
 *     packed weight [out, in]  ->  panels [ceil(out / NR)][in][NR], zeros after the last output; read once, front to
 *                                  back, per MR rows
 */
/* From PACK_ROWS rows on, x is first laid out for the tiles, in chunks of PACK_BYTES that fit the L2 cache. */
#define PACK_ROWS 96
#define PACK_BYTES (256 << 10)

static int linear_coded(const float *x, int64_t rows, int64_t k, const struct part *parts, int count, int how, const float *add, float *out,
                        int threads);

void zoo_pack(const float *w, int64_t n, int64_t k, int64_t stride_n, int64_t stride_k, float *out, int threads)
{
    int64_t panels = (n + NR - 1) / NR;
#pragma omp parallel for schedule(dynamic, SHARE(panels)) num_threads(threads)
    for (int64_t p = 0; p < panels; p++)
        for (int64_t i = 0; i < k; i++)
            for (int64_t j = 0; j < NR; j++) {
                int64_t o = p * NR + j;
                out[(p * k + i) * NR + j] = o < n ? w[o * stride_n + i * stride_k] : 0.0f;
            }
}

void zoo_unpack(const float *packed, int64_t n, int64_t k, float *out, int threads)
{
#pragma omp parallel for schedule(dynamic, SHARE(n)) num_threads(threads)
    for (int64_t o = 0; o < n; o++)
        for (int64_t i = 0; i < k; i++) out[o * k + i] = packed[((o / NR) * k + i) * NR + o % NR];
}

/* m rows times one panel. Element p of row i is x[i * step + p * next]: rows as stored (k, 1) or laid out (1, MR).
 * Meanwhile `pace` floats from `fetch` on are prefetched for every element of k. */
INLINE void tile(int m, int64_t k, const float *restrict x, int64_t step, int64_t next, const float *restrict w, const float *fetch, int64_t pace,
                 float *restrict out, int64_t across)
{
    vec acc[MR][NV];
    const float *rows[BASES];
    for (int i = 0; i < m; i++)
        for (int j = 0; j < NV; j++) acc[i][j] = (vec){0};
    for (int i = 0; i < m; i += 3) rows[i / 3] = x + i * step;
    for (int64_t p = 0; p < k; p++) {
        vec b[NV];
        for (int j = 0; j < NV; j++) b[j] = *(const vec *)(w + p * NR + j * VL);
        for (int j = 0; j < pace; j += 16) __builtin_prefetch(fetch + p * pace + j);
        for (int i = 0; i < m; i++) {
            vec s = broadcast(rows[i / 3][i % 3 * step]);
            for (int j = 0; j < NV; j++) acc[i][j] = fused(b[j], s, acc[i][j]);
        }
        for (int i = 0; i < m; i += 3) rows[i / 3] = KEPT(rows[i / 3] + next);
    }
    for (int i = 0; i < m; i++)
        for (int j = 0; j < NV; j++) *(vec *)(out + i * across + j * VL) = acc[i][j];
}

#define ROWS(m) \
    case m: \
        if (fetch == NULL) \
            tile(m, k, x, step, 1, w, w + AHEAD, NR, out, across); \
        else \
            tile(m, k, x, step, 1, w, fetch, NR / 2, out, across); \
        break;
/* m rows of x, `step` floats apart, to rows of out, `across` floats apart. */
static void rows_tile(int64_t m, int64_t k, int64_t step, const float *x, const float *w, const float *fetch, float *out, int64_t across)
{
    switch (m) {
        ROWS(1) ROWS(2) ROWS(3) ROWS(4)
#if MR > 4
        ROWS(5) ROWS(6)
#endif
#if MR > 6
        ROWS(7) ROWS(8) ROWS(9) ROWS(10) ROWS(11) ROWS(12)
#endif
    }
}

static void laid_tile(int64_t k, const float *x, const float *w, float *out) { tile(MR, k, x, 1, MR, w, w + AHEAD, NR, out, NR); }

typedef float four __attribute__((vector_size(16), aligned(4)));

/* Transpose four values of each of four rows into four columns, `stride` floats apart. */
INLINE void turn(const float *a, const float *b, const float *c, const float *d, float *out, int64_t stride)
{
    four ra = *(const four *)a, rb = *(const four *)b, rc = *(const four *)c, rd = *(const four *)d;
    four low_ab = __builtin_shufflevector(ra, rb, 0, 4, 1, 5), low_cd = __builtin_shufflevector(rc, rd, 0, 4, 1, 5);
    four high_ab = __builtin_shufflevector(ra, rb, 2, 6, 3, 7), high_cd = __builtin_shufflevector(rc, rd, 2, 6, 3, 7);
    *(four *)out = __builtin_shufflevector(low_ab, low_cd, 0, 1, 4, 5);
    *(four *)(out + stride) = __builtin_shufflevector(low_ab, low_cd, 2, 3, 6, 7);
    *(four *)(out + 2 * stride) = __builtin_shufflevector(high_ab, high_cd, 0, 1, 4, 5);
    *(four *)(out + 3 * stride) = __builtin_shufflevector(high_ab, high_cd, 2, 3, 6, 7);
}

/* Lay out blocks [from, end) of x [rows, k] as [blocks][k][MR], zeros after the last row. Called in a parallel region;
 * all its threads wait at the end. */
static void lay_out(const float *x, int64_t rows, int64_t k, int64_t from, int64_t end, float *out)
{
#pragma omp for schedule(dynamic, 1)
    for (int64_t b = from; b < end; b++)
        for (int64_t i = 0; i < MR;) { /* few rows at a time: more would evict each other from the cache */
            const float *row = x + (b * MR + i) * k;
            float *o = out + (b - from) * k * MR + i;
            int64_t p = 0, quick = i + 4 <= MR && b * MR + i + 4 <= rows;
            for (; quick && p + 4 <= k; p += 4) turn(row + p, row + k + p, row + 2 * k + p, row + 3 * k + p, o + p * MR, MR);
            for (; p < k; p++)
                for (int64_t j = 0; j < (quick ? 4 : 1); j++) o[p * MR + j] = b * MR + i + j < rows ? row[j * k + p] : 0.0f;
            i += quick ? 4 : 1;
        }
}

/* x [rows, k] times `count` weights side by side -> out [rows, sum of n], plus `add` [rows, sum of n] if not NULL.
 * `how` GATED_SILU: two weights of one size, out [rows, n] = silu(x W0) * (x W1). ROUNDED: out is rounded to bfloat16.
 * Returns 0, or 1 if out of memory. */
int zoo_linear(const float *x, int64_t rows, int64_t k, const struct part *parts, int count, int how, const float *add, float *out,
                int threads)
{
    if (parts[0].narrow == 2) return linear_coded(x, rows, k, parts, count, how, add, out, threads);
    if (parts[0].narrow) return linear_narrow(x, rows, k, parts, count, how, add, out, threads);
    int64_t total = 0, panels = 0, blocks = (rows + MR - 1) / MR;
    int used = how == GATED_SILU ? 1 : count;
    for (int c = 0; c < used; c++) {
        total += parts[c].n;
        panels += (parts[c].n + NR - 1) / NR;
    }
    float *laid = NULL; /* two chunks of blocks: one is laid out while other threads may still read the preceding one */
    int64_t chunk = PACK_BYTES / (MR * k * 4) + 1;
    if (rows >= PACK_ROWS) laid = aligned_alloc(64, (size_t)((2 * chunk * MR * k * 4 + 63) / 64 * 64));
    if (laid == NULL) chunk = blocks;
#pragma omp parallel num_threads(threads)
    {
        float buffer[2][MR * NR] ALIGNED;
        for (int64_t from = 0; from < blocks; from += chunk) {
            int64_t end = from + chunk < blocks ? from + chunk : blocks;
            float *here = laid == NULL ? NULL : laid + from / chunk % 2 * chunk * MR * k;
            if (here != NULL) lay_out(x, rows, k, from, end, here);
#pragma omp for schedule(dynamic, SHARE(panels)) nowait
            for (int64_t panel = 0; panel < panels; panel++) {
                int which = 0;
                int64_t p = panel, left = 0;
                while (p >= (parts[which].n + NR - 1) / NR) {
                    p -= (parts[which].n + NR - 1) / NR;
                    left += parts[which].n;
                    which++;
                }
                const struct part *part = &parts[which];
                int64_t width = part->n - p * NR < NR ? part->n - p * NR : NR;
                for (int64_t b = from; b < end; b++) {
                    int64_t lo = laid != NULL ? b * MR : rows * b / blocks;
                    int64_t hi = laid == NULL ? rows * (b + 1) / blocks : (lo + MR < rows ? lo + MR : rows);
                    for (int64_t i = lo; i < hi; i++) /* prefetch the output: it is not in the cache */
                        for (int64_t j = 0; j < width; j += 16) {
                            __builtin_prefetch(out + i * total + left + p * NR + j, 1);
                            if (add != NULL) __builtin_prefetch(add + i * total + left + p * NR + j);
                        }
                    for (int g = 0; g < (how == GATED_SILU ? 2 : 1); g++) {
                        const float *w = (const float *)parts[which + g].weight + p * k * NR;
                        if (laid != NULL)
                            laid_tile(k, here + (b - from) * k * MR, w, buffer[g]);
                        else
                            rows_tile(hi - lo, k, k, x + lo * k, w, b == from ? NULL : w + k * NR, buffer[g], NR);
                        const float *bias = parts[which + g].bias;
                        if (bias != NULL)
                            for (int64_t i = 0; i < hi - lo; i++)
                                for (int64_t j = 0; j < width; j++) buffer[g][i * NR + j] += bias[p * NR + j];
                    }
                    for (int64_t i = 0; i < hi - lo; i++) {
                        float *s = buffer[0] + i * NR;
                        if (how == GATED_SILU)
                            for (int64_t j = 0; j < NR; j += VL) *(vec *)(s + j) = silu(*(vec *)(s + j)) * *(vec *)(buffer[1] + i * NR + j);
                        int64_t at = (lo + i) * total + left + p * NR;
                        if (add != NULL)
                            for (int64_t j = 0; j < width; j++) out[at + j] = add[at + j] + s[j];
                        else
                            memcpy(out + at, s, (size_t)width * 4);
                    }
                }
            }
        }
    }
    free(laid);
    return 0;
}
