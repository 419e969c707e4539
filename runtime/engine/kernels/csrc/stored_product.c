/* Products with weights as they are stored, for tied heads, stitches and experts; included by kernels.c. */

/* Up to FEW rows are multiplied with a weight as it is stored while it is read. */
#define FEW 4

/* Read units [p, p + VL) of VL rows of a weight as it is stored, `apart` bytes apart, and transpose them: a unit is a float
 * or a pair of bfloat16. Only `count` rows exist, and `bytes` of each. Prefetches as much from `fetch` on. */
INLINE void turn_rows(const char *w, int64_t apart, int64_t count, int64_t bytes, int64_t p, const char *fetch, uvec *r)
{
    if (count >= VL && (p + VL) * 4 <= bytes) {
        for (int i = 0; i < VL; i++) {
            __builtin_prefetch(fetch + i * VL * 4, 0, 2); /* into L2: a panel is larger than L1 */
            r[i] = *(const uvec *)(w + i * apart + p * 4);
        }
    } else {
        int64_t rest = bytes - p * 4 < VL * 4 ? bytes - p * 4 : VL * 4;
        for (int i = 0; i < VL; i++) {
            r[i] = (uvec){0};
            if (i < count) memcpy(&r[i], w + i * apart + p * 4, (size_t)rest);
        }
    }
    transpose(r);
}

/* Lay out NR rows of a weight as one panel of a packed weight: [units][NR]. Arguments as for turn_rows. */
static void lay_out_panel(const char *w, int64_t apart, int64_t count, int64_t bytes, const char *fetch, uint32_t *out)
{
    int64_t units = (bytes + 3) / 4;
    for (int64_t at = 0; at < NR; at += VL)
        for (int64_t p = 0; p < units; p += VL, fetch += VL * VL * 4) {
            uvec r[VL];
            turn_rows(w + at * apart, apart, count - at, bytes, p, fetch, r);
            for (int i = 0; i < VL; i++)
                if (p + i < units) *(uvec *)(out + (p + i) * NR + at) = r[i];
        }
}

/* m rows of x [m, units] times VL rows of a weight as it is stored -> out [m, NR]: as lay_out_panel and a tile of the
 * packed weight, in registers. */
INLINE void stored_tile(int m, const uint32_t *x, const char *w, int64_t apart, int64_t count, int64_t bytes, int narrow, const char *fetch,
                        float *out)
{
    int64_t units = (bytes + 3) / 4;
    vec acc[FEW];
    for (int i = 0; i < m; i++) acc[i] = (vec){0};
    for (int64_t p = 0; p < units; p += VL, fetch += VL * VL * 4) {
        uvec r[VL];
        turn_rows(w, apart, count, bytes, p, fetch, r);
        int64_t left = units - p < VL ? units - p : VL;
#pragma GCC unroll 16
        for (int j = 0; j < VL; j++) {
            if (j >= left) break;
            for (int i = 0; i < m; i++) {
                uvec s = (uvec){0} + x[i * units + p + j];
                acc[i] = narrow ? dot_pairs(acc[i], r[j], s) : fused((vec)r[j], (vec)s, acc[i]);
            }
        }
    }
    for (int i = 0; i < m; i++) *(vec *)(out + i * NR) = acc[i];
}

#define STORED(m) \
    case m: \
        if (narrow) \
            stored_tile(m, x, w, apart, count, bytes, 1, fetch, out); \
        else \
            stored_tile(m, x, w, apart, count, bytes, 0, fetch, out); \
        break;
static void few_stored(int64_t m, const uint32_t *x, const char *w, int64_t apart, int64_t count, int64_t bytes, int64_t narrow, const char *fetch,
                       float *out)
{
    switch (m) {
        STORED(1) STORED(2) STORED(3) STORED(4)
    }
}

/* x [rows, k] times a weight [n, k] as it is stored, rows `apart` values apart -> out [rows, n]; bias [n] or NULL.
 * narrow: the weight is bfloat16. Each panel is laid out on the fly, so a row's sums have the order, and the bits, of
 * zoo_linear. Returns 0, or 1 if out of memory. */
int zoo_stored(const float *x, int64_t rows, int64_t k, const char *w, int64_t apart, int64_t narrow, const float *bias, int64_t n,
               float *out, int threads)
{
    int64_t panels = (n + NR - 1) / NR, blocks = (rows + MR - 1) / MR, size = narrow ? 2 : 4, units = narrow ? (k + 1) / 2 : k;
    if (narrow && on_tiles()) return stored_on_tiles(x, rows, k, (const uint16_t *)w, apart, bias, n, out, threads);
    uint32_t *paired = NULL; /* x rounded to bfloat16 */
    if (narrow) {
        paired = aligned_alloc(64, (size_t)((rows * units * 4 + 63) / 64 * 64));
        if (paired == NULL) return 1;
    }
    int failed = 0;
#pragma omp parallel num_threads(threads)
    {
        float buffer[MR * NR] ALIGNED;
        uint32_t *panel = aligned_alloc(64, (size_t)((units * NR * 4 + 63) / 64 * 64));
        if (panel == NULL) __atomic_store_n(&failed, 1, __ATOMIC_RELAXED);
        if (narrow) {
#pragma omp for schedule(dynamic, SHARE(rows))
            for (int64_t r = 0; r < rows; r++) pair_up(x + r * k, k, paired + r * units);
        }
#pragma omp for schedule(dynamic, SHARE(panels))
        for (int64_t p = 0; p < panels; p++) {
            if (panel == NULL) continue;
            const char *from = w + p * NR * apart * size, *coming = from + (p + 1 < panels ? NR * apart * size : 0);
            int64_t width = n - p * NR < NR ? n - p * NR : NR;
            /* Two full blocks of rows take long enough to read the next panel beside them. Fewer rows would wait for it: they
             * read it beside the layout. */
            const int beside = narrow && rows >= 2 * MR && apart == k;
            if (rows > FEW) lay_out_panel(from, apart * size, width, k * size, beside ? from : coming, panel);
            for (int64_t b = 0; b < blocks; b++) {
                int64_t lo = rows * b / blocks, hi = rows * (b + 1) / blocks;
                if (rows <= FEW)
                    for (int64_t at = 0; at < NR; at += VL)
                        few_stored(rows, narrow ? paired : (const uint32_t *)x, from + at * apart * size, apart * size, width - at, k * size,
                                   narrow, coming + at * k * size, buffer + at);
                else if (narrow)
                    rows_tile_narrow(hi - lo, units, units, paired + lo * units, panel,
                                     beside && b < 2 ? (const uint32_t *)coming + b * units * (NR / 2) : panel, buffer, NR);
                else
                    rows_tile(hi - lo, k, k, x + lo * k, (const float *)panel, (const float *)panel, buffer, NR);
                for (int64_t i = 0; i < hi - lo; i++)
                    for (int64_t j = 0; j < width; j++)
                        out[(lo + i) * n + p * NR + j] = buffer[i * NR + j] + (bias == NULL ? 0.0f : bias[p * NR + j]);
            }
        }
        free(panel);
    }
    free(paired);
    return failed;
}
